"""`model.generate(custom_generate=...)`: transformers' own greedy texts, its distribution, and what is refused by name."""

from __future__ import annotations

import copy
import gc
import inspect
import json
import queue
import re
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessorList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.logits_process import (
    LogitNormalization,
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from data_gen.held_out import load_frozen
from toolkit import ModelPair, api
from toolkit.acceptance.head import AcceptanceHead
from toolkit.distillation.drafts import export
from toolkit.engine.engine import engine_of
from toolkit.errors import InputError
from toolkit.integrations.custom_generate import WARPERS, _sampling, generate
from toolkit.integrations.kept_drafts import pair_of
from toolkit.integrations.transformers import custom_generate
from toolkit.models.pair import resolve
from toolkit.sampling import warp
from toolkit.testing import tiny_llama

METHODS = {
    "copies": {},
    "a draft": {"draft": "toy/draft"},
    "a head": {"draft": "toy/draft", "method": "rate", "head": str(resolve("toy/target").parent / "head")},
    "a tree": {"draft": "toy/draft", "method": "mcsd"},
    "beams of the draft": {"draft": "toy/draft", "method": "mtad", "overrides": ["rule=rejection"]},
}
VOCAB, NEW, ENDS = 6, 3, 5


@pytest.fixture(scope="module")
def target():
    return ModelPair.toy().target


@pytest.fixture(scope="module")
def inputs():
    """Eight prompts of uneven length by padding side."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("toy/target"))
    tokenizer.pad_token = tokenizer.eos_token
    prompts = [load_frozen(domain, "dev")[number].prompt for domain in ("instruct", "math") for number in range(4)]
    return {
        side: tokenizer(prompts, padding=True, padding_side=side, return_tensors="pt") for side in ("left", "right")
    }


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("options", [*METHODS.values()][:4], ids=[*METHODS][:4])
def test_greedy_texts_of_a_batch_are_transformers_own(target, inputs, side, options):
    settings = {"max_new_tokens": 24, "do_sample": False, "repetition_penalty": 1.2, "pad_token_id": 0}
    width = inputs["left"].input_ids.shape[1]
    own = target.generate(**inputs["left"], **settings)[:, width:]
    answer = target.generate(
        **inputs[side], **settings, custom_generate=custom_generate, return_dict_in_generate=True, **options
    )
    assert torch.equal(answer.sequences[:, width:], own)
    assert torch.equal(answer.sequences[:, :width], inputs[side].input_ids)
    forwards = sum(counts.num_target_calls for counts in answer.counts)
    produced = sum(counts.num_generated for counts in answer.counts)  # costs are measured: drafting need not pay here
    assert forwards < produced if options.get("method") == "mcsd" else forwards <= produced
    assert len(answer.finish_reasons) == 8


def test_sampled_texts_have_the_distribution_of_transformers():
    """Temperature, top-k and top-p as in the config, prompts padded; 2,000 texts of three tokens over six."""
    model, draft = (tiny_llama(16, layers, seed, torch.float32, vocab_size=VOCAB) for layers, seed in ((2, 1), (1, 2)))
    prompt, sampled = [0, 3, 1], {"do_sample": True, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05}
    ids = torch.tensor([[4, *prompt]]).repeat(2000, 1)
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)
    options = {**sampled, "max_new_tokens": NEW, "eos_token_id": ENDS, "pad_token_id": ENDS}
    torch.manual_seed(0)
    drawn = model.generate(
        ids, attention_mask=mask, custom_generate=custom_generate, draft=draft, method="mcsd",
        overrides=["max_drafted=2"], **options,
    )  # fmt: skip
    theirs = torch.cat([
        model.generate(ids, attention_mask=mask, **options) for _ in range(10)
    ])  # fmt: skip
    code = (torch.tensor([VOCAB**2, VOCAB, 1]) * drawn[:, 4:]).sum(-1)
    expected = torch.bincount((torch.tensor([VOCAB**2, VOCAB, 1]) * theirs[:, 4:]).sum(-1), minlength=VOCAB**3)
    texts = torch.bincount(code, minlength=VOCAB**3)
    assert not texts[expected == 0].sum() > 4
    assert two_samples(texts, expected) > 1e-4


def two_samples(first, second):
    """The chi-square p-value of two samples over the cells where the pooled count is at least 25."""
    from scipy.stats import chi2_contingency

    table = torch.stack([first, second]).double()
    cells = table.sum(0) >= 25
    return chi2_contingency(torch.cat([table[:, cells], table[:, ~cells].sum(1, keepdim=True) + 1], 1).numpy()).pvalue


def test_seeds_repeat_and_rows_of_one_prompt_differ(target, inputs):
    ids = inputs["left"].input_ids[-1:][:, inputs["left"].attention_mask[-1] == 1]
    options = {
        "custom_generate": custom_generate,
        "do_sample": True,
        "temperature": 9.0,
        "max_new_tokens": 12,
        "pad_token_id": 0,
    }
    first, again, other = (
        target.generate(ids, num_return_sequences=3, seed=seed, **options).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other and len({tuple(row) for row in first}) == 3
    torch.manual_seed(5)
    free = [target.generate(ids, **options).tolist() for _ in range(2)]
    torch.manual_seed(5)
    assert free[0] != free[1] and target.generate(ids, **options).tolist() == free[0]


def test_an_exported_folder_streams_and_stops_at_strings(target, inputs, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(resolve("toy/target"))
    folder = export(tmp_path / "draft", ModelPair.toy().draft, tokenizer, "a card")
    ids = inputs["left"].input_ids[:1][:, inputs["left"].attention_mask[0] == 1]
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    own = target.generate(ids, **options)
    text = tokenizer.decode(own[0, ids.shape[1] :])
    stop = text[5:8]
    stopped = target.generate(ids, **options, stop_strings=[stop], tokenizer=tokenizer)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=1)
    answer = target.generate(
        ids, **options, custom_generate=str(folder), trust_remote_code=True, draft=str(folder), streamer=streamer,
        stop_strings=[stop], tokenizer=tokenizer,
    )  # fmt: skip
    assert answer.tolist() == stopped.tolist()
    assert "".join(streamer) == tokenizer.decode(stopped[0, ids.shape[1] :])
    head = AcceptanceHead.load(METHODS["a head"]["head"])[0].save(tmp_path / "head")
    assert (head / "custom_generate" / "generate.py").read_text() == (
        folder / "custom_generate" / "generate.py"
    ).read_text()
    with pytest.raises((queue.Empty, StopIteration)):
        next(streamer)


def test_what_a_call_of_a_folder_names_precedes_the_config(target, inputs):
    """None as in transformers: no end of text, no stop strings of the config."""
    tokenizer, target = AutoTokenizer.from_pretrained(resolve("toy/target")), copy.copy(target)
    ids = inputs["left"].input_ids[:1][:, inputs["left"].attention_mask[0] == 1]
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "pad_token_id": 0,
        "tokenizer": tokenizer,
        "eos_token_id": None,
    }
    text = tokenizer.decode(target.generate(ids, **options)[0, ids.shape[1] :])
    target.generation_config = copy.deepcopy(target.generation_config)
    target.generation_config.stop_strings = [text[3:6]]
    lengths = set()
    for more in ({"stop_strings": None}, {"stop_strings": [text[9:12]]}, {}):
        own = target.generate(ids, **options, **more)
        assert generate(ids, model=target, **options, **more, method="prompt_lookup").tolist() == own.tolist()
        lengths.add(own.shape[1])
    assert len(lengths) == 3 and max(lengths) == ids.shape[1] + 24


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"penalty_alpha": 0.6}, "penalty_alpha=0.6"),  # transformers hands these on without a word
        ({"dola_layers": "low"}, "dola_layers=low"),
        ({"no_repeat_ngram_size": 3}, "NoRepeatNGramLogitsProcessor"),
        ({"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(2)])}, "NoRepeatNGramLogitsProcessor"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5|UnbatchedClassifierFree"),
        ({"max_time": 5.0}, "MaxTimeCriteria"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"typical_p": 0.5, "do_sample": True}, "TypicalLogitsWarper"),
        ({"min_new_tokens": 3, "eos_token_id": 1}, "MinLengthLogitsProcessor"),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "no holes"),
        ({"position_ids": torch.tensor([[1, 2, 3, 4]])}, "position_ids"),
        ({"method": "no_such"}, "unknown method"),
        ({"method": "specdec_pp", "draft": "toy/draft"}, "head"),
        ({"draft": "no/such/folder/at/all"}, "tokenizer"),
        ({"draft": "toy/draft", "assistant_model": "toy/draft"}, "got both"),
        ({"inputs_embeds": torch.zeros(1, 3, 192), "inputs": None}, "inputs_embeds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_followed_is_named(target, options, words):
    target = copy.copy(target) if "draft" in options else target
    with pytest.raises(InputError, match=words):
        target.generate(**{"inputs": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 4, "pad_token_id": 0,
                           "custom_generate": custom_generate, **options})  # fmt: skip


def test_an_empty_prompt_is_one_line(target):
    with pytest.raises(InputError, match="at least one token"):
        target.generate(torch.zeros(1, 0, dtype=torch.long), custom_generate=custom_generate, max_new_tokens=4)


# -- what is kept between two calls -----------------------------------------------------------------------------------


def test_drafts_and_engines_are_kept_with_their_model_and_not_copied(target):
    pair, again = pair_of(target, "toy/draft", "a call's"), pair_of(target, "toy/draft")
    assert again.draft is pair.draft and engine_of(again) is engine_of(pair)
    assert (pair.tokenizer, again.tokenizer) == ("a call's", None)
    assert pair_of(copy.deepcopy(target), "toy/draft").draft is not pair.draft


def test_calls_at_the_same_time_share_no_stop_strings(target):
    """Two threads on one model, 100 texts, of which every second one ends at strings."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("toy/target"))
    prompts = [tokenizer(load_frozen("instruct", "dev")[number].prompt, return_tensors="pt") for number in range(50)]

    def texts(stop):
        options = {
            "do_sample": False,
            "max_new_tokens": 16,
            "pad_token_id": 0,
            "text_tokenizer": tokenizer if stop else None,
        }
        calls = (
            target.generate(**ids, **options, custom_generate=custom_generate, draft="toy/draft", stop=stop)
            for ids in prompts
        )
        return [answer.tolist() for answer in calls]

    stops = (["e", "a", "o"], ())
    alone = [texts(stop) for stop in stops]
    assert sum(map(len, (row for text in alone[0] for row in text))) < sum(
        map(len, (row for text in alone[1] for row in text))
    )
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(texts, stops)) == alone


