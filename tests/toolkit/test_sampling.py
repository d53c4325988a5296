"""Distributions that tokens are drawn from."""

from __future__ import annotations

import math

import pytest
import torch

from toolkit.errors import InputError
from toolkit.sampling import Sampling, draw, draws, largest, penalized, row_generator, seed_of, warp

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


def slow_warp(logits: list[float], settings: Sampling, seen: list[bool] | None) -> list[float]:
    """`warp` of one distribution, token by token."""
    values = list(logits)
    for token, is_seen in enumerate(seen or []):
        if is_seen:
            scale = settings.repetition_penalty
            values[token] = values[token] / scale if values[token] > 0 else values[token] * scale
    values = [value / settings.temperature for value in values]
    if settings.top_k:
        edge = sorted(values, reverse=True)[min(settings.top_k, len(values)) - 1]
        values = [value if value >= edge else -math.inf for value in values]
    weights = [math.exp(value) for value in values]
    probs = [weight / sum(weights) for weight in weights]
    kept, mass = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda token: (-probs[token], token)):
        if mass >= settings.top_p:
            break
        kept.add(token)
        mass += probs[token]
    probs = [prob if token in kept else 0.0 for token, prob in enumerate(probs)]
    probs = [prob / sum(probs) for prob in probs]
    probs = [0.0 if prob < settings.min_p * max(probs) else prob for prob in probs]
    return [prob / sum(probs) for prob in probs]


