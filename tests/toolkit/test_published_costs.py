"""Published cost tables: their times, where they end, and what is refused."""

from __future__ import annotations

import pytest

from toolkit import ModelPair, config
from toolkit.costs.load import LoadCost
from toolkit.errors import InputError

NEMOTRON = "published/nemotron-30b-a3b"


def test_times_are_those_published_and_linear_between_them(tmp_path):
    table = LoadCost.load(f"{NEMOTRON}:.1")
    assert [table.target(1, width) for width in (1, 2, 3, 5, 8)] == [0.00847, 0.01349, 0.01564, 0.02067, 0.02813]
    assert table.target(1, 4, 700) == pytest.approx((0.01564 + 0.02067) / 2)
    assert table.draft(1, 1) == pytest.approx(0.000847)
    assert "vllm-mlx#763" in table.whose and "2026-09-04" in table.whose
    again = LoadCost.load(table.save(tmp_path / "costs.json"))
    assert again.whose == table.whose and again.target(1, 4) == table.target(1, 4)


def test_no_time_beyond_the_last_published_one_is_made_up():
    table = LoadCost.load(f"{NEMOTRON}:.1")
    assert table.lacks([1], widest=8) is None
    assert "of at most 7" in table.lacks([1], widest=9)
    assert "batch size 4" in table.lacks([4], widest=2)
    pair = ModelPair.toy()
    words = [f"policy.costs={NEMOTRON}:.1"]
    config.method("rate", [*words, "max_drafted=7"]).bind(pair)
    with pytest.raises(InputError, match="of at most 7"):
        config.method("rate", [*words, "max_drafted=8"]).bind(pair)


@pytest.mark.parametrize(
    "words, expected",
    [("published/nemotron:.1", "did you mean nemotron-30b-a3b"), (NEMOTRON, "expected published/.*:C"),
     (f"{NEMOTRON}:0", "expected published/.*:C"), (f"{NEMOTRON}:dear", "expected published/.*:C")],
)  # fmt: skip
def test_other_names_and_a_draft_without_a_cost_are_refused(words, expected):
    with pytest.raises(InputError, match=expected):
        LoadCost.load(words)
