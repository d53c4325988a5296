"""Pairs: configs, checkpoints, tokenizers and vocabularies that differ, drafts with fewer tokens."""

from __future__ import annotations

import copy
import inspect
import shutil

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import get_class, get_method
from transformers import AutoModelForCausalLM

from toolkit import ModelPair, config, generate
from toolkit.engine import TabularModel
from toolkit.engine.capture import CaptureGuard
from toolkit.errors import InputError
from toolkit.models import reduced
from toolkit.models.pair import check_same_tokenizer, load_draft, load_tokenizer
from toolkit.testing import output_pvalue, save_checkpoint, tiny_llama, tiny_tokenizer

PAPERS = {"llama2_7b_70b", "llama3_1b_8b", "opt_125m_13b", "gemma_2b_27b", "gemma11_2b_gemma2_27b", "llama_68m_vicuna_13b",
          "llama_68m_vicuna_33b", "llama_160m_vicuna_13b", "llama_160m_vicuna_33b", "llama_2x68m_2_13b", "opt_125m_30b",
          "opt_125m_iml_30b", "opt_350m_30b"}  # fmt: skip


def test_pair_configs_name_arguments_of_their_loader():
    """Each group's yaml alone: the commands that it is a part of are composed elsewhere."""
    names = config.choices("pair")
    assert PAPERS | {"toy", "toy_padded"} <= set(names) and any(name.startswith("qwen") for name in names)
    with initialize_config_dir(str(config.CONF), version_base="1.3"):
        composed = {name: dict(compose(overrides=[f"+pair={name}"]).pair) for name in names}
    for name, cfg in composed.items():
        target = cfg.pop("_target_")
        padded = target.endswith("padded_pair")
        loader = get_method(target) if padded else get_class(target.rpartition(".")[0]).from_pretrained
        inspect.signature(loader).bind(**cfg)
        assert {"target", "draft"} <= cfg.keys(), name


def test_local_folders_load_and_decode_in_any_format(checkpoints):
    pair = ModelPair.from_pretrained(*checkpoints)
    assert pair.end_ids == (2,)
    assert pair.max_length == 256
    (generation,) = generate(pair, ["the cat"], "speculative", max_new_tokens=5)
    assert 1 <= len(generation.token_ids) <= 5
    assert generation.prompt_ids == pair.tokenizer("the cat").input_ids
    assert ModelPair.from_pretrained(*checkpoints, dtype="float64").target.dtype == torch.float64


def test_bad_sources_and_options_are_one_line(checkpoints, tmp_path):
    for arguments, options, words in (
        (
            checkpoints,
            {"dtype": "float31"},
            "dtype: expected float32, float64, float16, bfloat16 or auto, got 'float31'",
        ),
        ((tmp_path / "nowhere", checkpoints[1]), {}, "expected a model folder at .*nowhere, found none"),
        ((tmp_path, checkpoints[1]), {}, "could not load a tokenizer from"),
        (checkpoints, {"quantization": "3bit"}, "quantization: expected 8bit, 4bit or null, got '3bit'"),
        (checkpoints, {"quantization": "4bit"}, "quantization=4bit needs bitsandbytes: pip install"),
        (checkpoints, {"cuda_graphs": "fast"}, "cuda_graphs: expected one of auto, on, off or true or false"),
    ):
        with pytest.raises(InputError, match=rf"^[^\n]*{words}[^\n]*$"):
            ModelPair.from_pretrained(*arguments, **options)


# -- tokenizers and vocabularies --------------------------------------------------------------------------------------------


def test_different_tokenizers_are_refused_with_the_first_token(checkpoints, tmp_path):
    other = save_checkpoint(tmp_path / "other", 16, 1, words="quick brown foxes jump over lazy zebras")
    with pytest.raises(
        InputError, match=r"same tokenizer: token \d+ is '.*' in the target's and '.*' in .*'s"
    ) as caught:
        ModelPair.from_pretrained(checkpoints[0], other)
    assert "\n" not in str(caught.value)


