"""Rules that choose copies, a draft or neither for a batch: by brute force, exact together, and as wide as the widest row."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.toolkit.stopping.test_prices import Given, match_of, random_table
from toolkit import ModelPair, config
from toolkit.acceptance import MatchEstimator
from toolkit.acceptance.estimators import ConfidenceEstimator
from toolkit.costs.table import CostTable
from toolkit.decoding import BestSourceProposer, DraftContext, Method, Sampling, SuffixProposer, decode
from toolkit.engine import TabularModel
from toolkit.stopping import BatchBestSource, BatchLookupRate
from toolkit.testing import llama_pair, ragged_prompts
from toolkit.types import DraftStep, RoundCounts, Verdict
from toolkit.verification import get

CPU = torch.device("cpu")
FALLS = CostTable(1, (1, 2, 4), (0,), ((1.0, 1.15, 1.05),), (0.03,))


def method_of(kind=BatchBestSource, most=3, **settings):
    if kind is BatchLookupRate:
        return Method("x", kind(MatchEstimator(), **settings), get("rejection"), SuffixProposer(), 0, most)
    policy = kind(ConfidenceEstimator(), MatchEstimator(), **settings)
    return Method("x", policy, get("rejection"), BestSourceProposer(), min_drafted=0, max_drafted=most)


# -- the choice, slow and obvious ----------------------------------------------------------------------------------------


def best_choice(rows, acceptance, live, rate, read, draft):
    """(width, depth, rows that draft) of the largest gain, by trying all; read and draft: the price of w columns, d passes."""
    best = (0.0, 0, 0, set())
    for width, depth in product(range(len(read)), repeat=2):
        longest = max((len(row) for row, is_live in zip(rows, live, strict=True) if is_live), default=0)
        if (width != depth and not depth < width <= longest) or (depth and draft is None):
            continue
        gained, drafting = 0.0, set()
        for r, row in enumerate(rows):
            if live[r]:
                copied = sum(math.prod(row[:k]) for k in range(1, min(width, len(row)) + 1))
                drafted = sum(acceptance[r] ** k for k in range(1, depth + 1))
                gained += max(copied, drafted)
                drafting |= {r} if drafted > copied else set()
        worth = gained - rate * (read[width] + (draft[depth] if depth else 0.0))
        if worth > best[0] + 1e-9:
            best = worth, width, depth, drafting
    return best[1:]


def random_rows(generator, count=3, longest=6):
    rows = [[generator.random() ** 0.3 for _ in range(generator.randrange(longest + 1))] for _ in range(count)]
    rows[0] = rows[0] or [0.9]
    return rows, torch.tensor([generator.random() < 0.8 for _ in range(count)])


def together(state, live):
    tokens, cost = (sum(state[name][live].tolist()) for name in ("tokens", "cost"))
    return int(live.sum()) * tokens / cost if live.any() else 0.0


def test_copies_have_the_width_that_all_rows_gain_most_by():
    generator, widths = random.Random(0), set()
    for _ in range(80):
        table = random_table(generator)
        policy = BatchLookupRate(Given(), costs=table, deepest=8).bind(None)
        rows, live = random_rows(generator)
        available = torch.tensor([len(row) for row in rows]) * live
        state = policy.init(3, CPU)
        state["tokens"] *= torch.tensor([0.4, 1.0, 1.5])
        read = [table.target(width + 1, 0) - 1.0 for width in range(9)]
        rate = together(state, live)
        width, *_ = best_choice(rows, [0.0] * 3, live.tolist(), rate, read, None)
        lengths = policy.plan(match_of(rows), available, live, state)[1].tolist()
        assert lengths == [min(width, n) for n in available.tolist()]
        widths.add(width)
    assert len(widths) > 4


def test_width_depth_and_sources_are_those_that_all_rows_gain_most_by():
    generator, seen, pair = random.Random(1), Counter(), llama_pair()
    for _ in range(150):
        table = random_table(generator)
        policy = BatchBestSource(ConfidenceEstimator(), Given(), costs=table, deepest=6).bind(pair)
        rows, live = random_rows(generator)
        state = policy.init(3, CPU)
        state["tokens"] *= torch.tensor([0.4, 1.0, 1.5])
        state["verified"] += 9
        state["accepted"] += torch.tensor([generator.random() * 9 for _ in rows])
        acceptance = policy.posterior(state).tolist()
        read = [table.target(width + 1, 0) - 1.0 for width in range(7)]
        draft = [depth * table.draft(0) for depth in range(7)]
        width, depth, drafting = best_choice(rows, acceptance, live.tolist(), together(state, live), read, draft)
        available = torch.tensor([len(row) for row in rows]) * live
        planned, lengths = policy.plan(match_of(rows), available, live, state)
        drafts = policy.begin(live, planned)[1]
        assert set(drafts.nonzero().flatten().tolist()) == drafting
        copies = [min(width, n) for n in available.tolist()]
        assert all(length == n for r, (length, n) in enumerate(zip(lengths.tolist(), copies, strict=True)))
        seen[bool(drafting), len(drafting) < int(live.sum()), width > depth] += 1
    assert len(seen) >= 4, "some kind of choice never came up"


def test_a_draft_goes_on_while_the_rows_that_draft_gain_together():
    """By hand: one row expects .3 of its next token, another .3: alone neither pays .4, together they do."""
    settings = {"cost_ratio": 0.1, "column_cost": 0.05, "deepest": 4, "acceptance": 0.9}
    policy = BatchBestSource(Twice(), MatchEstimator(), **settings).bind(None)
    both, one = torch.tensor([True, True]), torch.tensor([True, False])
    state, going = policy.begin(both, policy.init(2, CPU))
    assert going.all()
    step = DraftStep(4, *[torch.zeros(2, 3)] * 3, torch.tensor([0, 0]), live=both)
    state = {**state, "rate": torch.tensor([2.4, 2.4])}  # a token costs .15 * 2.4 = .36
    assert policy.step(step, state)[1].tolist() == [True, True]
    step.live = one
    assert policy.step(step, state)[1].tolist() == [False, False]
    wide = {**state, "width": torch.tensor([4.0, 4.0])}  # the copies of others have paid for the column: .24
    assert policy.step(step, wide)[1].tolist() == [True, True]


class Twice:
    """The next token enters with .3: y_k is accepted with 1."""

    def bind(self, pair):
        return self

    def drawn_probs(self, step):
        return torch.ones(2), torch.full((2,), 0.3)


@pytest.mark.parametrize("kind", [BatchLookupRate, BatchBestSource])
def test_every_row_pays_for_the_widest(kind):
    policy = method_of(kind, costs=FALLS).policy.within(3).bind(llama_pair())
    state = policy.init(3, CPU)
    calls = torch.tensor([0, 2, 0]) * (kind is BatchBestSource)
    after = policy.observe(RoundCounts(torch.tensor([0, 2, 3]), calls, 3), RoundVerdict(torch.tensor([0, 1, 0])), state)
    spent = 1 + 0.05 + (2 * 0.03 if kind is BatchBestSource else 0)
    assert after["cost"].tolist() == pytest.approx([20 + spent] * 3)
    assert after["tokens"].tolist() == pytest.approx([25.0, 26.0, 25.0])
    if kind is BatchBestSource:
        assert after["unread"].tolist() == [1.0, 0.0, 1.0], "the draft has read all texts as they were before the round"
        idle = RoundCounts(torch.tensor([0, 0, 0]), torch.zeros(3, dtype=torch.long), 0)
        after = policy.observe(idle, RoundVerdict(torch.zeros(3, dtype=torch.long)), after)
        assert after["unread"].tolist() == [2.0, 1.0, 2.0]


class RoundVerdict:
    def __init__(self, length):
        self.length = length


def test_one_copy_in_a_large_batch_does_not_pay_for_the_others():
    """A copy that is worth its column for one row alone is not worth that of eight rows; eight such copies are."""
    policy = BatchLookupRate(Given(), column_cost=0.1, deepest=4).bind(None)
    for copies, width in ((1, 0), (8, 1)):
        rows = [[0.5]] * copies + [[]] * (8 - copies)
        live = torch.ones(8, dtype=torch.bool)
        available = torch.tensor([len(row) for row in rows])
        assert policy.plan(match_of(rows), available, live, policy.init(8, CPU))[1].amax() == width


def test_slots_without_a_text_count_for_nothing():
    """Beside free slots, which the batch keeps until half of it is free, a row copies what it copies alone."""
    text, lengths = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3], set()
    for cost in (0.05, 0.1, 0.2, 0.4):
        method = method_of(BatchLookupRate, most=4, column_cost=cost).bind(llama_pair())

        def sent(texts, rooms, method=method):
            context = DraftContext(
                sequences=texts, sessions=[], unread=lambda _: None, limits=torch.tensor(rooms), room=rooms,
                uniforms=torch.zeros(len(texts), 4), sampling=Sampling(), vocab_size=9, fit=None, seen=None, end_ids=(),
            )  # fmt: skip
            state = method.policy.init(len(texts), CPU)
            return method.proposer.propose(context, method.policy, state)[0].num_drafted.tolist()

        (alone,) = sent([text], [4])
        assert sent([[5], text, [5], [5]], [0, 4, 0, 0]) == [0, alone, 0, 0]
        lengths.add(alone)
    assert len(lengths) > 2


# -- exact together --------------------------------------------------------------------------------------------------------


def proposals(pair, method, texts, rooms, state):
    """Every joint proposal that can come up: its probability, it, and the state after it. Through `propose` itself."""
    seen, size, most = {}, pair.vocab_size, method.limit
    draws = product(range(size), repeat=most * len(texts)) if method.proposer.needs_draft_model else [()]
    for drawn in draws:

        class Drawing(type(method.proposer)):
            def draw(self, context, depth, probs, drawn=drawn):
                return torch.tensor([drawn[row * most + depth - 1] for row in range(len(texts))])

        sessions = [pair.draft.open_session(len(texts), 32)] if method.proposer.needs_draft_model else []
        longest = max(map(len, texts))
        padded = torch.tensor([[0] * (longest - len(text)) + list(text) for text in texts])
        context = DraftContext(
            sequences=texts, sessions=sessions, unread=lambda _, padded=padded: (padded, [len(text) for text in texts]),
            limits=torch.tensor(rooms), room=rooms, uniforms=torch.zeros(len(texts), most), sampling=Sampling(),
            vocab_size=size, fit=lambda logits: logits, seen=None, end_ids=(),
        )  # fmt: skip
        proposal, after = Drawing().propose(context, method.policy, state)
        sent = [tuple(row[:n]) for row, n in zip(proposal.tokens.tolist(), proposal.num_drafted.tolist(), strict=True)]
        prob = 1.0
        for row, tokens in enumerate(sent):
            for depth, token in enumerate(tokens):
                prob *= float(proposal.draft_probs[row, depth, token])
        if prob > 0:
            seen[tuple(sent)] = prob, proposal, after
    assert sum(prob for prob, *_ in seen.values()) == pytest.approx(1, abs=1e-9)  # a drawn token is always sent
    return seen


def joint_outputs(pair, method, prompts, length):
    """The joint distribution of two rows' whole outputs, over everything that can be drawn; and the kinds of rounds."""
    method = method.bind(pair)
    going, outputs, kinds = {(((), ()), ()): (1.0, method.policy.init(2, CPU))}, Counter(), Counter()
    while going:
        after = {}
        for (produced, history), (mass, state) in going.items():
            texts = [[*prompt, *row] for prompt, row in zip(prompts, produced, strict=True)]
            rooms = [max(min(length - len(row) - 1, method.limit), 0) for row in produced]
            for sent, (prob, proposal, drafted) in proposals(pair, method, texts, rooms, state).items():
                by = tuple(
                    "draft" if calls else "copy" if tokens else "nothing"
                    for calls, tokens in zip(proposal.num_calls.tolist(), sent, strict=True)
                )
                kinds[by] += 1
                ends = []
                for row, tokens in enumerate(sent):
                    p = torch.stack(
                        [
                            pair.target.probs[pair.target.state([*texts[row], *tokens[:i]])]
                            for i in range(len(tokens) + 1)
                        ]
                    )
                    lengths, extras = torch.ones(1), p
                    if tokens:
                        q = proposal.draft_probs[row, : len(tokens)].to(p.dtype)
                        lengths, extras = method.rule.distribution(p, q, torch.tensor(tokens))
                    ends.append(
                        [
                            (float(lengths[n] * extras[n, token]), n, (*produced[row], *tokens[:n], token)[:length])
                            for n, token in product(range(len(tokens) + 1), range(pair.vocab_size))
                        ]
                        if len(produced[row]) < length
                        else [(1.0, 0, produced[row])]
                    )
                for first, second in product(*ends):
                    weight = mass * prob * first[0] * second[0]
                    new = first[2], second[2]
                    if weight == 0:
                        continue
                    if all(len(row) == length for row in new):
                        outputs[new] += weight
                        continue
                    key = new, (*history, (by, tuple(map(len, sent)), first[1], second[1]))
                    verdict = Verdict(None, torch.tensor([first[1], second[1]]), None, None, None)
                    learned = method.policy.observe(proposal, verdict, drafted)
                    after[key] = after.get(key, (0.0, learned))[0] + weight, learned
        going = after
    return outputs, kinds


