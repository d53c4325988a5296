"""Searches: the whole of a space is tried, what fails is tried again, what was interrupted goes on, and the best is found."""

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

from toolkit.errors import InputError  # noqa: E402
from toolkit.search.results import draw, write_results  # noqa: E402
from toolkit.search.scores import scores_of  # noqa: E402
from toolkit.search.space import read_space, words_of  # noqa: E402
from toolkit.search.study import JOURNAL, Search, Settings  # noqa: E402

SPACE = ["x=interval(-2.0,2.0)", "kind=a,b"]


def search(folder: Path, words=SPACE, **settings) -> Search:
    space, fixed = read_space(words)
    return Search(folder, Settings(**settings), space, fixed)


def run(found: Search, score, stop: int | None = None) -> list[dict]:
    """Trials until none is left, or `stop` were told; returns the parameters that were tried."""
    tried = []
    while found.left and (stop is None or len(tried) < stop):
        for trial in found.ask():
            tried.append(trial.params)
            try:
                found.tell(trial, score(trial.params))
            except RuntimeError as error:
                found.tell(trial, error)
    return tried


def parabola(params) -> list[float]:
    return [(params["x"] - 0.5) ** 2 + (params["kind"] == "a")]


# -- what varies ------------------------------------------------------------------------------------------------------


def test_overrides_become_distributions_and_the_others_stay():
    kinds = optuna.distributions
    words = [
        "a=interval(.1,.9)", "b=tag(log,interval(1e-5,1e-2))", "c=int(interval(1,8))", "d=range(1,9,2)", "e=1,2.5,x", "f=3",
        "+g=choice(u,v)", "h=range(0,1,.25)",
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
    assert fixed == ["f=3"]
    assert words_of({"a": 0.1234567890123, "c": 3, "+g": "u"}) == ["a=0.1234567890123", "c=3", "+g=u"]


def test_the_command_line_wins_over_the_configs_space():
    assert read_space(["x=interval(0,1)", "y=1,2", "x=.5"]) == (
        {"y": optuna.distributions.CategoricalDistribution(["1", "2"])}, ["x=0.5"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x=3"], "nothing varies"),
        (["x=interval(2.0,1.0)"], "x: expected values or an interval"),
        ([], "nothing varies"),
    ],
)
def test_a_space_that_is_none_is_refused(words, message):
    with pytest.raises(InputError, match=message):
        read_space(words)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trials": 0}, r"hydra.sweeper.trials: expected"), ({"sampler": "gird"}, "hydra.sweeper.sampler: expected"),
        ({"directions": ["up"]}, "hydra.sweeper.directions: expected"),
        ({"metrics": ["a", "b"]}, r"hydra.sweeper.directions: expected one per score \(2\), got 1"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_one_line(settings, message):
    with pytest.raises(InputError, match=message):
        Settings(**settings)


# -- trials -----------------------------------------------------------------------------------------------------------


def test_the_best_of_one_score_is_near_the_optimum(tmp_path):
    found = search(tmp_path, trials=40)
    assert len(run(found, parabola)) == 40 and found.left == 0
    (best,) = found.best()
    assert best.params["kind"] == "b" and abs(best.params["x"] - 0.5) < 0.2


def test_directions_are_heeded(tmp_path):
    found = search(tmp_path, trials=30, directions=["maximize"])
    run(found, lambda params: [-value for value in parabola(params)])
    assert found.best()[0].params["kind"] == "b" and abs(found.best()[0].params["x"] - 0.5) < 0.3


@pytest.mark.parametrize("sampler", ["tpe", "nsgaii", "random"])
def test_two_scores_have_a_front(tmp_path, sampler):
    found = search(tmp_path, trials=30, directions=["minimize"] * 2, metrics=["left", "right"], sampler=sampler)
    tried = run(found, lambda params: [(params["x"] + 1) ** 2, (params["x"] - 1) ** 2])
    front = sorted(one.values for one in found.best())
    assert 3 <= len(front) < 30 and len(tried) == 30
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(front))
    every = [[(p["x"] + 1) ** 2, (p["x"] - 1) ** 2] for p in tried]
    beaten = [one for one in every if any(o[0] <= one[0] and o[1] <= one[1] and o != one for o in every)]
    assert len(front) + len(beaten) == 30


def test_it_goes_on_where_it_was_interrupted(tmp_path):
    first = run(search(tmp_path, trials=9), parabola, stop=4)
    again = search(tmp_path, trials=9)
    assert again.left == 5 and again.num_jobs == 4
    rest = run(again, parabola)
    assert len(rest) == 5 and not [params for params in rest if params in first]
    assert search(tmp_path, trials=9).left == 0
    assert search(tmp_path, trials=12).left == 3


def test_what_a_killed_process_was_at_is_proposed_again(tmp_path):
    lost = search(tmp_path, trials=3, at_once=2).ask()
    again = search(tmp_path, trials=3)
    assert again.left == 3
    tried = run(again, parabola)
    assert tried[:2] == [one.params for one in lost] and len(tried) == 3
    assert again.left == 0


def test_a_job_that_fails_is_tried_again_and_then_counts_as_failed(tmp_path):
    calls = []

    def breaks(params):
        calls.append(params)
        raise RuntimeError("out of\nmemory")

    found = search(tmp_path, trials=2, retries=1)
    run(found, breaks)
    assert len(calls) == 4 and calls[0] == calls[1] and calls[2] == calls[3] != calls[0]
    lines = write_results(found)
    assert [line["status"] for line in lines] == ["failed, tried again: out of memory", "failed: out of memory"] * 2
    assert json.loads((tmp_path / "best.json").read_text()) == [] and draw(found) is None


def test_a_job_that_fails_once_costs_nothing(tmp_path):
    told = iter([RuntimeError("hiccup")])

    def once(params):
        for error in told:
            raise error
        return parabola(params)

    found = search(tmp_path, trials=4)
    assert len(run(found, once)) == 5
    assert sum(line["status"] == "done" for line in write_results(found)) == 4


def test_another_search_in_the_folder_is_refused(tmp_path):
    search(tmp_path)
    for change in ({"words": [*SPACE, "y=3"]}, {"words": SPACE[:1]}, {"directions": ["maximize"]}):
        with pytest.raises(InputError, match=r"holds another search .*choose another hydra.sweep.dir"):
            search(tmp_path, **change)
    search(tmp_path, trials=99, at_once=3, sampler="random", retries=0)


# -- what is written --------------------------------------------------------------------------------------------------


def test_tables_and_figure(tmp_path):
    found = search(tmp_path, trials=6)
    run(found, parabola)
    lines = write_results(found)
    assert lines == list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert list(lines[0]) == ["trial", "job", "x", "kind", "score", "best", "status"]
    (best,) = json.loads((tmp_path / "best.json").read_text())
    assert best["scores"]["score"] == min(float(parabola(one.params)[0]) for one in found.trials)
    assert [line["trial"] for line in lines if line["best"]] == [str(best["trial"])]
    assert draw(found).read_bytes().startswith(b"\x89PNG")


def test_scores_are_read_by_name(tmp_path):
    (tmp_path / "metrics.json").write_text('{"val/loss": 0.5, "name": "x"}')
    assert scores_of(tmp_path, ["val/loss"]) == [0.5]
    with pytest.raises(InputError, match="hydra.sweeper.metrics: expected of val/loss .*, got val/los"):
        scores_of(tmp_path, ["val/los"])
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / "summary.csv").write_text("method,setting,discard_rate\nautoregressive,,0\ntail,t=.3,.25\noracle,,0\n")
    assert scores_of(sweep, ["discard_rate"]) == [0.25]
    (sweep / "summary.csv").write_text("method,setting,discard_rate\ntail,t=.2,.1\ntail,t=.3,.25\n")
    with pytest.raises(InputError, match="expected one setting to score"):
        scores_of(sweep, ["discard_rate"])


