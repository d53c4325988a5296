"""From logits to the distribution that tokens are drawn from: the only code that knows the temperature.

Everything after `warp` works on its result alone: drafting, the acceptance test, residuals, the bonus token. So p and q
are warped once and alike.

Shapes: B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from toolkit.config.notes import Above, AtLeast, Between, Neutral
from toolkit.config.values import check_ranges
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash

NO_GRAMMAR = "sampling.grammar: this reads texts without grammars; expected null here"
BLOCK = 64  # entries whose maximum stands for them while the largest are looked for


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a response ends.

    temperature        0 is greedy, through the same path (a one-hot distribution)
    top_k              keep the k most probable tokens, with several beams pairs of beam and token; 0 keeps all
    top_p              keep the smallest set of most probable tokens that reaches this mass; 1 keeps all
    min_p              drop tokens less likely than this fraction of the most probable; 0 drops none
    repetition_penalty  divides positive and multiplies negative logits of tokens already in the text; 1 is off
    max_new_tokens     exact upper limit of produced tokens, end of text included
    max_length         upper limit of prompt and response together, in tokens; None: none but the models' own
    keep_prompt_tokens  of a longer prompt only its last n tokens are read; None: prompts are never cut
    stop               strings that end a response; the text ends before them, the tokens with the one that completes them.
                       A special token, which texts do not show, ends it by its id
    end_ids            tokens that end a response, beside the pair's own
    grammar            what a text may be: a JSON schema, a regular expression, a Lark grammar (with a rule `start`), `json`, or
                       a file of one (`toolkit.grammar`); None: anything. Masks come before all else, on p and on q
    grammar_whitespace  of JSON: True allows any whitespace, False the compact form alone
    generation_config  True: temperature, top_k, top_p, min_p, repetition_penalty and stop are those of the target's generation
                       config, where it names them; None: that config is not read, and nobody is warned of what differs
    seed               row r of a call draws from a generator seeded with (seed, r)
    """

    temperature: Annotated[float, AtLeast(0)] = 1.0
    top_k: Annotated[int, AtLeast(0)] = 0
    top_p: Annotated[float, Between(0, 1, "(]")] = 1.0
    min_p: Annotated[float, Between(0, 1, "[)")] = 0.0
    repetition_penalty: Annotated[float, Above(0)] = 1.0
    max_new_tokens: Annotated[int, AtLeast(1)] = 64
    max_length: Annotated[int, AtLeast(2)] | None = None
    keep_prompt_tokens: Annotated[int, AtLeast(1)] | None = None
    stop: tuple[str, ...] = ()
    end_ids: tuple[Annotated[int, AtLeast(0)], ...] = ()
    grammar: Annotated[str | None, Neutral(None)] = None
    grammar_whitespace: Annotated[bool, Neutral(False)] = False
    generation_config: bool | None = False
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        check_ranges(self)
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "end_ids", tuple(self.end_ids))
        if not all(self.stop):
            raise InputError(f"stop: expected a list of strings that are not empty, got {self.stop}")

    def check_vocab(self, vocab_size: int, num_beams: int = 1) -> None:
        """Raises InputError for an end id beyond the vocabulary, and for a `top_k` above it (beams: above their pairs)."""
        if max(self.end_ids, default=0) >= vocab_size:
            raise InputError(f"end_ids: expected token ids below the vocabulary size {vocab_size}, got {self.end_ids}")
        if self.top_k > num_beams * vocab_size:
            beams = f"{num_beams} beams times " if num_beams > 1 else ""
            raise InputError(f"top_k must be at most {beams}the vocabulary size {vocab_size}, got {self.top_k}")

    def room(self, prompt_length: int) -> int:
        """The most tokens a prompt of this length may be followed by; at most 0: none."""
        if self.max_length is None:
            return self.max_new_tokens
        return min(self.max_new_tokens, self.max_length - prompt_length)

    def longest_text(self, longest_prompt: int) -> int:
        """The most tokens of prompt and response together, of prompts of at most this length."""
        longest = longest_prompt + self.max_new_tokens
        return longest if self.max_length is None else min(longest, max(self.max_length, longest_prompt))

    def at(self, temperature: float | None) -> Sampling:
        """The same settings at another temperature (a draft may have its own); None changes nothing."""
        return self if temperature is None else replace(self, temperature=temperature)


