"""The main function of a stage: what it prints, how it ends on errors and interrupts, and what a sweep's jobs leave behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import CompactHydraException

from toolkit.config import CONF
from toolkit.config.commands import command_of
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.runs import stage
from toolkit.runs.command import command, main


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Runs a stage's command with words as its command line, in an empty folder; errors are not shortened by Hydra."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def run(words, work, score=None):
        GlobalHydra.instance().clear()
        monkeypatch.setattr(sys, "argv", ["mix", "responses=here", *words])
        command("mix", work, score)

    yield run
    GlobalHydra.instance().clear()


def fails(error):
    def run(cfg):
        raise error

    return run


def test_a_command_runs_on_its_config_says_where_the_output_is_and_is_scored(call, capsys, tmp_path):
    seen = []

    def work(cfg):
        seen.append((cfg.mixing_ratio, cfg.responses, stage.sweep_name(), stage.job_dir().resolve()))
        return Path("some") / "folder"

    def score(cfg, folder):
        seen.append((cfg.mixing_ratio, folder))
        return 1.0

    call(["mixing_ratio=0.5"], work, score)
    assert seen == [(0.5, "here", None, tmp_path.resolve()), (0.5, Path("some/folder"))]
    assert capsys.readouterr().out == "output: some/folder\n"
    assert not list(tmp_path.iterdir())  # only the jobs of a sweep leave a note
    call([], lambda cfg: 3)
    assert capsys.readouterr().out == "", "no folder"


def test_the_score_of_a_commands_module_takes_the_config_and_what_it_returned(tmp_path, monkeypatch):
    seen = []
    module = SimpleNamespace(run=lambda cfg: 3, score=lambda cfg, result: seen.append((cfg.mixing_ratio, result)))
    monkeypatch.setitem(sys.modules, command_of("mix").module, module)
    monkeypatch.setattr("toolkit.runs.command.answer_signals", lambda: None)
    monkeypatch.setattr(sys, "argv", ["mix", "responses=here", "mixing_ratio=0.5"])
    monkeypatch.chdir(tmp_path)
    GlobalHydra.instance().clear()
    with pytest.raises(SystemExit) as ended:
        main("mix")
    GlobalHydra.instance().clear()
    assert ended.value.code == 0 and seen == [(0.5, 3)]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (InputError("seed: too large"), "error: seed: too large"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), r"error: could not read or write /x/y: Permission .*"),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device; .*"),
    ],
)  # fmt: skip
def test_what_a_user_can_fix_is_one_line(call, error, line):
    with pytest.raises(SystemExit, match=f"^{line}$") as caught:
        call([], fails(error))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [OSError("no number"), ZeroDivisionError("a fault of ours")])
def test_other_errors_are_shown_whole(call, error):
    with pytest.raises(type(error), match=str(error)):
        call([], fails(error))


def test_the_config_is_checked_before_the_work(call):
    for words, reason in (
        (["mixing_ratio=2"], "mixing_ratio: expected .*, got 2"),
        (["seeed=2"], ".*seeed"),
        (["--config-name", "decode"], ".*responses"),  # the config of the user's choice: it has no such key
    ):
        with pytest.raises(SystemExit, match=f"^error: {reason}"):
            call(words, lambda cfg: pytest.fail("the work has begun"))


def test_each_job_of_a_sweep_notes_its_output_and_knows_the_sweeps_name(call, tmp_path, capsys):
    seen = []

    def work(cfg):
        seen.append((cfg.seed, stage.sweep_name()))
        return stage.output_dir("mix", {"paths": {"output_dir": "out"}}, f"hash{cfg.seed}")

    call(["-m", "seed=3,4", "hydra.sweep.dir=sweep"], work)
    assert seen == [(3, "sweep"), (4, "sweep")]
    for job in (0, 1):
        assert read_json(tmp_path / "sweep" / str(job) / stage.OUTPUT) == {"folder": f"out/hash{job + 3}"}
    assert "output: out/hash3\n" in capsys.readouterr().out


def test_a_bad_job_of_a_sweep_is_one_line_and_the_others_run(call):
    """Hydra names it: by the words that it got."""
    seen = []
    with pytest.raises(CompactHydraException, match="^error: seed: too large$"):
        call(["-m", "seed=3,4", "hydra.sweep.dir=sweep"], fails(InputError("seed: too large")))
    with pytest.raises(CompactHydraException, match="^error: mixing_ratio: expected"):
        call(["-m", "mixing_ratio=2,0.5", "hydra.sweep.dir=sweep"], lambda cfg: seen.append(cfg.mixing_ratio))
    assert seen == [0.5]


def test_an_error_of_a_command_in_its_own_process_is_one_line(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "toolkit.sync", "folder=none"], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(CONF.parent)},
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.strip().split("\n")[-1].startswith("error: folder: expected offline runs")
    assert "Traceback" not in result.stderr and list(tmp_path.iterdir()) == []


# -- Ctrl-C and SIGTERM: one line that says how to go on, exit code 130 or 143, at any moment --------------------------------

LINE = ": what is finished is kept; run the same line again to go on"
ENDS = {signal.SIGINT: (130, f"interrupted{LINE}"), signal.SIGTERM: (143, f"terminated{LINE}")}
either = pytest.mark.parametrize("number", ENDS)


def started(*words: str) -> subprocess.Popen[str]:
    """A Python process that hears interrupts, also where this one was started without them (nohup, a job in the background)."""
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear
    )


def assert_one_line(process: subprocess.Popen[str], number: int = signal.SIGINT) -> str:
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors.rstrip("\n").split("\n")[-1]) == ENDS[number]
    assert "Traceback" not in errors
    return errors


CHECKED = "from toolkit.errors import answer_signals; answer_signals()"


@either
def test_while_modules_are_imported_and_where_python_loses_it(number):
    """In a finalizer, the exception does not get out; the command ends all the same."""
    comes = f"import os, time; os.kill(os.getpid(), {number:d}); time.sleep(.1)"
    lost = f"class Lost:\n def __del__(self): {comes}\n"
    waits = "import time; Lost(); time.sleep(1)"
    processes = [
        started("-c", f"{CHECKED}; {comes}"),
        started("-c", f"{lost}{CHECKED}\ntry:\n {waits}\nexcept KeyboardInterrupt: raise"),
    ]
    for process in processes:
        assert_one_line(process, number)


def test_bad_input_that_nobody_handles_is_one_line():
    """As in the programs of the benchmarks; other errors keep their traceback."""
    raises = "from toolkit.errors import InputError; raise {}('expected a folder')"
    for error, errors in (("InputError", "error: expected a folder\n"), ("ValueError", "Traceback")):
        process = started("-c", f"{CHECKED}; {raises.format(error)}")
        assert process.communicate(timeout=120)[1].startswith(errors) and process.returncode == 1


def test_where_a_library_ends_the_process_itself():
    """As Lightning's trainer does: it catches the interrupt and exits with 1."""
    stops = "def run(cfg):\n try: raise KeyboardInterrupt\n except KeyboardInterrupt: raise SystemExit(1)\n"
    assert_one_line(started("-c", f"{stops}from toolkit.runs.command import command; command('decode', run)"))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_while_work_is_done(tmp_path, number):
    words = ["prompts=toy_math", "prompts.split=train", "shard_size=1", f"paths.output_dir={tmp_path / 'out'}"]
    process = started("-m", "data_gen.responses", *words)
    while not list(tmp_path.glob("out/shard-*")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    steps = ["importing torch and transformers", "reading the prompts", "1,000 prompts; loading the pair"]
    assert assert_one_line(process, number).startswith(
        "".join(f"responses: {step}\n" for step in steps)
    )  # never silent for long


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "number"), [("cpu", signal.SIGINT), ("ddp_sim", signal.SIGTERM)])
def test_while_heads_are_trained(trainer, number, tiny_overrides, tiny_mix, tmp_path):
    words = ["head.depth=1", "trainer.max_epochs=5000", "optimizer.lr=1e-3", "logger=csv", f"trainer={trainer}"]
    words += [*tiny_overrides, f"data.path={tiny_mix}", f"paths.output_dir={tmp_path / 'run'}"]
    process = started("-m", "toolkit.train", *words)
    while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(number)
    assert_one_line(process, number)


@pytest.mark.parametrize("program", sorted(path.stem for path in (CONF.parent / "benchmarks").glob("*.py")))
def test_in_every_program_of_the_benchmarks(program):
    """Its own main part: whatever it does then ends at the signal."""
    source = (CONF.parent / "benchmarks" / f"{program}.py").read_text()
    main = source.partition('if __name__ == "__main__":\n')[2]
    assert not main or main.startswith("    answer_signals()\n")
