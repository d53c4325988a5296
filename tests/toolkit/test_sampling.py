"""Distributions that tokens are drawn from."""

from __future__ import annotations

import pytest
import torch

from toolkit.errors import InputError
from toolkit.sampling import Sampling, draw, row_generator, warp

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.0], dtype=torch.float64)


def test_temperature_zero_is_one_hot_on_the_first_maximum():
    assert warp(torch.tensor([1.0, 3.0, 3.0]), Sampling(temperature=0)).tolist() == [0, 1, 0]


def test_warpers_against_transformers():
    from transformers.generation import logits_process as hf

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator, dtype=torch.float64) * 3
    seen_ids = torch.randint(50, (64, 9), generator=generator)
    seen = torch.zeros(64, 50, dtype=torch.bool).scatter(1, seen_ids, True)
    ours = Sampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.3)
    theirs = hf.RepetitionPenaltyLogitsProcessor(1.3)(seen_ids, logits)
    for warper in (hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(20), hf.TopPLogitsWarper(0.9),
                   hf.MinPLogitsWarper(0.02)):  # fmt: skip
        theirs = warper(seen_ids, theirs)
    assert torch.allclose(warp(logits, ours, seen), theirs.softmax(-1), atol=1e-12)


def test_warp_computes_in_float32_and_in_float64_for_float64():
    assert warp(LOGITS.bfloat16(), Sampling()).dtype == torch.float32
    assert warp(LOGITS, Sampling(top_p=0.5)).dtype == torch.float64


def test_not_a_number_is_passed_on_at_every_temperature():
    for temperature in (0.0, 1.0):
        assert bool(warp(torch.tensor([0.0, torch.nan]), Sampling(temperature=temperature)).isnan().any())


def test_a_distribution_without_any_token_is_passed_on_as_not_a_number_at_every_temperature():
    for temperature in (0.0, 0.7, 1.0):
        distributions = warp(
            torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf]]), Sampling(temperature=temperature)
        )
        assert distributions.isnan().tolist() == [[True, True], [False, False]]


def test_draw_inverts_the_cumulative_sum_and_never_returns_an_impossible_token():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.999999, 1 - 2**-53], dtype=torch.float64)
    assert [int(draw(probs, u)) for u in uniforms] == [1, 1, 3, 3, 3]


def test_draw_follows_the_distribution():
    probs = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    grid = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = torch.bincount(draw(probs.expand(10_000, 3), grid), minlength=3)
    assert counts.tolist() == [5000, 2000, 3000]


def test_row_generators_are_a_function_of_seed_and_row():
    first = [torch.rand(2, generator=row_generator(s, r)).tolist() for s, r in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert first[0] == first[3]
    assert len({tuple(values) for values in first}) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "temperature: expected at least 0, got -0.1"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0"),
        ({"top_k": -1}, "top_k: expected at least 0"),
        ({"min_p": 1.0}, "min_p: expected a number in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number above 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected at least 1"),
        ({"stop": ("",)}, "stop: expected a list"),
    ],
)
def test_bad_settings_are_one_clear_line(settings, words):
    with pytest.raises(InputError, match=words) as caught:
        Sampling(**settings)
    assert "\n" not in str(caught.value)


def test_top_k_beyond_the_vocabulary_is_refused():
    with pytest.raises(InputError, match="top_k must be at most the vocabulary size 5, got 6"):
        Sampling(top_k=6).check_vocab(5)
