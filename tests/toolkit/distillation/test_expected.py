"""The alpha that a draft's recipe expects, from measured points."""

import pandas as pd
import pytest

from toolkit import config
from toolkit.distillation.expected import CURVE, expected_alpha, run


def test_alpha_is_interpolated_in_the_logarithm_of_tokens_and_goes_on_beyond():
    """At a number of tokens the best number of epochs counts, and more tokens are never expected to be worse."""
    points = pd.DataFrame({"tokens": [1000, 10_000, 10_000, 100_000], "alpha_val": [0.1, 0.15, 0.2, 0.3]})
    assert expected_alpha(points, 1000) == pytest.approx(0.1)
    assert expected_alpha(points, 10**3.5) == pytest.approx(0.15)
    assert expected_alpha(points, 1_000_000) == pytest.approx(0.4)
    assert expected_alpha(points, 10) == pytest.approx(0.1)
    more = pd.concat([points, pd.DataFrame({"tokens": [200_000], "alpha_val": [0.25]})])
    assert expected_alpha(more, 200_000) == pytest.approx(0.3)


def test_the_recipe_says_what_its_points_say(capsys, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": 1, "prompt": "a"}\n')
    words = ["prompts=jsonl", f"prompts.path={prompts}", "prompts.limit=1000", "sampling.max_new_tokens=24"]
    run(config.compose("responses", words))
    points = pd.read_csv(CURVE)
    points = points[(points.kind == "separate") & (points.layers == 1)]
    expected = expected_alpha(points, 24_000)
    assert f"an alpha of {expected:.2f}" in capsys.readouterr().out
    run(config.compose("responses", [*words, "prompts.limit=100"]))  # fewer tokens than were ever measured
    assert f"an alpha of at most {expected_alpha(points, 1):.2f}" in capsys.readouterr().out
