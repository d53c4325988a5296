"""The target's states in its session's cache, for drafts that read them."""

from __future__ import annotations

from typing import Any

from toolkit.drafts.kinds import needs_target
from toolkit.engine.base import Session
from toolkit.engine.hf import HFSession
from toolkit.errors import InputError


def session_with_states(draft: Any, target: Session | None) -> HFSession:
    """The target's session. Raises InputError unless its cache keeps the states that a draft reads."""
    if target is None:
        raise InputError(needs_target(draft))
    if not isinstance(target, HFSession) or target.kept_layers != tuple(draft.target_layers):
        raise InputError(
            f"the draft reads layers {list(draft.target_layers)} of a transformers target, whose cache keeps "
            f"{list(getattr(target, 'kept_layers', ()))}: expected one draft that reads the target's states, or several of the "
            "same layers"
        )
    return target
