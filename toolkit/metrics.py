"""What counts mean. Totals travel, ratios are formed last.

    discard rate       = N_discarded / N          verification rate = N_target / N
    block efficiency   = N / N_target             the corrected or bonus token is included
    acceptance rate    = accepted / drafted tokens
    throughput         = N / (c * draft calls + target calls): tokens per target-forward time

N counts produced tokens, end of text included. See the papers page for the identity that ties them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.types import Counts, Generation


def discard_rate(counts: Counts) -> float:
    """Discarded tokens per produced token."""
    return counts.num_discarded / max(counts.num_generated, 1)


def verification_rate(counts: Counts) -> float:
    """Target forwards per produced token."""
    return counts.num_target_calls / max(counts.num_generated, 1)


def block_efficiency(counts: Counts) -> float:
    """Produced tokens per target forward, the extra token included."""
    return counts.num_generated / max(counts.num_target_calls, 1)


def throughput(counts: Counts, cost_ratio: float) -> float:
    """Produced tokens per target-forward time, at `cost_ratio` = draft forward / target forward."""
    cost = cost_ratio * counts.num_draft_calls + counts.num_target_calls
    return counts.num_generated / cost if cost else 0.0


def latency(counts: Counts, draft_seconds: float, target_seconds: float) -> float:
    """Seconds per produced token for forwards of these durations (all calls counted, prompt reading not)."""
    cost = draft_seconds * counts.num_draft_calls + target_seconds * counts.num_target_calls
    return cost / max(counts.num_generated, 1)


def total(generations: Sequence[Generation]) -> Counts:
    """Counts of all generations together."""
    return sum((generation.counts for generation in generations), Counts())


def summarize(generations: Sequence[Generation]) -> dict[str, Any]:
    """Totals, rates and seconds of a set of generations."""
    counts = total(generations)
    rounds = [r for generation in generations for r in generation.rounds]
    accepted = sum(r.num_accepted for r in rounds)
    lengths: dict[int, int] = {}
    for r in rounds:
        lengths[r.num_accepted] = lengths.get(r.num_accepted, 0) + 1
    return {
        "prompts": len(generations),
        "failed": sum(g.error is not None for g in generations),
        **{name: getattr(counts, name) for name in counts.__dataclass_fields__},
        "discard_rate": discard_rate(counts),
        "verification_rate": verification_rate(counts),
        "block_efficiency": block_efficiency(counts),
        "acceptance_rate": accepted / max(counts.num_drafted, 1),
        "throughput_c0.2": throughput(counts, 0.2),
        "accepted_lengths": {str(k): lengths[k] for k in sorted(lengths)},
    }
