"""Every page of evidence opens with its conclusion, and the numbers of that sentence are the page's own."""

import pytest

from benchmarks.conclusions import COMMAND, FOLDER, conclusions, missing_numbers
from benchmarks.evidence import FIGURES


@pytest.mark.parametrize("name", [name for name in FIGURES if (FOLDER / f"{name}.md").is_file()])
def test_a_page_opens_with_its_conclusion(name):
    head, mark, body = (FOLDER / f"{name}.md").read_text(encoding="utf-8").partition(COMMAND)
    assert mark and head.split("\n\n")[:2] == [f"# {name}", conclusions()[name]]
    assert missing_numbers(conclusions()[name], body) == []


def test_a_sentence_with_another_number_is_noticed():
    body = "| rule | 1.25 | +20.6% [19, 21] | 17,858,816 | 2.4e-16 |"
    assert missing_numbers("Of 17,858,816 bytes 20.6% are `K = 77`, to 2.4e-16 (c = .3).", body) == []
    assert missing_numbers("It gains 20.7% with 8 rules at 1.25.", body) == ["20.7%"]


def test_no_sentence_is_of_a_page_that_does_not_exist():
    assert set(conclusions()) <= set(FIGURES)
