"""Blocks of beams: the probability of every beam of a block of which one is drawn, against drawing it."""

from __future__ import annotations

import random

import pytest

from toolkit.decoding.beams import _shares


@pytest.mark.parametrize(
    ("living", "finished", "widths"),
    [([3, 3], [1, 2], [3, 3, 2]), ([2, 2, 2], [], [4, 3]), ([], [1, 1, 2], [2, 1]), ([1], [], [1])],
)
def test_shares_are_those_of_beams_drawn_layer_by_layer(living, finished, widths):
    """In every layer one of its beams, all alike; a block is over where the drawn one has ended."""
    lengths = [*living, *finished]
    shares = _shares(lengths, widths)
    rng, runs, seen = random.Random(0), 20_000, [0] * len(lengths)
    for _ in range(runs):
        for layer, width in enumerate(widths, start=1):
            here = [i for i, length in enumerate(lengths) if length == layer]
            place = rng.randrange(width)
            if place < len(here):
                seen[here[place]] += 1
                break
    for share, count in zip(shares, seen, strict=True):
        assert abs(count / runs - share) < 5 * (share * (1 - share) / runs) ** 0.5 + 1e-9
    assert sum(shares) <= 1 + 1e-12
