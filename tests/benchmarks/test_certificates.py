"""Every rule has a certificate: its largest error by enumeration, and a line on the page."""

from __future__ import annotations

import pytest

from benchmarks import certificates
from benchmarks.conclusions import FOLDER
from toolkit.verification import get, names


@pytest.mark.parametrize("name", names())
def test_lossless_rules_are_exact_and_lossy_ones_are_not(name, monkeypatch):
    monkeypatch.setattr(certificates, "PAIRS", 4)
    monkeypatch.setattr(certificates, "TABLES", 4)
    monkeypatch.setattr(certificates, "CHAINS", ((2, 2), (3, 2)))
    monkeypatch.setattr(certificates, "CANDIDATES", (1, 2))
    monkeypatch.setattr(certificates, "LAYERS", ((3, 2, 1), (3, 2, 2)))
    for _, _, error in certificates.errors(name):
        assert error < 1e-12 if get(name).lossless else error > 0.01


def test_the_page_has_every_rule_under_every_scheme():
    lines = [
        line.split(" | ") for line in (FOLDER / "certificates.md").read_text().split("\n") if line.startswith("| ")
    ]
    found = {(line[0].removeprefix("| "), line[2]) for line in lines[1:]}
    chains = {name for name, scheme in found if scheme == "any"}
    expected = {(name, scheme) for name in names() for scheme in (("any",) if name in chains else get(name).schemes)}
    assert found == expected
