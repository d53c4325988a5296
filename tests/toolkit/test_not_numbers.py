"""A draft, a policy or a head that gives what is not a number: its row ends and says so, and its neighbours never notice."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import pytest
import torch

from tests.methods import at_temperatures
from toolkit import ModelPair, config
from toolkit.decoding import Method, Sampling, TreeProposer, decode
from toolkit.engine import TabularModel, open_session
from toolkit.engine.device import Gate
from toolkit.stopping import BatchRate, Fixed, Rate, Survival
from toolkit.testing import llama_pair, random_heads
from toolkit.verification import get

METHODS = {name: config.method(name) for name in config.choices("method")}
MESSAGE = "prompt {}: the models' distributions hold values that are not numbers"
PLACE = 64  # the state of the table after tokens 6 4
BROKEN = 17  # a token that this draft's embedding has no numbers for: nothing that has read it is one


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """A pair of tables over ten tokens, whose draft is much like its target."""
    generator = torch.Generator().manual_seed(0)
    target, noise = (TabularModel.random(10, 2, generator, sharpness=sharpness) for sharpness in (1.0, 0.7))
    draft = TabularModel((target.probs * noise.probs) / (target.probs * noise.probs).sum(-1, keepdim=True))
    pair = ModelPair(target=target, draft=draft, end_ids=(0,))
    pair.head = str(random_heads(tmp_path_factory.mktemp("heads"), 100, 10, depth=0))
    return pair


def with_logits(pair, logits, at=PLACE):
    """The pair with other logits of its draft at one place of a hundred."""
    probs = pair.draft.probs.clone()
    probs[at] = logits.exp()
    return replace(pair, draft=TabularModel(probs), drafts=[])


def ended(generations, clean):
    """Rows that ended with an error. All others have the texts and rounds of a run without the fault."""
    errors = [generation.index for generation in generations if generation.error is not None]
    for generation, expected in zip(generations, clean, strict=True):
        if generation.index in errors:
            assert generation.error == MESSAGE.format(generation.index) and generation.finish_reason == "error"
            tokens = generation.token_ids
            assert expected.beams is not None or tokens == expected.token_ids[: len(tokens)] != expected.token_ids
        else:
            assert (generation.token_ids, generation.beams) == (expected.token_ids, expected.beams)
            assert generation.counts == expected.counts
    return errors


PROMPTS = [[7, 5, 1 + row] for row in range(6)]
LOGITS = {
    "all": torch.full((10,), torch.nan),
    "one": torch.tensor([0.0] * 9 + [torch.nan]),
    "infinite": torch.tensor([0.0, torch.inf] + [0.0] * 8),
    "nothing": torch.full((10,), -torch.inf),
    "half precision": torch.tensor([7e4] + [0.0] * 9).half(),
}  # fmt: skip


@pytest.mark.parametrize(("name", "temperature"), at_temperatures([*METHODS]))
def test_a_broken_draft_ends_the_rows_that_read_it_under_every_method(name, temperature, tables):
    """The last prompt ends at the place; of the others, some come by it."""
    method, sampling = METHODS[name], Sampling(temperature=temperature, max_new_tokens=7, seed=3)
    prompts, size = [*PROMPTS, [7, PLACE // 10, PLACE % 10]], 1 if method.couples_rows else 4
    pairs = (tables, with_logits(tables, LOGITS["one"]))
    errors = ended(*(decode(pair, prompts, method, sampling, batch_size=size) for pair in pairs[::-1]))
    drafts = method.bind(tables).drafts and method.proposer.needs_draft_model
    assert len(errors) < len(prompts) and (len(PROMPTS) in errors) == drafts


WARPED = [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"repetition_penalty": 1.3}, {"temperature": 0.0}]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("speculative", kind) for kind in LOGITS),
        *(("specinfer", kind) for kind in LOGITS),
        ("mtad", "one"),
        ("dsbd", "nothing"),
    ],
)
def test_whatever_is_not_a_number_however_it_is_warped(name, kind, tables):
    prompts, broken = [*PROMPTS[:3], [7, PLACE // 10, PLACE % 10]], with_logits(tables, LOGITS[kind].double())
    for settings in WARPED:
        if METHODS[name].beams is None or "repetition_penalty" not in settings:
            sampling = Sampling(**{"max_new_tokens": 5, "seed": 1, **settings})
            rows, clean = (decode(pair, prompts, METHODS[name], sampling) for pair in (broken, tables))
            assert 3 in ended(rows, clean), settings


def test_logits_of_minus_infinity_are_no_fault_while_one_is_left(tables):
    """A draft may speak a part of the vocabulary."""
    reduced = with_logits(tables, torch.tensor([-torch.inf] * 9 + [0.0]))
    for name in ("speculative", "mcsd", "mtad", "dsbd"):
        rows = decode(reduced, [*PROMPTS, [7, PLACE // 10, PLACE % 10]], METHODS[name], Sampling(max_new_tokens=8))
        assert not any(row.error for row in rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_of_several_drafts_is_enough(temperature, tables):
    """Both draft children of the context, so the place that breaks the second one ends the row."""
    second = with_logits(tables, LOGITS["one"]).draft
    method = Method("two", Fixed(2), get("specinfer"), TreeProposer("2x2", scheme="independent"))
    sampling = Sampling(temperature=temperature, max_new_tokens=6)
    pairs = [replace(tables, draft=None, drafts=[tables.draft, other]) for other in (second, tables.draft)]
    prompts = [*PROMPTS, [7, PLACE // 10, PLACE % 10]]
    assert len(PROMPTS) in ended(*(decode(pair, prompts, method, sampling) for pair in pairs))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["specinfer", "mcsd_naive", "mtad", "dsbd"])
def test_below_the_first_level_of_a_draft_too(name, temperature, tables):
    """At the context all is well: the draft is sure of the token that leads to the place."""
    sure = torch.full((10,), -torch.inf)
    sure[4] = 0.0
    context = tables.draft.state([7, 6])
    clean = with_logits(tables, sure, at=context)
    broken = with_logits(clean, LOGITS["one"], at=clean.draft.state([6, 4]))
    sampling = Sampling(temperature=temperature, max_new_tokens=6)
    rows = decode(broken, [[7, 6], [1, 1]], METHODS[name], sampling)
    assert ended(rows, decode(clean, [[7, 6], [1, 1]], METHODS[name], sampling))[0] == 0


# -- heads and policies -----------------------------------------------------------------------------------------------


class BrokenHead:
    """Every kind of estimator; it gives what is not a number for tokens that have come after token 6, and .9 else."""

    num_history = 0

    def bind(self, pair):
        return self

    def _prob(self, step):
        return torch.where(step.hidden.view(-1, 10, 10).sum(-1).argmax(-1) == 6, torch.nan, 0.9)

    def read_prob(self, step):
        return self._prob(step)

    def drawn_probs(self, step):
        return torch.full_like(step.entropy, 0.9), self._prob(step)


class BrokenMatches:
    """An estimator of copied tokens that gives what is not a number from the second one on."""

    def bind(self, pair):
        return self

    def prob(self, match, depth):
        sound = torch.where(torch.as_tensor(depth) > 1, torch.nan, 0.9)
        return torch.where(match.occurrences > 0, sound, 0.0)


@pytest.mark.parametrize(
    "policy",
    [Survival(BrokenHead()), Survival(BrokenHead(), lag=0), Rate(BrokenHead()), Rate(BrokenHead(), rate=1.5),
     BatchRate(BrokenHead())],
    ids=["survival", "survival, lag 0", "rate tracked", "rate", "batch_rate"],
)  # fmt: skip
def test_an_estimate_that_is_not_a_number_ends_its_row_alone(policy, tables):
    """The context of the second row ends in token 6 at once, which heads of every kind have read then."""

    @dataclass(frozen=True)
    class Sound(BrokenHead):
        def _prob(self, step):
            return torch.full_like(step.entropy, 0.9)

    method = Method("broken", policy, get("rejection"), max_drafted=4)
    sampling, prompts = Sampling(max_new_tokens=8, seed=2), [[1, 1], [3, 6], [2, 2], [7, 7]]
    size = 1 if policy.couples_rows else 4
    clean = decode(
        tables, prompts, replace(method, policy=replace(policy, estimator=Sound())), sampling, batch_size=size
    )
    assert ended(decode(tables, prompts, method, sampling, batch_size=size), clean)
    if policy.couples_rows:  # the neighbours of a broken row draft on
        rows = decode(tables, prompts, method, sampling)
        assert rows[1].error and not rows[0].error and max(r.num_drafted for r in rows[0].rounds) > 1


@pytest.mark.parametrize("name", ["best_source", "lookup_rate"])
def test_so_does_one_of_a_copied_token(name, tables):
    estimator = {"best_source": "copies", "lookup_rate": "estimator"}[name]
    method = METHODS[name]
    broken = replace(method, policy=replace(method.policy, **{estimator: BrokenMatches()}))
    rows = decode(tables, [[1, 2, 3] * 4, [9, 8, 7]], broken, Sampling(max_new_tokens=3))
    assert [row.error for row in rows] == [MESSAGE.format(0), None]


def test_and_states_that_are_not_numbers_where_a_head_reads_them(pairs):
    """Logits are sound here: only a policy that looks at the states notices."""
    pair, _ = pairs
    draft = deepcopy(pair.draft)
    draft.lm_head.register_forward_hook(
        lambda head, states, _: torch.nn.functional.linear(states[0].nan_to_num(0.0), head.weight)
    )
    draft.model.norm.register_forward_hook(lambda module, inputs, states: states.masked_fill(states > 1.9, torch.nan))
    broken = replace(pair, draft=draft, drafts=[])
    for name, reads in (("speculative", False), ("confidence", False), ("specdec_pp", True), ("rate", True)):
        rows = decode(broken, [[7, 30], [9, 40, 23]], METHODS[name], Sampling(max_new_tokens=8))
        assert any(row.error for row in rows) == reads, name


# -- caches -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A pair of random Llamas, and the same with a draft that one token breaks."""
    pair = llama_pair()
    pair.head = str(random_heads(tmp_path_factory.mktemp("heads"), 16, 16, depth=0))
    draft = deepcopy(pair.draft)
    draft.get_input_embeddings().weight[BROKEN] = torch.nan
    return pair, replace(pair, draft=draft, drafts=[])


