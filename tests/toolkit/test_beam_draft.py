"""The beam draft: a slow reference on the same uniforms, its cache, its counts, policies on beams."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from toolkit import ModelPair, config
from toolkit.decoding import BeamChainProposer, DraftContext, Method, Sampling, decode
from toolkit.engine import TabularModel
from toolkit.engine.engine import engine_of
from toolkit.sampling import draw, warp
from toolkit.stopping import Bounded, Confidence, DynamicConfidence, Fixed
from toolkit.stopping.base import StoppingPolicy
from toolkit.types import DraftStep
from toolkit.verification import get

WARPS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=4, top_p=0.8),
    Sampling(temperature=1.5, min_p=0.1, repetition_penalty=1.3),
    Sampling(temperature=0.0),
]
PROMPTS = [[0], [1, 2], [2, 0, 1], [3, 3], [1, 0, 0, 2], [2]]


def slow_draft(
    model: TabularModel,
    prompt: list[int],
    proposer: BeamChainProposer,
    policy: StoppingPolicy,
    sampling: Sampling,
    limit: int,
    uniforms: Tensor,
    ends: tuple[int, ...],
) -> tuple[list[int], int, list[Tensor], float]:
    """Path, forwards, warped distributions along the path, and its log-probability: one row, plain lists, no cache."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    best: tuple[list[int], float] = ([], 0.0)
    depth = 0

    def logits(path: list[int]) -> tuple[Tensor, Tensor]:
        seen = torch.zeros(model.vocab_size, dtype=torch.bool)
        seen[prompt + path] = True
        return model.probs[model.state(prompt + path)].log(), seen

    while depth < min(limit, proposer.num_tokens):
        depth += 1
        joint = []
        for path, score in beams:
            raw, seen = logits(path)
            after = warp(raw, Sampling(repetition_penalty=sampling.repetition_penalty), seen).log() + score
            joint.append(torch.full_like(after, -torch.inf) if path and path[-1] in ends else after)
        distribution = warp(torch.cat(joint), replace(sampling, repetition_penalty=1.0))
        first = (depth - 1) * proposer.num_beams
        pairs = [int(draw(distribution, uniforms[first + j])) for j in range(proposer.num_beams)]
        new = []
        for pair in pairs:
            path, _ = beams[pair // model.vocab_size]
            new.append(([*path, pair % model.vocab_size], float(torch.cat(joint)[pair])))
        best = max([*ended, *new], key=lambda beam: beam[1])
        ended += [beam for beam in new if beam[0][-1] in ends]
        beams = new
        if best[0][-1] in ends:
            break
        raw, seen = logits(best[0][:-1])
        step = DraftStep(
            depth, raw[None], warp(raw, sampling, seen)[None], torch.zeros(1, 1), torch.tensor(best[0][-1:])
        )
        if not bool(policy.step(step, {})[1]):
            break
    distributions = [
        warp(*(lambda raw, seen: (raw, sampling, seen))(*logits(best[0][:i]))) for i in range(len(best[0]))
    ]
    return best[0], depth, distributions, best[1]


def draft_context(pair: ModelPair, sampling: Sampling, limits: list[int], uniforms: Tensor) -> DraftContext:
    """What the loop would hand over in the first round."""
    drafts = engine_of(pair).open(len(PROMPTS), 60).drafts
    width = max(map(len, PROMPTS))
    seen = torch.zeros(len(PROMPTS), pair.vocab_size, dtype=torch.bool)
    for row, prompt in enumerate(PROMPTS):
        seen[row, prompt] = True
    return DraftContext(
        sequences=PROMPTS,
        sessions=drafts,
        unread=lambda draft: (torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS]), [len(p) for p in PROMPTS]),
        limits=torch.tensor(limits),
        room=limits,
        uniforms=uniforms,
        sampling=sampling,
        vocab_size=pair.vocab_size,
        fit=pair.fit,
        seen=None if sampling.repetition_penalty == 1.0 else seen,
        end_ids=pair.end_ids or (),
    )


@pytest.mark.parametrize("sampling", WARPS, ids=["plain", "warped", "penalty", "greedy"])
@pytest.mark.parametrize("ends", [(), (3,)], ids=["endless", "ends"])
@pytest.mark.parametrize("policy", [Fixed(9), Confidence(0.4)], ids=["fixed", "confidence"])
def test_a_draft_is_the_slow_one_on_the_same_uniforms(sampling, ends, policy):
    generator = torch.Generator().manual_seed(8)
    target, draft = (TabularModel.random(5, 2, generator, sharpness=1.5) for _ in range(2))
    pair = ModelPair(target=target, draft=draft, end_ids=ends)
    proposer, limits = BeamChainProposer(4, 3), [9, 3, 2, 1, 0, 9]
    lengths = set()
    for _ in range(12):
        uniforms = torch.rand(len(PROMPTS), 12, generator=generator, dtype=torch.float64)
        bounded = Bounded(policy, 1, 9)
        proposal, state = proposer.propose(draft_context(pair, sampling, limits, uniforms), bounded, {})
        assert state == {}
        for row, prompt in enumerate(PROMPTS):
            arguments = (draft, prompt, proposer, bounded, sampling, limits[row], uniforms[row], ends)
            path, forwards, distributions, _ = slow_draft(*arguments)
            count = int(proposal.num_drafted[row])
            assert proposal.tokens[row, :count].tolist() == path
            assert int(proposal.num_calls[row]) == forwards
            for got, distribution in zip(proposal.draft_probs[row, :count], distributions, strict=True):
                assert torch.allclose(got, distribution, atol=1e-12)
            lengths.add((count, forwards))
    assert (3, 3) in lengths and (1, 1) in lengths and (0, 0) in lengths
    if ends and isinstance(policy, Fixed) and sampling.temperature > 0:
        assert any(count < forwards for count, forwards in lengths)  # an ended path outlived longer ones


