"""Teacher-forced passes: one forward pass over whole texts, no cache; p and q along them.

Texts are padded on the right with their own first token: it is read in any case, so that padding brings no number of its own.
A causal model's states do not depend on what follows, so the padding needs no mask.

Distributions over V tokens are there for LOGITS numbers of a model at a time, or for one text if that has more.

Shapes: B texts, T longest text, V vocabulary, D hidden size, n tokens of a text that are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.drafts.kinds import needs_target, reads_states
from toolkit.engine import open_session
from toolkit.engine.facts import check_evaluation
from toolkit.engine.hidden_states import state_width, watched_states
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.models.pair import ModelPair, vocab_size
from toolkit.sampling import Sampling, penalized, warp

Text = tuple[Sequence[int], Sequence[int]]  # prompt ids, produced ids
LOGITS = 2**25  # numbers of one model


def pad_right(texts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Tensor:
    """Texts of different lengths as one tensor [B, T]."""
    longest = max(len(text) for text in texts)
    return torch.tensor(
        [[*text, *[text[0] if len(text) else 0] * (longest - len(text))] for text in texts], device=device
    )


def bounded(lengths: Sequence[int], columns: int) -> Iterator[slice]:
    """Consecutive texts whose logits, `lengths` of `columns` each, are at most LOGITS numbers; a longer text is alone."""
    first = total = 0
    for number, length in enumerate(lengths):
        if number > first and (total + length) * columns > LOGITS:
            yield slice(first, number)
            first, total = number, 0
        total += length
    if lengths:
        yield slice(first, len(lengths))


@dataclass(frozen=True)
class TextReading:
    """What both sides say of the n produced tokens of a text, on the target's device and over its vocabulary.

    target_probs  [n, V] p, warped as in decoding
    draft_logits  [n, V] of every draft model, after the repetition penalty and before anything else
    sampling      the target's
    """

    target_probs: Tensor
    draft_logits: Sequence[Tensor]
    sampling: Sampling

    @property
    def holds_numbers(self) -> bool:
        """Whether every model gives a distribution at every position."""
        sums = [self.target_probs.sum(-1), *(logits.logsumexp(-1) for logits in self.draft_logits)]
        return all(bool(torch.isfinite(values).all()) for values in sums)

    def draft_probs(self, temperature: float | None = None, draft: int = 0) -> Tensor:
        """q [n, V] of a draft at its own temperature (None: the target's), warped as in decoding."""
        return warp(self.draft_logits[draft], self.sampling.at(temperature)).to(self.target_probs.dtype)


def distributions_along(
    pair: ModelPair,
    texts: Sequence[Text],
    sampling: Sampling,
    draft_temperature: float | None = None,
    positions: Sequence[Sequence[int]] | None = None,
    check: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """p and the first draft's q [n, V] of each produced token. draft_temperature: the draft's own; None: the sampling's."""
    for reading in readings_along(pair, texts, sampling, positions, check=check):
        yield reading.target_probs, reading.draft_probs(draft_temperature)


@torch.no_grad()
def readings_along(
    pair: ModelPair,
    texts: Sequence[Text],
    sampling: Sampling,
    positions: Sequence[Sequence[int]] | None = None,
    num_drafts: int = 1,
    check: bool = True,
) -> Iterator[TextReading]:
    """What the target and the first drafts of a pair say of each produced token given what precedes it, text by text.

    texts      prompts and produced tokens, neither empty
    positions  per text the produced tokens that are looked at, from 0, in order; None: all
    check      raise InputError for a text of which a model gives what is not a number
    """
    chosen = positions or [range(len(produced)) for _, produced in texts]
    models = (pair.target, *pair.drafts[:num_drafts])
    for part in bounded(list(map(len, chosen)), pair.vocab_size):
        counts = list(map(len, chosen[part]))
        target, *drafts = (produced_logits(model, texts[part], chosen[part]).split(counts) for model in models)
        for row, ((prompt, produced), where) in enumerate(zip(texts[part], chosen[part], strict=True)):
            seen = None
            if sampling.repetition_penalty != 1.0:
                seen = seen_before(prompt, produced, pair.vocab_size)[list(where)].to(pair.device)
            target_probs = warp(target[row].to(pair.device), sampling, seen)
            logits = [penalized(pair.fit(draft[row]), sampling, seen) for draft in drafts]
            reading = TextReading(target_probs, logits, sampling)
            if check and not reading.holds_numbers:
                raise InputError(f"the response that begins with tokens {list(produced[:8])}: {NOT_NUMBERS}")
            yield reading


def seen_before(prompt: Sequence[int], produced: Sequence[int], size: int) -> Tensor:
    """Which tokens of a vocabulary of `size` the text holds before each of the produced ones [N, V] bool."""
    new = torch.zeros(len(produced), size, dtype=torch.uint8)
    new[0, list(prompt)] = 1
    new[torch.arange(1, len(new)), list(produced[:-1])] = 1
    return new.cummax(0).values.bool()


def picked(distributions: Tensor, tokens: Tensor) -> Tensor:
    return distributions.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def produced_logits(model: Any, texts: Sequence[Text], positions: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Unwarped logits [n, V] of produced tokens, one text after another, from one forward pass over all texts.

    positions  per text the produced tokens that are looked at, from 0, in order; None: all. The output layer reads these alone
    """
    tokens, where = _looked_at(model, texts, positions)
    if _is_tabular(model):
        return open_session(model, *tokens.shape).extend(tokens, last=tokens.shape[1]).logits[where]
    output = model.get_output_embeddings()
    with output.register_forward_pre_hook(lambda module, args: (args[0][where].unsqueeze(0),)):
        return model(input_ids=tokens, use_cache=False).logits[0]


def produced_states(model: Any, texts: Sequence[Text], positions: Sequence[Sequence[int]] | None = None) -> Tensor:
    """Final states [n, D] of produced tokens, which `logits_of` takes; arguments as for `produced_logits`."""
    tokens, where = _looked_at(model, texts, positions)
    states = list[Tensor]()

    def keep(module: Any, args: Any) -> Any:
        states.append(args[0][where])
        return (args[0][:1, -1:],)

    with model.get_output_embeddings().register_forward_pre_hook(keep):
        model(input_ids=tokens, use_cache=False)
    return states[0]


def logits_of(model: Any, states: Tensor) -> Tensor:
    """Unwarped logits [n, V] of final states [n, D], after whatever the model does to its logits (caps, scales).

    The model reads a single token, and the states take the place of that token's.
    """
    with model.get_output_embeddings().register_forward_pre_hook(lambda module, args: (states.unsqueeze(0),)):
        return model(input_ids=_readable(model, torch.zeros(1, 1, dtype=torch.long)), use_cache=False).logits[0]


def _looked_at(
    model: Any, texts: Sequence[Text], positions: Sequence[Sequence[int]] | None
) -> tuple[Tensor, tuple[list[int], list[int]]]:
    """What a model reads [B, T], and where the states are that predict the produced tokens at `positions`."""
    chosen = positions or [range(len(produced)) for _, produced in texts]
    reads = pad_right([[*a, *b[: max(where)]] for (a, b), where in zip(texts, chosen, strict=True)])
    rows = [row for row, where in enumerate(chosen) for _ in where]
    columns = [len(prompt) + i - 1 for (prompt, _), where in zip(texts, chosen, strict=True) for i in where]
    return _readable(model, reads), (rows, columns)


@torch.no_grad()
def states_of(model: Any, tokens: Tensor) -> Tensor:
    """Final hidden states [B, T, D] of tokens [B, T]: what the output embedding reads; state t has read token t."""
    tokens = _readable(model, tokens)
    if _is_tabular(model):
        return open_session(model, *tokens.shape).extend(tokens, last=tokens.shape[1]).hidden
    with watched_states(model) as states:
        # The logits are not used: compute one column of them. This hook comes after the one that reads the states.
        output = model.get_output_embeddings()
        with output.register_forward_pre_hook(lambda module, args: (args[0][:, -1:],)):
            model(input_ids=tokens, use_cache=False)
    return states[0]


@torch.no_grad()
def states_and_logits_of(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """States and logits of tokens [B, T] from one forward pass: states [B, T, D] and unwarped next-token logits [B, T, V]."""
    tokens = _readable(model, tokens)
    if _is_tabular(model):
        out = open_session(model, *tokens.shape).extend(tokens, last=tokens.shape[1])
        return out.hidden, out.logits
    with watched_states(model) as states:
        logits = model(input_ids=tokens, use_cache=False).logits
    return states[0], logits


def hidden_size(model: Any) -> int:
    """D: the width of what `states_of` returns."""
    return model.probs.shape[0] if _is_tabular(model) else state_width(model)


def _readable(model: Any, tokens: Tensor) -> Tensor:
    """Tokens on the model's device; a token beyond its vocabulary (padding of the other model's) becomes its last one.

    Raises InputError if the model would drop out activations.
    """
    check_evaluation(model)
    if reads_states(model):
        raise InputError(needs_target(model))
    return tokens.to(model.device).clamp(max=vocab_size(model) - 1)


def _is_tabular(model: Any) -> bool:
    return hasattr(model, "open_session")
