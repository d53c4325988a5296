"""The learning rate: a cosine over training, and short trials of a few rates around the one that a head's width suggests.

Adam moves every weight by about the rate per step, so a sum over `width` inputs moves by rate * width. The best rate falls as
1 / width (Yang et al., arXiv:2203.03466, table 3). SpecDec++'s 5e-5 is for drafts of 4,096 dimensions: the same product of
about .2 gives 2e-3 at 96. The best rate also depends on the number of steps and the size of the states. So three rates are
tried: a third of the suggested rate, the rate itself and three times the rate. Each trains a copy of the head for a tenth of
the steps, with its own cosine. The rate of the least calibrated log loss on validation is kept. If it is the largest or the
smallest of them, the trials go on beyond it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from toolkit.config.notes import AtLeast
from toolkit.training.examples import Positions

RATE_TIMES_WIDTH = 0.2
FACTORS = (1 / 3, 1.0, 3.0)
FURTHER = 3  # times that the search goes on beyond these
SHARE, FEWEST = 0.1, 20  # of the training's steps, and the fewest steps, per rate
Optimizers = Callable[..., Optimizer]


def cosine_factor(step: int, num_steps: int, warmup: int = 0) -> float:
    """Share of the full learning rate at a step: a linear rise over `warmup` steps, then half a cosine down to 0."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(num_steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


def cosine(optimizer: Optimizer, num_steps: int, warmup: Annotated[int, AtLeast(0)] = 0) -> LambdaLR:
    """The schedule of an optimizer that makes `num_steps` steps; warmup: steps until the full rate."""
    return LambdaLR(optimizer, lambda step: cosine_factor(step, num_steps, warmup))


def rates_of_width(head: nn.Module) -> list[float]:
    """The rates that are tried for a head, ascending. Its width is the largest number of inputs of a linear layer."""
    width = max(layer.in_features for layer in head.modules() if isinstance(layer, nn.Linear))
    return [RATE_TIMES_WIDTH / width * factor for factor in FACTORS]


def trial_steps(num_steps: int) -> int:
    """Steps of each trial for a training of `num_steps`."""
    return min(max(math.ceil(SHARE * num_steps), FEWEST), num_steps)


def best_rate(
    head: nn.Module,
    optimizer: Optimizers,
    batches: Iterable[Positions],
    num_steps: int,
    loss_of: Callable[[nn.Module, Positions], Tensor],
    score_of: Callable[[nn.Module], float],
) -> tuple[float, dict[float, float]]:
    """The rate of the smallest score after a trial, and every rate's score (infinite where it is not a number).

    head       stays as it is: copies are trained
    batches    of the training data; iterated again for every rate, and repeated if they are fewer than the steps
    loss_of    of a head and a batch, a scalar; score_of: of a head, smaller is better
    """

    def tried(rate: float) -> float:
        copied: Any = copy.deepcopy(head)
        steps = optimizer(copied.parameters(), lr=rate)
        schedule = LambdaLR(steps, lambda step: cosine_factor(step, num_steps))
        with torch.enable_grad():
            repeated = itertools.chain.from_iterable(itertools.repeat(batches))
            for batch in itertools.islice(repeated, num_steps):
                steps.zero_grad()
                loss_of(copied, batch).backward()  # type: ignore[no-untyped-call]
                steps.step()
                schedule.step()
        score = score_of(copied.eval())
        return score if math.isfinite(score) else math.inf

    scores = {rate: tried(rate) for rate in rates_of_width(head)}
    for _ in range(FURTHER):
        best = min(scores, key=lambda rate: scores[rate])
        if best not in (beyond := {max(scores): 3.0, min(scores): 1 / 3}):
            break
        scores[best * beyond[best]] = tried(best * beyond[best])
    return min(scores, key=lambda rate: scores[rate]), dict(sorted(scores.items()))
