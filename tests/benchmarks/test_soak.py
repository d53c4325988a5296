"""A reduced soak: all stages killed, on full disks, with damaged files, two at once, in a folder with an odd name."""

from __future__ import annotations

import random

import pytest

from benchmarks.soak import damage, soak


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_lose_nothing():
    table, wrong = soak(kills=10, minutes=20, seed=1)
    assert not wrong, table


def test_damage_changes_a_file(tmp_path):
    path = tmp_path / "file"
    for seed in range(20):
        path.write_bytes(b"content")
        what = damage(path, random.Random(seed))
        changed = path.read_bytes()
        assert changed != b"content"
        assert what.startswith("flipped") == (len(changed) == 7)