def test_a_draft_folder_that_changed_is_loaded_again(target, tmp_path, monkeypatch):
    """Trained again, and the same relative name in another working directory."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("toy/target"))
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {
        "do_sample": False,
        "max_new_tokens": 24,
        "pad_token_id": 0,
        "method": "speculative",
        "return_dict_in_generate": True,
    }

    def forwards(folder):
        answer = target.generate(ids, custom_generate=custom_generate, draft=folder, **options)
        return answer.counts[0].num_target_calls

    good, poor = copy.deepcopy(target), tiny_llama(32, 1, 0, torch.float32, vocab_size=target.config.vocab_size)
    export(tmp_path / "a" / "draft", poor, tokenizer, "a card")
    export(tmp_path / "b" / "draft", good, tokenizer, "a card")
    monkeypatch.chdir(tmp_path / "a")
    before = forwards("draft")
    monkeypatch.chdir(tmp_path / "b")
    assert forwards("draft") < before
    shutil.rmtree(tmp_path / "a" / "draft")
    export(tmp_path / "a" / "draft", good, tokenizer, "a card")
    monkeypatch.chdir(tmp_path / "a")
    assert forwards("draft") < before


def test_a_model_that_is_resized_is_decoded_at_its_new_size(target):
    target, ids = copy.deepcopy(target), torch.tensor([[5, 6, 7, 8]])
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    pair = ModelPair(target, draft=ModelPair.toy().draft, end_ids=(), costs="assumed")
    for size in (target.config.vocab_size, target.config.vocab_size + 64, target.config.vocab_size - 64):
        target.resize_token_embeddings(size)
        own = target.generate(ids, **options, eos_token_id=None).tolist()
        for method in ("mcsd", "speculative"):
            answer = target.generate(
                ids, **options, eos_token_id=None, custom_generate=custom_generate, draft="toy/draft", method=method
            )
            assert answer.tolist() == own
        (kept,) = api.generate(pair, ids.tolist(), "speculative", max_new_tokens=12, temperature=0)
        assert kept.token_ids == own[0][4:]


def test_the_last_four_drafts_stay_in_memory(target):
    target = copy.deepcopy(target)
    drafts = [weakref.ref(pair_of(target, copy.deepcopy(target)).draft) for _ in range(6)]
    pair_of(target, None)
    gc.collect()
    assert [draft() is not None for draft in drafts] == [False, False, True, True, True, True]


def test_a_draft_folder_of_another_tokenizer_is_refused(target, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(resolve("toy/draft"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="same tokenizer"):
        pair_of(target, folder)


# -- what a caller hands in -------------------------------------------------------------------------------------------

OWN_PROCESSORS = {
    RepetitionPenaltyLogitsProcessor: {"penalty": 1.5, "prompt_ignore_length": torch.tensor([2])},
    TemperatureLogitsWarper: {"temperature": 0.5},
    TopKLogitsWarper: {"top_k": 3, "filter_value": -5.0, "min_tokens_to_keep": 4},
    TopPLogitsWarper: {"top_p": 0.3, "filter_value": -5.0, "min_tokens_to_keep": 4},
    MinPLogitsWarper: {"min_p": 0.5, "filter_value": -5.0, "min_tokens_to_keep": 4},
    LogitNormalization: {},
}


def test_every_attribute_of_a_processor_is_followed_or_refused():
    """Each attribute of each accepted class at another value: the distribution of a token is the processor's, or an error."""
    assert {kind.__name__ for kind in OWN_PROCESSORS} == set(WARPERS)
    logits, ids = torch.linspace(-2, 3, 8)[None], torch.tensor([[0, 7]])
    refused = []
    for kind, changes in OWN_PROCESSORS.items():
        required = {name: value for name, value in changes.items() if name in WARPERS[kind.__name__]}
        required.pop("min_tokens_to_keep", None)
        assert set(inspect.signature(kind).parameters) <= {*changes, "args", "kwargs"}, kind
        for changed in ({}, *({name: value} for name, value in changes.items() if name not in required)):
            processor = kind(**{**required, **changed})
            settings = GenerationConfig(do_sample=True, max_length=9)
            try:
                sampling = _sampling(torch.ones(1, 2, dtype=torch.bool), [processor], [], settings, (), 0)
            except InputError as error:
                refused.append(re.search(r"follow (\w+\.\w+)=", str(error)).group(1))
                continue
            expected = processor(ids, logits.clone()).softmax(-1)
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
            torch.testing.assert_close(warp(logits, sampling, seen), expected)
    assert refused == [
        "RepetitionPenaltyLogitsProcessor.prompt_ignore_length", "TopKLogitsWarper.filter_value",
        "TopPLogitsWarper.filter_value", "TopPLogitsWarper.min_tokens_to_keep",
        "MinPLogitsWarper.filter_value", "MinPLogitsWarper.min_tokens_to_keep",
    ]  # fmt: skip


