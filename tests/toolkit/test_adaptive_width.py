"""How many candidates a layer of draft beams has, where the policy foresees acceptance."""

from __future__ import annotations

import pytest
import torch

from toolkit.decoding import Beams, ForestProposer, Method, Sampling, decode
from toolkit.stopping import Confidence
from toolkit.types import DraftStep
from toolkit.verification import get


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
