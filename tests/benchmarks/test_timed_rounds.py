"""Processes in turns, and which rounds of a response are compared with those of a cost table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks.timed_rounds import COMPARED, Seconds, _rounds, in_turns
from toolkit.types import Generation, Round


def counting() -> Iterator[Seconds]:
    for turn in count():
        yield {0: float(turn)}


def squaring() -> Iterator[Seconds]:
    for turn in count():
        yield {0: float(turn * turn)}


def failing() -> Iterator[Seconds]:
    yield {}
    raise SystemExit(1)


@pytest.mark.slow
def test_every_process_goes_once_per_turn_and_its_first_value_is_left_out():
    found = in_turns({"plain": counting, "squares": squaring}, 1, 3)
    assert found == {"plain": [[{0: 1.0}, {0: 2.0}, {0: 3.0}]], "squares": [[{0: 1.0}, {0: 4.0}, {0: 9.0}]]}


@pytest.mark.slow
def test_a_process_that_ends_is_not_waited_for():
    with pytest.raises(EOFError):
        in_turns({"failing": failing}, 1, 2)


def test_rounds_without_the_first_one_with_full_drafts_up_to_some_tokens():
    drafted = [4, 4, 2, *[4] * 20]
    rounds = [Round(k, k, k, k + 1, True, float(n), 100.0) for n, k in enumerate(drafted)]
    generation = Generation(0, [1], list(range(sum(k + 1 for k in drafted))), rounds=rounds)
    counted = _rounds(generation, 4)
    assert counted == [101.0, *[100.0 + n for n in range(3, 10)]]
    assert sum(k + 1 for k in drafted[:10]) == COMPARED
