"""Decoding speed: the meter counts what runs, both sides alike; tables say what the lines say."""

import pytest
import torch

from benchmarks.decoding import CONTENDERS, load_pair, markdown, measure, prompts_of, summary
from benchmarks.meter import ForwardMeter
from toolkit import ModelPair


def test_the_meter_counts_forwards_and_tokens():
    model = ModelPair.toy().draft
    with ForwardMeter(model) as meter:
        model(input_ids=torch.ones(2, 3, dtype=torch.long))
        model(torch.ones(1, 5, dtype=torch.long))
    model(torch.ones(1, 5, dtype=torch.long))
    assert (meter.calls, meter.tokens) == (2, 11)
    assert meter.seconds > 0


def test_the_benchmark_counts_both_sides_alike():
    pair = load_pair("toy")
    names = ["transformers autoregressive", "transformers assisted K=2", "autoregressive", "speculative K=2"]
    lines = measure(pair, prompts_of(pair, 3), [CONTENDERS[name] for name in names], max_new_tokens=8)
    assert set(lines.contender) == set(names)
    assert len(lines) == 12
    plain = lines[lines.contender.isin(["transformers autoregressive", "autoregressive"])]
    assert (plain.target_forwards == plain.tokens).all()
    assert (plain.draft_forwards == 0).all()
    drafted = lines[~lines.contender.isin(["transformers autoregressive", "autoregressive"])]
    assert (drafted.draft_forwards >= drafted.target_forwards - 1).all()
    assert (drafted.tokens <= 8).all()
    assert (lines.forward_seconds < lines.seconds).all()
    table = summary(lines, "transformers autoregressive")
    assert table.loc[0, "against"] == pytest.approx(1.0)
    assert table.loc[0, "low"] <= table.loc[0, "tokens/s"] <= table.loc[0, "high"]
    text = markdown(table, "transformers autoregressive")
    assert all(name in text for name in names) and "[1.00, 1.00]" in text
    few = summary(lines[lines.group < 2], "transformers autoregressive")
    assert few.low.isna().all() and "[" not in markdown(few, "transformers autoregressive")


def test_assisted_generation_runs_one_prompt_at_a_time():
    pair = load_pair("toy")
    chosen = [CONTENDERS["transformers assisted K=2"], CONTENDERS["autoregressive"]]
    lines = measure(pair, prompts_of(pair, 2), chosen, batch_size=2, max_new_tokens=4)
    assert set(lines.contender) == {"autoregressive"}
