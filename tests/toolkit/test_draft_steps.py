"""What a policy that reads is shown, and the state that it is handed back, with every kind of proposer."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from toolkit import ModelPair
from toolkit.decoding import (
    BeamChainProposer,
    Beams,
    ChainProposer,
    ForestProposer,
    Method,
    Proposer,
    Sampling,
    TreeProposer,
    decode,
)
from toolkit.engine import TabularModel
from toolkit.engine.device import Gate
from toolkit.sampling import warp
from toolkit.stopping import Confidence
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Drafted, DraftStep, Verified
from toolkit.verification import get

SAMPLING = Sampling(max_new_tokens=14, temperature=0.8, top_k=2, seed=3)


class Counts(StoppingPolicy):
    """Goes on behind every token but 1, to the fourth forward at most; counts its readings and draws in its state."""

    reads: ClassVar[bool] = True
    uses_history: ClassVar[bool] = False

    def __init__(self, last: int = 3) -> None:
        self.last = last
        self.steps: list[tuple[str, DraftStep, State]] = []
        self.rounds: list[tuple[Drafted, State]] = []

    def init(self, num_rows: int, device: torch.device) -> State:
        """Readings [B, 3], thrice the same, and draws [B]."""
        return {"read": torch.zeros(num_rows, 3), "drawn": torch.zeros(num_rows)}

    def read(self, step: DraftStep, state: State) -> tuple[State, torch.Tensor]:
        new = {"read": state["read"] + 1, "drawn": state["drawn"]}
        self.steps.append(("read", step, new))
        return new, torch.full((len(step.logits),), step.depth <= self.last)

    def step(self, step: DraftStep, state: State) -> tuple[State, torch.Tensor]:
        new = {"read": state["read"], "drawn": state["drawn"] + 1}
        self.steps.append(("drawn", step, new))
        return new, step.tokens != 1

    def observe(self, proposal: Drafted, verdict: Verified, state: State) -> State:
        self.rounds.append((proposal, state))
        return {key: torch.zeros_like(value) for key, value in state.items()}


@pytest.fixture(scope="module")
def endless_pair() -> ModelPair:
    """Tables over three tokens whose texts do not end."""
    generator = torch.Generator().manual_seed(2)
    models = [TabularModel.random(3, 2, generator, sharpness=1.5) for _ in range(2)]
    return ModelPair(target=models[0], draft=models[1], end_ids=())


PARTS: dict[str, tuple[str, Proposer]] = {
    "chain": ("rejection", ChainProposer()),
    "tree": ("specinfer", TreeProposer("2x2x1x1")),
    "beam_chain": ("mtad", BeamChainProposer(3, 5)),
    "forest": ("beam_layer", ForestProposer(3, 5)),
}


def decoded(name: str, policy: StoppingPolicy, pair: ModelPair, num_rows: int = 3) -> list:
    """Generations by a kind of proposer."""
    rule, proposer = PARTS[name]
    method = Method(name, policy, get(rule), proposer, beams=Beams(2) if name == "forest" else None)
    return decode(pair, [[0, 1], [2], [1, 1, 0]][:num_rows], method, SAMPLING)


@pytest.mark.parametrize("name", PARTS)
def test_steps_show_the_drafts_own_distributions_and_states(name, endless_pair):
    """A table's state says which of its rows was read: logits, distribution and state belong together."""
    policy = Counts()
    decoded(name, policy, endless_pair)
    draft = endless_pair.draft
    for _, step, _ in policy.steps:
        expected = draft.probs[step.hidden.argmax(-1)].log()
        assert torch.equal(step.logits, expected)
        assert torch.equal(step.probs.view_as(expected), warp(expected, SAMPLING))
    assert {step.depth for kind, step, _ in policy.steps if kind == "read"} == {1, 2, 3, 4}
    assert {step.depth for kind, step, _ in policy.steps if kind == "drawn"} == {1, 2, 3}


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("name", ["chain", "forest"])
def test_a_rows_state_stands_still_once_the_row_has_stopped(name, num_rows, ahead, endless_pair, monkeypatch):
    """It has counted the forwards and the draws that the row paid for, also if more were launched."""
    monkeypatch.setattr(f"toolkit.decoding.proposers.{name}.Gate", lambda device: Gate(device, ahead))
    policy = Counts()
    decoded(name, policy, endless_pair, num_rows)
    for proposal, state in policy.rounds:
        assert torch.equal(state["read"], proposal.num_calls.unsqueeze(1).expand(-1, 3).float())
        assert torch.equal(state["drawn"], proposal.num_drafted.float())
    numbers = {int(count) for proposal, _ in policy.rounds for count in proposal.num_drafted}
    assert numbers == {0, 1, 2, 3}


@pytest.mark.parametrize("name", ["tree", "beam_chain"])
def test_every_node_has_the_state_of_its_own_path(name, endless_pair):
    """It has been read and drawn once per depth."""
    policy = Counts()
    decoded(name, policy, endless_pair, 1)
    for kind, step, state in policy.steps:
        drawn = step.depth - (kind == "read")
        assert torch.equal(state["read"], torch.full_like(state["read"], step.depth))
        assert torch.equal(state["drawn"], torch.full_like(state["drawn"], drawn))


@pytest.mark.parametrize("name", PARTS)
def test_a_stop_after_reading_draws_nothing_more(name, endless_pair):
    """The forward that was read is paid for; its token is not drawn."""
    for generation in decoded(name, Counts(last=1), endless_pair):
        calls = [r.num_draft_calls for r in generation.rounds]
        assert set(calls) <= {0, 1, 2} and 2 in calls


@pytest.mark.parametrize(("level", "calls"), [(1.0, 1), (0.0, 5)])
def test_a_forest_has_as_many_layers_as_its_policy_wants(level, calls, endless_pair):
    assert {g.rounds[0].num_draft_calls for g in decoded("forest", Confidence(level), endless_pair)} == {calls}
