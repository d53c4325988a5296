"""What engines get wrong with an EAGLE-3 draft."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from toolkit.drafts.causes import Case, Cause, ReplayedRound, altered
from toolkit.drafts.causes.shared import cut_contexts, other_format, penalty_of_target_alone, shifted_positions
from toolkit.drafts.causes.states import other_layers, vocabulary_maps
from toolkit.engine import Session


def causes(case: Case) -> list[Cause]:
    """The causes that apply to a case."""
    parts = (
        guessed_states,
        other_layers,
        other_norms,
        vocabulary_maps,
        shifted_positions,
        cut_contexts,
        penalty_of_target_alone,
        other_format,
    )
    return [cause for part in parts for cause in part(case)]


def guessed_states(_: Case) -> Iterator[Cause]:
    """A stale cache: accepted tokens stay as they were drafted, beside the draft's own states."""
    yield Cause(
        "the draft's cache keeps accepted tokens as they were drafted, without the target's states", keeps=guessed
    )


def guessed(session: Session, row: int, last: ReplayedRound) -> None:
    """Count accepted tokens that the draft has read among those that it need not read again."""
    session.certain[row] += min(last.accepted, len(last.drafted) - 1)  # type: ignore[attr-defined]


def other_norms(case: Case) -> Iterator[Cause]:
    """Norms that are there and should not be, or the reverse, where no weights decide it."""
    flags, setting = case.draft.flags, "a version of the engine that reads the flag {} of the draft's config.json"
    for flag, meaning in (
        ("norm_output", "hands on its state {} its last norm"),
        ("norm_before_residual", "adds its state {} its norm"),
    ):
        side = "before" if flag in flags else "after"
        yield Cause(
            f"the draft {meaning.format(side)}", setting.format(flag), draft=partial(altered, flags=flags ^ {flag})
        )
    for flag, name in (("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm")):
        if flag in flags:
            meaning = "the draft reads the target's states without their norm"
            yield Cause(meaning, setting.format(flag), draft=partial(altered, **{name: None}))
