"""The checks that are offered to others: they pass what is right and find what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from scipy.stats import chisquare

from toolkit import testing, verification
from toolkit.decoding import Method
from toolkit.stopping import Fixed, StoppingPolicy
from toolkit.stopping.base import Thresholded
from toolkit.verification.rules.rejection import Rejection


@dataclass(frozen=True)
class FollowsTheFirstRow(StoppingPolicy):
    """Goes on where row 0 is likely: rows are not independent."""

    def step(self, step, state):
        return state, (step.token_prob[0] > 0.2).expand(len(step.tokens))


@dataclass(frozen=True)
class ReadsTheVocabulary(StoppingPolicy):
    """Reads the whole distribution, which no recording holds."""

    def step(self, step, state):
        return state, step.probs.amax(-1) > 0.2


@dataclass(frozen=True)
class RemembersTheLastRound(Thresholded):
    """A sum of the round's log probabilities that the next round goes on with: a replay scores every round anew."""

    threshold: float = 0.5

    @property
    def level(self):
        return self.threshold

    def init(self, num_rows, device):
        return {"total": torch.zeros(num_rows, device=device)}

    def score(self, step, state):
        total = state["total"] + step.token_prob.log()
        return {**state, "total": total}, total.exp()


class KeepsTarget(Rejection):
    """The extra token comes from p itself: wrong by a little."""

    def distribution(self, *arguments, **named):
        lengths, _ = super().distribution(*arguments, **named)
        return lengths, arguments[0]


@pytest.mark.parametrize("name", verification.names())
def test_rule_error_is_zero_for_lossless_rules_only(name):
    error = testing.rule_error(verification.get(name))
    assert error < 1e-9 if verification.get(name).lossless else error > 1e-3


def test_wrong_rules_and_policies_are_found():
    assert testing.rule_error(KeepsTarget()) > 1e-3
    with pytest.raises(AssertionError, match="total lives on after a round"):
        testing.check_policy(RemembersTheLastRound())
    testing.check_policy(Fixed(3))
    with pytest.raises(AssertionError, match="decides otherwise"):
        testing.check_policy(FollowsTheFirstRow())
    with pytest.raises(AssertionError, match=r"reads step\.probs, which recordings do not hold"):
        testing.check_policy(ReadsTheVocabulary())


def test_whole_outputs_of_a_lossless_method():
    method = Method("speculative", Fixed(2), verification.get("rejection"), max_drafted=2)
    counts, expected = testing.output_counts(testing.table_pair(), method, 2000)
    assert float(counts.sum()) == 2000 == pytest.approx(float(expected.sum()))
    assert testing.output_pvalue(testing.table_pair(), method, 2000) > 1e-4


def test_chi_square_agrees_with_scipy_and_what_cannot_be_has_no_probability():
    assert testing.chi_square(torch.tensor([9.0, 1.0]), torch.tensor([10.0, 0.0])) == 0.0
    counts, expected = torch.tensor([18.0, 29, 53]).double(), torch.tensor([25.0, 25, 50]).double()
    assert testing.chi_square(counts, expected) == pytest.approx(chisquare(counts, expected).pvalue, rel=1e-9)
