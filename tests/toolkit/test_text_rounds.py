"""One text per row: free slots, cuts at stop strings, what the target reads again, what a tree's candidates come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.toolkit.test_beam_stops import lettered, letters
from toolkit import ModelPair, config
from toolkit.decoding import ChainProposer, DraftContext, Method, Sampling, TreeProposer, decode
from toolkit.decoding.proposers.distinct import DistinctNodes
from toolkit.engine.tabular import TabularSession
from toolkit.sampling import warp
from toolkit.stopping import Fixed
from toolkit.types import Proposal
from toolkit.verification import get


def watched(kind: type, *settings: Any) -> tuple[Any, list[tuple[DraftContext, Proposal]]]:
    """A proposer, and the rounds it has drafted so far."""
    rounds: list[tuple[DraftContext, Proposal]] = []

    class Watched(kind):
        def propose(self, context, policy, state):
            proposal, state = super().propose(context, policy, state)
            rounds.append((context, proposal))
            return proposal, state

    return Watched(*settings), rounds


def test_slots_without_a_text_draft_nothing(table_pair):
    """A row that has ended leaves one token behind, until half of the slots are free."""
    proposer, rounds = watched(ChainProposer)
    method = Method("chain", Fixed(3), get("rejection"), proposer)
    decode(table_pair, [[0, 1]] * 9, method, Sampling(max_new_tokens=12, seed=1), batch_size=9)
    free = [
        (context.room[slot], int(proposal.num_calls[slot]), int(proposal.num_drafted[slot]))
        for context, proposal in rounds
        for slot, text in enumerate(context.sequences)
        if len(text) == 1
    ]
    assert free and set(free) == {(0, 0, 0)}


@pytest.mark.parametrize("num_drafted", [1, 4])
def test_a_stop_string_may_be_complete_at_any_token_of_a_round(num_drafted, exact_pair, prompts):
    """A draft equal to the target: whole runs are accepted, and cut behind the first occurrence."""
    same = ModelPair(target=exact_pair.target, draft=exact_pair.target, end_ids=())
    pair, method = lettered(same), Method("chain", Fixed(num_drafted), get("rejection"))
    (whole,) = decode(pair, prompts[:1], method, Sampling(temperature=0, max_new_tokens=12))
    text = letters(*whole.token_ids)
    for start in range(11):
        stop = text[start : start + 2]
        sampling = Sampling(temperature=0, max_new_tokens=12, stop=(stop,))
        (cut,) = decode(pair, prompts[:1], method, sampling)
        first = text.index(stop)
        assert (letters(*cut.token_ids), cut.text) == (text[: first + 2], text[:first])
        assert cut.finish_reason == "stop"


@pytest.mark.parametrize("name", ["speculative", "specinfer"])
def test_the_target_reads_every_token_once(name, table_pair, monkeypatch):
    """Behind an accepted chain or path of a tree, however short, its cache lacks the newest token only."""
    again, original = [], TabularSession.extend

    def spy(self, tokens, **settings):
        if self.model is pair.target:
            again.append(tokens.shape[1] - settings["last"])
        return original(self, tokens, **settings)

    pair = ModelPair(target=table_pair.target, draft=table_pair.draft, end_ids=())
    monkeypatch.setattr(TabularSession, "extend", spy)
    (generation,) = decode(pair, [[0, 1]], config.method(name), Sampling(max_new_tokens=40))
    assert {r.num_accepted for r in generation.rounds} >= {0, 1, 2}
    assert again == [1] + [0] * (len(generation.rounds) - 1)


def test_a_trees_candidates_are_drawn_under_the_repetition_penalty(table_pair):
    """The tokens of the context are less likely, as they are for the target."""
    pair = ModelPair(target=table_pair.target, draft=table_pair.draft, end_ids=())
    sampling = Sampling(max_new_tokens=8, repetition_penalty=3.0)
    proposer, rounds = watched(TreeProposer, "2x2")
    decode(pair, [[0, 0]], Method("tree", Fixed(2), get("specinfer"), proposer), sampling)
    context, proposal = rounds[0]
    logits = pair.draft.probs[pair.draft.state([0, 0])].log()
    expected = warp(logits, sampling, torch.tensor([True, False, False]))
    assert torch.equal(context.seen[0], torch.tensor([True, False, False]))
    assert torch.equal(proposal.draft_probs[0, proposal.drawn_from[0, 0]], expected)
    assert not torch.equal(expected, warp(logits, sampling))


def test_chains_that_have_stopped_share_no_node():
    """A chain that goes on leads its own node, even if one that has stopped drew the same token before it."""
    nodes = DistinctNodes()
    alive = torch.tensor([[False, True, True, True]])
    nodes.add(torch.tensor([[1, 1, 2, 1]]), torch.full((1, 4), -1), alive)
    assert nodes.ids[0].tolist() == [[-1, 0, 1, 0]]
    assert nodes.tokens[0].tolist() == [[1, 2]] and nodes.real[0].tolist() == [[True, True]]
    nodes.add(torch.tensor([[0, 0, 0, 0]]), nodes.ids[0], torch.tensor([[False, False, True, True]]))
    assert nodes.ids[1].tolist() == [[-1, -1, 2, 3]]
    assert nodes.parents[1].tolist() == [[1, 0]]


def test_a_prompt_and_its_answer_must_fit_into_the_context_together(exact_pair):
    """Neither is too long alone."""
    longest = exact_pair.max_length
    prompts = [[7] * (longest - 9), [7] * (longest - 10)]
    method, sampling = config.method("autoregressive"), Sampling(max_new_tokens=10)
    long, fitting = decode(exact_pair, prompts, method, sampling)
    assert fitting.error is None and fitting.token_ids
    assert long.error.startswith(
        f"prompt 0: {longest - 9} tokens and max_new_tokens=10 exceed the target's context of {longest}"
    )
    assert (long.prompt_ids, long.token_ids, long.finish_reason) == ([], [], "error")
