"""Several beams with a draft: what the draft reads, how far it drafts, and what becomes of drafted beams."""

from __future__ import annotations

import pytest
import torch

from tests.toolkit.test_beam_stops import lettered, letters
from tests.toolkit.test_beams import method
from toolkit import ModelPair, config
from toolkit.decoding import BeamChainProposer, Beams, ForestProposer, Method, Sampling, decode
from toolkit.decoding.proposers.forest import joint_distribution
from toolkit.decoding.text_order import TextOrder
from toolkit.engine import TabularModel
from toolkit.sampling import warp
from toolkit.stopping import Confidence, Fixed
from toolkit.types import DraftStep
from toolkit.verification import get


@pytest.fixture
def endless_pair(table_pair) -> ModelPair:
    """Texts that do not end."""
    return ModelPair(target=table_pair.target, draft=table_pair.draft, end_ids=())


def likelihood(model: TabularModel, text: list[int], start: int) -> float:
    """Log-likelihood of text[start:] behind what is before."""
    probs = [model.probs[model.state(text[:i]), text[i]] for i in range(start, len(text))]
    return float(torch.stack(probs).log().sum())


@pytest.mark.parametrize("ends", [(), (2,)])
def test_as_many_beams_come_out_as_were_asked_for_with_their_likelihoods(ends, table_pair):
    """Accepted, redrawn and ended ones: none is lost on the way."""
    pair, wanted = ModelPair(target=table_pair.target, draft=table_pair.draft, end_ids=ends), 3
    generations = decode(pair, [[0, 1]] * 60, method(wanted, drafted=4), Sampling(max_new_tokens=9, seed=7))
    assert {r.num_accepted for g in generations for r in g.rounds} == {0, 1, 2}
    for generation in generations:
        assert len(generation.beams) == len(generation.scores) == wanted
        assert sum(r.num_produced for r in generation.rounds) == len(generation.token_ids)
        for tokens, score in zip(generation.beams, generation.scores, strict=True):
            assert score == pytest.approx(likelihood(pair.target, [0, 1, *tokens], 2) / len(tokens))


def test_the_draft_reads_every_token_of_a_beam_once(endless_pair, monkeypatch):
    """With one beam it lacks the newest token, and the last drafted one if that was accepted: never more."""
    lacks, original = [], ForestProposer.propose

    def spy(self, context, policy, state):
        lacks.append(context.catch_up[0].shape[1])
        return original(self, context, policy, state)

    monkeypatch.setattr(ForestProposer, "propose", spy)
    (generation,) = decode(endless_pair, [[0, 1]], method(1, drafted=2, layers=2), Sampling(max_new_tokens=40))
    assert {r.num_accepted for r in generation.rounds} == {0, 1, 2}
    assert set(lacks) == {1, 2}


def test_the_drafts_cache_grows_with_its_beams(exact_pair):
    """A draft equal to the target: many beams of short texts, all kept, hold more tokens than the cache began with."""
    same = ModelPair(target=exact_pair.target, draft=exact_pair.target, end_ids=())
    sampling = Sampling(max_new_tokens=9, temperature=8.0)
    (generation,) = decode(same, [[7, 8]], method(58, drafted=58, layers=1), sampling)
    assert (generation.error, len(generation.token_ids), len(generation.beams)) == (None, 9, 58)


def test_no_layer_is_drafted_beyond_a_block(endless_pair):
    """Blocks of three layers: the draft has two at most, the target adds the third."""
    built = method(2, drafted=2, layers=5, collapse_after=3)
    for generation in decode(endless_pair, [[0, 1]] * 5, built, Sampling(max_new_tokens=12)):
        assert generation.rounds[0].num_draft_calls == 2
        ends, depth = [], 0
        for r in generation.rounds:
            depth += len(r.widths)
            ends += [depth] if depth % 3 == 0 else []
            assert r.num_draft_calls <= 2
        assert ends == [3, 6, 9, 12]


