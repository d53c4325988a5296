"""The decode command: what it writes, what it says, and what other tools read of it; finished work is said again, not done."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from tests.offline_runs import inventory
from toolkit import config, decode
from toolkit.files.atomic import read_json


def lines_of(folder):
    return [json.loads(line) for line in (folder / "generations.jsonl").read_text().split("\n") if line]


def test_a_second_run_finds_the_first(tiny_overrides, tmp_path, capsys):
    options = ["prompts=toy_math", "prompts.limit=3", "sampling.max_new_tokens=6", "method=speculative", "batch_size=2"]
    cfg = config.compose("decode", [*tiny_overrides, *options, f"paths.output_dir={tmp_path}/out"])
    folder = decode.run(cfg)
    manifest = read_json(folder / "manifest.json")
    assert manifest["num_tokens"] == sum(len(line["token_ids"]) for line in lines_of(folder)) > 3
    assert manifest["seconds"] > 0
    first = json.dumps(lines_of(folder)[0]["text"], ensure_ascii=False)
    assert f" {first} (more in " in capsys.readouterr().out
    assert decode.run(cfg) == folder and read_json(folder / "manifest.json") == manifest
    assert f"{manifest['num_tokens'] / manifest['seconds']:.4g} (batch size 2" in capsys.readouterr().out


@pytest.mark.parametrize(("method", "shared"), [("batch_rate", False), ("rate", True)])
def test_a_batch_of_another_size_is_decoded_where_rows_decide_together(method, shared, tmp_path):
    options = ["prompts=toy_math", "prompts.limit=4", "sampling.max_new_tokens=12", f"method={method}", "track=false"]
    cfgs = [config.compose("decode", [*options, f"batch_size={size}", f"paths.root_dir={tmp_path}"]) for size in (1, 4)]
    folders = [decode.run(cfg) for cfg in cfgs]
    assert (folders[0] == folders[1]) == shared
    sizes = [read_json(folder / "manifest.json")["batch_size"] for folder in folders]
    assert sizes == [1, 1 if shared else 4]


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
    drafted = [r["num_draft_calls"] > 0 for line in lines_of(folder) for r in line["rounds"]]
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


def speed(path, base, count_tokens, task):
    """What Spec-Bench's evaluation/speed.py computes of two files, re-implemented: tokens per second, the same of the
    baseline, their ratio, and the accepted lengths of all steps. The baseline's tokens are counted from its text."""
    wanted = lambda line: task == "overall" or line["category"] == task
    chosen, plain = ([line["choices"][0] for line in map(json.loads, file.read_text().splitlines()) if wanted(line)]
                     for file in (path, base))  # fmt: skip
    fast = np.mean([sum(one["new_tokens"]) / sum(one["wall_time"]) for one in chosen])
    theirs = np.mean([sum(count_tokens(turn) - 1 for turn in one["turns"]) / sum(one["wall_time"]) for one in plain])
    return fast, theirs, fast / theirs, [length for one in chosen for length in one["accept_lengths"]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("decoded")
    folders = {}
    for method in ("speculative", "autoregressive"):
        options = [
            f"method={method}",
            "prompts=toy_math",
            "prompts.limit=3",
            "batch_size=1",
            "sampling.max_new_tokens=12",
        ]
        options.append(f"paths.root_dir={root}")
        folders[method] = decode.run(config.compose("decode", options))  # finished: exported then
        options += ["export=true", "category=math_reasoning"]
        assert decode.run(config.compose("decode", options)) == folders[method]
    return folders


def test_spec_bench_reads_it(exported):
    ours, base = exported["speculative"], exported["autoregressive"]
    for task in ("overall", "math_reasoning"):
        fast, plain, ratio, lengths = speed(ours / "spec_bench.jsonl", base / "spec_bench.jsonl", len, task)
        assert fast > 0 and plain > 0 and ratio == fast / plain
        assert sum(lengths) == sum(line["counts"]["num_generated"] for line in lines_of(ours))
        assert len(lengths) == sum(line["counts"]["num_target_calls"] for line in lines_of(ours))
    first = json.loads((ours / "spec_bench.jsonl").read_text().splitlines()[0])
    assert {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"} == set(first)


def test_exports_carry_each_prompts_id_and_category(tmp_path):
    """Of a prompts file with both; acceptance.csv is counted again from the rounds, by category and of all."""
    questions = ["Q: 2 + 3 =", "Q: 10 - 4 =", "Q: 7 + 8 =", "Q: 9 - 1 ="]
    rows = [
        {"id": 80 + n, "prompt": text, **({"category": "sums" if "+" in text else "rest, all"} if n < 3 else {})}
        for n, text in enumerate(questions)
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [f"prompts.path={tmp_path}/p.jsonl", "method=speculative", "batch_size=1", "sampling.max_new_tokens=16"]
    options += [f"paths.root_dir={tmp_path}", "export=true", "category=other"]
    folder = decode.run(config.compose("decode", options))
    answers = [json.loads(line) for line in (folder / "spec_bench.jsonl").read_text().splitlines()]
    assert [(line["question_id"], line["category"]) for line in answers] == [
        (80, "sums"), (81, "rest, all"), (82, "sums"), (83, "other")
    ]  # fmt: skip
    with (folder / "acceptance.csv").open() as file:
        table = {
            line.pop("subset"): {name: float(value) for name, value in line.items()} for line in csv.DictReader(file)
        }
    lines = lines_of(folder)
    for name, numbers in {"sums": (0, 2), "rest, all": (1,), "other": (3,), "all": range(4)}.items():
        accepted = [r["num_accepted"] for n in numbers for r in lines[n]["rounds"] if r["num_drafted"]]
        assert table[name]["acceptance_length"] == pytest.approx(1 + np.mean(accepted), abs=1e-4)
        for at in range(len(table[name]) - 1):
            assert table[name][f"pos_{at}"] == pytest.approx(np.mean(np.array(accepted) > at), abs=1e-4)
    assert set(table) == {"sums", "rest, all", "other", "all"}


def test_rates_have_numerators_and_the_formats_agree(exported):
    ours = exported["speculative"]
    summary, rates = read_json(ours / "summary.json"), read_json(ours / "aggregate.json")["rates"]
    for name in ("discard_rate", "verification_rate", "block_efficiency", "acceptance_rate"):
        assert rates[name]["value"] == pytest.approx(summary[name])
        assert (
            rates[name]["value"] == rates[name]["numerator"] / rates[name]["denominator"] and rates[name]["definition"]
        )
    theirs = read_json(ours / "specdec_pp.json")
    generated = sum(one["generated_length"] for one in theirs)
    assert sum(one["num_mismatched_tokens"] for one in theirs) / generated == pytest.approx(summary["discard_rate"])
    assert sum(one["num_LM_call"] for one in theirs) / generated == pytest.approx(summary["verification_rate"])
    assert all(one["spec_time"] == pytest.approx(one["draft_time"] + one["target_time"]) for one in theirs)


def test_times_of_batches_are_missing_not_made_up(tmp_path):
    options = ["method=speculative", "prompts=toy_math", "prompts.limit=2", "batch_size=2", "sampling.max_new_tokens=8"]
    folder = decode.run(config.compose("decode", [*options, "export=true", f"paths.root_dir={tmp_path}"]))
    assert not (folder / "spec_bench.jsonl").exists()
    assert all(one["spec_time"] is None for one in read_json(folder / "specdec_pp.json"))
