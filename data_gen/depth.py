"""How deep roll-outs of a recording pay: as deep as drafted tokens are accepted at all, on the first texts.

The method is ours. A round from position s has its first k tokens accepted with the product of alpha = sum_x min(p, q) over
s..s + k - 1, if every draft follows the text. The depth is the first k at which the mean over all s falls below PAYS. A draft
that reads the target's states is recorded instead, and the share of rounds is counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_gen.recording_by_start import StartRecorder
from toolkit.engine.facts import reads_states
from toolkit.models.pair import ModelPair
from toolkit.models.teacher import Text, readings_along
from toolkit.sampling import Sampling
from toolkit.trace.rounds import Geometry

PAYS = 0.02  # share of rounds whose k-th token is accepted, below which no policy needs it
DEEPEST = 20  # of any recording whose depth is measured
TEXTS, TOKENS = 4, 128  # that are looked at, and the most tokens of each


def depth_that_pays(
    pair: ModelPair, texts: Sequence[Text], sampling: Sampling, draft_temperatures: Sequence[float | None] = (None,)
) -> int:
    """The depth for these texts, at the draft temperature that needs the deepest one; from 1 to DEEPEST."""
    if reads_states(pair.draft):
        depths = []
        for temperature in draft_temperatures:
            recorder = StartRecorder(pair, sampling, DEEPEST, draft_temperature=temperature)
            trace = recorder.record(texts[:TEXTS], range(len(texts[:TEXTS])))
            assert trace.run is not None
            run, left = trace.run, Geometry.of(trace).left
            shares = [float((run[left >= depth] >= depth).double().mean()) for depth in range(1, DEEPEST)]
            depths.append(next((depth for depth, share in enumerate(shares, 1) if not share >= PAYS), DEEPEST))
        return max(depths)
    alphas: dict[float | None, list[Tensor]] = {temperature: [] for temperature in draft_temperatures}
    for prompt, produced in texts[:TEXTS]:
        for reading in readings_along(pair, [(prompt, produced[:TOKENS])], sampling):
            for temperature, values in alphas.items():
                q = reading.draft_probs(temperature)
                values.append(torch.minimum(reading.target_probs, q).sum(-1).double().cpu())
    return max(map(depth_of, alphas.values()))


def depth_of(alphas: Sequence[Tensor]) -> int:
    """The first depth that is accepted in less than PAYS of the rounds, from alpha [N] of every text."""
    for depth in range(1, DEEPEST):
        products = [text.unfold(0, depth, 1).prod(-1) for text in alphas if len(text) >= depth]
        if not products or float(torch.cat(products).mean()) < PAYS:
            return depth
    return DEEPEST
