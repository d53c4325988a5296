"""Rounds that choose their source: exact at every choice, ragged batches, caches that are behind, what the choice is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from toolkit import ModelPair, config
from toolkit.acceptance import MatchEstimator
from toolkit.acceptance.estimators import ConfidenceEstimator as DraftConfidence
from toolkit.costs.table import CostTable
from toolkit.decoding import BestSourceProposer, ChainProposer, DraftContext, Method, Sampling, SuffixProposer, decode
from toolkit.engine import TabularModel
from toolkit.engine.hf import HFSession
from toolkit.errors import InputError
from toolkit.sampling import warp
from toolkit.stopping import BestSource, Confidence, Fixed, LookupRate
from toolkit.testing import llama_pair, output_pvalue, ragged_prompts
from toolkit.types import Match, Proposal, Verdict
from toolkit.verification import get

CPU = torch.device("cpu")
END = 2


def source(record):
    """Which source a round has drafted from."""
    return "draft" if record.num_draft_calls else "copy" if record.num_drafted else "nothing"


class InTurns(BestSource):
    """Draft, copy, nothing, in turns: every change of source comes up. Reads the number of earlier rounds alone."""

    def begin(self, live, state):
        state, _ = super().begin(live, state)
        return state, live & (state["turn"] % 3 == 0)

    def plan(self, match, available, live, state):
        return state, torch.where(state["turn"] % 3 == 1, available, 0)

    def init(self, num_rows, device):
        return {**super().init(num_rows, device), "turn": torch.zeros(num_rows, device=device)}

    def observe(self, proposal, verdict, state):
        return {**super().observe(proposal, verdict, state), "turn": state["turn"] + 1}


def method_of(kind=InTurns, most=3, **settings):
    policy = kind(DraftConfidence(), MatchEstimator(), **settings)
    return Method("sources", policy, get("rejection"), BestSourceProposer(), min_drafted=0, max_drafted=most)


def tables(sharpness=1.5):
    generator = torch.Generator().manual_seed(4)
    target, draft = (TabularModel.random(3, 2, generator, sharpness) for _ in range(2))
    return ModelPair(target=target, draft=draft, end_ids=(END,))


def proposals(pair, method, text, room, state, sampling):
    """Every proposal that can come up: its probability, it, and the policy's state after it. Through `propose` itself."""
    seen = {}
    for drawn in product(range(3), repeat=method.limit):
        session = pair.draft.open_session(1, 32)

        class Drawing(type(method.proposer)):
            def draw(self, context, depth, probs, drawn=drawn):
                return torch.tensor([drawn[depth - 1]])

        context = DraftContext(
            sequences=[text], sessions=[session], unread=lambda _: (torch.tensor([text]), [len(text)]),
            limits=torch.tensor([room]), room=[room], uniforms=torch.zeros(1, method.limit), sampling=sampling,
            vocab_size=3, fit=lambda logits: logits, seen=None, end_ids=(END,),
        )  # fmt: skip
        proposal, after = Drawing().propose(context, method.policy, state)
        tokens = tuple(proposal.tokens[0, : int(proposal.num_drafted)].tolist())
        prob = 1.0
        for depth, token in enumerate(tokens):
            prob *= float(proposal.draft_probs[0, depth, token])
        if prob > 0:
            seen[tokens] = prob, proposal, after
    assert sum(prob for prob, *_ in seen.values()) == pytest.approx(1, abs=1e-12)  # a drawn token is always sent
    return seen