def test_ones_own_penalty_and_criteria_are_followed(target, inputs):
    """In a padded batch a penalty that counts the padding is refused, one that ignores it is followed; criteria add up."""
    ids, width = inputs["left"], inputs["left"].input_ids.shape[1]
    padding = ids.attention_mask.argmax(1)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    criteria = [EosTokenCriteria([19]), EosTokenCriteria([33]), MaxLengthCriteria(width + 15)]
    own = [RepetitionPenaltyLogitsProcessor(1.3, padding)]
    theirs = target.generate(**ids, **options, logits_processor=own, stopping_criteria=criteria)
    ours = target.generate(
        **ids, **options, logits_processor=own, stopping_criteria=criteria, custom_generate=custom_generate
    )
    assert ours.tolist() == theirs.tolist()
    with pytest.raises(InputError, match="prompt_ignore_length"):
        target.generate(
            **ids, **options, logits_processor=[RepetitionPenaltyLogitsProcessor(1.3)], custom_generate=custom_generate
        )


def test_a_temperature_of_ones_own_leaves_greedy_decoding_greedy(target):
    options = {
        "do_sample": False,
        "max_new_tokens": 12,
        "pad_token_id": 0,
        "logits_processor": [TemperatureLogitsWarper(5.0)],
    }
    ids = torch.tensor([[5, 6, 7, 8]])
    assert (
        target.generate(ids, **options, custom_generate=custom_generate).tolist()
        == target.generate(ids, **options).tolist()
    )


