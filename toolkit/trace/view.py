"""What a policy's rounds did to every token of a few texts: drafted, accepted or rejected, predicted, corrected or bonus.

From a recording, as `toolkit.trace.replay.replay` walks it; what was not recorded is None.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.stopping import StoppingPolicy
from toolkit.trace import Trace
from toolkit.trace.replay import replay_rounds
from toolkit.trace.steps import Geometry, logits_at, step_at


def token_rounds(
    trace: Trace, policy: StoppingPolicy, sequences: list[int], tokenizer: Any
) -> list[list[dict[str, Any]]]:
    """For each of `texts` (numbers within the trace) its rounds: {"drafted": [...], "extra": {"kind", "position"} or None}.

    A token is {"text", "kind": accepted | rejected | unused, "draft_prob": q, "accept_prob": min(1, p/q),
    "predicted": a recorded head's P(accept)}. `unused` ones follow a rejected one, or the text's end. The extra token,
    corrected or bonus, is the text's at a position; there is none where the text ends within the accepted run.
    """
    geometry, rounds = Geometry.of(trace), [[] for _ in sequences]  # type: ignore[var-annotated]
    for text, start, drafted, _, accepted, produced in replay_rounds(trace, policy):
        columns = (values.tolist() for values in (text, start, drafted, accepted, produced))
        for number, begins, count, good, length in zip(*columns, strict=True):
            if number in sequences:
                rounds[sequences.index(number)].append(_round(trace, geometry, begins, count, good, length, tokenizer))
    return rounds


def _round(
    trace: Trace, geometry: Geometry, start: int, drafted: int, accepted: int, produced: int, tokenizer: Any
) -> dict[str, Any]:
    at = torch.tensor([start])
    line = []
    for depth in range(1, drafted + 1):
        index, exists = step_at(trace, geometry, at, depth)
        if not bool(exists):  # certain tokens that ride along beyond the recorded depth
            break
        kind = "accepted" if depth <= accepted else "rejected" if depth == accepted + 1 <= produced else "unused"
        line.append({
            "text": piece(tokenizer, int(trace.tokens[index])),
            "kind": kind,
            "draft_prob": _number(trace.draft_prob[index]),
            "accept_prob": _number(trace.accept_prob[index]),
            "predicted": _predicted(trace, geometry, at, depth),
        })  # fmt: skip
    if produced <= accepted:
        return {"drafted": line, "extra": None}
    # On path the text's token is the draft's where accepted; else only the text itself knows it.
    position = start + accepted
    first_of_text = int(trace.text_first[torch.searchsorted(trace.text_first, position, right=True) - 1])
    kind = "bonus" if accepted == drafted else "corrected"
    return {"drafted": line, "extra": {"kind": kind, "position": position - first_of_text}}


def _predicted(trace: Trace, geometry: Geometry, start: torch.Tensor, depth: int) -> float | None:
    """P(accept) of the token at a depth by the first recorded head: an acceptance head says it one forward pass later."""
    logits = next(iter(trace.estimates.values()), None)
    if logits is None:
        return None
    ahead = 1 if logits.dim() == 1 or (logits.dim() == 3 and logits.shape[-1] == 1) else 0  # of acceptance heads
    index, exists = step_at(trace, geometry, start, depth + ahead)
    if not bool(exists):
        return None
    value = logits_at(trace, logits, index, depth + ahead)[0]
    return _number(torch.sigmoid((value[0] if value.dim() else value).float()))


def _number(value: torch.Tensor) -> float | None:
    """A probability with four digits; None where it was not recorded."""
    number = float(value)
    return None if number != number else round(number, 4)


def piece(tokenizer: Any, token: int) -> str:
    """A token as text; its number if there is no tokenizer."""
    return f"#{token}" if tokenizer is None else str(tokenizer.decode([token]))
