"""What engines get wrong above temperature 0: how drafts are drawn and tested, and what texts are drawn from.

A text tells the emitted token x of every position. An engine that drafts with q and tests by min(1, p / q) emits x by
acceptance with probability min(p, q)(x), and after a rejection with (p - q)+(x). Other schemes have other terms:

    drafted    tested                            accepted, x            rejected, x
    drawn      by p / q                          min(p, q)(x)           (p - q)+(x)
    top t      the target's draw is it           p(x) [x = t]           p(x) [x != t]
    drawn      the target's draw is it           p(x) q(x)              p(x) (1 - q(x))
    top t      by p / q, as if it were drawn     min(1, p / q)(t) [x = t]   (1 - min(1, p / q)(t)) norm((p - q)+)(x)

The first three are lossless: the terms add up to p. Shapes: b rounds, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from toolkit.drafts.causes import Case, Cause
from toolkit.models.teacher import picked
from toolkit.sampling import Sampling, first_maximum

TEXTS = (0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.25, 1.5, 2)  # temperatures, times what they should be
DRAFTS = (0.5, 0.7, 1.4, 2)
TOP_P = (0.95, 0.9, 0.8, 0.7, 0.5)


def causes(case: Case) -> list[Cause]:
    """The causes that apply to a case above temperature 0."""
    parts = (schemes, draft_temperatures, draft_top_p, text_temperatures)
    return [cause for part in parts for cause in part(case)]


def schemes(_: Case) -> Iterator[Cause]:
    greedy, setting = "the draft's top tokens are taken", "sampling.temperature=0 here: this is how it drafts"
    yield Cause(f"{greedy}, and accepted where the target draws them", setting, scheme=top_tokens)
    meaning = "drafts are drawn, and accepted only where the target draws the same token"
    yield Cause(meaning, "the draft's probabilities for the engine's rejection sampler", scheme=drawn_twice)
    meaning = f"{greedy}, and tested as if they were drawn"
    yield Cause(meaning, "drafts that are drawn: the texts are not the target's", scheme=top_tokens_by_ratio)


def top_tokens(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    is_top, p = first_maximum(q) == tokens, picked(p, tokens)
    return p * is_top, p * ~is_top


def drawn_twice(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    p, q = picked(p, tokens), picked(q, tokens)
    return p * q, p * (1 - q)


def top_tokens_by_ratio(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    top, residual = first_maximum(q), (p - q).clamp(min=0)
    accepted = (picked(p, top) / picked(q, top)).clamp(max=1)
    total = residual.sum(-1).clamp(min=1e-12)
    return accepted * (top == tokens), (1 - accepted) * picked(residual, tokens) / total


def draft_temperatures(case: Case) -> Iterator[Cause]:
    for factor in DRAFTS:
        temperature = factor * case.sampling.temperature
        change = partial(with_temperature, temperature=temperature)
        yield Cause(f"the draft's temperature is {temperature:g}", "the draft's temperature", sampling=change)


def draft_top_p(case: Case) -> Iterator[Cause]:
    """Top-p of the draft alone, or of the target alone."""
    if case.sampling.top_p < 1:
        yield Cause("top-p is the target's alone", sampling=partial(replace, top_p=1.0))
    else:
        for top_p in TOP_P:
            yield Cause(f"top-p is the draft's alone, {top_p:g}", sampling=partial(replace, top_p=top_p))


def text_temperatures(case: Case) -> Iterator[Cause]:
    for factor in TEXTS:
        temperature = factor * case.sampling.temperature
        change = partial(with_temperature, temperature=temperature)
        meaning = f"the texts were drawn at temperature {temperature:g}"
        yield Cause(meaning, f"sampling.temperature={temperature:g} here, or there", sampling=change, texts=change)


def with_temperature(sampling: Sampling, temperature: float) -> Sampling:
    return sampling.at(temperature)
