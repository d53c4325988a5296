"""Settings of proposers: what is out of range is named, whether a config or code builds them."""

from __future__ import annotations

import pytest

from toolkit.decoding.proposers.forest import ForestProposer
from toolkit.decoding.proposers.prompt_lookup import PromptLookupProposer
from toolkit.decoding.proposers.tree import TreeProposer
from toolkit.errors import InputError


@pytest.mark.parametrize(
    ("kind", "settings", "name"),
    [
        (ForestProposer, {"num_beams": 0}, "num_beams"),
        (ForestProposer, {"num_beams": 4097}, "num_beams"),
        (ForestProposer, {"min_beams": 0}, "min_beams"),
        (PromptLookupProposer, {"max_ngram": 0}, "max_ngram"),
        (TreeProposer, {"k_config": "2x2", "temperatures": [-1.0]}, "temperatures"),
    ],
)
def test_what_is_out_of_range_is_named(kind, settings, name):
    with pytest.raises(InputError, match=f"^proposer.{name}[^:]*: expected "):
        kind(**settings)


def test_as_many_beams_as_there_are_may_be_the_fewest():
    assert ForestProposer(num_beams=6, min_beams=6).fewest == ForestProposer(num_beams=6).fewest == 6
    assert ForestProposer(num_beams=6, min_beams=1).fewest == 1
    with pytest.raises(InputError, match=r"^proposer.min_beams: expected 1 to 6 \(num_beams\) or null, got 7$"):
        ForestProposer(num_beams=6, min_beams=7)