def tables():
    generator = torch.Generator().manual_seed(4)
    target, draft = (TabularModel.random(2, 2, generator, 1.5) for _ in range(2))
    return ModelPair(target=target, draft=draft, end_ids=())


def error_of(pair, method, length):
    prompts = [[0, 1, 0, 1], [1, 1, 0]]
    outputs, kinds = joint_outputs(pair, method, prompts, length)
    expected = [pair.target.sequence_distribution(prompt, length, -1) for prompt in prompts]
    pairs = product(*(alone.items() for alone in expected))
    joint = {(first, second): a * b for (first, a), (second, b) in pairs}
    return sum(abs(outputs[key] - joint.get(key, 0.0)) for key in {*outputs, *joint}) / 2, kinds


@pytest.mark.parametrize(
    ("method", "needed"),
    [
        (method_of(BatchLookupRate, most=2, column_cost=0.15), {("copy", "copy"), ("nothing", "nothing")}),
        (method_of(BatchLookupRate, most=2, costs=FALLS), {("copy", "copy")}),
        (
            method_of(most=2, cost_ratio=0.12, column_cost=0.1, evidence=1.0, acceptance=0.6),
            {("draft", "draft"), ("nothing", "nothing")},
        ),
        (method_of(most=2, costs=FALLS, evidence=1.0, acceptance=0.4), {("draft", "copy"), ("copy", "draft")}),
    ],
    ids=["copies", "copies, a table that falls", "sources", "sources, a table that falls"],
)
def test_two_rows_are_independent_and_follow_their_targets(method, needed):
    error, kinds = error_of(tables(), method, 3)
    assert error < 1e-9
    assert needed <= {*kinds}, kinds


