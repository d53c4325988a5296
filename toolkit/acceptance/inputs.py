"""What a head sees of a drafted token: features of its step, and of the positions before it.

A pre-read head always reads the newest position: its state, the drawn token and the shape of q. An acceptance head always reads
the state that has read the token. For this head, the first earlier position is the token's own. Earlier positions are those of
the text without the prompt. They do not depend on the rounds that made the text, so one score per step serves every start of
a round. The likelihood of the text so far is the draft's, per token. The depth in the round depends on where the round
starts. With this input a step has one score per start (`toolkit.trace.score`).

Shapes: B rows, D hidden size, E embedding size, H earlier positions, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from toolkit.config.notes import Between
from toolkit.errors import InputError
from toolkit.types import SMALLEST, History, Step

NUM_STATISTICS = 5
NUM_HISTORY_STATISTICS = 4
NUM_LIKELIHOOD = 2


@dataclass(frozen=True)
class Inputs:
    """Which features a head reads beside those of the newest position.

    earlier             H, how many positions before
    earlier_states      their states
    earlier_tokens      the embeddings of the tokens that came there
    earlier_statistics  log q of these tokens, entropy and the two largest probabilities of q there
    likelihood          the mean log q of the text's tokens so far, and the logarithm of their number
    round_depth         the token's depth in the round, one-hot: 1 to this number, larger ones counting as it; 0: not read
    """

    earlier: Annotated[int, Between(0, 8)] = 0
    earlier_states: bool = True
    earlier_tokens: bool = True
    earlier_statistics: bool = True
    likelihood: bool = False
    round_depth: Annotated[int, Between(0, 64)] = 0

    def read(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        return {name: value for name, value in vars(self).items() if value != vars(Inputs())[name]}

    @property
    def num_history(self) -> int:
        """The number of earlier positions that have to be kept for the head."""
        return max(self.earlier, int(self.likelihood))

    def size(self, hidden_size: int, embedding_size: int) -> int:
        """F, from a draft's sizes."""
        return hidden_size + embedding_size + NUM_STATISTICS + self.size_of_more(hidden_size, embedding_size)

    def size_of_more(self, hidden_size: int, embedding_size: int) -> int:
        """The number of the F features that come after those of the newest position."""
        parts = (
            self.earlier_states * hidden_size,
            self.earlier_tokens * embedding_size,
            self.earlier_statistics * NUM_HISTORY_STATISTICS,
            1,  # whether there is such a position
        )
        return self.earlier * sum(parts) + self.likelihood * NUM_LIKELIHOOD + self.round_depth

    def features(self, step: Step, table: Tensor, depth: Tensor | int | None = None) -> Tensor:
        """Features of drawn tokens [B, F], from a step whose token has been drawn. `table` [V, E] embeds tokens.

        depth  in the round, of every row [B] or of all; None: the step's
        States and embeddings are scaled to unit mean square, and logarithms of probabilities are taken. Features of
        absent positions are 0. Raises InputError where the step does not know the positions before it.
        """
        newest = newest_features(step, table)
        return self.with_more(newest, self.before(step), table, step.depth if depth is None else depth)

    def before(self, step: Step) -> History | None:
        """The positions before a step that the head reads; None if it reads none.

        Raises InputError where the step does not know them.
        """
        if not self.num_history:
            return None
        before = step.history(self.num_history)
        if before is None:
            raise InputError(
                "this head reads earlier positions of the text, which only drafted chains keep: expected a method that "
                "drafts chains, or a head with head.earlier=0"
            )
        return before

    def with_more(self, newest: Tensor, before: History | None, table: Tensor | None, depth: Tensor | int) -> Tensor:
        """The newest position's features [B, ...] followed by the others: earlier positions, likelihood, depth."""
        parts = [newest]
        if before is not None and self.earlier:
            parts.append(self._of_history(before.last(self.earlier), table).to(newest.dtype))
        if before is not None and self.likelihood:
            mean = before.likelihood / before.count.clamp(min=1)
            parts.append(torch.stack([mean, before.count.log1p()], -1).to(newest.dtype))
        if self.round_depth:
            parts.append(depth_features(depth, self.round_depth, newest))
        return newest if len(parts) == 1 else torch.cat(parts, -1)

    def _of_history(self, before: History, table: Tensor | None) -> Tensor:
        """Features of the earlier positions [B, H * ...], oldest first."""
        present = before.present.float().unsqueeze(-1)
        parts = [present]
        if self.earlier_states:
            parts.append(_scaled(before.hidden))
        if self.earlier_tokens:
            assert table is not None
            parts.append(_scaled(table[before.tokens.clamp(max=len(table) - 1)]) * present)
        if self.earlier_statistics:
            statistics = [_log(before.token_prob).unsqueeze(-1), before.entropy.unsqueeze(-1), _log(before.top_probs)]
            parts.append(torch.cat([values.float() for values in statistics], -1) * present)
        return torch.cat(parts, -1).flatten(1)


def depth_features(depth: Tensor | int, most: int, like: Tensor) -> Tensor:
    """Depths from 1, of all rows or of each [B], as one-hot rows [B, most].

    A depth above `most` counts as `most`. Depth 0 gives a row of zeros.
    """
    own = min(depth, most) if isinstance(depth, int) else depth.clamp(max=most).unsqueeze(-1)
    return (torch.arange(1, most + 1, device=like.device) == own).to(like.dtype).expand(len(like), -1)


def newest_features(step: Step, table: Tensor) -> Tensor:
    """Features of the step alone [B, D + E + 5]: state, embedding and five numbers about q.

    The five are log q(y), warped and unwarped, the entropy, and the logarithms of the two largest probabilities.
    """
    assert step.tokens is not None
    probs = torch.stack([step.draft_prob, step.token_prob], -1).float()
    statistics = [_log(probs), step.entropy.float().unsqueeze(-1), _log(step.top_probs.float())]
    return torch.cat([_scaled(step.hidden), _scaled(table[step.tokens]), *statistics], -1)


def _scaled(values: Tensor) -> Tensor:
    """values [..., D], scaled to unit mean square."""
    return rms_norm(values.float(), values.shape[-1:])


def _log(probs: Tensor) -> Tensor:
    return probs.clamp(min=SMALLEST).log()
