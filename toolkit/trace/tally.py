"""From rounds to counts: what a replayed policy's rounds add up to, per text and per round length."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit import metrics
from toolkit.types import Counts


@dataclass
class Replayed:
    """Totals per text, and how often each round length came up.

    counts  name of `toolkit.types.Counts` -> [T]
    accepted [T, M + 1]  rounds of each text that accepted 0, 1, 2, ... tokens
    drafted [T, M + 1]  rounds of each text that drafted 0, 1, 2, ... tokens
    sources  "copy_rounds", "draft_rounds" -> [T], rounds that copied tokens, and that a draft model drafted in
    judged [T, M + 1]  the same, counting tokens up to and including the first rejected one, or up to the text's end
    lengths [M + 1]  rounds that drafted 0, 1, 2, ... tokens
    reached [M]  rounds whose draft reached depth k with everything before it accepted
    passed [M]  those of them whose k-th token was accepted
    """

    counts: dict[str, NDArray[np.int64]]
    accepted: NDArray[np.int64]
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    reached: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    passed: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    drafted: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    judged: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    sources: dict[str, NDArray[np.int64]] = field(default_factory=dict)

    @property
    def per_text(self) -> NDArray[np.float64]:
        """Every text's counts [T, counts], in the order of `Counts`."""
        return np.stack([self.counts[name] for name in Counts.__dataclass_fields__], axis=1).astype(np.float64)

    def cost(self, cost_ratio: float) -> NDArray[np.float64]:
        """What every text's forwards cost [T], in target-forward times."""
        draft_calls, target_calls = (self.counts[name] for name in ("num_draft_calls", "num_target_calls"))
        return metrics.cost(draft_calls.astype(np.float64), target_calls.astype(np.float64), cost_ratio)

    @property
    def total(self) -> Counts:
        """The counts over all texts."""
        return Counts(**{name: int(values.sum()) for name, values in self.counts.items()})


@dataclass(frozen=True)
class Sent:
    """What `observe` may ask of a Proposal."""

    num_drafted: Tensor
    num_calls: Tensor

    @property
    def num_nodes(self) -> int:
        return int(self.num_drafted.max())


@dataclass(frozen=True)
class JudgedLengths:
    """What `observe` may ask of a Verdict."""

    length: Tensor


def tally(
    texts: int,
    width: int,
    groups: int,
    group: Tensor,
    text: Tensor,
    drafted: Tensor,
    calls: Tensor,
    accepted: Tensor,
    produced: Tensor,
) -> list[Replayed]:
    """The totals of `groups` policies from all their rounds, one entry each: whose, of which text, and its counts.

    texts  T;  width  M + 1
    """
    columns = {
        "num_drafted": drafted,
        "num_draft_calls": calls,
        "num_target_calls": torch.ones_like(drafted),
        "num_generated": produced,
        "num_discarded": drafted + 1 - produced,
    }

    def summed(keys: Tensor, size: int, weights: Tensor | None = None) -> Tensor:
        weights = None if weights is None else weights.double()  # exact: far below 2^53
        return torch.bincount(group * size + keys, weights, minlength=groups * size).view(groups, size).long()

    def by_text(lengths: Tensor) -> Tensor:
        return summed(text * width + lengths, texts * width).view(groups, texts, width)

    counts = {name: summed(text, texts, values) for name, values in columns.items()}
    by_source = {name: summed(text, texts, values) for name, values in sources_of(drafted, calls).items()}
    histogram, drafts, judged = (by_text(n) for n in (accepted, drafted, torch.minimum(drafted, produced)))
    lengths, passed, reached = drafts.sum(1), _from(histogram.sum(1)), _from(judged.sum(1))
    return [
        Replayed(
            {name: values[i].numpy() for name, values in counts.items()},
            histogram[i].numpy(),
            lengths[i].numpy(),
            reached[i, 1:].numpy(),
            passed[i, 1:].numpy(),
            drafts[i].numpy(),
            judged[i].numpy(),
            {name: values[i].numpy() for name, values in by_source.items()},
        )
        for i in range(groups)
    ]


def sources_of(drafted: Tensor, calls: Tensor) -> dict[str, Tensor]:
    """Which rounds [n] copied tokens, and which a draft model drafted in, by what they drafted and paid for."""
    return {"copy_rounds": (calls == 0) & (drafted > 0), "draft_rounds": calls > 0}


def _from(counts: Tensor) -> Tensor:
    """How many are at least k, from how many are k: [..., M + 1]."""
    return counts.flip(-1).cumsum(-1).flip(-1)