def test_a_special_token_that_only_the_target_has_is_not_drafted(checkpoints, tmp_path):
    """The draft's output layer lacks it; texts may hold it."""
    target = save_checkpoint(tmp_path / "target", 16, 5)
    tokenizer = load_tokenizer(target)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tokenizer.save_pretrained(target)
    model = load_draft(target)
    model.resize_token_embeddings(model.vocab_size + 1, mean_resizing=False)
    model.save_pretrained(target)
    with pytest.warns(
        RuntimeWarning, match="special tokens differ between target and draft .*, which never proposes them"
    ):
        pair = ModelPair.from_pretrained(target, checkpoints[1])
    new = pair.tokenizer.convert_tokens_to_ids("<|new|>")
    assert pair.unshared == (new,)
    for name in ("speculative", "mcsd"):
        for temperature in (0.0, 1.0):
            (generation,) = generate(pair, ["the <|new|> cat"], name, max_new_tokens=12, temperature=temperature)
            assert new in generation.prompt_ids and generation.token_ids
        (plain,) = generate(pair, ["the <|new|> cat"], "autoregressive", max_new_tokens=12, temperature=0.0)
        (greedy,) = generate(pair, ["the <|new|> cat"], name, max_new_tokens=12, temperature=0.0)
        assert greedy.token_ids == plain.token_ids


def test_a_special_token_that_the_draft_calls_otherwise_is_not_drafted(checkpoints, tmp_path):
    shutil.copytree(checkpoints[1], tmp_path / "draft")
    for file in (tmp_path / "draft").glob("tokenizer*.json"):
        file.write_text(file.read_text().replace("<|begin|>", "<|start|>"))
    with pytest.warns(RuntimeWarning, match="which never proposes them: 1$"):
        pair = ModelPair.from_pretrained(checkpoints[0], tmp_path / "draft")
    logits = torch.zeros(2, pair.vocab_size)
    assert pair.fit(logits)[0].isneginf().nonzero().view(-1).tolist() == [1]
    with pytest.raises(InputError, match=r"same tokenizer: token 1 is '<\|begin\|>' in the target's"):
        check_same_tokenizer(pair.tokenizer, load_tokenizer(tmp_path / "draft"))


def test_outputs_follow_the_target_where_the_draft_lacks_a_token(table_pair):
    pair = ModelPair(target=table_pair.target, draft=table_pair.draft, end_ids=(2,), unshared=(1,))
    assert output_pvalue(pair, config.method("specinfer"), 4000) > 1e-3


def test_the_same_tokens_split_differently_are_refused():
    one, other = tiny_tokenizer(), tiny_tokenizer()
    check_same_tokenizer(one, other)
    from tokenizers import pre_tokenizers

    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    with pytest.raises(InputError, match="the same tokens but splits text differently"):
        check_same_tokenizer(one, other)


@pytest.mark.parametrize("sizes", [(97, 104), (104, 97)])
def test_padded_vocabularies_fit(sizes, prompts):
    """Qwen pads models of one tokenizer to different sizes: missing tokens are impossible, extra ones are cut."""
    target, draft = (tiny_llama(16, 1, seed, torch.float64, vocab_size=size) for seed, size in enumerate(sizes))
    pair = ModelPair(target=target, draft=draft)
    assert pair.vocab_size == sizes[0]
    distribution = pair.fit(torch.zeros(1, sizes[1])).softmax(-1)
    assert distribution.shape[-1] == sizes[0]
    assert float(distribution[0, sizes[1] :].sum()) == 0
    greedy = generate(pair, prompts, "speculative", temperature=0.0, max_new_tokens=10)
    alone = generate(pair, prompts, "autoregressive", temperature=0.0, max_new_tokens=10)
    assert [g.token_ids for g in greedy] == [g.token_ids for g in alone]