def whole_outputs(pair, method, prompt, length, sampling):
    """The distribution of whole outputs, summed in float64 over everything that can be drawn; and the sources seen."""
    warped = warp(pair.target.probs.log(), sampling)
    method = method.bind(pair)
    first = method.policy.init(1, CPU)
    going, outputs, sources = {((), ()): (1.0, first)}, Counter(), Counter()
    while going:
        after = {}
        for (produced, history), (mass, state) in going.items():
            text, room = [*prompt, *produced], min(length - len(produced) - 1, method.limit)
            for tokens, (prob, proposal, drafted) in proposals(pair, method, text, room, state, sampling).items():
                by = "draft" if int(proposal.num_calls) else "copy" if tokens else "nothing"
                sources[by] += 1
                p = torch.stack([warped[pair.target.state([*text, *tokens[:i]])] for i in range(len(tokens) + 1)])
                lengths, extras = torch.ones(1), p
                if tokens:
                    q = proposal.draft_probs[0, : len(tokens)].to(p.dtype)
                    lengths, extras = method.rule.distribution(p, q, torch.tensor(tokens))
                for n, extra in product(range(len(tokens) + 1), range(3)):
                    weight = mass * prob * float(lengths[n] * extras[n, extra])
                    if weight == 0:
                        continue
                    new = (*produced, *tokens[:n], extra)[:length]
                    new = new[: new.index(END) + 1] if END in new else new
                    if END in new or len(new) == length:
                        outputs[new] += weight
                        continue
                    key = new, (*history, (by, len(tokens), n))
                    verdict = Verdict(None, torch.tensor([n]), None, None, None)
                    learned = method.policy.observe(proposal, verdict, drafted)
                    after[key] = after.get(key, (0.0, learned))[0] + weight, learned
        going = after
    return outputs, sources


@pytest.mark.parametrize(
    "sampling",
    [Sampling(), Sampling(top_p=0.8, temperature=1.3)],
    ids=["whole", "top-p"],
)
@pytest.mark.parametrize(
    "method",
    [
        method_of(),
        method_of(BestSource, cost_ratio=0.1, column_cost=0.1, evidence=1.0, acceptance=0.6),
        method_of(
            BestSource, costs=CostTable(1, (1, 2, 4), (0,), ((1.0, 1.6, 1.3),), (0.1,)), evidence=1.0, acceptance=0.6
        ),
    ],
    ids=["in turns", "by worth", "by a table that falls"],
)
def test_whole_outputs_are_the_targets_by_enumeration(method, sampling):
    """Nothing is lost or gained by the choice: total variation to the target's own outputs is rounding."""
    pair = tables()
    warped = TabularModel(warp(pair.target.probs.log(), sampling))
    outputs, sources = whole_outputs(pair, method, [0, 1, 0, 1], 5, sampling)
    expected = warped.sequence_distribution([0, 1, 0, 1], 5, END)
    assert sum(abs(outputs[output] - expected.get(output, 0.0)) for output in {*outputs, *expected}) / 2 < 1e-12
    assert all(sources[name] for name in ("draft", "copy", "nothing"))


def test_enumeration_catches_a_choice_that_looks_at_a_drawn_token():
    """Negative control: a round that withholds what it drew where it does not like it."""

    class Withholds(BestSourceProposer):
        def propose(self, context, policy, state):
            proposal, state = super().propose(context, policy, state)
            keep = (
                (proposal.num_calls == 0) | (proposal.tokens[:, 0] != 0)
                if proposal.num_nodes
                else proposal.num_calls < 9
            )
            return replace(proposal, num_drafted=proposal.num_drafted * keep), state

    pair, method = tables(), replace(method_of(), proposer=Withholds())
    assert output_pvalue(pair, method_of(), 6000) > 1e-4
    assert output_pvalue(pair, method, 6000) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batches_of_all_sources_are_rows_alone(temperature):
    """Rows that draft, copy and do neither side by side: each row's texts and rounds are what they are alone."""
    pair, method = llama_pair(), method_of()
    prompts, sampling = (
        [prompt * 2 for prompt in ragged_prompts(6)],
        Sampling(temperature=temperature, max_new_tokens=16),
    )
    alone = [decode(pair, [p], method, sampling, row_ids=[i])[0] for i, p in enumerate(prompts)]
    for batch_size in (2, 6):
        together = decode(pair, prompts, method, sampling, batch_size=batch_size)
        rounds = [
            [[(source(r), r.num_drafted, r.num_accepted, r.num_draft_calls) for r in g.rounds] for g in side]
            for side in (alone, together)
        ]
        assert [g.token_ids for g in together] == [g.token_ids for g in alone]
        assert rounds[0] == rounds[1]
        assert all(r.num_draft_calls == r.num_drafted or source(r) == "copy" for g in together for r in g.rounds)
    assert {source(r) for g in alone for r in g.rounds} == {"draft", "copy", "nothing"}


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_greedy_outputs_of_real_forwards_in_float32_are_plain_ones(penalty):
    pair = llama_pair(dtype=torch.float32)
    prompts = [prompt * 2 for prompt in ragged_prompts(21)]
    sampling = Sampling(temperature=0, max_new_tokens=20, repetition_penalty=penalty)
    plain = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=7)
    generations = decode(pair, prompts, method_of(), sampling, batch_size=7)
    assert [g.token_ids for g in generations] == [g.token_ids for g in plain]
    assert {source(r) for g in generations for r in g.rounds} == {"draft", "copy", "nothing"}


