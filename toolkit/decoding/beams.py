"""Several texts per row: beams, as the leaves of one tree per cache.

A row's beams share their prefixes in the cache; what all of them share is the trunk. Each beam's newest token has not
been read yet: it goes to the target together with the next proposal.

What a beam weighs, stated so that the law is definite: p_beam is over the living beams and their next tokens, in
proportion to the target's likelihood of the whole response so far. A beam that ends (end of text) leaves: it has no mass
in p_beam from then on, and waits among the finished ones with its score, log-likelihood / length. A row is done when no
beam lives, as many are finished as it has beams, or the length limit is reached; living ones then count as finished. Its
beams are the best scored, the best one is its text.

Shapes: B places, W living beams at most, N nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from toolkit.decoding.beam_settings import Beams as Settings
from toolkit.decoding.forest import Forest, ForestContext
from toolkit.decoding.layers import BeamVerdict, judge
from toolkit.decoding.loop import Batch, right_aligned
from toolkit.decoding.method import Method
from toolkit.errors import InputError
from toolkit.pair import ModelPair
from toolkit.sampling import Sampling, draw, warp
from toolkit.session import Session
from toolkit.transfer import tensor_on
from toolkit.types import Round
from toolkit.verification import LayerRule


@dataclass
class Beam:
    """One text of a row.

    tokens      the response so far; the newest of them is unread (of a fresh row: the prompt's last one, not in `tokens`)
    score       log-likelihood of the response by the target
    node        id in the target's cache of the token before the newest one; -1: the end of the trunk
    draft_node  id in the draft's cache of the last token it has read there, `draft_unread` what follows up to the newest
    """

    tokens: list[int]
    score: float
    node: int = -1
    draft_node: int = -1
    draft_unread: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Length-normalised score."""
        return self.score / max(len(self.tokens), 1)


@dataclass
class RowBeams:
    """The beams of one row: living, finished, and the score at the last collapse."""

    living: list[Beam]
    finished: list[Beam] = field(default_factory=list)
    since: int = 0  # layers since the last collapse
    score_then: float = 0.0


class BeamBatch(Batch):
    """Rows whose context is several texts."""

    beams: list[RowBeams]

    def __init__(self, pair: ModelPair, method: Method, sampling: Sampling, *rest: Any):
        for value, name in ((sampling.stop, "stop"), (sampling.repetition_penalty != 1.0, "repetition_penalty")):
            if value:
                raise InputError(f"{name} is not available with several beams; leave it out")
        assert method.beams is not None
        self.beams, self.settings = [], method.beams
        super().__init__(pair, method, sampling, *rest)

    def capacity(self, longest: int) -> int:
        return longest + self.sampling.max_new_tokens + 2 * self.most + 1

    def join(self, place: int) -> None:
        newest = self.rows[place].context[-1]
        fresh = RowBeams([Beam([], 0.0, draft_unread=[newest])])
        if place < len(self.beams):
            self.beams[place] = fresh
        else:
            self.beams.append(fresh)

    def drop(self, places: list[int]) -> None:
        self.beams = [self.beams[place] for place in places]

    def unread(self, session: Session, place: int) -> list[int]:
        """Only prompts are read as a trunk; what follows is read as nodes."""
        return self.rows[place].generation.prompt_ids[session.index.trunk[place] : -1] if self.busy[place] else []

    # -- a round --------------------------------------------------------------------------------------------------

    def draft_context(self, uniforms: Tensor) -> ForestContext:
        width = max(len(beams.living) for beams in self.beams)
        scores = [[b.score for b in beams.living] + [-torch.inf] * (width - len(beams.living)) for beams in self.beams]
        room = [self._layers_left(place) for place in range(len(self.rows))]
        most = self.method.proposer.max_layers(self.method.policy.limit)
        limits = [min(r, most) for r in room]
        unread, catch_up, newest = self._catch_up(width)
        return ForestContext(
            session=self.drafts[0] if self.drafts else None,
            unread=unread,
            catch_up=catch_up,
            newest=newest,
            scores=torch.tensor(scores, dtype=torch.float64).to(self.device),
            limits=tensor_on(self.device, limits),
            most=max(0, *limits),
            uniforms=uniforms[:, : self.most],
            sampling=self.draft_sampling,
            fit=self.pair.fit,
            end_ids=self.pair.end_ids or (),
            uniforms_of_collapse=uniforms[:, -1],
        )

    def _layers_left(self, place: int) -> int:
        """The most layers a place may draft: the target adds one, and texts and blocks have a length."""
        if not self.busy[place]:
            return 0
        beams = self.beams[place]
        room = self.sampling.max_new_tokens - len(beams.living[0].tokens) - 1
        after = self.settings.collapse_after if self.settings.by_block else None
        return room if after is None else min(room, after - beams.since - 1)

    def _catch_up(self, width: int) -> tuple[tuple[Tensor, list[int]], tuple[Tensor, Tensor], Tensor]:
        """What the draft has not read: the prompt, and the tail of each beam as nodes, shared parts once."""
        if not self.drafts:
            nothing = torch.zeros(len(self.rows), 0, dtype=torch.long, device=self.device)
            return (
                (nothing, [0] * len(self.rows)),
                (nothing, nothing),
                torch.zeros(len(self.rows), width, dtype=torch.long, device=self.device),
            )
        session = self.drafts[0]
        device = session.index.device
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        newest: list[list[int]] = []
        for place, beams in enumerate(self.beams):
            held, known, ids = session.index.num_nodes(place), {}, []
            row_tokens: list[int] = []
            row_parents: list[int] = []
            for beam in beams.living:
                at = beam.draft_node
                for i, token in enumerate(beam.draft_unread):
                    # Beams with the same unread path so far share it; the newest token is each beam's own.
                    key = (at, token) if i < len(beam.draft_unread) - 1 else None
                    if key is None or key not in known:
                        row_tokens.append(token)
                        row_parents.append(at)
                        known[key] = held + len(row_tokens) - 1
                    at = known[key]
                ids.append(at - held)
            tokens.append(row_tokens)
            parents.append(row_parents)
            newest.append(ids + [0] * (width - len(ids)))
        unread = right_aligned([self.unread(session, place) for place in range(len(self.rows))], device)
        count = max(map(len, tokens))
        nodes = tensor_on(device, [row + [0] * (count - len(row)) for row in tokens])
        above = tensor_on(device, [row + [-1] * (count - len(row)) for row in parents])
        session.reserve(max(session.lengths) + unread[0].shape[1] + count + self.most)
        return unread, (nodes, above), tensor_on(device, newest)

    def score(self, proposal: Forest) -> Tensor:
        """Logits at the block [B, W + N, V], one forward."""
        width = max(len(beams.living) for beams in self.beams)
        device = self.target.index.device
        newest, nodes = [], []
        for row, beams in zip(self.rows, self.beams, strict=True):
            spare = width - len(beams.living)
            newest.append([b.tokens[-1] if b.tokens else row.context[-1] for b in beams.living] + [0] * spare)
            nodes.append([b.node for b in beams.living] + [-1] * spare)
        unread, counts = right_aligned([self.unread(self.target, place) for place in range(len(self.rows))], device)
        self.held = [self.target.index.num_nodes(place) for place in range(len(self.rows))]
        parents = torch.cat(
            [tensor_on(device, nodes), proposal.parents.to(device) + tensor_on(device, self.held)[:, None]], 1
        )
        block = torch.cat([tensor_on(device, newest), proposal.tokens.to(device)], 1)
        self.target.reserve(max(self.target.lengths) + unread.shape[1] + block.shape[1])
        tokens = torch.cat([unread, block], 1)
        return self.target.extend(tokens, counts=counts, parents=parents, last=block.shape[1]).logits

    def verify(self, proposal: Forest, scores: Tensor, uniforms: Tensor) -> BeamVerdict:
        end_ids = self.pair.end_ids or ()
        room = [self._room(beams) for beams in self.beams]
        rule = self.method.rule
        assert isinstance(rule, LayerRule)
        return judge(
            rule, self.settings, proposal, scores, uniforms, self.sampling, end_ids,
            tensor_on(self.device, room),
        )  # fmt: skip

    # -- after the verdict ----------------------------------------------------------------------------------------

    def commit(
        self, context: ForestContext, proposal: Forest, verdict: BeamVerdict, started: float, drafted: float
    ) -> None:
        """The beams of the layer the round ended in live on; those that ended are finished."""
        facts = _Facts(proposal, verdict, context.uniforms_of_collapse.tolist())
        seconds = (drafted - started, perf_counter() - drafted)
        for place, row in enumerate(self.rows):
            if not self.busy[place]:
                continue
            if not facts.valid[place]:
                row.generation.error = (
                    f"prompt {row.generation.index}: the models' laws hold values that are not numbers"
                )
                self._settle(place)
                self.end(place, "error")
                continue
            self._advance(place, facts, seconds)
            if self._done(self.beams[place]):
                self._finish(place)
        self._forget(facts)

    def _advance(self, place: int, facts: _Facts, seconds: tuple[float, float]) -> None:
        """Replace the row's living beams by those of the layer that its round ended in."""
        beams, ends = self.beams[place], set(self.pair.end_ids or ())
        old, beams.living = beams.living, []
        for parent, token, score, last in facts.beams(place, self.settings, ends):
            tokens = [*facts.path(place, parent, old), token]
            if token in ends:
                beams.finished.append(Beam(tokens, score))
            elif last:
                node, unread = facts.draft_place(place, parent, old)
                beams.living.append(Beam(tokens, score, self.held[place] + parent, node, [*unread, token]))
        widths = facts.widths(place, self.settings.num_beams)
        length, num_drafted, num_calls = facts.length[place], facts.num_drafted[place], facts.num_calls[place]
        bonus = length == facts.num_layers[place]
        self.rows[place].generation.rounds.append(
            Round(num_drafted, num_calls, length, len(widths), bonus, *seconds, widths=widths)
        )
        beams.since += len(widths)
        if self._collapses(beams):
            self._collapse(beams, facts.uniforms[place])

    def _collapses(self, beams: RowBeams) -> bool:
        after = self.settings.collapse_after
        if after is None:
            return False
        at_limit = bool(beams.living) and len(beams.living[0].tokens) >= self.sampling.max_new_tokens
        return beams.since >= after or not beams.living or at_limit

    def _collapse(self, beams: RowBeams, uniform: float) -> None:
        """Keep one beam."""
        beams.since = 0
        if self.settings.collapse_to == "best":
            beams.living = sorted(beams.living, key=lambda beam: -beam.mean)[:1]
            return
        choices = beams.living + beams.finished
        gains = torch.tensor([beam.score - beams.score_then for beam in choices], dtype=torch.float64)
        chosen = choices[int(draw(warp(gains, self.sampling), torch.tensor(uniform, dtype=torch.float64)))]
        beams.score_then = chosen.score
        lives = any(chosen is beam for beam in beams.living)
        beams.living, beams.finished = ([chosen], []) if lives else ([], [chosen])

    def _done(self, beams: RowBeams) -> bool:
        if not beams.living or len(beams.living[0].tokens) >= self.sampling.max_new_tokens:
            return True
        return self._room(beams) <= 0

    def _room(self, beams: RowBeams) -> int:
        """How many more beams may end before the row is done; blocks of MTJD end with their last layer only."""
        if self.settings.by_block:
            return 2**31
        return self.settings.num_beams - len(beams.finished)

    def _finish(self, place: int) -> None:
        self._settle(place)
        generation = self.rows[place].generation
        self.end(place, "end" if generation.token_ids[-1] in (self.pair.end_ids or ()) else "length")

    def _settle(self, place: int) -> None:
        """The row's beams by score, the best one as its text; what the rounds produced beyond it was in vain."""
        beams, generation = self.beams[place], self.rows[place].generation
        best = sorted(beams.finished + beams.living, key=lambda beam: -beam.mean)[: self.settings.num_beams]
        generation.beams = [beam.tokens for beam in best]
        generation.scores = [beam.mean for beam in best]
        generation.token_ids = list(best[0].tokens)
        left = len(generation.token_ids)
        for i, r in enumerate(generation.rounds):
            produced = min(r.num_produced, left)
            generation.rounds[i] = replace(r, num_produced=produced, num_accepted=min(r.num_accepted, produced))
            left -= produced

    def _forget(self, facts: _Facts) -> None:
        """Leave in the caches what living beams descend from."""
        for place, row in enumerate(self.rows):
            if not self.busy[place]:  # goes on as a text of one token that nobody reads
                row.context = row.context[-1:]
                self.beams[place] = RowBeams([Beam([], 0.0, draft_unread=row.context)])
        width = max(len(beams.living) for beams in self.beams)
        for session, name in ((self.target, "node"), *((draft, "draft_node") for draft in self.drafts)):
            ids = [[getattr(beam, name) for beam in beams.living] for beams in self.beams]
            padded = [row + row[:1] * (width - len(row)) for row in ids]
            kept = session.keep(tensor_on(session.index.device, padded)).tolist()
            for beams, row in zip(self.beams, kept, strict=True):
                for beam, node in zip(beams.living, row, strict=False):
                    setattr(beam, name, node)
            for place in range(len(self.rows)):
                if not self.busy[place]:
                    session.reset(place)


class _Facts:
    """A round on the host, as lists. Block index x: beam x of the W before the round, or node x - W."""

    def __init__(self, forest: Forest, verdict: BeamVerdict, uniforms: list[float]):
        self.num_before = forest.num_before
        self.num_candidates = forest.pairs[0].shape[1] if forest.pairs else 0
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
            sum(layer[place] for layer in drafted[:layers]) for place, layers in enumerate(self.num_layers)
        ]
        self.uniforms = uniforms

    def nodes(self, place: int, layer: int) -> list[int]:
        """Nodes of a layer that are beams."""
        first = layer * self.num_candidates
        return [
            n for n in range(first, min(first + self.num_candidates, len(self.tokens[place]))) if self.kept[place][n]
        ]

    def beams(self, place: int, settings: Settings, ends: set[int]) -> Iterator[tuple[int, int, float, bool]]:
        """Beams that end or live on: parent, token, score, and whether they are of the last layer."""
        done = not self.num_extra[place] and not self.nodes(place, self.length[place])
        for layer in range(self.length[place] + 1):
            last = layer == self.length[place] - done
            for n in self.nodes(place, layer):
                yield self.parents[place][n], self.tokens[place][n], self.node_scores[place][n], last
        extras = list(zip(self.extra_parents[place], self.extra_tokens[place], self.extra_scores[place], strict=True))
        extras = extras[: self.num_extra[place]]
        if settings.selection == "top":
            extras = _searched(extras, settings.num_beams, ends)
        yield from ((parent, token, score, True) for parent, token, score in extras)

    def widths(self, place: int, num_beams: int) -> tuple[int, ...]:
        """Beams of each layer, ended ones included."""
        passed = [len(self.nodes(place, layer)) for layer in range(self.length[place])]
        last = len(self.nodes(place, self.length[place])) + min(self.num_extra[place], num_beams)
        return tuple(passed + [last] * (last > 0))

    def path(self, place: int, index: int, old: list[Beam]) -> list[int]:
        """Response tokens up to a block index."""
        if index < self.num_before:
            return old[index].tokens
        n = index - self.num_before
        return [*self.path(place, self.parents[place][n], old), self.tokens[place][n]]

    def draft_place(self, place: int, index: int, old: list[Beam]) -> tuple[int, list[int]]:
        """The draft's node nearest above a block index, and the tokens between, the index's own included."""
        if index < self.num_before:
            beam = old[index]
            return (self.newest_ids[place][index], []) if self.draft_read else (beam.draft_node, beam.draft_unread)
        n = index - self.num_before
        if n < self.num_read:
            return self.node_ids[place][n], []
        node, unread = self.draft_place(place, self.parents[place][n], old)
        return node, [*unread, self.tokens[place][n]]


def _searched(pairs: list[tuple[int, int, float]], num_beams: int, ends: set[int]) -> list[tuple[int, int, float]]:
    """Beam search: the first W pairs that do not end, and those that end among the first W pairs."""
    found, living = [], 0
    for rank, (parent, token, score) in enumerate(pairs):
        if token in ends:
            if rank < num_beams:
                found.append((parent, token, score))
        elif living < num_beams:
            found.append((parent, token, score))
            living += 1
    return found