def test_the_enumeration_notices_a_width_that_reads_what_was_drawn():
    """Negative control: a draft is withheld where the other row drew a token that it would not like."""

    class Withholds(BestSourceProposer):
        def propose(self, context, policy, state):
            proposal, state = super().propose(context, policy, state)
            if not proposal.num_nodes:
                return proposal, state
            keep = (proposal.num_calls == 0) | (proposal.tokens[:, 0] != 0)
            return replace(proposal, num_drafted=proposal.num_drafted * keep), state

    method = method_of(most=1, cost_ratio=0.05, column_cost=0.05, evidence=1.0, acceptance=0.6)
    with pytest.raises(AssertionError):
        error_of(tables(), replace(method, proposer=Withholds()), 3)


@pytest.mark.parametrize("kind", [BatchLookupRate, BatchBestSource])
def test_greedy_outputs_of_real_forwards_in_float32_are_plain_ones(kind):
    pair = llama_pair(dtype=torch.float32)
    prompts, sampling = [prompt * 2 for prompt in ragged_prompts(21)], Sampling(temperature=0, max_new_tokens=20)
    plain = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=7)
    method = method_of(kind, column_cost=0.01, **({"cost_ratio": 0.05} if kind is BatchBestSource else {}))
    generations = decode(pair, prompts, method, sampling, batch_size=7)
    assert [g.token_ids for g in generations] == [g.token_ids for g in plain]
    assert any(r.num_drafted and not r.num_draft_calls for g in generations for r in g.rounds)
    assert kind is BatchLookupRate or any(r.num_draft_calls for g in generations for r in g.rounds)
