"""Cost tables from timed rounds: by hand, and that the clock runs for captured forwards."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.loads import measured
from data_gen.frozen import load_frozen
from toolkit import ModelPair
from toolkit.decoding import Sampling
from toolkit.errors import InputError
from toolkit.session.capture import TracedForward


def forwards(spread: float = 0.0, **seconds: float) -> pd.DataFrame:
    """Ten timed forwards each of a draft, and of a target at widths w1, w2, ..."""
    lines = []
    for number in range(10):
        shared = {"batch": 1, "context": 50.0 + number, "repeat": 1}
        lines.append({"model": "draft", "width": 1, **shared, "seconds": 0.1})
        for name, value in seconds.items():
            noise = spread * (number - 4.5)
            lines.append({"model": "target", "width": int(name[1:]), **shared, "seconds": value + noise})
    return pd.DataFrame(lines)


def test_more_tokens_per_row_never_take_less_time():
    costs, entries = measured.cost_table(forwards(w1=1.0, w2=3.0, w3=2.0, w5=4.0), {})
    assert [costs.target(1, width, 50) for width in (1, 2, 3, 5)] == pytest.approx([1.0, 2.5, 2.5, 4.0])
    assert costs.draft(1, 1, 50) == pytest.approx(0.1)
    found = entries[entries.model == "target"].seconds.tolist()
    assert found == pytest.approx([1.0, 3.0, 2.0, 4.0]), "the entries are the medians themselves"


def test_times_that_vary_too_much_are_refused():
    with pytest.raises(
        InputError, match="the times of 1 of 3 settings vary too much .*first: target, batch 1, 2 tokens"
    ):
        measured.cost_table(forwards(spread=0.1, w1=4.0, w2=1.0), {})


def test_forwards_are_captured_before_the_clock_counts(monkeypatch):
    """While the timed passes run, the target's forward at their widths is a replay."""
    made, passes, decoded = [], [], measured._decoded
    init = TracedForward.__init__

    def noting(self, *arguments):
        made.append(len(passes))
        init(self, *arguments)

    def counting(*arguments, **named):
        passes.append(arguments)
        return decoded(*arguments, **named)

    monkeypatch.setattr(TracedForward, "__init__", noting)
    monkeypatch.setattr(measured, "_decoded", counting)
    pair = ModelPair.toy()
    prompt = min((e.prompt for e in load_frozen("math", "dev")), key=lambda text: len(pair.encode(text)))
    found = measured.measure_loads(pair, [prompt], Sampling(seed=1), [1], [1], num_rounds=24)
    discarded = len(passes) - 4  # two lengths, two timed passes
    assert discarded == 2 + 2 * (measured.SETTLED // (measured.WARM_UP + 24) + 1)
    assert made and sum(number > discarded for number in made) <= 1, "at most one of a rare window of context"
    assert set(found.repeat) == {1, 2} and set(found[found.model == "target"].width) == {1, 2}


def test_a_prompt_that_does_not_fit_is_named():
    pair = ModelPair.toy()
    longest = pair.target.config.max_position_embeddings
    with pytest.raises(InputError, match="a prompt cannot be timed: "):
        measured.measure_loads(pair, [[5] * (longest - 2)], Sampling(seed=1), [1], [1], num_rounds=2)