def test_streamers_and_assistants_beside_the_function_are_used(target):
    tokenizer, ids = AutoTokenizer.from_pretrained(resolve("toy/target")), torch.tensor([[5, 6, 7, 8]])
    options = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=1)
    answer = target.generate(
        ids, **options, custom_generate=custom_generate, assistant_model=copy.deepcopy(target), method="speculative",
        return_dict_in_generate=True, streamer=streamer,
    )  # fmt: skip
    assert answer.counts[0].num_target_calls < 24, "the assistant is the draft"
    assert "".join(streamer) == tokenizer.decode(answer.sequences[0, 4:])


def test_a_stop_string_may_begin_in_the_prompt(target):
    """As in transformers; one that is whole in the prompt ends nothing."""
    tokenizer, options = (
        AutoTokenizer.from_pretrained(resolve("toy/target")),
        {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0},
    )
    ids = tokenizer(load_frozen("instruct", "dev")[0].prompt, return_tensors="pt").input_ids
    prompt, text = (tokenizer.decode(part) for part in (ids[0], target.generate(ids, **options)[0, ids.shape[1] :]))
    lengths = []
    for stop in (prompt[-3:] + text[:3], prompt[-3:], text[6:9]):
        theirs = target.generate(ids, **options, stop_strings=[stop], tokenizer=tokenizer)
        ours = target.generate(ids, **options, custom_generate=custom_generate, stop=stop, text_tokenizer=tokenizer)
        assert ours.tolist() == theirs.tolist()
        lengths.append(ours.shape[1])
    assert lengths[0] < lengths[2] < lengths[1]


def test_a_draft_that_is_loaded_with_its_code_generates(target, tmp_path):
    """transformers binds the folder's function to it: alone, by a name, as an assistant, in a pipeline."""
    tokenizer, ids = AutoTokenizer.from_pretrained(resolve("toy/target")), torch.tensor([[5, 6, 7, 8]])
    folder = export(tmp_path / "draft", ModelPair.toy().draft, tokenizer, "a card")
    draft = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    own = plain.generate(ids, **options).tolist()
    assert draft.generate(ids, **options).tolist() == own
    assert draft.generate(inputs=ids, custom_generate=custom_generate, **options).tolist() == own
    assert draft.generate(ids, custom_generate=str(folder), trust_remote_code=True, **options).tolist() == own
    assisted = target.generate(ids, assistant_model=draft, **options)
    assert assisted.tolist() == target.generate(ids, **options).tolist()
    texts = [
        pipeline("text-generation", model=model, tokenizer=tokenizer)(
            "Q: Spell baker.", **options, return_full_text=False
        )
        for model in (draft, plain)
    ]
    assert texts[0] == texts[1]