EACH_ALONE = [
    {},
    {"temperature": 2.0},
    {"temperature": 0.3},
    *({"top_k": k} for k in (1, 2, 3, 5)),
    *({"top_p": mass} for mass in (0.1, 0.5, 0.7, 0.95)),
    *({"min_p": share} for share in (0.05, 0.4, 0.9)),
    *({"repetition_penalty": scale} for scale in (0.5, 1.7, 2.0)),
    {"temperature": 0.8, "top_k": 4, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("settings", EACH_ALONE, ids=str)
def test_warp_is_its_definition(settings):
    """Every setting alone, on blocks of distributions of three dimensions; their other sizes are not the vocabulary's."""
    sampling, generator = Sampling(**settings), torch.Generator().manual_seed(3)
    logits = torch.randn(7, 2, 5, generator=generator, dtype=torch.float64) * 1.5
    seen = torch.rand(7, 2, 5, generator=generator) < 0.5
    warped = warp(logits, sampling, seen)
    slow = [[slow_warp(*pair) for pair in zip(a, [sampling] * 2, b, strict=True)]
            for a, b in zip(logits.tolist(), seen.tolist(), strict=True)]  # fmt: skip
    assert torch.allclose(warped, torch.tensor(slow, dtype=torch.float64), atol=1e-12)
    unpenalized = warp(logits, sampling)
    slow = [[slow_warp(row, sampling, None) for row in block] for block in logits.tolist()]
    assert torch.allclose(unpenalized, torch.tensor(slow, dtype=torch.float64), atol=1e-12)


def test_settings_that_are_off_change_no_bit():
    """Sums of float32 pass 1 by rounding: a cut at a mass of 1 would drop tokens of long tails."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 4
    plain = logits.softmax(-1)
    assert bool((plain.sort(-1, descending=True).values.cumsum(-1) >= 1).any())
    assert torch.equal(warp(logits, Sampling(), torch.ones(4, 5000, dtype=torch.bool)), plain)
    assert torch.equal(warp(logits, Sampling(top_k=5000)), plain)


@pytest.mark.parametrize("kept", range(1, 6))
def test_top_k_keeps_exactly_k_tokens_and_all_ties_at_its_edge(kept):
    logits = torch.tensor([0.3, 2.0, -1.0, 1.0, 0.5], dtype=torch.float64)
    assert int((warp(logits, Sampling(top_k=kept)) > 0).sum()) == kept
    tied = torch.tensor([0.0, 2.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    assert (warp(tied, Sampling(top_k=2)) > 0).tolist() == [False, True, True, True, False]


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass_and_the_first_of_equals():
    quarters = torch.tensor([0.25, 0.25, 0.25, 0.25], dtype=torch.float64).log()
    assert (warp(quarters, Sampling(top_p=0.5)) > 0).tolist() == [True, True, False, False]
    many = torch.zeros(200, dtype=torch.float64)  # long enough for a sort that is not stable to show
    assert (warp(many, Sampling(top_p=0.105)) > 0).nonzero().squeeze(-1).tolist() == list(range(21))


def whole_sort(logits, mass):
    """The nucleus by a sort of the whole vocabulary."""
    probs = logits.softmax(-1)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    dropped = ordered.cumsum(-1) - ordered >= mass
    probs = probs.masked_fill(torch.zeros_like(dropped).scatter_(-1, order, dropped), 0.0)
    return probs / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mass", [1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7])
def test_top_p_is_that_of_the_whole_sort_bit_for_bit(mass, dtype):
    """Of peaked and of flat rows, with equals, with rows of one token, and of rows that are no distributions."""
    generator = torch.Generator().manual_seed(5)
    logits = (
        torch.randn(8, 3001, generator=generator, dtype=dtype) * torch.tensor([0, 0.1, 1, 2, 3, 5, 20, 90])[:, None]
    )
    logits[4] = logits[4].round()  # many equals
    logits[5, 7:] = -torch.inf
    for rows in (logits, logits[:1], logits[3:7], logits[:0], logits.view(2, 4, -1), logits[4]):
        assert torch.equal(warp(rows, Sampling(top_p=mass)), whole_sort(rows, mass))
    logits[2, 4], logits[3] = torch.nan, -torch.inf
    assert torch.equal(warp(logits, Sampling(top_p=mass)).nan_to_num(-1), whole_sort(logits, mass).nan_to_num(-1))


def test_min_p_keeps_what_is_just_likely_enough():
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    assert (warp(probs.log(), Sampling(min_p=0.5 - 1e-9)) > 0).tolist() == [True, True, False, False]
    assert (warp(probs.log(), Sampling(min_p=0.5 + 1e-9)) > 0).tolist() == [True, False, False, False]


def test_a_penalty_makes_seen_tokens_less_likely_whatever_their_sign():
    logits = torch.tensor([2.0, 0.5, 0.0, -1.0, 1.0])
    seen = torch.tensor([True, True, True, True, False])
    assert penalized(logits, Sampling(repetition_penalty=2.0), seen).tolist() == [1.0, 0.25, 0.0, -2.0, 1.0]
    assert penalized(logits, Sampling(repetition_penalty=2.0)).tolist() == logits.tolist()


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


def test_an_infinite_logit_is_not_a_number_at_every_temperature():
    """No weight of a softmax is finite beside it; half precision overflows to it."""
    logits = torch.tensor([[-3.0, torch.inf, -torch.inf], [-3.0, 7e4, 0.0]]).half()
    for settings in ({"temperature": 0.0}, {"temperature": 0.7}, {}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert bool(warp(logits, Sampling(**settings)).isnan().all()), settings


def test_the_first_of_equal_maxima_is_the_greedy_choice():
    """A draw from the one-hot distribution is its position, whatever the uniform."""
    logits = torch.tensor([[-3.0, -1.0, -torch.inf], [-3.0, -1.0, -1.0]])
    distributions = warp(logits, Sampling(temperature=0.0))
    assert distributions.tolist() == [[0.0, 1.0, 0.0]] * 2
    for uniform in (0.0, 0.5, 1 - 2**-24):
        assert torch.equal(draw(distributions, torch.full((2,), uniform)), distributions.argmax(-1))


def test_draw_inverts_the_cumulative_sum_and_never_returns_an_impossible_token():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    uniforms = torch.tensor([0.0, 0.2499, 0.25, 0.999999, 1 - 2**-53], dtype=torch.float64)
    assert [int(draw(probs, u)) for u in uniforms] == [1, 1, 3, 3, 3]


def test_draws_take_any_positive_scale_and_every_row_its_own():
    probs = torch.tensor([[1.0, 3.0], [6.0, 2.0]], dtype=torch.float64) * 5
    uniforms = torch.tensor([[0.2, 0.3, 0.9], [0.2, 0.7, 0.8]], dtype=torch.float32)
    assert draws(probs, uniforms).tolist() == [[0, 1, 1], [0, 0, 1]]


def test_row_generators_are_a_function_of_seed_and_row():
    first = [torch.rand(2, generator=row_generator(s, r)).tolist() for s, r in ((0, 0), (0, 1), (1, 0), (0, 0))]
    assert first[0] == first[3]
    assert len({tuple(values) for values in first}) == 3


def test_seeds_of_rows_stay_what_they_were():
    """Texts of earlier versions can be drawn again; written out, so that a change of the formula is seen."""
    seeds = {(0, 0): 1_499_779_743_744_070_123, (1, 2): 3_582_704_001_961_253_234, (7, 1000): 6_425_405_242_822_349_094}
    seeds |= {(2**32 - 1, 3): 3_741_403_177_200_994_049, (-1, 0): 8_545_808_998_130_423_254}
    assert {key: row_generator(*key).initial_seed() for key in seeds} == seeds


def test_large_seeds_are_read_whole():
    """Integers that share their low 32 bits are seeds of their own: torch's CPU generator alone would tell none apart."""
    keys = [(7 + high, row) for high in (0, 2**32, 2**33, 2**62, -(2**62), 2**63, 2**90) for row in (0, 1, 2**32)]
    drawn = {tuple(torch.rand(2, generator=row_generator(*key)).tolist()) for key in keys}
    assert len(drawn) == len(keys)


def test_several_integers_are_one_seed():
    tuples = [(rank, seed, step) for rank in range(4) for seed in (0, 1, 2, 4096, 2**32) for step in range(50)]
    assert len({seed_of(*numbers) % 2**32 for numbers in tuples}) == len(tuples)
    assert [seed_of(5), seed_of(0, 0, 5), seed_of(-3), seed_of(2**32 - 1)] == [5, 5, -3, 2**32 - 1]
    assert seed_of(1, 5) == seed_of(1, 5) != seed_of(5, 1)
    assert all(Sampling(seed=seed_of(*numbers)).seed < 2**63 for numbers in tuples)


def test_stop_strings_are_a_tuple_whatever_was_given():
    assert Sampling(stop="ab").stop == ("ab",)
    assert Sampling(stop=["a", "b"]).stop == ("a", "b")
    assert Sampling().stop == ()


def test_a_limit_of_length_counts_the_prompt():
    assert Sampling(max_new_tokens=8).room(100) == 8
    limited = Sampling(max_new_tokens=8, max_length=12)
    assert [limited.room(prompt) for prompt in (2, 4, 7, 12, 15)] == [8, 8, 5, 0, -3]
    assert Sampling(max_new_tokens=8).longest_text(100) == 108
    assert [limited.longest_text(prompt) for prompt in (2, 4, 7, 15)] == [10, 12, 12, 15]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": -0.1}, "temperature: expected at least 0, got -0.1"),
        ({"top_p": 0.0}, r"top_p: expected a number in \(0, 1\], got 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: expected a number above 0"),
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
    with pytest.raises(InputError, match="top_k must be at most 2 beams times the vocabulary size 5, got 11"):
        Sampling(top_k=11).check_vocab(5, 2)
    Sampling(top_k=5).check_vocab(5)
    Sampling(top_k=10).check_vocab(5, 2)


def test_exactly_k_tokens_are_kept_the_first_of_equals():
    logits = torch.tensor(
        [[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 2.0, -torch.inf, -torch.inf]]
    )
    kept = warp(logits, Sampling(top_k=3), exactly=True) > 0
    assert [row.nonzero().flatten().tolist() for row in kept] == [[0, 1, 3], [0, 1, 2], [0, 1, 2]]
    assert largest(logits, 4).tolist() == [[1, 3, 0, 2], [0, 1, 2, 3], [0, 2, 1, 3]]