def test_a_draft_that_is_behind_reads_what_it_has_missed():
    """A draft equal to the target is accepted whole, after any number of rounds without it: its cache holds the text."""
    pair = llama_pair()
    pair = ModelPair(target=pair.target, draft=pair.target, end_ids=())
    prompts = [prompt * 2 for prompt in ragged_prompts(6)]
    for batch_size in (1, 4):
        generations = decode(pair, prompts, method_of(), Sampling(max_new_tokens=20, seed=1), batch_size=batch_size)
        by = {
            name: [r for g in generations for r in g.rounds if source(r) == name]
            for name in ("draft", "copy", "nothing")
        }
        assert all(by.values()) and all(r.num_accepted == r.num_drafted for r in by["draft"])
        assert any(r.num_accepted < r.num_drafted for r in by["copy"])


def test_no_forward_of_the_draft_where_no_row_drafts():
    pair = llama_pair()
    sessions = []
    method = method_of(BestSource, acceptance=0.01, evidence=1e6)  # no draft is worth it
    opened = HFSession.extend

    def spy(self, *args, **kwargs):
        sessions.append(self.model)
        return opened(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFSession, "extend", spy)
        generations = decode(
            pair, [prompt * 3 for prompt in ragged_prompts(7)], method, Sampling(max_new_tokens=30), batch_size=3
        )
    reads = sum(model is pair.draft for model in sessions)
    assert (
        reads <= 1 and sum(g.counts.num_draft_calls for g in generations) == 0
    )  # the prompts of rows that join the first round
    assert sum(g.counts.num_drafted for g in generations) > 0


def state_after(policy, rounds):
    """The state after rounds of (source, drafted, accepted)."""
    state = policy.init(1, CPU)
    for by, drafted, accepted in rounds:
        tokens = torch.zeros(1, drafted, dtype=torch.long)
        calls = torch.tensor([drafted if by == "draft" else 0])
        proposal = Proposal(tokens, tokens.unsqueeze(2).float(), torch.tensor([drafted]), calls)
        state = policy.observe(proposal, Verdict(None, torch.tensor([accepted]), None, None, None), state)
    return state


@pytest.mark.parametrize(
    "rounds", [[], [("draft", 3, 1)], [("draft", 4, 4), ("copy", 5, 2), ("nothing", 0, 0)], [("draft", 2, 0)] * 9]
)
def test_the_choice_by_hand(rounds):
    """Tokens, cost, the posterior mean of acceptance and both worths, summed one by one."""
    c, column, policy = (
        0.15,
        0.04,
        method_of(BestSource, cost_ratio=0.15, column_cost=0.04, acceptance=0.5, most=6).bind(tables()).policy,
    )
    state = state_after(policy, rounds)
    tokens = 1.2 * 20 + sum(accepted + 1 for _, _, accepted in rounds)
    cost = 20 + sum(1 + column * drafted + (c * drafted if by == "draft" else 0) for by, drafted, _ in rounds)
    judged = kept = 0.0
    for by, drafted, accepted in rounds:  # what the draft has shown fades while nobody asks it
        judged, kept = (
            (judged + min(accepted + 1, drafted), kept + accepted) if by == "draft" else (0.9 * judged, 0.9 * kept)
        )
    a, rate = (kept + 0.5 * 5) / (judged + 5), tokens / cost
    assert float(state["tokens"] / state["cost"]) == pytest.approx(rate, rel=1e-5)
    worth = max(sum(a**k - rate * (c + column) for k in range(1, depth + 1)) for depth in range(1, 7))
    for gain in (0.0, worth - 1e-3, worth + 1e-3):
        chosen = policy.begin(torch.tensor([True]), {**state, "gain": torch.tensor([gain])})[1]
        assert bool(chosen) == (worth > max(gain, 0))
    assert not bool(policy.begin(torch.tensor([False]), state)[1])


