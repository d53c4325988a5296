"""Searches: a space is read, what was interrupted goes on, what fails is tried again, and the best is found."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna", reason="the extra optuna is not installed")

from hydra_plugins.acceptance_search import directions_of  # noqa: E402
from toolkit.errors import InputError  # noqa: E402
from toolkit.search.study import JOURNAL, Search, Settings, read_scores, read_space, write_results  # noqa: E402

SPACE = ["x=interval(-2.0,2.0)", "kind=a,b"]


def run(search: Search, score, stop: int = 1000) -> list[dict]:
    """Trials until none is left, or `stop` were told; returns the parameters that were tried."""
    tried = []
    while search.left and len(tried) < stop:
        for trial in search.ask():
            tried.append(trial.params)
            search.tell(trial, score(trial.params))
    return tried


def parabola(params) -> list[float]:
    return [(params["x"] - 0.5) ** 2 + (params["kind"] == "a")]


def test_overrides_become_distributions_and_the_others_stay():
    kinds = optuna.distributions
    words = [
        "a=interval(.1,.9)", "b=tag(log,interval(1e-5,1e-2))", "c=int(interval(1,8))", "d=range(1,9,2)", "e=1,2.5,x", "f=3",
        "+g=choice(u,v)", "h=range(0,1,.25)", "i=1,2", "i=.5",
    ]  # fmt: skip
    space, fixed = read_space(words)
    assert space == {
        "a": kinds.FloatDistribution(0.1, 0.9),
        "b": kinds.FloatDistribution(1e-5, 1e-2, log=True),
        "c": kinds.IntDistribution(1, 8),
        "d": kinds.IntDistribution(1, 7, step=2),
        "e": kinds.CategoricalDistribution(["1", "2.5", "x"]),
        "+g": kinds.CategoricalDistribution(["u", "v"]),
        "h": kinds.CategoricalDistribution(["0.0", "0.25", "0.5", "0.75"]),
    }
    assert fixed == ["f=3", "i=0.5"]
    for words, message in ((["x=3"], "nothing varies"), (["x=interval(2.0,1.0)"], "x: expected values or an interval")):
        with pytest.raises(InputError, match=message):
            read_space(words)


def test_settings_have_one_direction_per_score():
    with pytest.raises(InputError, match=r"hydra.sweeper.directions: expected one per score \(2\), got 1"):
        Settings(metrics=["a", "b"])


def test_the_largest_seed_of_a_sampler_goes_on(tmp_path):
    """Optuna's samplers take seeds of 32 bits; a search that goes on takes a later one."""
    for stop in (1, 2):
        run(Search(tmp_path, Settings(trials=9, seed=2**32 - 1), SPACE), parabola, stop=stop)
    with pytest.raises(InputError, match=r"hydra.sweeper.seed: expected .*4294967295.*, got 4294967296"):
        Settings(seed=2**32)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_the_best_of_one_score_is_near_the_optimum_and_in_the_tables(tmp_path, direction):
    search = Search(tmp_path, Settings(trials=30, directions=[direction]), SPACE)
    sign = 1 if direction == "minimize" else -1
    assert len(run(search, lambda params: [sign * value for value in parabola(params)])) == 30 and search.left == 0
    lines = write_results(search)
    assert list(lines[0]) == ["trial", "x", "kind", "score", "best", "status"]
    (best,) = json.loads((tmp_path / "best.json").read_text())
    assert best["params"]["kind"] == "b" and abs(best["params"]["x"] - 0.5) < 0.3
    assert [line["trial"] for line in lines if line["best"]] == [str(best["trial"])]
    assert (tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii", "random"])
def test_two_scores_have_a_front(tmp_path, sampler):
    settings = Settings(trials=30, directions=["minimize"] * 2, metrics=["left", "right"], sampler=sampler)
    search = Search(tmp_path, settings, SPACE)
    run(search, lambda params: [(params["x"] + 1) ** 2, (params["x"] - 1) ** 2])
    front = sorted(one.values for one in search.study.best_trials)
    assert 3 <= len(front) < 30 and all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(front))
    assert sum(line["best"] == "yes" for line in write_results(search)) == len(front)
    assert (tmp_path / "search.png").exists()


def test_it_goes_on_where_it_was_interrupted(tmp_path):
    tried = run(Search(tmp_path, Settings(trials=9), SPACE), parabola, stop=4)
    lost = Search(tmp_path, Settings(trials=9, at_once=2), SPACE).ask()  # killed meanwhile
    search = Search(tmp_path, Settings(trials=9), SPACE)
    assert search.left == 5
    rest = run(search, parabola)
    assert rest[:2] == [trial.params for trial in lost] and len(rest) == 5
    assert not [params for params in rest if params in tried]
    assert Search(tmp_path, Settings(trials=12), SPACE).left == 3


def test_a_trial_that_failed_counts_and_says_why(tmp_path):
    search = Search(tmp_path, Settings(trials=2), SPACE)
    run(search, lambda params: RuntimeError("out of\nmemory"))
    assert [line["status"] for line in write_results(search)] == ["failed: out of memory"] * 2
    assert json.loads((tmp_path / "best.json").read_text()) == [] and not (tmp_path / "search.png").exists()


def test_another_search_in_the_folder_is_refused(tmp_path):
    Search(tmp_path, Settings(), SPACE)
    for words, directions in (([*SPACE, "y=3"], ["minimize"]), (SPACE[:1], ["minimize"]), (SPACE, ["maximize"])):
        with pytest.raises(InputError, match=r"holds another search .*choose another hydra.sweep.dir"):
            Search(tmp_path, Settings(directions=directions), words)
    Search(tmp_path, Settings(trials=99, at_once=3, sampler="random", retries=0), SPACE)


