"""Mutants: which of them change nothing, what is tried again, and the list of equivalents is about code that is there."""

from __future__ import annotations

import json
from types import SimpleNamespace

from benchmarks import mutants, quick_first
from benchmarks.mutants import ROOT, Mutant, forget_survivors, known_equivalents, reason_of, row_of


def mutant(number: int, code: int | None, old: str = "a = 1", new: str = "a = 2") -> Mutant:
    return Mutant("toolkit/one.py", f"toolkit.one.x_f__mutmut_{number}", code, old, new)


KNOWN = [{"file": "toolkit/one.py", "function": "f", "new": ["a = 3"], "reason": "It is never read."}]


def test_reasons_are_those_listed_and_that_zip_is_asked_to_check_lengths():
    assert reason_of(mutant(1, 0), KNOWN) is None
    assert reason_of(mutant(1, 0, new="a = 3"), KNOWN) == "It is never read."
    assert reason_of(mutant(1, 0, new="a = 3"), [{**KNOWN[0], "function": "g"}]) is None
    for new in ("zip(a, b, strict=False)", "zip(a, b, )", "zip(a, b, strict=None)"):
        assert "equally long" in str(reason_of(mutant(1, 0, "zip(a, b, strict=True)", new), []))
    assert reason_of(mutant(1, 0, "zip(a, b, strict=True)", "zip(a, strict=True)"), []) is None


def test_whatever_is_changed_in_a_function_may_change_nothing():
    whole = {key: value for key, value in KNOWN[0].items() if key != "new"}
    assert reason_of(mutant(1, 0), [whole]) == reason_of(mutant(1, 0, new="b"), [whole]) == "It is never read."


def test_only_a_second_device_would_tell_where_a_tensor_is():
    old = "x = torch.tensor(row[0], device=p.device)"
    for new in ("x = torch.tensor(row[0], device=None)", "x = torch.tensor(row[0], )"):
        assert "second device" in str(reason_of(mutant(1, 0, old, new), []))
    for new in ("x = torch.tensor(row[1], device=p.device)", "x = torch.tensor(None, device=p.device)", "x = None"):
        assert reason_of(mutant(1, 0, old, new), []) is None
    assert reason_of(mutant(1, 0, "x = f(a, 1)", "x = f(a, )"), []) is None


def test_the_page_of_what_was_tried_is_written_without_running_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "FOLDER", tmp_path)
    monkeypatch.setattr(
        mutants, "mutants_of", lambda workspace: [mutant(1, 1), mutant(2, 1 if workspace.name == "stage" else 0)]
    )
    for name in ("prepare", "run"):
        monkeypatch.setattr(mutants, name, None)
    for name in ("stage", "mixing"):
        (tmp_path / name / "mutants").mkdir(parents=True)
    assert mutants.main(["--minutes", "0", "--out", str(tmp_path / "page.md")]) == 1
    page = (tmp_path / "page.md").read_text()
    assert "| stage | 2 | 2 | 2 | 0 | 0 | 100.0 |" in page and "| mixing | 2 | 2 | 1 | 0 | 1 | 50.0 |" in page
    assert "Not run yet: sampling, verification, decoding" in page
    assert mutants.main(["--minutes", "0", "--areas", "stage"]) == 0


def test_the_quickest_tests_come_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    items = [SimpleNamespace(nodeid=name) for name in ("slow", "new", "quick")]
    quick_first.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["slow", "new", "quick"]
    (tmp_path / quick_first.STATS).write_text('{"duration_by_test": {"slow": 3.0, "quick": 0.1}}')
    quick_first.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["new", "quick", "slow"]


def test_counts_of_an_area():
    found = [mutant(1, 1), mutant(2, 0), mutant(3, None), mutant(4, 33), mutant(5, 0, new="a = 3"), mutant(6, 36)]
    assert row_of("one", found, KNOWN) == "| one | 6 | 5 | 2 | 1 | 2 | 50.0 |"


def test_what_nothing_noticed_is_tried_again(tmp_path, monkeypatch):
    found = [mutant(1, 1), mutant(2, 0), mutant(3, 33), mutant(4, None), mutant(5, 0, new="a = 3"), mutant(6, -15)]
    monkeypatch.setattr(mutants, "mutants_of", lambda workspace: found)
    forget_survivors(tmp_path, KNOWN)  # never run: nothing to forget
    meta, stats = tmp_path / "mutants" / "toolkit" / "one.py.meta", tmp_path / "mutants" / "mutmut-stats.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"exit_code_by_key": {one.name: one.code for one in found}, "other": 7}))
    stats.write_text("{}")
    forget_survivors(tmp_path, KNOWN)
    said = json.loads(meta.read_text())
    assert list(said["exit_code_by_key"].values()) == [1, None, None, None, 0, None] and said["other"] == 7
    assert not stats.exists()


def test_every_equivalent_is_in_a_file_that_is_there_with_a_reason():
    for entry in known_equivalents():
        assert set(entry) <= {"file", "function", "new", "reason"} and entry.get("new", True) and entry["reason"]
        text = (ROOT / entry["file"]).read_text(encoding="utf-8")
        name = entry.get("function", "").rpartition(".")[2]
        assert f"def {name}(" in text or not name
