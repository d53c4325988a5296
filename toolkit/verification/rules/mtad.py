"""Joint threshold: keep the longest prefix that the target finds likely enough as a whole.

Paper: Multi-Token Assisted Decoding (arXiv:2407.09722), section 3.2 and Algorithm 1.
theirs -> ours: gamma -> K, P -> target_probs, q(x_1..j) -> the product of draft_probs along the chain, eta -> length.
Deviation: compared in log space, with p and q both warped per token (their experiments warp, their formulas do not).
Deviation: Algorithm 1 starts eta at -1 and sets it to the token; it is an index, and 0 where no prefix passes.
Deviation: tau = 1 is allowed (the paper: tau < 1): everything is rejected, which is sampling from the target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from toolkit.config.notes import Between
from toolkit.config.values import check_ranges
from toolkit.verification.base import first_ones
from toolkit.verification.cut import CutRule, token_probs


@dataclass(frozen=True)
class MTAD(CutRule):
    """Keep the largest j with min(1, p(x_1..j)/q(x_1..j)) > tau, all j tested, then one token from p. Lossy.

    tau  what a prefix must beat; 1 keeps nothing

    A prefix may fail and a longer one pass. tau = 0 keeps every prefix with p > 0. A prefix of p = 0 never passes; one
    of q = 0 does if p > 0. Beams are drawn from a joint distribution, which can hold a token that its own warped
    distribution has cut. Theorem 3.6: length + 1 >= min(K + 1, |log tau| / U), U the largest |log p - log q| of a
    token.
    """

    name = "mtad"
    schemes = ("beams", "iid", "independent")
    tau: Annotated[float, Between(0, 1)] = 0.1

    def __post_init__(self) -> None:
        check_ranges(self, "rule.")

    def length(self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor) -> Tensor:
        p, q = token_probs(target_probs[..., :-1, :], tokens), token_probs(draft_probs, tokens)
        ratio = p.log().cumsum(-1) - q.log().cumsum(-1)  # 0/0 is not a number, which passes nothing
        level = math.log(self.tau) if self.tau > 0 else -math.inf
        passed = (ratio.clamp(max=0.0) > level) & first_ones(tokens, num_drafted)
        ends = torch.arange(1, tokens.shape[-1] + 1, device=tokens.device)
        return torch.nn.functional.pad(passed * ends, (1, 0)).amax(-1)
