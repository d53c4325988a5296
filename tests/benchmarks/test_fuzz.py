"""Malformed command lines and calls end in one line."""

from __future__ import annotations

import io
import logging
import sys
import weakref

import pytest

from benchmarks.fuzz import fuzz, table
from benchmarks.fuzz_commands import GOOD
from benchmarks.fuzz_outcomes import ACCEPTED, HANG, REFUSED, TRACEBACK, outcome, quiet
from toolkit.config.commands import COMMANDS
from toolkit.errors import InputError


def test_no_command_is_left_out():
    assert set(GOOD) == set(COMMANDS) - {"method_only"}  # composed by the library, not run


def test_three_hundred_inputs_end_in_one_line():
    tally = fuzz(300, seed=1, run=False, share=0.15)
    assert sum(tally.counts.values()) == 300
    assert not tally.wrong, "\n".join(tally.wrong)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_what_is_accepted_runs():
    tally = fuzz(600, seed=2)
    assert not tally.wrong, "\n".join(tally.wrong)
    assert "| **all** | 600 |" in table(tally, 600, 2)


def test_no_handler_of_logs_can_close_what_tests_print_to(monkeypatch):
    """As absl's do when Hydra shuts all handlers down; they come with a metric of another test."""
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stderr", printed)
    handler = logging.StreamHandler()
    handler.close = lambda: handler.stream.close()
    with quiet():
        logging.shutdown([weakref.ref(handler)])
    assert not printed.closed


def test_outcomes_are_told_apart():
    def fails(error: BaseException) -> None:
        raise error

    def waits() -> None:
        while True:
            pass

    assert outcome(lambda: "run", 5).kind == ACCEPTED
    assert outcome(lambda: fails(InputError("x: expected 1, got 2")), 5).kind == REFUSED
    assert outcome(lambda: fails(SystemExit("error: x: expected 1, got 2")), 5).kind == REFUSED
    assert outcome(lambda: fails(InputError("two\nlines")), 5).kind == TRACEBACK
    assert outcome(lambda: fails(SystemExit(1)), 5).kind == TRACEBACK
    assert outcome(lambda: fails(ValueError("x")), 5).kind == TRACEBACK
    assert outcome(waits, 0.05).kind == HANG