# -- whole commands ---------------------------------------------------------------------------------------------------


def command(tmp_path: Path, *more: str) -> list[str]:
    """A search over a threshold by decoding, scored by the two rates of the paper."""
    return [
        sys.executable, "-m", "toolkit.decode", "-m", "hydra/sweeper=ask_tell", "method=tail", "prompts=toy_instruct",
        "prompts.limit=2", "sampling.max_new_tokens=6", "method.policy.threshold=interval(.05,.95)",
        "hydra.sweeper.metrics=[discard_rate,verification_rate]", "hydra.sweeper.directions=[minimize,minimize]",
        f"hydra.sweep.dir={tmp_path}/search", f"paths.root_dir={tmp_path}/out", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_a_search_by_command_line_goes_on_after_a_kill(tmp_path):
    said = command(tmp_path, "hydra.sweeper.trials=3")
    process = subprocess.Popen(said, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    table = tmp_path / "search" / "trials.csv"
    while process.poll() is None and not table.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = subprocess.run(said, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(table.open()))
    assert sum(line["status"] == "done" for line in lines) == 3 and (tmp_path / "search" / JOURNAL).exists()
    assert all(0 < float(line["verification_rate"]) <= 1 for line in lines if line["status"] == "done")
    assert "search search" in done.stdout and (tmp_path / "search" / "search.png").exists()


@pytest.mark.slow
def test_faults_are_one_line(tmp_path):
    for more, message in (
        (["hydra.sweeper.trials=0"], "error: hydra.sweeper.trials: expected"),
        (["method.policy.threshold=.5"], "error: nothing varies"),
    ):
        done = subprocess.run(command(tmp_path, *more), capture_output=True, text=True)
        assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run(
        command(tmp_path, "method.policy.threshold=interval(2,3)", "hydra.sweeper.trials=1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    (line, *_) = csv.DictReader((tmp_path / "search" / "trials.csv").open())
    assert line["status"].startswith("failed, tried again") and "threshold" in line["status"]


@pytest.mark.slow
def test_heads_are_searched_for(tiny_overrides, tiny_mix, tmp_path):
    said = [
        sys.executable, "-m", "toolkit.train", "+hparams_search=optuna", *tiny_overrides, f"data.path={tiny_mix}",
        "trainer.max_epochs=1", "logger=none", "callbacks=none", "optimizer.lr=.01", "hydra.sweeper.trials=3",
        "optimized_metric=val/log_loss", f"paths.root_dir={tmp_path}",
    ]  # fmt: skip
    done = subprocess.run(said, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader((tmp_path / "search" / "trials.csv").open()))
    assert [line["status"] for line in lines] == ["done"] * 3
    assert all(0 <= int(line["head.depth"]) <= 4 and 1 <= float(line["loss.w_rej"]) <= 12 for line in lines)
