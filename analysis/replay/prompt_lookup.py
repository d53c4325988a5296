"""Replay of copied tokens from texts alone: no recording is needed.

Their q is a point mass, so a copied token y at position i is accepted with probability p(y). If it is rejected, the token drawn
instead is another one, because the residual has no mass left at y. So, given the emitted token X_i, y was accepted iff y = X_i.

Shapes: T texts, P positions of all of them, B rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from analysis.replay.tally import JudgedLengths, Replayed, Sent, sources_of
from toolkit.decoding import Method
from toolkit.decoding.proposers.copying import NOTHING, Copy, CopyProposer
from toolkit.stopping import StoppingPolicy
from toolkit.stopping.base import State
from toolkit.trace.rounds import Geometry
from toolkit.types import Counts

Text = tuple[Sequence[int], Sequence[int]]  # prompt ids, produced ids


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
                copy = NOTHING if proposer is None else proposer.lookup(whole[:start], room[-1], end_ids)
                pairs = zip(copy.tokens, whole[start:], strict=False)
                agreeing = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
                self.proposer.copies.append((copy, agreeing))
        self.text_first = torch.tensor([0, *(len(produced) for _, produced in texts)]).cumsum(0)
        run = torch.tensor([agreeing for _, agreeing in self.proposer.copies])
        self.geometry = Geometry(run, torch.tensor(left), torch.tensor(room), run)

    @property
    def num_positions(self) -> int:
        """P."""
        return len(self.geometry.run)

    def round(
        self, starts: Tensor, room: Tensor, policy: StoppingPolicy, state: State, begins: Tensor
    ) -> tuple[Tensor, Tensor, State]:
        """Tokens copied by rounds from positions `starts` [B], how many agree with the text [B], the policy's state.

        room    the most tokens that may be copied [B]
        begins  whether the round may copy at all [B] bool
        """
        positions = [[start] for start in starts.tolist()]
        _, copied, state = self.proposer.copied(positions, room.tolist(), (), policy, state, begins)
        return copied, torch.minimum(copied, self.geometry.run[starts]), state

    def draft(
        self, starts: Tensor, policy: StoppingPolicy, state: State, busy: Tensor | None = None
    ) -> tuple[Tensor, Tensor, State]:
        """One round from each of `starts` [B]: tokens copied [B], draft forwards (none) [B], the policy's state.

        busy  [B] bool: slots that hold a text; the others copy nothing. None: all do
        """
        room = self.geometry.room[starts]
        room = room if busy is None else torch.where(busy, room, 0)
        state, begins = policy.begin(room > 0, state)
        copied, _, state = self.round(starts, room, policy, state, begins)
        return copied, torch.zeros_like(copied), state


class _Recalled(CopyProposer):
    """Copies that were looked up before, each with how many of its tokens agree; a text is the number of its position."""

    def __init__(self, copies: list[tuple[Copy, int]]):
        self.copies = copies

    def lookup(self, text: Sequence[int], most: int, end_ids: Sequence[int]) -> Copy:
        copy = self.copies[text[0]][0]
        return copy._replace(tokens=copy.tokens[:most])


@torch.inference_mode()
def replay_prompt_lookup(
    method: Method, texts: Sequence[Text], max_new_tokens: int, end_ids: Sequence[int]
) -> Replayed:
    """The counts that live decoding of these texts would have had; `method` is bound to a pair."""
    proposer, policy = method.proposer, method.policy
    assert isinstance(proposer, CopyProposer)
    copies = Copies(proposer, texts, method.limit, max_new_tokens, end_ids)
    first, lengths = copies.text_first[:-1].clamp(max=copies.num_positions - 1), copies.text_first.diff()
    done = torch.zeros_like(lengths)  # how far each text has come
    counts = {name: np.zeros(len(texts), dtype=np.int64) for name in Counts.__dataclass_fields__}
    sources = {name: np.zeros(len(texts), dtype=np.int64) for name in ("copy_rounds", "draft_rounds")}
    accepted, drawn, judged = (np.zeros((len(texts), method.limit + 1), dtype=np.int64) for _ in range(3))
    state = policy.init(len(texts), torch.device("cpu"))
    while bool((going := done < lengths).any()):
        starts = torch.where(going, first + done, first)
        room = torch.where(going, copies.geometry.room[starts], 0)
        state, begins = policy.begin(room > 0, state)
        copied, length, state = copies.round(starts, room, policy, state, begins)
        none = torch.zeros_like(copied)
        produced = torch.where(going, torch.minimum(length + 1, lengths - done), 0)
        columns = (copied, none, going, produced, torch.where(going, copied + 1, 0) - produced)
        for name, values in zip(counts, columns, strict=True):
            counts[name] += values.numpy()
        for name, chosen in sources_of(copied, none).items():
            sources[name] += chosen.numpy()
        for histogram, values in ((accepted, length), (drawn, copied), (judged, torch.minimum(copied, produced))):
            histogram[np.flatnonzero(going), values[going]] += 1
        state = policy.observe(Sent(copied, none), JudgedLengths(length), state)
        done = done + produced
    return Replayed(counts, accepted, drafted=drawn, judged=judged, sources=sources)
