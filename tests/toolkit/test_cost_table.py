"""The cost table of a pair at one batch size: between, beyond and below its points, and its file."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from toolkit.costs.table import CostTable
from toolkit.errors import InputError

# As measured on a processor where three tokens cost more than five.
TABLE = CostTable(
    2, (1, 2, 3, 5, 9), (100, 300), ((60, 118, 149, 112, 122), (62, 120, 151, 114, 120)), (9, 10), {"dtype": "float32"}
)


def test_times_are_used_as_measured_and_linear_between():
    assert [TABLE.target(width, 100) for width in TABLE.widths] == [60, 118, 149, 112, 122], "not made monotone"
    assert TABLE.target(4, 100) == pytest.approx(130.5)
    assert TABLE.target(2, 150) == pytest.approx(118.5)
    assert TABLE.draft(200) == pytest.approx(9.5)


def test_the_last_slope_continues_unless_it_falls_and_the_first_time_holds_below():
    assert TABLE.target(13, 300) == pytest.approx(120 + 4 * 1.5)
    assert TABLE.target(1, 500) == pytest.approx(64)
    assert CostTable(1, (1, 2), (0,), ((3, 2),)).target(9, 50) == 2
    assert TABLE.target(1, 0) == 60 and TABLE.draft(0) == 9


def test_a_saved_table_is_the_same_and_is_read_without_torch(tmp_path):
    path = TABLE.save(tmp_path / "costs.json")
    again = CostTable.load(path)
    assert again.machine == TABLE.machine
    assert [again.target(w, x) for w in range(1, 20) for x in (0, 170, 900)] == [
        TABLE.target(w, x) for w in range(1, 20) for x in (0, 170, 900)
    ]
    code = f"import sys; from toolkit.costs.table import CostTable; CostTable.load({str(path)!r})"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'torch' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 0},
        {"widths": [2, 1, 3, 5, 9]},
        {"contexts": []},
        {"target_seconds": [[1, 2, 3, 4, 5]]},
        {"target_seconds": [[1, 2, 3, 4, 5], [1, 2, 3, 4, float("nan")]]},
        {"target_seconds": [[1, 2, 3, 4, 5], [1, 2, 3, 4, 0]]},
        {"draft_seconds": [1]},
        {"draft_seconds": ["a", "b"]},
        {"sizes": [1]},
        "cut off",
    ],
)
def test_a_broken_file_is_one_line_that_names_it(tmp_path, change):
    path = TABLE.save(tmp_path / "costs.json")
    text = path.read_text()
    path.write_text(text[: len(text) // 2] if change == "cut off" else json.dumps({**json.loads(text), **change}))
    with pytest.raises(InputError, match="costs.json is not a cost table") as error:
        CostTable.load(path)
    assert "\n" not in str(error.value)


def test_a_target_alone_has_no_draft_forwards():
    with pytest.raises(InputError, match="draft_seconds"):
        CostTable(1, (1,), (0,), ((1,),)).draft(0)


def test_a_ratio_is_in_units_of_a_target_forward():
    table = CostTable.ratio(0.2, column=0.05, batch_size=4)
    assert table.target(1, 500) == 1 and table.target(5, 0) == pytest.approx(1.2) and table.draft(90) == 0.2
