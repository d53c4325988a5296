"""Texts and counts of every method on the toy pair in float64, as they were when last recorded.

The distribution tests prove the methods; these ten texts tell a refactoring that it changed something.
`python -m tests.toolkit.test_recorded_texts` records them again after a deliberate change.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path

import pytest

from data_gen.prompts import ToyPrompts
from toolkit import ModelPair, generate

ROOT = Path(__file__).parent.parent.parent
RECORDED = Path(__file__).parent.parent / "fixtures" / "recorded_texts.json"
METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml") if not path.stem.startswith("batch_"))


@cache
def toy_pair_in_double() -> ModelPair:
    folder = ROOT / "toolkit" / "assets" / "toy"
    return ModelPair.from_pretrained(target=str(folder / "target"), draft=str(folder / "draft"), dtype="float64")


def texts_and_counts(method: str, temperature: float) -> list[object]:
    """Sums of the counts over ten prompts (four of instructions, three of math and of code), and a digest of the tokens."""
    prompts = [
        prompt.prompt
        for domain, limit in (("instruct", 4), ("math", 3), ("code", 3))
        for prompt in ToyPrompts(domain, "dev", limit).load()
    ]
    results = generate(
        toy_pair_in_double(), prompts, method=method, head=str(ROOT / "toolkit" / "assets" / "toy" / "head"),
        max_new_tokens=12, temperature=temperature, batch_size=4, seed=5,
    )  # fmt: skip
    names = ("num_drafted", "num_draft_calls", "num_target_calls", "num_generated", "num_discarded")
    tokens = json.dumps([[result.token_ids, result.beams] for result in results])
    counts = [sum(getattr(result.counts, name) for result in results) for name in names]
    return [*counts, hashlib.sha256(tokens.encode()).hexdigest()[:16]]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_texts_and_counts_are_those_recorded(method: str, temperature: float) -> None:
    recorded = json.loads(RECORDED.read_text())
    assert texts_and_counts(method, temperature) == recorded[f"{method} {temperature}"]


if __name__ == "__main__":
    made = {f"{method} {heat}": texts_and_counts(method, heat) for method in METHODS for heat in (0.0, 1.0)}
    RECORDED.write_text("{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in made.items()) + "\n}\n")
