"""Replay of prompt lookup from texts alone: no recording is needed.

Its q is a point mass, so a drafted token y at position i is accepted with probability p(y). If it is rejected, the token drawn
instead is another one, because the residual has no mass left at y. So, given the emitted token X_i, y was accepted iff y = X_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from analysis.replay.tally import Replayed
from toolkit.decoding import Method
from toolkit.decoding.proposers.copying import NOTHING, Copy, CopyProposer
from toolkit.stopping import StoppingPolicy
from toolkit.stopping.base import State
from toolkit.trace.rounds import Geometry

Text = tuple[Sequence[int], Sequence[int]]  # prompt ids, produced ids
COUNTS = ("num_drafted", "num_draft_calls", "num_target_calls", "num_generated", "num_discarded")


class Copies:
    """What may be copied at every position of some texts [P]: worked out once, for all policies that decide on it.

    proposer  None: nothing is copied, as in autoregressive decoding
    most      the longest copy

    text_first [T + 1]  where each text's positions begin;  geometry  as that of a recording
    """

    def __init__(
        self,
        proposer: CopyProposer | None,
        texts: Sequence[Text],
        most: int,
        max_new_tokens: int,
        end_ids: Sequence[int],
    ):
        self.proposer, self.most = _Recalled([]), most
        room, left = list[int](), list[int]()
        for prompt, produced in texts:
            whole = [*map(int, prompt), *map(int, produced)]
            for number in range(len(produced)):
                start = len(prompt) + number
                room.append(min(max_new_tokens - number - 1, most))
                left.append(len(produced) - number)
                found = NOTHING if proposer is None else proposer.lookup(whole[:start], room[-1], end_ids)
                self.proposer.copies.append((found, _agreeing(found.tokens, whole[start:])))
        self.text_first = torch.tensor([0, *(len(produced) for _, produced in texts)]).cumsum(0)
        run = torch.tensor([agreeing for _, agreeing in self.proposer.copies])
        self.geometry = Geometry(run, torch.tensor(left), torch.tensor(room))

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.geometry.run)

    def draft(
        self, starts: Tensor, policy: StoppingPolicy, state: State, busy: Tensor | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """One round from each of `starts` [B]: tokens copied [B], draft forwards (none) [B], the policy's state.

        busy  [B] bool: slots that hold a text; the others copy nothing. None: all do
        """
        room = self.geometry.room[starts]
        room = room if busy is None else torch.where(busy, room, 0)
        texts = [[at] for at in starts.tolist()]
        _, copied, state = self.proposer.copied(texts, room.tolist(), (), policy, state, torch.device("cpu"))
        return copied, torch.zeros_like(copied), state


class _Recalled(CopyProposer):
    """Copies that were looked up before, each with how many of its tokens agree; a text is the number of its position."""

    def __init__(self, copies: list[tuple[Copy, int]]):
        self.copies = copies

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        return self.copies[text[0]][0]


@dataclass(frozen=True)
class _Verdict:
    length: Tensor


@torch.inference_mode()
def replay_prompt_lookup(
    method: Method, texts: Sequence[Text], max_new_tokens: int, end_ids: Sequence[int]
) -> Replayed:
    """The counts that live decoding of these texts would have had; `method` is bound to a pair."""
    proposer, policy = method.proposer, method.policy
    assert isinstance(proposer, CopyProposer)
    cpu = torch.device("cpu")
    whole = [[*map(int, prompt), *map(int, produced)] for prompt, produced in texts]
    starts = np.array([len(prompt) for prompt, _ in texts])
    ends = np.array([len(text) for text in whole])
    at = starts.copy()  # how far each text has come
    counts = {name: np.zeros(len(texts), dtype=np.int64) for name in COUNTS}
    accepted, drawn, judged = (np.zeros((len(texts), method.limit + 1), dtype=np.int64) for _ in range(3))
    state = policy.init(len(texts), cpu)
    while (going := at < ends).any():
        room = np.where(going, np.minimum(max_new_tokens - (at - starts) - 1, method.limit), 0)
        contexts = [text[:stop] for text, stop in zip(whole, at, strict=True)]
        tokens, drafted, state = proposer.copied(contexts, room.tolist(), end_ids, policy, state, cpu)
        length = np.array(
            [
                _agreeing(copy[:count], text[stop:])
                for copy, count, text, stop in zip(tokens.tolist(), drafted.tolist(), whole, at, strict=True)
            ]
        )
        produced = np.where(going, np.minimum(length + 1, ends - at), 0)
        for name, values in zip(
            COUNTS, (drafted.numpy(), 0 * room, going, produced, going * (drafted.numpy() + 1) - produced), strict=True
        ):
            counts[name] += values
        copied = drafted.numpy()
        for histogram, values in ((accepted, length), (drawn, copied), (judged, np.minimum(copied, produced))):
            histogram[np.flatnonzero(going), values[going]] += 1
        state = policy.observe(_Round(len(tokens[0]), drafted, 0 * drafted), _Verdict(torch.from_numpy(length)), state)
        at = at + produced
    return Replayed(counts, accepted, drafted=drawn, judged=judged)


@dataclass(frozen=True)
class _Round:
    num_nodes: int
    num_drafted: Tensor
    num_calls: Tensor


def _agreeing(copied: Sequence[int], text: Sequence[int]) -> int:
    """The number of tokens that agree before the first that does not."""
    for index, (token, other) in enumerate(zip(copied, text, strict=False)):
        if token != other:
            return index
    return min(len(copied), len(text))