def warp(
    logits: Tensor,
    sampling: Sampling,
    seen: Tensor | None = None,
    *,
    allowed: Tensor | None = None,
    exactly: bool = False,
) -> Tensor:
    """Logits to the distribution tokens are drawn from.

    logits [..., V] of any float type; computed in float32, in float64 if that is what comes.
    seen [..., V] bool marks tokens already in the text (needed for `repetition_penalty` only).
    allowed [..., V] bool marks what a grammar leaves; None where there is none.
    Returns probabilities [..., V]. Order as in transformers: the grammar, repetition penalty, temperature, top-k, top-p, min-p.
    Ties at the edge of top-k are kept, unless `exactly` k are: the first of equals then. At temperature 0 the first of
    equal maxima wins.
    A logit that is not a number or plus infinity, or none above minus infinity, leaves no number in the whole distribution.
    Raises InputError where the sampling has a grammar and nobody says what it leaves.
    """
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    elif sampling.grammar is not None:
        raise InputError(NO_GRAMMAR)
    logits = penalized(logits, sampling, seen)
    if sampling.temperature == 0:
        # What is not a distribution is passed on instead of being hidden by the argmax: the loop names the row.
        best = first_maximum(logits).unsqueeze(-1)
        highest = logits.gather(-1, best)  # not a number if any is
        undefined = highest.mul_(0.0).abs_()  # 0, or not a number: also where a logit is inf, or all are -inf
        return (
            undefined.expand_as(logits).clone(memory_format=torch.contiguous_format).scatter_(-1, best, undefined + 1)
        )
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = _only_largest(logits, sampling.top_k, exactly)
    probs = logits.softmax(-1)
    if sampling.top_p < 1.0:
        probs = _nucleus(probs, sampling.top_p)
        probs = probs / probs.sum(-1, keepdim=True)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _only_largest(logits: Tensor, count: int, exactly: bool) -> Tensor:
    """logits [..., V] with -inf at all but the `count` largest."""
    if exactly or not _on_host(logits):
        return logits.masked_fill(_below_largest(logits, count, exactly), -torch.inf)
    chosen = not_below(logits, top_values(logits, count)[..., -1:])
    return torch.full_like(logits, -torch.inf).index_put_(chosen, logits[chosen])


def _nucleus(probs: Tensor, mass: float) -> Tensor:
    """probs [..., V] with 0 outside the smallest set of most probable ones that reaches a mass; the first of equals are in."""
    for share in (16, 1) if _on_host(probs) else ():
        if (few := nucleus_of_few(probs.reshape(-1, probs.shape[-1]), mass, share)) is not None:
            return few.view_as(probs)
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    outside = ordered.cumsum(-1) - ordered >= mass
    return probs.masked_fill(torch.zeros_like(outside).scatter_(-1, order, outside), 0.0)


def nucleus_of_few(probs: Tensor, mass: float, share: float) -> Tensor | None:
    """The same of probs [R, V] without a sort of all V; None: it needs more entries.

    Only entries of at least share (1 - mass) / V are sorted. With share = 1 what is left out weighs less than what may be
    dropped. Sums run from the largest entry on, so they are those of the whole sort, bit for bit.
    """
    floor = probs.new_full((1, 1), share * (1 - mass) / probs.shape[1])
    row, token = not_below(probs, floor)
    values = probs[row, token]
    for few in values.split(row.bincount(minlength=len(probs)).tolist()):
        ordered, order = few.sort(descending=True, stable=True)
        cumulative = ordered.cumsum(-1)
        if not bool((cumulative[-1:] - floor >= mass).any()):  # too few, rounding, or what is not a number
            return None
        few[order[cumulative - ordered >= mass]] = 0.0
    return torch.zeros_like(probs).index_put_((row, token), values)


def not_below(values: Tensor, floor: Tensor) -> tuple[Tensor, ...]:
    """Indices of entries of values [..., V] on a CPU that are not below floor [..., 1], as of `nonzero`: those of nan, too.

    numpy compares and looks for what is true in a fifth of torch's time.
    """
    below = np.less(values.detach().numpy(), floor.detach().numpy())
    flat = torch.from_numpy(np.flatnonzero(np.logical_not(below, out=below)))
    return torch.unravel_index(flat, values.shape)