def test_the_worth_of_a_copy_is_summed_while_it_is_decided_on():
    policy = method_of(BestSource, column_cost=0.1, most=4).bind(tables()).policy
    worth, survival, copied = 0.0, 1.0, 0
    tokens = [(9, 3, 1.0), (9, 3, 0.9), (9, 1, 0.1)]
    for depth, token in enumerate(tokens, start=1):
        match = Match(*(torch.tensor([float(value)]) for value in token))
        survival *= float(MatchEstimator().prob(match, depth))
        worth += max(survival - 1.2 * 0.1, 0)
        copied += survival > 1.2 * 0.1
        columns = (torch.tensor([column]).float() for column in zip(*tokens[:depth], strict=True))
        state, length = policy.plan(Match(*columns), torch.tensor([depth]), torch.tensor([True]), policy.init(1, CPU))
        assert int(length) == copied and float(state["gain"]) == pytest.approx(worth, rel=1e-5)


def test_a_draft_that_is_behind_costs_what_the_table_says(tmp_path):
    """A draft forward that reads 11 tokens takes twice as long as one of a single token, so it is worth that much less."""
    lines = [
        "model,batch,width,context,seconds",
        "draft,1,1,0,.1",
        "draft,1,11,0,.2",
        "target,1,1,0,1",
        "target,1,11,0,1.5",
    ]
    (tmp_path / "costs.csv").write_text("\n".join(lines) + "\n")
    policy = method_of(BestSource, costs=str(tmp_path / "costs.csv"), most=1, acceptance=0.3).bind(tables()).policy
    rate = 1.2
    for behind, cost in ((0, 0.1), (10, 0.2), (5, 0.15)):
        state = {**policy.init(1, CPU), "unread": torch.tensor([float(behind)])}
        worth = 0.3 - rate * (cost + 0.05)
        for gain, goes in ((worth - 1e-3, worth > 0), (worth + 1e-3, False)):
            assert bool(policy.begin(torch.tensor([True]), {**state, "gain": torch.tensor([gain])})[1]) == goes
    state = state_after(policy, [("copy", 1, 1)] * 5 + [("draft", 1, 1)])
    assert float(state["cost"]) == pytest.approx(20 + 5 * 1.05 + 1 + 0.05 + 0.2, rel=1e-5)
    assert float(state["unread"]) == 0


def test_parts_that_do_not_go_together_are_refused():
    best, rejection = BestSource(DraftConfidence(), MatchEstimator()), get("rejection")
    for policy, proposer, words in (
        (best, ChainProposer(), "BestSource decides on copied tokens, and ChainProposer draws from a draft model"),
        (
            best,
            SuffixProposer(),
            "BestSource looks at a draft model's distribution or states, and SuffixProposer has no",
        ),
        (Confidence(), BestSourceProposer(), "BestSourceProposer has two sources, and Confidence does not choose"),
        (LookupRate(MatchEstimator()), BestSourceProposer(), "has two sources, and LookupRate does not choose"),
        (Fixed(3), BestSourceProposer(), "has two sources, and Fixed does not choose"),
    ):
        with pytest.raises(InputError, match=words):
            Method("mixed", policy, rejection, proposer)
    alone = ModelPair(target=tables().target, end_ids=(END,))
    with pytest.raises(InputError, match="needs a draft model, the pair has none"):
        decode(alone, [[0]], method_of(), Sampling())