def test_a_blank_at_the_beginning_of_a_text_survives_decoders_that_strip_it():
    """Llama-2's decoder drops one: indentation of code would be off by it."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "\u2581def": 1, "\u2581\u2581return": 2, "\u2581x": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    model = TabularModel(torch.eye(4, dtype=torch.float64))
    pair = ModelPair(target=model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=backend), end_ids=())
    assert pair.text([2, 3]) == " return x"
    assert pair.text([2, 3], before=[1]) == "  return x"


def test_a_model_smaller_than_its_tokenizer_is_refused():
    with pytest.raises(InputError, match="the draft has 90 output tokens, the tokenizer"):
        ModelPair(
            target=tiny_llama(16, 1, 0, torch.float32, vocab_size=400),
            draft=tiny_llama(16, 1, 0, torch.float32, vocab_size=90),
            tokenizer=tiny_tokenizer(),
        )


def test_prompts_are_strings_ids_or_messages(checkpoints):
    pair = ModelPair.from_pretrained(*checkpoints)
    assert pair.encode([5, 6]) == [5, 6]
    with pytest.raises(InputError, match="the tokenizer has no chat template"):
        pair.encode([{"role": "user", "content": "hi"}])
    pair.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %} it"
    assert pair.encode([{"role": "user", "content": "the cat"}]) == pair.tokenizer("the cat it").input_ids
    with pytest.raises(InputError, match="no tokenizer: expected prompts as lists of token ids"):
        ModelPair(target=pair.target).encode("text")


@pytest.mark.parametrize("device", ["cuda:99", "hpu", "meta", "cuad", "CUDA"])
def test_a_device_that_is_not_there_is_one_line_before_anything_is_loaded(device, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    for load in (lambda: ModelPair.toy(device=device), lambda: load_draft("toy/draft", device=device)):
        with pytest.raises(InputError, match=rf"^device: expected .*cpu.*, got '?{device}[^\n]*$"):
            load()


def test_the_devices_of_a_pair_are_all_that_its_models_lie_on(checkpoints):
    """A map as accelerate leaves it; the layer on disk has its weights on meta and runs on a GPU."""
    pair = ModelPair.from_pretrained(*checkpoints)
    assert pair.devices == ["cpu"]
    layers = {"model.layers.0": "cuda:0", "model.layers.1": "disk"}
    pair.target.hf_device_map = {"model.embed_tokens": 1, **layers, "lm_head": 1}
    assert pair.devices == ["cpu", "cuda:1", "cuda:0"]
    pair.target.to("meta")
    assert ModelPair(target=pair.target).devices == ["cuda:1", "cuda:0"]
    assert ModelPair(target=TabularModel(torch.eye(3))).devices == ["cpu"]


# -- drafts with a reduced output vocabulary --------------------------------------------------------------------------------

KEPT = [2, *range(40, 1024, 5)]


@pytest.fixture(scope="module")
def reduced_pair(tmp_path_factory) -> ModelPair:
    """The toy pair, its draft's output layer reduced to 198 of 1,024 tokens, loaded from its folder."""
    pair = ModelPair.toy()
    folder = tmp_path_factory.mktemp("reduced")
    reduced.save(folder, reduced.reduce_vocabulary(pair.draft, KEPT, pair.end_ids))
    pair.tokenizer.save_pretrained(folder)
    return ModelPair.from_pretrained("toy/target", folder)


@torch.no_grad()
def test_kept_logits_are_the_models_own_and_the_others_cannot_be_drawn(reduced_pair):
    ids = torch.randint(3, 1000, (2, 30), generator=torch.Generator().manual_seed(0))
    ours, whole = reduced_pair.draft(ids).logits, ModelPair.toy().draft(ids).logits
    others = sorted(set(range(1024)) - set(KEPT))
    torch.testing.assert_close(ours[..., KEPT], whole[..., KEPT])
    assert bool(ours[..., others].isneginf().all())
    assert reduced_pair.vocab_size == 1024
    assert not CaptureGuard(reduced_pair.draft).hooks, "its forward passes can be captured"
    target = torch.rand(1024, 96, generator=torch.Generator().manual_seed(1))
    plain = reduced.whole_vocabulary(reduced_pair.draft, target)
    assert torch.equal(plain.lm_head.weight[others], target[others])
    torch.testing.assert_close(plain(ids).logits[..., KEPT], ours[..., KEPT])


def test_a_library_that_knows_nothing_of_it_refuses_the_folder(reduced_pair, tmp_path):
    reduced.save(tmp_path, reduced_pair.draft)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["speculative", "mcsd", "dsbd"])
def test_greedy_outputs_are_the_targets_own(name, reduced_pair):
    prompts = ["Tom has 3 red balls and", "def add(a, b):"]
    (plain, ours) = (
        generate(reduced_pair, prompts, method, max_new_tokens=16, temperature=0.0)
        for method in ("autoregressive", name)
    )
    assert [g.token_ids for g in ours] == [g.token_ids for g in plain]
    assert ours[0].counts.num_drafted > 0


@pytest.mark.parametrize("name", ["block", "spectr", "mcsd"])
def test_whole_outputs_follow_the_targets_distribution_where_the_draft_has_fewer_tokens_than_candidates(
    name, table_pair
):
    """The draft can draw token 1 and the end alone: of three or more candidates, two are real."""
    probs = table_pair.draft.probs.clone()
    probs[:, 0] = 0.0
    pair = copy.copy(table_pair)
    pair.draft = TabularModel(probs / probs.sum(-1, keepdim=True))
    pair.drafts = (pair.draft, *table_pair.drafts[1:])
    assert output_pvalue(pair, config.method(name), 4_000, batch_size=4000) > 1e-4


def test_a_config_of_a_reduced_vocabulary_that_is_cut_off_is_one_line(tmp_path):
    (tmp_path / "reduced_config.json").write_text('{"model_type": "lla')
    with pytest.raises(InputError, match="reduced_config.json is not valid JSON"):
        ModelPair.from_pretrained("toy/target", tmp_path)
