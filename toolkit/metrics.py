"""Rates from counts. Totals are added up, ratios are formed last.

    discard rate       = N_discarded / N          verification rate = N_target / N
    block efficiency   = N / N_target             the corrected or bonus token is included
    acceptance rate    = accepted / drafted tokens
    cost               = c * draft calls + target calls, in target-forward times
    throughput         = N / cost: tokens per target-forward time

N counts produced tokens, end of text included. In every round drafted + 1 = produced + discarded. So
num_drafted + num_target_calls = N + num_discarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from toolkit.types import Counts, Generation, Round

Amount = TypeVar("Amount", float, NDArray[np.float64])  # a number, or an array of them


def cost(draft_calls: Amount, target_calls: Amount, cost_ratio: float) -> Amount:
    """Cost of forward passes in target-forward times, at `cost_ratio` = draft forward / target forward."""
    return cost_ratio * draft_calls + target_calls


def tokens_per_cost(tokens: Amount, draft_calls: Amount, target_calls: Amount, cost_ratio: float) -> Amount:
    """Produced tokens per target-forward time; 0 without a forward pass. Numbers, or arrays of one shape."""
    spent = cost(draft_calls, target_calls, cost_ratio)
    if isinstance(spent, np.ndarray):
        return np.divide(tokens, spent, out=np.zeros_like(spent), where=spent > 0)
    return tokens / spent if spent else 0.0


def discard_rate(counts: Counts) -> float:
    """Discarded tokens per produced token."""
    return counts.num_discarded / max(counts.num_generated, 1)


def verification_rate(counts: Counts) -> float:
    """Target forward passes per produced token."""
    return counts.num_target_calls / max(counts.num_generated, 1)


def block_efficiency(counts: Counts) -> float:
    """Produced tokens per target forward pass, the extra token included."""
    return counts.num_generated / max(counts.num_target_calls, 1)


def throughput(counts: Counts, cost_ratio: float) -> float:
    """Produced tokens per target-forward time, at `cost_ratio` = draft forward / target forward."""
    return tokens_per_cost(counts.num_generated, counts.num_draft_calls, counts.num_target_calls, cost_ratio)


def scalars(counts: Counts, cost_ratio: float) -> dict[str, float]:
    """What runs are sorted by: both rates, throughput, and its gain over autoregressive decoding, whose throughput is 1."""
    per_cost = throughput(counts, cost_ratio)
    rates = {"verification_rate": verification_rate(counts), "discard_rate": discard_rate(counts)}
    return {"cost_ratio": cost_ratio, **rates, "throughput": per_cost, "gain": per_cost - 1}


def total(generations: Sequence[Generation]) -> Counts:
    return sum((generation.counts for generation in generations), Counts())


def source_shares(generations: Sequence[Generation]) -> dict[str, float]:
    """Shares of the rounds that copied tokens and that a draft model drafted in; the others drafted nothing."""
    sources = [r.source for generation in generations for r in generation.rounds]
    return {f"{name}_share": sources.count(name) / max(len(sources), 1) for name in ("copy", "draft")}


def summarize(generations: Sequence[Generation]) -> dict[str, Any]:
    """Totals, rates and seconds of a set of generations."""
    counts = total(generations)
    rounds = [r for generation in generations for r in generation.rounds]
    lengths = Counter(r.num_accepted for r in rounds)
    return {
        "prompts": len(generations),
        "failed": sum(g.error is not None for g in generations),
        **{name: getattr(counts, name) for name in counts.__dataclass_fields__},
        "discard_rate": discard_rate(counts),
        "verification_rate": verification_rate(counts),
        "block_efficiency": block_efficiency(counts),
        "acceptance_rate": sum(lengths.elements()) / max(counts.num_drafted, 1),
        "throughput_c0.2": throughput(counts, 0.2),
        **source_shares(generations),
        "accepted_lengths": {str(k): lengths[k] for k in sorted(lengths)},
    }


def request_counts(rounds: Sequence[Round], longest: int) -> dict[str, Any]:
    """The counts of one text as vLLM 0.32.0 answers them under `--per-request-spec-decode-metrics detailed`.

    rounds   of chains; those that drafted nothing are left out, as there. Accepted tokens beyond the text's end count, as there
    longest  K, the most tokens of a round
    """
    drafted = [r.num_drafted for r in rounds if r.num_drafted]
    accepted = [r.num_accepted for r in rounds if r.num_drafted]
    return {
        "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "draft_acceptance_rate": sum(accepted) / max(sum(drafted), 1),
        "acceptance_histogram": [accepted.count(n) for n in range(longest + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": longest,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }


def acceptance_floor(acceptance: NDArray[np.float64], divergence: NDArray[np.float64]) -> float:
    """What a draft's mean acceptance is at least, after its target has moved; 0 or less: nothing is known.

    acceptance [n]  alpha = sum min(p, q) of the old target p, at tokens of the *new* target's texts
    divergence [n]  KL of the two targets at the same tokens, in nats, either way round; infinite at temperature 0

    By Pinsker's inequality: sum min(p', q) >= sum min(p, q) - TV(p', p) >= alpha - sqrt(KL / 2) after every context.
    """
    return float(np.mean(acceptance - np.sqrt(divergence / 2)))
