"""Drafts that read the target's states: replays equal a slow engine, mistake by mistake; those of the toy target are named."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.diagnosis.along import AlongTexts
from analysis.diagnosis.answers import Answer
from analysis.diagnosis.replay import expected
from tests.analysis.diagnosis.drafts import taught
from tests.analysis.diagnosis.engine import DRAFTED, BlockEngine, EagleEngine, texts
from tests.analysis.diagnosis.test_diagnose import diagnosed
from toolkit import ModelPair
from toolkit.drafts import kind_of
from toolkit.drafts.block import format as block_format
from toolkit.drafts.causes import AS_IT_SHOULD_BE, Case
from toolkit.drafts.eagle3 import format as eagle3_format
from toolkit.errors import InputError
from toolkit.models.pair import TOY
from toolkit.sampling import Sampling
from toolkit.testing import ragged_prompts, tiny_eagle3, tiny_llama
from toolkit.testing.blocks import tiny_block

GREEDY = Sampling(temperature=0)
EAGLE3 = {
    "accepted tokens as they were drafted": {"guessed": True},
    "hands on its state after its last norm": {"normed": True},
    "read one layer early": {"early": 1},
    "the last one, 3 times": {"last": True},
    "that of the row after it": {"rows": 1},
    "that of the row before it": {"rows": -1},
    "positions after the prompt are one too high": {"shift": 1},
    "positions after the prompt are one too low": {"shift": -1},
    "the last 12 tokens alone": {"window": 12},
}
BLOCKS = {
    "do not see those after them": {"causal": True},
    "positions of a block's tokens are one too high": {"shift": 1},
    "positions of a block's tokens are one too low": {"shift": -1},
    "read one layer early": {"early": 1},
    "that of the row after it": {"rows": 1},
    "the last 12 tokens alone": {"window": 12},
}
KINDS = {"eagle3": (EagleEngine, EAGLE3), "dflash": (BlockEngine, BLOCKS), "dspark": (BlockEngine, BLOCKS)}


def tiny(kind, **settings):
    """A random target of three layers and a random draft, in float64; the draft has rows for every other token."""
    target = tiny_llama(32, 3, 0, torch.float64)
    layers, kept = (1, 2, 3), torch.arange(1, 97, 2)
    if kind == "eagle3":
        return ModelPair(target=target, draft=tiny_eagle3(target, layers, kept))
    size = DRAFTED + (kind == "dflash")
    draft = tiny_block(target, kind, kept, block_size=size, target_layers=layers, **settings)
    return ModelPair(target=target, draft=draft, tokenizer=None)


def answers_of(pair, engine, generator):
    """Texts that an engine's drafts are often accepted in, with its counts."""
    answers = []
    for prompt in ragged_prompts(5)[:4]:
        text = [7]
        engine.begin(len(prompt))
        while len(text) < 32:
            ids = [*prompt, *text]
            with torch.no_grad():
                drafted = engine.round(ids, engine.states(ids), len(ids) - 1)
            accepted = int(generator.integers(0, DRAFTED + 1))
            text += [*drafted[:accepted], 2 * int(generator.integers(3, 40))]  # which the draft has no row for
            engine.end(accepted)
        counts = engine.rounds("", prompt, text)
        starts = np.cumsum([1, *(count + 1 for count in counts)])
        rounds = [(int(start), DRAFTED, count) for start, count in zip(starts, counts, strict=False)]
        answers.append(Answer(prompt, text, [each for each in rounds if each[0] + DRAFTED + 1 <= len(text)]))
    return answers


def replayed(pair, cause, answers):
    return np.concatenate(expected(pair.draft, cause, answers, GREEDY, [], int, AlongTexts(pair.target, answers)))


def causes_of(pair, **settings):
    case = Case(pair.draft, None, [[1]], 64, GREEDY, [12], pair.target)
    return kind_of(pair.draft).part("causes")(case)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, (_, all_) in KINDS.items() for name in [None, *all_]]
)
def test_a_replay_accepts_what_a_slow_engine_accepts(kind, name):
    """In float64, round by round, under the cause that was planted and no other."""
    pair, (engine_class, planted) = tiny(kind), KINDS[kind]
    engine = engine_class(pair, **planted.get(name, {}))
    answers = answers_of(pair, engine, np.random.default_rng(0))
    counted = np.array([count for answer in answers for _, _, count in answer.rounds])
    right = replayed(pair, AS_IT_SHOULD_BE, answers)
    assert len(counted) > 12 and counted.sum() > 12
    if name is None:
        assert (right == counted).all()
        return
    equal = [cause.meaning for cause in causes_of(pair) if (replayed(pair, cause, answers) == counted).all()]
    if "after the prompt" in name:  # of an EAGLE-3 draft that changes next to nothing
        assert any(name in meaning for meaning in equal)
        return
    assert (right != counted).any()
    assert [meaning for meaning in equal if name in meaning] == equal != []


