"""Blocks of beams: the chance of every beam of a block of which one is drawn, against drawing it."""

from __future__ import annotations

import random

import pytest

from toolkit.decoding.beams import Beam, RowBeams, _shares


def beams_of(living, finished, before):
    """Beams of these lengths behind a text of `before` tokens."""
    made = [[Beam([7] * (before + length), 0.0) for length in lengths] for lengths in (living, finished)]
    return RowBeams(made[0], finished=made[1], length_then=before)


@pytest.mark.parametrize(
    ("living", "finished", "widths"),
    [([3, 3], [1, 2], [3, 3, 2]), ([2, 2, 2], [], [4, 3]), ([], [1, 1, 2], [2, 1]), ([1], [], [1])],
)
@pytest.mark.parametrize("before", [0, 5])
def test_shares_are_those_of_beams_drawn_layer_by_layer(living, finished, widths, before):
    """In every layer one of its beams, all alike; a block is over where the drawn one has ended."""
    lengths = [*living, *finished]
    found = _shares(beams_of(living, finished, before), widths)
    rng, runs, seen = random.Random(0), 20_000, [0] * len(lengths)
    for _ in range(runs):
        for layer, width in enumerate(widths, start=1):
            here = [i for i, length in enumerate(lengths) if length == layer]
            place = rng.randrange(width)
            if place < len(here):
                seen[here[place]] += 1
                break
    for share, count in zip(found, seen, strict=True):
        assert abs(count / runs - share) < 5 * (share * (1 - share) / runs) ** 0.5 + 1e-9
    assert sum(found) <= 1 + 1e-12
