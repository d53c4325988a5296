"""Pairs: loading local checkpoints, comparing tokenizers, fitting vocabularies, fingerprints."""

from __future__ import annotations

import shutil

import pytest
import torch

from toolkit import ModelPair, config, generate
from toolkit.engine import TabularModel
from toolkit.errors import InputError
from toolkit.models.pair import TOY, check_same_tokenizer, fingerprint, load_draft, load_tokenizer
from toolkit.testing import output_pvalue, save_checkpoint, tiny_llama, tiny_tokenizer


def test_local_folders_load_and_decode(checkpoints):
    pair = ModelPair.from_pretrained(*checkpoints)
    assert pair.end_ids == (2,)
    assert pair.max_length == 256
    (generation,) = generate(pair, ["the cat"], "speculative", max_new_tokens=5)
    assert 1 <= len(generation.token_ids) <= 5
    assert generation.prompt_ids == pair.tokenizer("the cat").input_ids


def test_dtype_and_bad_sources(checkpoints, tmp_path):
    pair = ModelPair.from_pretrained(*checkpoints, dtype="float64")
    assert pair.target.dtype == torch.float64
    with pytest.raises(InputError, match="dtype: expected float32, float64, float16, bfloat16 or auto, got 'float31'"):
        ModelPair.from_pretrained(*checkpoints, dtype="float31")
    with pytest.raises(InputError, match="expected a model folder at .*nowhere, found none"):
        ModelPair.from_pretrained(tmp_path / "nowhere", checkpoints[1])
    with pytest.raises(InputError, match="could not load a tokenizer from"):
        ModelPair.from_pretrained(tmp_path, checkpoints[1])
    with pytest.raises(InputError, match="quantization: expected 8bit, 4bit or null, got '3bit'"):
        ModelPair.from_pretrained(*checkpoints, quantization="3bit")


def test_quantization_needs_its_library(checkpoints):
    with pytest.raises(InputError, match="quantization=4bit needs bitsandbytes: pip install"):
        ModelPair.from_pretrained(*checkpoints, quantization="4bit")


def test_different_tokenizers_are_refused_with_the_first_token(checkpoints, tmp_path):
    other = save_checkpoint(tmp_path / "other", 16, 1, words="quick brown foxes jump over lazy zebras")
    with pytest.raises(
        InputError, match=r"same tokenizer: token \d+ is '.*' in the target's and '.*' in .*'s"
    ) as caught:
        ModelPair.from_pretrained(checkpoints[0], other)
    assert "\n" not in str(caught.value)


def with_special_tokens(folder, name, *tokens):
    """A copy of a checkpoint whose tokenizer has more special tokens than its model."""
    shutil.copytree(folder, name)
    tokenizer = load_tokenizer(name)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.save_pretrained(name)
    return name


def test_a_special_token_that_only_the_target_has_is_not_drafted(checkpoints, tmp_path):
    """The draft's output layer lacks it; texts may hold it."""
    target = with_special_tokens(save_checkpoint(tmp_path / "larger", 16, 5), tmp_path / "target", "<|new|>")
    model = load_draft(target)
    model.resize_token_embeddings(model.vocab_size + 1, mean_resizing=False)
    model.save_pretrained(target)
    with pytest.warns(
        RuntimeWarning, match="special tokens differ between target and draft .*, which never proposes them"
    ):
        pair = ModelPair.from_pretrained(target, checkpoints[1])
    new = pair.tokenizer.convert_tokens_to_ids("<|new|>")
    assert pair.unshared == (new,)
    for name in ("speculative", "mcsd", "specinfer"):
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


@pytest.mark.parametrize("name", ["speculative", "block", "specinfer", "spectr", "mcsd"])
def test_outputs_follow_the_target_where_the_draft_lacks_a_token(name, table_pair):
    pair = ModelPair(target=table_pair.target, draft=table_pair.draft, end_ids=(2,), unshared=(1,))
    assert output_pvalue(pair, config.method(name), 4000) > 1e-3


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


def test_fingerprints_tell_weights_apart(checkpoints):
    one = ModelPair.from_pretrained(*checkpoints)
    again = ModelPair.from_pretrained(*checkpoints, dtype="float64")
    assert fingerprint(one.draft) == fingerprint(again.draft) != fingerprint(one.target)
    with torch.no_grad():
        again.draft.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert fingerprint(one.draft) != fingerprint(again.draft)


def test_the_devices_of_a_pair_are_all_that_its_models_lie_on(checkpoints):
    """A map as accelerate leaves it; the layer on disk has its weights on meta and runs on a GPU."""
    pair = ModelPair.from_pretrained(*checkpoints)
    assert pair.devices == ["cpu"]
    pair.target.hf_device_map = {
        "model.embed_tokens": 1,
        "model.layers.0": "cuda:0",
        "model.layers.1": "disk",
        "lm_head": 1,
    }
    assert pair.devices == ["cpu", "cuda:1", "cuda:0"]
    pair.target.to("meta")
    assert ModelPair(target=pair.target).devices == ["cuda:1", "cuda:0"]
    assert ModelPair(target=TabularModel(torch.eye(3))).devices == ["cpu"]


def test_the_toy_pair_ships_with_a_head_of_its_own():
    from toolkit.acceptance import AcceptanceHead
    from toolkit.acceptance.folder import check_draft

    pair = ModelPair.toy()
    assert pair.head is not None
    _, about = AcceptanceHead.load(pair.head)
    check_draft(about, pair.draft, pair.head)
    with pytest.raises(InputError, match="reads states of size|was trained for another draft"):
        check_draft(about, pair.target, pair.head)
    assert sum(path.stat().st_size for path in TOY.rglob("*") if path.is_file()) < 12e6


def test_a_head_for_another_draft_is_refused(checkpoints):
    pair = ModelPair.from_pretrained(*checkpoints)
    with pytest.raises(InputError, match="the head in .* reads states of size"):
        generate(pair, ["the cat"], "specdec_pp", head=str(TOY / "head"))
    with pytest.raises(InputError, match="needs an acceptance head: expected head=FOLDER, got none"):
        generate(pair, ["the cat"], "specdec_pp")
    with pytest.raises(InputError, match="expected an acceptance head .* in .*, found none"):
        generate(pair, ["the cat"], "specdec_pp", head=str(checkpoints[0]))
