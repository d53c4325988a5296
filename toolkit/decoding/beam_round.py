"""A round of beams on the host, as lists: what became of every drafted node, and where a new beam's tokens lie.

Block index x: beam x of the W before the round, or node x - W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.beam_verdict import BeamVerdict
from toolkit.decoding.proposers.forest import Forest

Ends = Callable[[int, int], bool]  # whether a text is over with this token after the block's beam or node


@dataclass
class Beam:
    """One text of a row.

    tokens      the response so far; the newest of them is unread (of a fresh row: the prompt's last one, not in `tokens`)
    score       log-likelihood of the response by the target
    node        id in the target's cache of the token before the newest one; -1: the end of the context
    draft_node  id in the draft's cache of the last token it has read there, `draft_unread` what follows up to the newest
    draft_score  log-likelihood by the draft up to the first of `draft_unread`; 0 unless beams are weighed by it
    """

    tokens: list[int]
    score: float
    node: int = -1
    draft_node: int = -1
    draft_unread: list[int] = field(default_factory=list)
    draft_score: float = 0.0

    @property
    def mean(self) -> float:
        """Length-normalised score."""
        return self.score / max(len(self.tokens), 1)


class BeamRound:
    """The facts of one round, per batch slot."""

    def __init__(self, forest: Forest, verdict: BeamVerdict):
        self.num_before = forest.num_before
        self.num_candidates = forest.pairs[0].shape[1] if forest.pairs else 0
        self.joint = forest.joint
        self.num_read, self.draft_read = forest.num_read, forest.was_read
        self.tokens, self.parents = forest.tokens.tolist(), forest.parents.tolist()
        self.newest_ids, self.node_ids = forest.newest_ids.tolist(), forest.node_ids.tolist()
        self.kept, self.node_scores = verdict.kept.tolist(), verdict.node_scores.tolist()
        self.extra_parents, self.extra_tokens = verdict.extra_parents.tolist(), verdict.extra_tokens.tolist()
        self.extra_scores = verdict.extra_scores.tolist()
        self.length, self.num_extra, self.valid = (
            value.tolist() for value in (verdict.length, verdict.num_extra, verdict.valid)
        )
        self.num_layers, self.num_calls = forest.num_layers.tolist(), forest.num_calls.tolist()
        drafted = [layer.tolist() for layer in forest.counts]
        self.num_drafted = [
            sum(layer[slot] for layer in drafted[:layers]) for slot, layers in enumerate(self.num_layers)
        ]

    def nodes(self, slot: int, layer: int) -> list[int]:
        """Nodes of a layer that are beams."""
        first = layer * self.num_candidates
        end = min(first + self.num_candidates, len(self.tokens[slot]))
        return [n for n in range(first, end) if self.kept[slot][n]]

    def beams(self, slot: int, settings: Beams, ends: Ends) -> Iterator[tuple[int, int, float, bool]]:
        """Beams that end or live on: parent, token, score, and whether they are of the last layer."""
        last_layer = self.length[slot]
        if not self.num_extra[slot] and not self.nodes(slot, last_layer):  # the row was done a layer earlier
            last_layer -= 1
        for layer in range(self.length[slot] + 1):
            for n in self.nodes(slot, layer):
                yield self.parents[slot][n], self.tokens[slot][n], self.node_scores[slot][n], layer == last_layer
        extras = self.extras(slot)
        if settings.selection == "top":
            extras = _searched(extras, settings.num_beams, ends)
        yield from ((parent, token, score, True) for parent, token, score in extras)

    def extras(self, slot: int) -> list[tuple[int, int, float]]:
        """Beams of the last layer that were not drafted: parent, token, score; of beam search all pairs it looked at."""
        pairs = zip(self.extra_parents[slot], self.extra_tokens[slot], self.extra_scores[slot], strict=True)
        return list(pairs)[: self.num_extra[slot]]

    def widths(self, slot: int, num_beams: int) -> tuple[int, ...]:
        """Beams of each layer, ended ones included."""
        passed = [len(self.nodes(slot, layer)) for layer in range(self.length[slot])]
        last = len(self.nodes(slot, self.length[slot])) + min(self.num_extra[slot], num_beams)
        return (*passed, last) if last else tuple(passed)

    def path(self, slot: int, index: int, old: list[Beam]) -> list[int]:
        """Response tokens up to a block index."""
        if index < self.num_before:
            return old[index].tokens
        n = index - self.num_before
        return [*self.path(slot, self.parents[slot][n], old), self.tokens[slot][n]]

    def draft_position(self, slot: int, index: int, old: list[Beam]) -> tuple[int, list[int]]:
        """The draft's node nearest above a block index, and the tokens between, the index's own included."""
        if index < self.num_before:
            beam = old[index]
            return (self.newest_ids[slot][index], []) if self.draft_read else (beam.draft_node, beam.draft_unread)
        n = index - self.num_before
        if n < self.num_read:
            return self.node_ids[slot][n], []
        node, unread = self.draft_position(slot, self.parents[slot][n], old)
        return node, [*unread, self.tokens[slot][n]]

    def draft_score(self, slot: int, index: int, token: int, old: list[Beam]) -> float:
        """`Beam.draft_score` of a beam that goes on from a block index with a token."""
        if index < self.num_before:  # an input beam
            return float(self.joint[0][slot, index, token]) if self.joint else old[index].draft_score
        node = index - self.num_before
        layer, candidate = divmod(node, self.num_candidates)
        if layer + 1 < len(self.joint):
            return float(self.joint[layer + 1][slot, candidate, token])
        return self.draft_score(slot, self.parents[slot][node], self.tokens[slot][node], old)


def _searched(pairs: list[tuple[int, int, float]], num_beams: int, ends: Ends) -> list[tuple[int, int, float]]:
    """Pairs that beam search chooses: the first W that do not end, and those that end among the first W."""
    chosen, living = [], 0
    for rank, (parent, token, score) in enumerate(pairs):
        if ends(parent, token):
            if rank < num_beams:
                chosen.append((parent, token, score))
        elif living < num_beams:
            chosen.append((parent, token, score))
            living += 1
    return chosen
