"""What a pre-read head sees of a drafted token: features of its step, and of the positions before it.

The newest position always gives its state, the drawn token and the shape of q. Earlier positions are those of the text,
prompt apart, whatever rounds it was made in: so one score per step serves every start of a round. The likelihood of the
text so far is the draft's, per token.

Shapes: B rows, D hidden size, E embedding size, H earlier positions, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from toolkit.errors import InputError
from toolkit.schema.ranges import Between
from toolkit.types import SMALLEST, Earlier, Step

NUM_STATISTICS = 5
NUM_EARLIER_STATISTICS = 4
NUM_LIKELIHOOD = 2


@dataclass(frozen=True)
class Inputs:
    """Which features a head reads beside those of the newest position.

    earlier             H, how many positions before
    earlier_states      their states
    earlier_tokens      the embeddings of the tokens that came there
    earlier_statistics  log q of these tokens, entropy and the two largest probabilities of q there
    likelihood          the mean log q of the text's tokens so far, and the logarithm of their number
    """

    earlier: Annotated[int, Between(0, 8)] = 0
    earlier_states: bool = True
    earlier_tokens: bool = True
    earlier_statistics: bool = True
    likelihood: bool = False

    @property
    def num_earlier(self) -> int:
        """Positions that have to be kept for it."""
        return max(self.earlier, int(self.likelihood))

    def size(self, hidden_size: int, embedding_size: int) -> int:
        """F of a draft's sizes."""
        parts = (
            self.earlier_states * hidden_size,
            self.earlier_tokens * embedding_size,
            self.earlier_statistics * NUM_EARLIER_STATISTICS,
            1,  # whether there is such a position
        )
        newest = hidden_size + embedding_size + NUM_STATISTICS
        return newest + self.earlier * sum(parts) + self.likelihood * NUM_LIKELIHOOD

    def features(self, step: Step, table: Tensor) -> Tensor:
        """What is known of drawn tokens [B, F]: of a step whose token is there. `table` [V, E] embeds tokens.

        States and embeddings are scaled to unit mean square, probabilities are logarithms. What is absent is 0.
        Raises InputError where the step does not know the positions before it.
        """
        newest = newest_features(step, table)
        if not self.num_earlier:
            return newest
        before = step.earlier(self.num_earlier)
        if before is None:
            raise InputError(
                "this head reads earlier positions of the text, and only chains of toolkit.decode keep them: expected a "
                "method that drafts chains, or a head with head.earlier=0"
            )
        parts = [newest]
        if self.earlier:
            parts.append(self._of_earlier(before.last(self.earlier), table))
        if self.likelihood:
            mean = before.likelihood / before.count.clamp(min=1)
            parts.append(torch.stack([mean, before.count.log1p()], -1).to(newest.dtype))
        return torch.cat(parts, -1)

    def _of_earlier(self, before: Earlier, table: Tensor) -> Tensor:
        """Features of the earlier positions [B, H * ...], oldest first."""
        present = before.present.float().unsqueeze(-1)
        parts = [present]
        if self.earlier_states:
            parts.append(_scaled(before.hidden))
        if self.earlier_tokens:
            parts.append(_scaled(table[before.tokens.clamp(max=len(table) - 1)]) * present)
        if self.earlier_statistics:
            statistics = [_log(before.token_prob).unsqueeze(-1), before.entropy.unsqueeze(-1), _log(before.top_probs)]
            parts.append(torch.cat([values.float() for values in statistics], -1) * present)
        return torch.cat(parts, -1).flatten(1)


def newest_features(step: Step, table: Tensor) -> Tensor:
    """Of the step alone [B, D + E + 5]: state, embedding; of q: log q(y) warped and not, entropy, the two largest."""
    assert step.tokens is not None
    probs = torch.stack([step.draft_prob, step.token_prob], -1).float()
    statistics = [_log(probs), step.entropy.float().unsqueeze(-1), _log(step.top_probs.float())]
    return torch.cat([_scaled(step.hidden), _scaled(table[step.tokens]), *statistics], -1)


def _scaled(values: Tensor) -> Tensor:
    """values [..., D] with unit mean square."""
    return rms_norm(values.float(), values.shape[-1:])


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=SMALLEST).log()