def test_other_content_of_a_file_that_all_trials_read_is_another_search(tmp_path):
    file = tmp_path / "prompts.jsonl"
    words = ["method.policy.num_drafted=1,2", "method=speculative", "prompts=jsonl", f"prompts.path={file}"]
    for number, folder in ((1, "first"), (1, "first"), (2, "second")):
        file.write_text(json.dumps({"id": number, "prompt": f"Q: {number}"}))
        Search(tmp_path / folder, Settings(), words, command="decode")
    with pytest.raises(InputError, match="holds another search"):
        Search(tmp_path / "first", Settings(), words, command="decode")


def test_scores_are_read_by_name(tmp_path):
    (tmp_path / "metrics.json").write_text('{"val/loss": 0.5, "name": "x"}')
    assert read_scores(tmp_path, ["val/loss"]) == [0.5]
    with pytest.raises(InputError, match="hydra.sweeper.metrics: expected of .*val/loss.*, got val/los"):
        read_scores(tmp_path, ["val/los"])
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "summary.csv").write_text("method,setting,discard_rate\nautoregressive,,0\ntail,t=.3,.25\noracle,,0\n")
    assert read_scores(sweep, ["discard_rate"]) == [0.25]
    (sweep / "summary.csv").write_text("method,setting,discard_rate\ntail,t=.2,.1\ntail,t=.3,.25\n")
    with pytest.raises(InputError, match="expected one setting to score"):
        read_scores(sweep, ["discard_rate"])


def test_the_worst_training_is_not_searched_for():
    """Validation scores have a direction of their own; others are searched in the one that is named."""
    assert directions_of(["val/alpha"], []) == ["maximize"] and directions_of(["val/loss"], []) == ["minimize"]
    assert directions_of(["val/auroc", "val/log_loss"], []) == ["maximize", "minimize"]
    assert directions_of(["throughput", "val/loss"], ["maximize", "minimize"]) == ["maximize", "minimize"]
    for scores, directions, message in (
        (["val/alpha"], ["minimize"], "expected maximize for val/alpha, got minimize"),
        (["val/loss"], ["maximize"], "expected minimize for val/loss, got maximize"),
        (["throughput", "val/loss"], [], "expected minimize or maximize for each of throughput, val/loss"),
    ):
        with pytest.raises(InputError, match=f"hydra.sweeper.directions: {message}"):
            directions_of(scores, directions)


def test_a_search_refuses_a_wrong_direction_in_one_line(tmp_path):
    words = ["-m", "hydra/sweeper=ask_tell", "optimizer.lr=interval(.001,.1)", "responses=[x]"]
    words += [f"hydra.sweep.dir={tmp_path}/search", "hydra.sweeper.retries=0", "hydra.sweeper.trials=1"]
    more = ["hydra.sweeper.directions=[minimize]"]
    done = subprocess.run([sys.executable, "-m", "toolkit.distill", *words, *more], capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: hydra.sweeper.directions: expected maximize for val/alpha, got minimize" in done.stderr


# -- whole commands ---------------------------------------------------------------------------------------------------


def command(tmp_path: Path, *more: str) -> list[str]:
    """A search over a threshold by decoding, scored by two rates."""
    return [
        sys.executable, "-m", "toolkit.decode", "-m", "hydra/sweeper=ask_tell", "method=tail", "prompts=toy_instruct",
        "prompts.limit=2", "sampling.max_new_tokens=6", "method.policy.threshold=interval(.05,.95)",
        "hydra.sweeper.metrics=[discard_rate,verification_rate]", "hydra.sweeper.directions=[minimize,minimize]",
        f"hydra.sweep.dir={tmp_path}/search", f"paths.root_dir={tmp_path}/out", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_search_by_command_line_goes_on_after_a_kill(tmp_path):
    words = command(tmp_path, "hydra.sweeper.trials=3")
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    table = tmp_path / "search" / "trials.csv"
    while process.poll() is None and not table.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(table.open()))
    assert [line["status"] for line in lines] == ["done"] * 3 and (tmp_path / "search" / JOURNAL).exists()
    assert all(0 < float(line["verification_rate"]) <= 1 for line in lines)
    assert "search search" in done.stdout and (tmp_path / "search" / "search.png").exists()


@pytest.mark.slow
def test_faults_are_one_line_and_a_job_that_fails_is_tried_again(tmp_path):
    for more, message in (
        (["hydra.sweeper.trials=0"], "error: hydra.sweeper.trials: expected"),
        (["method.policy.threshold=.5"], "error: nothing varies"),
    ):
        done = subprocess.run(command(tmp_path, *more), capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    words = command(tmp_path, "method.policy.threshold=interval(2,3)", "hydra.sweeper.trials=1")
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("#0") == 2
    (line,) = csv.DictReader((tmp_path / "search" / "trials.csv").open())
    assert line["status"].startswith("failed: ") and "threshold" in line["status"]


@pytest.mark.slow
def test_heads_are_searched_for(tiny_overrides, tiny_mix, tmp_path):
    words = [
        sys.executable, "-m", "toolkit.train", "+hparams_search=optuna", *tiny_overrides, f"data.path={tiny_mix}",
        "trainer.max_epochs=1", "logger=none", "callbacks=none", "optimizer.lr=.01", "hydra.sweeper.trials=3",
        "optimized_metric=val/log_loss", f"paths.root_dir={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader((tmp_path / "search" / "trials.csv").open()))
    assert [line["status"] for line in lines] == ["done"] * 3
    assert all(0 <= int(line["head.depth"]) <= 4 and 1 <= float(line["loss.w_rej"]) <= 12 for line in lines)