@pytest.mark.parametrize(
    ("name", "ahead"), [("confidence", 0), ("mcsd", 0), ("specdec_pp", 1), ("mcsd", 1), ("mtad_head", 1), ("dsbd", 1)]
)
def test_what_a_stopped_row_reads_on_for_its_neighbours_does_not_stay(name, ahead, pairs, monkeypatch):
    """The rows that end are those that end alone, also where the host runs ahead of the answers, as on a GPU.

    Masked slots would let what is not a number through.
    """
    prompts, sampling = (
        [[7 + row, *[9, 40, 23][: row % 3], 30 + row] for row in range(6)],
        Sampling(max_new_tokens=7, seed=3),
    )
    whole, alone = (decode(pair, prompts, METHODS[name], sampling, batch_size=1) for pair in pairs)
    for module in ("chain", "tree", "beam_chain", "forest"):
        monkeypatch.setattr(f"toolkit.decoding.proposers.{module}.Gate", lambda device: Gate(device, ahead))
    together = decode(pairs[1], prompts, METHODS[name], sampling, batch_size=3)
    assert ended(together, whole) == ended(alone, whole) != list(range(6))


def test_a_cache_that_has_read_what_is_not_a_number_is_sound_once_it_is_wiped(pairs):
    """The second row has read it beyond its text; without `clear` the masked slot spoils all that follows."""
    for wiped in (False, True):
        session = open_session(pairs[1].draft, 2, 64)
        session.extend(torch.tensor([[7, 8, 9], [7, 8, 9]]))
        for tokens in ((10, 10), (11, BROKEN), (12, 12)):
            session.extend(torch.tensor(tokens).unsqueeze(1))
        assert session.spoilt.tolist() == [False, True]
        session.truncate([6, 4])
        if wiped:
            session.clear(1)
        logits = session.extend(torch.tensor([[13], [13]])).logits
        assert logits.isnan().flatten(1).any(1).tolist() == [False, not wiped]