@pytest.mark.parametrize("non_causal", [False, True])
def test_layers_with_windows_are_causal_or_not_by_their_setting(non_causal):
    """The cause of a draft with windows is the opposite of its setting."""
    pair = tiny("dflash", window=30, sliding_window_non_causal=non_causal)
    engine = BlockEngine(pair)
    engine.draft.settings = replace(pair.draft.settings, sliding_window_non_causal=not non_causal)
    answers = answers_of(pair, engine, np.random.default_rng(1))
    counted = np.array([count for answer in answers for _, _, count in answer.rounds])
    cause = next(cause for cause in causes_of(pair) if "of a block" in cause.meaning)
    assert ("see all of it" in cause.meaning) is not non_causal
    assert (replayed(pair, cause, answers) == counted).all()
    assert (replayed(pair, AS_IT_SHOULD_BE, answers) != counted).any()


def test_blocks_that_end_after_the_drafted_tokens():
    """A draft that was trained with longer ones sees fewer masks there."""
    target = tiny_llama(32, 3, 0, torch.float64)
    draft = tiny_block(target, "dflash", torch.arange(1, 97, 2), block_size=DRAFTED + 5, target_layers=(1, 2, 3))
    pair = ModelPair(target=target, draft=draft, tokenizer=None)
    answers = answers_of(pair, BlockEngine(pair, size=DRAFTED + 1), np.random.default_rng(0))
    counted = np.array([count for answer in answers for _, _, count in answer.rounds])
    case = Case(draft, None, [[1]], 64, GREEDY, [], target, DRAFTED)
    (name,) = [
        cause.meaning
        for cause in kind_of(draft).part("causes")(case)
        if (replayed(pair, cause, answers) == counted).all()
    ]
    assert name.startswith(f"blocks of {DRAFTED + 1} tokens, not {DRAFTED + 5}")
    assert (replayed(pair, AS_IT_SHOULD_BE, answers) != counted).any()
    assert draft.block_length == DRAFTED + 4


def test_rounds_longer_than_a_block_are_one_line():
    pair = tiny("dflash")
    answers = [Answer([5, 6], list(range(10, 40)), [(1, 9, 2)])]
    with pytest.raises(InputError, match="expected rounds of at most 4 drafted tokens, a block of this draft, got 9"):
        replayed(pair, AS_IT_SHOULD_BE, answers)


# -- drafts of the toy target ---------------------------------------------------------------------------------------------

STEPS = {"eagle3": (10, 3e-3), "dflash": (120, 4e-3)}


@pytest.fixture(scope="module")
def toy_texts():
    return texts(ModelPair.toy(), 24, 48)


@pytest.fixture(scope="module", params=["eagle3", "dflash"])
def toy_draft(request, toy_texts, tmp_path_factory):
    """The kind and the folder of a draft that has learnt some of the texts."""
    target = ModelPair.toy().target
    draft = taught(request.param, target, [each[2:] for each in toy_texts[:8]], DRAFTED, *STEPS[request.param])
    folder = tmp_path_factory.mktemp("drafts") / request.param
    {"eagle3": eagle3_format, "dflash": block_format}[request.param].save(folder, draft, str(TOY / "target"))
    return request.param, folder


@pytest.mark.slow
def test_mistakes_with_a_draft_of_the_toy_target_are_named(toy_draft, toy_texts, tmp_path):
    kind, folder = toy_draft
    engine_class, planted = KINDS[kind]
    pair, words = ModelPair.from_pretrained(TOY / "target", folder), [f"pair.draft={folder}", "rounds=400"]
    for name in NAMED[kind]:
        path = engine_class(pair, **planted[name]).answer(toy_texts, tmp_path / "answers.jsonl")
        (cause,) = diagnosed(path, *words)["explained_by"]
        assert name in cause
    for dtype in (None, torch.bfloat16):
        path = engine_class(pair, dtype=dtype).answer(toy_texts, tmp_path / "answers.jsonl")
        assert diagnosed(path, *words)["sentence"].startswith("as it should be")


NAMED = {
    "eagle3": list(EAGLE3)[:5],
    "dflash": list(BLOCKS)[1:5],  # the first of them changes 2 of 400 rounds of this draft
}
