"""Recordings with the pair's own heads in them, and policies that read these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from analysis.replay.recorded_heads import with_recorded_heads
from data_gen.recording import Recorder
from toolkit import ModelPair
from toolkit.acceptance.folder import recorded_scorers
from toolkit.sampling import Sampling
from toolkit.trace import Trace
from toolkit.types import Generation

OWN = "own"  # what a trace calls the pair's head folder


def record(
    pair: ModelPair,
    responses: Sequence[Generation],
    sampling: Sampling,
    max_drafted: int,
    rows: Sequence[int] | None = None,
    kind: type[Recorder] = Recorder,
    **options: Any,
) -> Trace:
    """The trace of plain decoding's responses. rows: of the acceptance draws, from 0 if not given; options: the recorder's."""
    recorder = kind(pair, sampling, max_drafted, recorded_scorers(pair, {OWN: str(pair.head)}), **options)
    texts = [(response.prompt_ids, response.token_ids) for response in responses]
    return recorder.record_all(texts, range(len(texts)) if rows is None else rows)


def reading(pair: ModelPair, policy: Any) -> Any:
    """A policy, bound to the pair, that reads its head's logits from such a trace."""
    return with_recorded_heads(policy.bind(pair), {str(pair.head): OWN})
