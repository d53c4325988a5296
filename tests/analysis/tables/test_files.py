"""Numbers as people read them."""

from __future__ import annotations

import pytest

from analysis.tables.files import with_interval

NAN = float("nan")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((0.8233, 0.79, 0.8533), "0.823 [0.790, 0.853]"),
        ((1001.4, 912.2, 1105.7), "1001 [912, 1106]"),
        ((1.03123, 1.02874, 1.0335), "1.0312 [1.0287, 1.0335]"),
        ((2.0, 2.0, 2.0), "2.0000 [2.0000, 2.0000]"),
        ((12.34, 9.0, 19.0), "12 [9, 19]"),
        ((0.5, NAN, NAN), "0.5"),
        ((NAN, NAN, NAN), ""),
    ],
)
def test_an_interval_says_how_many_digits_are_worth_reading(numbers, text):
    assert with_interval(*numbers) == text