def outcome(generations) -> list:
    """Tokens and counts of every round."""
    return [(g.token_ids, [(r.num_drafted, r.num_draft_calls, r.num_accepted) for r in g.rounds]) for g in generations]


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_one_beam_is_the_chain_token_for_token(penalty, exact_pair, prompts):
    sampling = Sampling(max_new_tokens=20, top_k=20, repetition_penalty=penalty)
    rule = get("mtad", tau=0.3)
    chain = decode(exact_pair, prompts, Method("chain", Fixed(4), rule), sampling)
    beam = decode(exact_pair, prompts, Method("beam", Fixed(4), rule, BeamChainProposer(1, 4)), sampling)
    assert outcome(chain) == outcome(beam)


@pytest.mark.parametrize("tau", [0.0, 0.7])
def test_the_draft_cache_holds_what_the_text_holds(tau, exact_pair, prompts):
    """Against a draft that forgets everything after each round and reads the whole text again."""

    class Keeps(BeamChainProposer):
        def commit(self, context, proposal, verdict, accepted, lengths):
            super().commit(context, proposal, verdict, accepted, lengths)
            read = 0 if proposal.cache_ids is None else int((proposal.cache_ids >= 0).any(1).any(0).sum())
            held = [length + min(count, read) for length, count in zip(lengths, accepted, strict=True)]
            if proposal.num_nodes:  # else the draft was not asked, and has not read the newest token
                assert context.sessions[0].lengths == context.sessions[0].index.context_lengths == held

    class Forgets(BeamChainProposer):
        def commit(self, context, proposal, verdict, accepted, lengths):
            for row in range(len(lengths)):
                context.sessions[0].reset(row)

    rule, sampling = get("mtad", tau=tau), Sampling(max_new_tokens=24, top_k=30)
    keeps = decode(exact_pair, prompts, Method("keeps", Fixed(4), rule, Keeps(3, 4)), sampling)
    forgets = decode(exact_pair, prompts, Method("forgets", Fixed(4), rule, Forgets(3, 4)), sampling)
    assert outcome(keeps) == outcome(forgets)
    accepted = {r.num_accepted for g in keeps for r in g.rounds}
    assert len(accepted) >= 3


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("confidence", []), ("rate", []), ("specdec_pp", ["policy.lag=0", "policy.threshold=.9"]),
        *(pytest.param(name, [], marks=pytest.mark.slow) for name in (
            "dynamic_confidence", "tail", "heuristic", "adaedl", "specdec_pp"
        )),
    ],
)  # fmt: skip
def test_policies_stop_beams_and_rows_stay_apart(name, overrides, exact_pair, prompts):
    policy = config.method(name, overrides).policy
    method = Method("beams", policy, get("mtad"), BeamChainProposer(3, 6), min_drafted=0)
    sampling = Sampling(max_new_tokens=24)
    alone = decode(exact_pair, prompts, method, sampling, batch_size=1)
    assert outcome(alone) == outcome(decode(exact_pair, prompts, method, sampling, batch_size=4))
    for generation in alone:
        for r in generation.rounds:
            assert r.num_drafted <= r.num_draft_calls <= 6


def test_an_early_stop_saves_forwards(exact_pair, prompts):
    endless = ModelPair(target=exact_pair.target, draft=exact_pair.draft, end_ids=())

    def calls(policy: StoppingPolicy) -> list[int]:
        method = Method("beams", policy, get("mtad"), BeamChainProposer(3, 4))
        generations = decode(endless, prompts, method, Sampling(max_new_tokens=24))
        return [r.num_draft_calls for g in generations for r in g.rounds[:-4]]

    assert set(calls(Fixed(9))) == {4}
    assert set(calls(Fixed(2))) == {2}
    assert set(calls(Confidence(1.0))) == {1}


def test_a_policy_learns_from_the_path_that_was_sent():
    """The scores that come back in the state are those of the most probable path's own tokens."""
    generator = torch.Generator().manual_seed(8)
    target, draft = (TabularModel.random(5, 2, generator, sharpness=1.5) for _ in range(2))
    pair, policy = ModelPair(target=target, draft=draft, end_ids=(3,)), DynamicConfidence(threshold=0.0)
    for _ in range(10):
        uniforms = torch.rand(len(PROMPTS), 12, generator=generator, dtype=torch.float64)
        context = draft_context(pair, Sampling(), [9] * 6, uniforms)
        state = policy.init(6, torch.device("cpu"))
        proposal, state = BeamChainProposer(4, 3).propose(context, Bounded(policy, 0, 9), state)
        for row, count in enumerate(proposal.num_drafted.tolist()):
            own = (
                proposal.draft_probs[row, :count].gather(1, proposal.tokens[row, :count, None]).squeeze(1)
            )  # unwarped here
            assert torch.allclose(state["fresh"][row, :count].double(), own, atol=1e-6)