def test_the_best_of_a_layer_is_the_most_probable_token(endless_pair):
    """Beam search that keeps the best beam of every layer is greedy decoding, at any temperature."""
    built = method(3, selection="top", collapse_after=1, collapse_to="best")
    greedy = decode(
        endless_pair, [[0, 1], [2]], config.method("autoregressive"), Sampling(max_new_tokens=9, temperature=0)
    )
    generations = decode(endless_pair, [[0, 1], [2]], built, Sampling(max_new_tokens=9, temperature=1.3))
    assert [g.token_ids for g in generations] == [g.token_ids for g in greedy]


def test_a_row_that_is_done_hides_none_that_needs_more_pairs(exact_pair, prompts):
    """Every second token stops a text: a search goes on for every row, whatever the rows before it need."""
    many = tuple(letters(token) for token in range(exact_pair.vocab_size) if token % 2)
    longest = max(prompts, key=len)
    together = [longest, *(prompt for prompt in prompts if len(prompt) < len(longest))]
    built = config.method("beam_search", ["beams.num_beams=6"])
    sampling = Sampling(max_new_tokens=8, max_length=len(longest) + 1, stop=many)
    generations = decode(lettered(exact_pair), together, built, sampling)
    alone = [decode(lettered(exact_pair), [prompt], built, sampling)[0] for prompt in together]
    assert [g.beams for g in generations] == [g.beams for g in alone]
    assert len(generations[0].rounds) == 1 and all(len(g.rounds) > 1 for g in generations[1:])


def test_a_beam_draft_says_what_its_cache_holds(endless_pair):
    """Of a chain's tokens the draft has read all but the last one."""
    held = []

    class Watched(BeamChainProposer):
        def commit(self, context, proposal, verdict, accepted, lengths):
            if proposal.num_nodes:
                held.append((proposal.cache_ids >= 0).squeeze(1)[0].tolist())
            super().commit(context, proposal, verdict, accepted, lengths)

    decode(endless_pair, [[0, 1]], Method("beams", Fixed(4), get("mtad"), Watched(3, 4)), Sampling(max_new_tokens=5))
    assert held[0] == [True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_weighed_in_single_precision(dtype):
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores = torch.tensor([[-1.0, -2.0, -torch.inf], [-300.0, -301.0, -300.5]], dtype=torch.float64)
    probs, joint = joint_distribution(
        scores, logits, Sampling(temperature=0.9), TextOrder.of(torch.arange(3).expand(2, -1))
    )
    wide = scores.unsqueeze(-1) + logits.double().log_softmax(-1)
    assert (joint - wide).nan_to_num().abs().max() < 1e-4
    assert (probs - warp(wide.flatten(1), Sampling(temperature=0.9))).abs().max() < 1e-4


class Certain(Confidence):
    """Foresees acceptance with a probability that it was told."""

    prob = 0.0

    def foresee(self, step: DraftStep) -> torch.Tensor:
        return torch.full((len(step.logits),), self.prob)


@pytest.mark.parametrize(("prob", "expected"), [(1.0, 2), (0.9, 3), (0.5, 4), (0.4, 5), (0.3, 6), (0.01, 6), (0.0, 6)])
def test_a_layer_has_as_many_candidates_as_let_the_wanted_number_be_accepted(prob, expected, table_pair):
    """ceil(2 / probability), between 2 and 6; the first layer, which nothing was foreseen for, has all 6."""
    policy = Certain(0.0)
    object.__setattr__(policy, "prob", prob)
    adaptive = Method("beams", policy, get("beam_layer"), ForestProposer(6, 2, 2), beams=Beams(2))
    (generation,) = decode(table_pair, [[0, 1]], adaptive, Sampling(max_new_tokens=30, seed=1))
    whole = [r.num_drafted for r in generation.rounds if r.num_draft_calls == 2]
    assert set(whole) == {6 + expected}
