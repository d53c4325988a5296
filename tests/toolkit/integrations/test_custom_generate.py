"""`model.generate(custom_generate=...)`: transformers' own greedy texts, its distribution, and what is refused by name."""

from __future__ import annotations

import copy
import json
import queue
import shutil

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessorList, TextIteratorStreamer
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from data_gen.held_out import load_frozen
from toolkit import ModelPair
from toolkit.acceptance.head import AcceptanceHead
from toolkit.distillation.drafts import export
from toolkit.errors import InputError
from toolkit.integrations.custom_generate import generate, pair_of
from toolkit.integrations.transformers import custom_generate
from toolkit.models.pair import resolve
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
    assert forwards < produced or (forwards == produced and "head" in options)
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
        assert generate(target, inputs=ids, **options, **more, method="prompt_lookup").tolist() == own.tolist()
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
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_is_not_followed_is_named(target, options, words):
    target = copy.copy(target) if "draft" in options else target
    with pytest.raises(InputError, match=words):
        target.generate(
            torch.tensor([[5, 6, 7, 8]]), custom_generate=custom_generate, max_new_tokens=4, pad_token_id=0, **options
        )


def test_an_empty_prompt_is_one_line(target):
    with pytest.raises(InputError, match="at least one token"):
        target.generate(torch.zeros(1, 0, dtype=torch.long), custom_generate=custom_generate, max_new_tokens=4)


def test_pairs_are_kept_with_their_model_and_not_copied(target):
    pair = pair_of(target, "toy/draft")
    assert pair_of(target, "toy/draft") is pair and pair_of(target, None) is not pair
    assert pair_of(copy.deepcopy(target), "toy/draft") is not pair
    for tokenizer in ("a call's", "another's", None):
        assert pair_of(target, "toy/draft", tokenizer) is pair and pair.tokenizer == tokenizer


def test_a_draft_folder_of_another_tokenizer_is_refused(target, tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(resolve("toy/draft"), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="same tokenizer"):
        pair_of(target, folder)
