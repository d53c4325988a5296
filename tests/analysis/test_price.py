"""Prices solved on a recording: what the table says is what the policy reaches when it is played at that price."""

from __future__ import annotations

import pytest
import torch

from analysis import timing
from analysis.replay.policies import replay
from analysis.replay.recorded_heads import with_recorded_heads
from analysis.tables.files import read_table
from data_gen import traces
from toolkit import ModelPair, config, metrics
from toolkit.acceptance import AcceptanceHead, PrereadHead
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.models.pair import fingerprint
from toolkit.trace.folders import read_traces

KINDS = {"survival": "specdec_pp", "preread": "rate"}


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return ModelPair.from_pretrained(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))


@pytest.fixture(scope="module")
def heads(pair, tmp_path_factory):
    root, about = tmp_path_factory.mktemp("heads"), {"draft_fingerprint": fingerprint(pair.draft)}
    torch.manual_seed(0)
    AcceptanceHead(16, depth=1).save(root / "survival", about)
    PrereadHead(16, 16, width=8).save(root / "preread", about)
    return {kind: root / kind for kind in KINDS}


@pytest.fixture(scope="module")
def recorded(tiny_overrides, tiny_responses, heads, tmp_path_factory):
    named = f"heads={{survival: {heads['survival']}, preread: {heads['preread']}}}"
    words = [f"responses={tiny_responses}", "max_drafted=6", "limit=30", named]
    return traces.run(
        compose("traces", [*tiny_overrides, *words, f"paths.output_dir={tmp_path_factory.mktemp('t')}/t"])
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_price_is_worth_what_the_table_says(kind, recorded, heads, pair, tiny_overrides, tmp_path):
    words = [f"traces={recorded}", f"head={heads[kind]}", "cost_ratios=[0.1,0.3]", f"paths.output_dir={tmp_path}/p"]
    table = read_table(timing.run(compose("timing", [*tiny_overrides, *words])), "prices")
    assert list(table.c) == [0.1, 0.3]
    trace = read_traces(recorded)
    for _, line in table.iterrows():
        name, *overrides = (word.removeprefix("method") for word in line.override.split())
        assert name == f"={KINDS[kind]}"
        words = [*(word.removeprefix(".") for word in overrides), "min_drafted=1", "max_drafted=6"]
        method = config.method(KINDS[kind], words, str(heads[kind]))
        policy = with_recorded_heads(method.bind(pair).policy, {str(heads[kind]): kind})
        reached = metrics.throughput(replay(trace, policy).total, line.c)
        assert reached == pytest.approx(line["tokens per target time"], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stopping_problem_is_solved_on_request(kind, recorded, heads, tiny_overrides, tmp_path):
    words = [
        f"traces={recorded}",
        f"head={heads[kind]}",
        "cost_ratios=[0.2]",
        "values=true",
        f"paths.output_dir={tmp_path}/p",
    ]
    folder = timing.run(compose("timing", [*tiny_overrides, *words]))
    (line,) = read_table(folder, "prices").to_dict("records")
    assert line["best policy"] >= 0.98 * line["tokens per target time"]
    assert line["rate rule below it"] == pytest.approx(1 - line["tokens per target time"] / line["best policy"])
    thresholds, values = read_table(folder, "thresholds"), read_table(folder, "values")
    assert list(thresholds.k) == [1, 2, 3, 4, 5] and thresholds.h.between(0, 1).all()
    assert values.groupby("k").states.sum().is_monotonic_decreasing
    assert "## thresholds" in (folder / "prices.md").read_text()


def test_bad_input(recorded, heads, tiny_overrides):
    words = [*tiny_overrides, f"traces={recorded}", f"head={heads['preread']}"]
    with pytest.raises(InputError, match="cost_ratios: expected a list of numbers above 0, got "):
        timing.run(compose("timing", [*words, "cost_ratios=[0.1,-1]"]))
