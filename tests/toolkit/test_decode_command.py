"""The decode command: what it writes, what it says, and that finished work is said again, not done again."""

from __future__ import annotations

import json

import pytest

from tests.offline_runs import inventory
from toolkit import config, decode
from toolkit.files.atomic import read_json


def test_a_run_says_its_speed_and_a_second_one_repeats_it(tiny_overrides, tmp_path, capsys):
    options = ["prompts=toy_math", "prompts.limit=3", "sampling.max_new_tokens=6", "method=speculative", "batch_size=2"]
    cfg = config.compose("decode", [*tiny_overrides, *options, f"paths.output_dir={tmp_path}/out"])
    folder = decode.run(cfg)
    first = capsys.readouterr().out
    manifest = read_json(folder / "manifest.json")
    lines = [json.loads(line) for line in (folder / "generations.jsonl").read_text().split("\n") if line]
    assert manifest["num_tokens"] == sum(len(line["token_ids"]) for line in lines) > 3
    assert manifest["seconds"] > 0
    (said,) = [line for line in first.split("\n") if line.startswith("tokens per second")]
    assert f"{manifest['num_tokens'] / manifest['seconds']:.4g} (batch size 2" in said
    assert decode.run(cfg) == folder
    assert said in capsys.readouterr().out
    assert read_json(folder / "manifest.json") == manifest


def test_a_run_is_logged_by_its_rates_and_its_gain(tiny_overrides, tmp_path):
    options = [
        "prompts=toy_math",
        "prompts.limit=2",
        "sampling.max_new_tokens=6",
        "method=speculative",
        "cost_ratio=.5",
    ]
    folder = decode.run(config.compose("decode", [*tiny_overrides, *options, f"paths.output_dir={tmp_path}/out"]))
    summary, run = read_json(folder / "summary.json"), inventory(folder)
    throughput = summary["num_generated"] / (summary["num_target_calls"] + 0.5 * summary["num_draft_calls"])
    lines = (folder / "generations.jsonl").read_text().splitlines()
    drafted = [r["num_draft_calls"] > 0 for line in lines for r in json.loads(line)["rounds"]]
    assert run["scalars"] == pytest.approx(
        {
            "cost_ratio": 0.5,
            "verification_rate": summary["num_target_calls"] / summary["num_generated"],
            "discard_rate": summary["num_discarded"] / summary["num_generated"],
            "throughput": throughput,
            "gain": throughput - 1,
            "copy_share": 0,
            "draft_share": sum(drafted) / len(drafted),
        }
    )
    assert (run["job_type"], run["name"]) == ("decode", "speculative")
