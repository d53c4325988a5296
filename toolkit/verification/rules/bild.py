"""BiLD's rollback: keep drafted tokens up to the first one that the target finds too surprising.

Paper: Kim et al., Speculative Decoding with Big Little Decoder (arXiv:2302.07863), as the baseline of Multi-Token Assisted
Decoding (arXiv:2407.09722), section 4. theirs -> ours: rollback threshold tau_2 (alpha_RB) -> tau_2; fallback threshold
tau_1 (alpha_FB) -> the policy `confidence`, its threshold; step length -> max_drafted.
Variant: sampled text, decoder only, the fallback token is kept.
Deviation: tokens are drawn from the warped distributions and p is warped; the original is greedy.
Deviation: the token at which the draft falls back is sent and verified like any other; the original throws it away.
Deviation: fallback looks at q(y_k) of the drawn token, unwarped, instead of the largest q (alike where text is greedy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from toolkit.config.notes import AtLeast
from toolkit.config.values import check_ranges
from toolkit.verification.base import first_ones
from toolkit.verification.cut import CutRule, token_probs


@dataclass(frozen=True)
class BiLD(CutRule):
    """Keep tokens while -log p(token) <= tau_2, then one token from p. q plays no part. Lossy.

    tau_2  nats of surprise
    """

    name = "bild"
    tau_2: Annotated[float, AtLeast(0)] = 2.0

    def __post_init__(self) -> None:
        check_ranges(self, "rule.")

    def length(self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor) -> Tensor:
        likely = -token_probs(target_probs[..., :-1, :], tokens).log() <= self.tau_2
        return (likely & first_ones(tokens, num_drafted)).long().cumprod(-1).sum(-1)
