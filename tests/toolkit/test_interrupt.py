"""Ctrl-C: one line that says how to go on, exit code 130, at any moment of a command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from functools import partial

import pytest

LINE = "interrupted: what is finished is kept; run the same line again to go on"


def started(*words: str) -> subprocess.Popen[str]:
    """A Python process that hears interrupts, also where this one was started without them (nohup, a job in the background)."""
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear
    )


def assert_one_line(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert errors.rstrip("\n").split("\n")[-1] == LINE
    assert "Traceback" not in errors
    return errors


CHECKED = "from toolkit.config.command_line import check_command_line; check_command_line('decode')"


def test_while_modules_are_imported_and_where_python_loses_it():
    """In a finalizer, the exception does not get out; the command ends all the same."""
    lost = "class Lost:\n def __del__(self): raise KeyboardInterrupt\n"
    waits = "import time; Lost(); time.sleep(1)"
    processes = [
        started("-c", f"{CHECKED}; raise KeyboardInterrupt"),
        started("-c", f"{lost}{CHECKED}\ntry:\n {waits}\nexcept KeyboardInterrupt: raise"),
    ]
    for process in processes:
        assert_one_line(process)


def test_where_a_library_ends_the_process_itself():
    """As Lightning's trainer does: it catches the interrupt and exits with 1."""
    stops = "def run(cfg):\n try: raise KeyboardInterrupt\n except KeyboardInterrupt: raise SystemExit(1)\n"
    assert_one_line(started("-c", f"{stops}from toolkit.runs.stage import command; command('decode', run)"))


def test_while_work_is_done(tmp_path):
    words = ["prompts=toy_math", "prompts.split=train", "shard_size=1", f"paths.output_dir={tmp_path / 'out'}"]
    process = started("-m", "data_gen.responses", *words)
    while not list(tmp_path.glob("out/shard-*")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    steps = ["importing torch and transformers", "reading the prompts", "1,000 prompts; loading the pair"]
    assert assert_one_line(process).startswith(
        "".join(f"responses: {step}\n" for step in steps)
    )  # never silent for long


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["cpu", "ddp_sim"])
def test_while_heads_are_trained(trainer, tiny_overrides, tiny_mix, tmp_path):
    words = ["head.depth=1", "trainer.max_epochs=5000", "optimizer.lr=1e-3", "logger=csv", f"trainer={trainer}"]
    words += [*tiny_overrides, f"data.path={tiny_mix}", f"paths.output_dir={tmp_path / 'run'}"]
    process = started("-m", "toolkit.train", *words)
    while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert_one_line(process)
