"""Programs and queries that try to escape: all of them fail, each for the reason it should, and nothing outside has changed."""

from __future__ import annotations

import os
import sys

import pytest

from analysis.quality.confinement import mechanisms
from analysis.quality.sandbox import PASSED, Tests, Verdict, run
from benchmarks import escapes, escaping, query_escapes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")
SLOW = [escape.name for escape in escaping.ALL if escape.stopped == escapes.LATE]


def check(escape, walls):
    with escaping.arena() as place:
        verdict, changes = escaping.attempt(escape, walls, place)
    assert changes == []
    assert escaping.stopped(escape, verdict, changes), verdict


@pytest.mark.parametrize("escape", [one for one in escaping.ALL if one.name not in SLOW], ids=lambda one: one.name)
def test_what_is_used_here_stops_it(escape):
    check(escape, mechanisms.chosen())


@pytest.mark.slow
@pytest.mark.parametrize("escape", [one for one in escaping.ALL if one.name in SLOW], ids=lambda one: one.name)
def test_what_is_used_here_stops_what_hangs(escape):
    check(escape, mechanisms.chosen())


@pytest.mark.slow
@pytest.mark.parametrize("walls", escaping.COMBINATIONS, ids=str)
def test_every_confinement_stops_all(walls):
    if said := mechanisms.problem(walls, mechanisms.STOPPED):
        pytest.skip(said)
    for escape in escaping.ALL:
        check(escape, walls)


def test_there_are_many_and_one_hangs_here():
    assert len(escaping.ALL) > 90 and len({escape.name for escape in escaping.ALL}) == len(escaping.ALL)
    check(next(one for one in escaping.ALL if one.name == "an endless loop"), mechanisms.chosen())


def test_the_arena_notices_what_it_should():
    """Without walls the attempts work: the canaries live."""
    import socket

    with escaping.arena() as place:
        assert place.changes() == []
        assert place.fill("{secret!r} {port} {x}") == f"{str(place.secret)!r} {place.port} {{x}}"
        assert os.environ["SECRET"] == place.content
        for family, target in (
            (socket.AF_INET, ("127.0.0.1", place.port)),
            (socket.AF_UNIX, str(place.folder / "socket")),
            (socket.AF_UNIX, "\0" + place.abstract),
        ):
            with socket.socket(family) as visitor:
                visitor.connect(target)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as visitor:
            visitor.sendto(b"x", ("127.0.0.1", place.port))
        (place.folder / "written").touch()
        assert [change.split()[-1] for change in place.changes()] == ["changed", "TCP", "unix", "unix", "came"]
        assert escaping.left([os.getsid(0)])


@pytest.mark.parametrize(
    "escape", [one for one in escaping.OUTSIDE if one.name in escaping.REAL], ids=lambda one: one.name
)
def test_the_attempts_are_real(escape):
    """Behind no wall they work, and what can be noticed is."""
    assert escaping.bare(escape) == "works"


def test_a_right_program_passes_the_tests_of_forgeries():
    code = "def candidate(a, b): return a + b"
    assert run(code, Tests(escapes.HONEST, entry_point="candidate"), escaping.LIMITS) == Verdict(PASSED)


@pytest.mark.slow
def test_queries_are_stopped():
    lines = query_escapes.table([mechanisms.chosen()])
    assert lines[-1].endswith(", 0 out.") and "OUT" not in "".join(lines)
