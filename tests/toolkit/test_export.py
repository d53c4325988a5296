"""Decoded prompts as other tools read them."""

import json

import numpy as np
import pytest

from toolkit import config, decode
from toolkit.files.atomic import read_json


def speed(path, base, count_tokens, task):
    """What Spec-Bench's evaluation/speed.py computes of two files, re-implemented: tokens per second, the same of the
    baseline, their ratio, and the accepted lengths of all steps. The baseline's tokens are counted from its text."""
    wanted = lambda line: task == "overall" or line["category"] == task
    chosen, plain = ([line["choices"][0] for line in map(json.loads, file.read_text().splitlines()) if wanted(line)]
                     for file in (path, base))  # fmt: skip
    mine = np.mean([sum(one["new_tokens"]) / sum(one["wall_time"]) for one in chosen])
    theirs = np.mean([sum(count_tokens(turn) - 1 for turn in one["turns"]) / sum(one["wall_time"]) for one in plain])
    return mine, theirs, mine / theirs, [length for one in chosen for length in one["accept_lengths"]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("decoded")
    found = {}
    for method in ("speculative", "autoregressive"):
        options = [
            f"method={method}",
            "prompts=toy_math",
            "prompts.limit=3",
            "batch_size=1",
            "sampling.max_new_tokens=24",
        ]
        found[method] = decode.run(
            config.compose("decode", [*options, f"paths.root_dir={root}"])
        )  # finished: exported then
        options += ["export=true", "category=math_reasoning", f"paths.root_dir={root}"]
        assert decode.run(config.compose("decode", options)) == found[method]
    return found


def test_spec_bench_reads_it(exported):
    made, base = exported["speculative"], exported["autoregressive"]
    lines = [json.loads(line) for line in (made / "generations.jsonl").read_text().splitlines()]
    for task in ("overall", "math_reasoning"):
        mine, plain, ratio, lengths = speed(made / "spec_bench.jsonl", base / "spec_bench.jsonl", len, task)
        assert mine > 0 and plain > 0 and ratio == mine / plain
        assert sum(lengths) == sum(line["counts"]["num_generated"] for line in lines)
        assert len(lengths) == sum(line["counts"]["num_target_calls"] for line in lines)
    first = json.loads((made / "spec_bench.jsonl").read_text().splitlines()[0])
    assert {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} == set(first)


def test_rates_have_numerators_and_the_formats_agree(exported):
    made = exported["speculative"]
    summary, rates = read_json(made / "summary.json"), read_json(made / "aggregate.json")["rates"]
    for name in ("discard_rate", "verification_rate", "block_efficiency", "acceptance_rate"):
        assert rates[name]["value"] == pytest.approx(summary[name])
        assert (
            rates[name]["value"] == rates[name]["numerator"] / rates[name]["denominator"] and rates[name]["definition"]
        )
    theirs = read_json(made / "specdec_pp.json")
    generated = sum(one["generated_length"] for one in theirs)
    assert sum(one["num_mismatched_tokens"] for one in theirs) / generated == pytest.approx(summary["discard_rate"])
    assert sum(one["num_LM_call"] for one in theirs) / generated == pytest.approx(summary["verification_rate"])
    assert all(one["spec_time"] == pytest.approx(one["draft_time"] + one["target_time"]) for one in theirs)


def test_times_of_batches_are_missing_not_made_up(tmp_path):
    options = ["method=speculative", "prompts=toy_math", "prompts.limit=2", "batch_size=2", "sampling.max_new_tokens=8"]
    made = decode.run(config.compose("decode", [*options, "export=true", f"paths.root_dir={tmp_path}"]))
    assert not (made / "spec_bench.jsonl").exists()
    assert all(one["spec_time"] is None for one in read_json(made / "specdec_pp.json"))