def _on_host(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.numel() > 0


def first_maximum(values: Tensor) -> Tensor:
    """The first index [...] of the largest of values [..., V]; of nan, if any is.

    That of the largest block's largest: maxima without indices take a tenth of the time.
    """
    size = values.shape[-1] // BLOCK * BLOCK
    if size < values.shape[-1] or not size:
        return values.argmax(-1)
    blocks = values.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).argmax(-1, keepdim=True)
    within = blocks.gather(-2, best.unsqueeze(-1).expand(*best.shape, BLOCK)).squeeze(-2).argmax(-1)
    return best.squeeze(-1) * BLOCK + within


def top_values(values: Tensor, count: int) -> Tensor:
    """The `count` largest of values [..., V] in order; nan counts as larger than all.

    No value outside of the `count` blocks with the largest maxima is larger than the least of these maxima.
    """
    blocks = values.shape[-1] // BLOCK
    if blocks <= count:
        return values.topk(count, dim=-1).values
    body, rest = values.split([blocks * BLOCK, values.shape[-1] - blocks * BLOCK], -1)
    body = body.unflatten(-1, (-1, BLOCK))
    best = body.amax(-1).topk(count, dim=-1, sorted=False).indices.unsqueeze(-1)
    few = body.gather(-2, best.expand(*best.shape[:-1], BLOCK)).flatten(-2)
    return torch.cat([few, rest], -1).topk(count, dim=-1).values


def largest(values: Tensor, count: int) -> Tensor:
    """Indices [..., count] of the largest values [..., M] in order, of equals the first."""
    index = torch.arange(values.shape[-1], device=values.device).expand_as(values)
    chosen = torch.where(_below_largest(values, count, exactly=True), values.shape[-1] - 1, index)
    chosen = chosen.topk(count, dim=-1, largest=False).values
    order = values.gather(-1, chosen).sort(dim=-1, descending=True, stable=True).indices
    return chosen.gather(-1, order)


def _below_largest(values: Tensor, count: int, exactly: bool) -> Tensor:
    """Which values [..., M] are not among the `count` largest; equals at the edge all are, or only the first of them."""
    edge = top_values(values, count)[..., -1:]
    below = values < edge
    if not exactly:
        return below
    equal = values == edge
    room = count - (values > edge).sum(-1, keepdim=True)
    return below | (equal & (equal.cumsum(-1) > room))


def penalized(logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
    """Logits [..., V] in float32 (float64 if that is what comes), after the repetition penalty and before anything else."""
    assert not sampling.generation_config, "the sampling is resolved first (toolkit.models.generation_config)"
    if logits.dtype != torch.float64:
        logits = logits.float()
    if sampling.repetition_penalty == 1.0 or seen is None:
        return logits
    scale = sampling.repetition_penalty
    return torch.where(seen, torch.where(logits > 0, logits / scale, logits * scale), logits)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """One token per distribution: probs [..., V], uniforms [...] in [0, 1) -> [...] int64. See `draws`."""
    return draws(probs, uniforms.unsqueeze(-1)).squeeze(-1)


def draws(probs: Tensor, uniforms: Tensor) -> Tensor:
    """k i.i.d. tokens per distribution by inverting its cumulative sum: probs [..., V] (any positive scale), uniforms [..., k].

    Never returns a token of probability 0. Returns [..., k] int64.
    """
    cumulative = probs.cumsum(-1)
    total = cumulative[..., -1:]
    points = uniforms.to(probs.dtype) * total
    # The product can round up to the total; the last token of positive probability is meant then.
    points = torch.minimum(points, torch.nextafter(total, total.new_zeros(())))
    return torch.searchsorted(cumulative, points, right=True).clamp_(max=probs.shape[-1] - 1)


def row_generator(seed: int, row: int) -> torch.Generator:
    """The random stream of one row: a function of (seed, row) alone, always on the CPU, the same on every device."""
    mixed = (int(seed) * 0x9E3779B97F4A7C15 + int(row) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**63
    if max(abs(seed), abs(row)) >= 2**32:  # of which the product's low 32 bits know nothing
        mixed = seed_of(seed, row)
    generator = torch.Generator("cpu")
    generator.manual_seed(mixed)
    return generator


def seed_of(*numbers: int) -> int:
    """The seed for some integers of any size, another one for others; for (0, ..., 0, n) that is n, if 32 bits hold it.

    torch's generators read the low 32 bits of a seed on a CPU and 64 on CUDA, so what is larger is hashed.
    """
    *high, low = map(int, numbers)
    return low if not any(high) and abs(low) < 2**32 else int(content_hash([*high, low], 15), 16)
