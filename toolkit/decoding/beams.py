"""Several texts per row: beams, as the leaves of one tree per cache.

A row's beams share their prefixes in the cache; the prefix that all of them share is the context. Each beam's newest token
has not been read yet: it goes to the target together with the next proposal.

A beam ends with an end of text, or with the token that completes a stop string; both count alike. Drafts do not look for
stop strings: a token drafted after one has p = 0.

The weights of beams define the distribution. p_beam is a distribution over the living beams and their next tokens, in
proportion to the target's likelihood of the whole response so far. A beam that ends has no mass in p_beam from then on. It
waits among the finished ones with its score, log-likelihood / length. A row is done when no beam lives, when enough
of its beams have finished, or at the length limit. Living beams then count as finished. The row keeps the beams with
the best scores, and the best one is its text.

Shapes: B batch slots, W living beams at most, N nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from toolkit.decoding.batch import Batch, Clock, Job, Row, right_aligned
from toolkit.decoding.beam_round import Beam, BeamRound
from toolkit.decoding.beam_verdict import BeamVerdict, verify_forest
from toolkit.decoding.method import Method
from toolkit.decoding.proposers.forest import Forest, ForestContext, ForestProposer
from toolkit.decoding.text_order import TextOrder
from toolkit.engine import Session
from toolkit.engine.device import tensor_on
from toolkit.engine.engine import Sessions
from toolkit.sampling import Sampling, draw, warp
from toolkit.stopping.base import State
from toolkit.types import Round
from toolkit.verification import LayerRule

NEVER = 2**31  # more beams than can end


@dataclass
class RowBeams:
    """The beams of one row: living, finished, the beams of each layer since the last collapse, score and length then."""

    living: list[Beam]
    finished: list[Beam] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    score_then: float = 0.0
    length_then: int = 0

    @property
    def since(self) -> int:
        """Layers since the last collapse."""
        return len(self.widths)


class BeamBatch(Batch[ForestContext, Forest, BeamVerdict]):
    """Rows whose context is several texts."""

    def __init__(self, job: Job, sessions: Sessions, rows: list[Row]):
        super().__init__(job, sessions, rows)
        proposer, rule, settings = job.method.proposer, job.method.rule, job.method.beams
        assert isinstance(proposer, ForestProposer) and isinstance(rule, LayerRule)  # checked by Method
        assert settings is not None
        self.proposer, self.rule, self.settings = proposer, rule, settings
        self.beams = [_fresh(row.context[-1]) for row in rows]

    @staticmethod
    def capacity(method: Method, sampling: Sampling, longest: int) -> int:
        return sampling.longest_text(longest) + 2 * method.max_nodes + 1

    def join(self, slot: int) -> None:
        self.beams[slot] = _fresh(self.rows[slot].context[-1])

    def select(self, slots: list[int]) -> None:
        self.beams = [self.beams[slot] for slot in slots]

    def unread(self, session: Session, slot: int) -> list[int]:
        """Tokens of the prompt that a cache lacks: only prompts are read as a context, what follows is read as nodes."""
        if not self.busy[slot]:
            return []
        return self.rows[slot].generation.prompt_ids[session.index.context_lengths[slot] : -1]

    # -- a round --------------------------------------------------------------------------------------------------

    def context(self, uniforms: Tensor) -> ForestContext:
        width = max(len(beams.living) for beams in self.beams)
        scores = [[b.score for b in beams.living] + [-torch.inf] * (width - len(beams.living)) for beams in self.beams]
        by_draft = [[b.draft_score for b in beams.living] + [0.0] * (width - len(beams.living)) for beams in self.beams]
        most = self.proposer.max_layers(self.method.limit)
        limits = [min(self._layers_left(slot), most) for slot in range(len(self.rows))]
        unread, catch_up, newest = self._catch_up(width)
        return ForestContext(
            session=self.drafts[0] if self.drafts else None,
            unread=unread,
            catch_up=catch_up,
            newest=newest,
            held=[self.target.index.num_nodes(slot) for slot in range(len(self.rows))],
            scores=torch.tensor(scores, dtype=torch.float64, device=self.device),
            draft_scores=torch.tensor(by_draft, dtype=torch.float64, device=self.device),
            sequences=TextOrder.of(tensor_on(self.device, [_codes(beams.living, width) for beams in self.beams])),
            limits=tensor_on(self.device, limits),
            most=max(0, *limits),
            uniforms=uniforms[:, : self.most],
            sampling=self.draft_sampling,
            fit=self.pair.fit,
            end_ids=self.end_ids,
            uniforms_of_collapse=uniforms[:, -1],
        )

    def propose(self, context: ForestContext) -> tuple[Forest, State]:
        return self.proposer.propose(context, self.method.policy, self.state)

    def score(self, context: ForestContext, proposal: Forest) -> Tensor:
        """Logits at the block [B, W + N, V], from one forward pass."""
        width = proposal.num_before
        device = self.target.index.device
        newest, nodes = [], []
        for row, beams in zip(self.rows, self.beams, strict=True):
            spare = width - len(beams.living)
            newest.append([b.tokens[-1] if b.tokens else row.context[-1] for b in beams.living] + [0] * spare)
            nodes.append([b.node for b in beams.living] + [-1] * spare)
        unread, counts = right_aligned([self.unread(self.target, slot) for slot in range(len(self.rows))], device)
        below = proposal.parents.to(device) + tensor_on(device, context.held)[:, None]
        parents = torch.cat([tensor_on(device, nodes), below], 1)
        block = torch.cat([tensor_on(device, newest), proposal.tokens.to(device)], 1)
        block = torch.where(proposal.counts_in_block.to(device), block, block[:, :1])  # what is read in any case
        self.target.reserve(max(self.target.lengths) + unread.shape[1] + block.shape[1])
        tokens = torch.cat([unread, block], 1)
        return self.target.extend(tokens, counts=counts, parents=parents, last=block.shape[1]).logits

    def verify(self, context: ForestContext, proposal: Forest, scores: Tensor, uniforms: Tensor) -> BeamVerdict:
        room = tensor_on(self.device, [self._room(beams) for beams in self.beams])
        arguments = (self.rule, self.settings, proposal, scores, uniforms, self.sampling, self.end_ids, room)
        if not self.has_stops:
            return verify_forest(*arguments)
        stopped = tensor_on(self.device, self._stopped(proposal))
        verdict = verify_forest(*arguments, stopped)
        looked_at, available = verdict.extra_tokens.shape[1], scores.shape[1] * scores.shape[2]
        while self.settings.selection == "top" and looked_at < available and self._lacks_beams(proposal, verdict):
            looked_at = min(2 * looked_at, available)
            verdict = verify_forest(*arguments, stopped, looked_at)
        return verdict

    # -- what ends a beam -----------------------------------------------------------------------------------------

    def _ends(self, slot: int, tokens: list[int]) -> bool:
        """Whether a response is over: its newest token is an end of text, or has completed a stop string."""
        return tokens[-1] in self.end_ids or self._stops(slot, tokens)

    def _stops(self, slot: int, tokens: list[int]) -> bool:
        return self.has_stops and self.stop_position(self.rows[slot].generation, tokens) is not None

    def _stopped(self, forest: Forest) -> list[list[bool]]:
        """Nodes of each slot [B, N] whose text holds a stop string."""
        tokens, parents = forest.tokens.tolist(), forest.parents.tolist()
        stopped = []
        for slot, beams in enumerate(self.beams):
            sequences = [beam.tokens for beam in beams.living]
            sequences += [[]] * (forest.num_before - len(sequences))
            for token, parent in zip(tokens[slot], parents[slot], strict=True):
                sequences.append([*sequences[parent], token])
            nodes = sequences[forest.num_before :]
            stopped.append([self.busy[slot] and self._stops(slot, text) for text in nodes])
        return stopped

    def _lacks_beams(self, forest: Forest, verdict: BeamVerdict) -> bool:
        """Whether beam search has looked at too few pairs: those that stop leave fewer living beams than there could be."""
        facts, most = BeamRound(forest, verdict), verdict.extra_tokens.shape[1]
        for slot in range(len(self.rows)):
            old, pairs = self.beams[slot].living, facts.extras(slot)
            if not self.busy[slot] or not facts.valid[slot] or len(pairs) < most:
                continue
            sequences = ([*facts.path(slot, parent, old), token] for parent, token, _ in pairs)
            if sum(not self._ends(slot, text) for text in sequences) < self.settings.num_beams:
                return True
        return False

    # -- what the draft reads -------------------------------------------------------------------------------------

    def _layers_left(self, slot: int) -> int:
        """The most layers a slot may draft: the target adds one, and texts and blocks have a length."""
        if not self.busy[slot]:
            return 0
        beams = self.beams[slot]
        produced = len(beams.living[0].tokens)
        length = len(self.rows[slot].generation.prompt_ids) + produced
        room = max(0, min(self._limit(slot) - produced - 1, self.draft_room(length)))
        after = self.settings.collapse_after if self.settings.by_block else None
        return room if after is None else min(room, after - beams.since - 1)

    def _catch_up(self, width: int) -> tuple[tuple[Tensor, list[int]], tuple[Tensor, Tensor], Tensor]:
        """What the draft has not read: the prompt, and the tail of each beam as nodes, shared parts once.

        Without a draft model there is nothing to read.
        """
        if not self.drafts:
            num_rows = len(self.rows)
            nothing = torch.zeros(num_rows, 0, dtype=torch.long, device=self.device)
            newest = torch.zeros(num_rows, width, dtype=torch.long, device=self.device)
            return (nothing, [0] * num_rows), (nothing, nothing), newest
        session = self.drafts[0]
        device = session.index.device
        tails = [_tails(beams.living, session.index.num_nodes(slot)) for slot, beams in enumerate(self.beams)]
        unread = right_aligned([self.unread(session, slot) for slot in range(len(self.rows))], device)
        count = max(len(tail.tokens) for tail in tails)
        nodes = tensor_on(device, [tail.tokens + [0] * (count - len(tail.tokens)) for tail in tails])
        above = tensor_on(device, [tail.parents + [-1] * (count - len(tail.parents)) for tail in tails])
        newest = tensor_on(device, [tail.newest + [0] * (width - len(tail.newest)) for tail in tails])
        session.reserve(max(session.lengths) + unread[0].shape[1] + count + self.most)
        return unread, (nodes, above), newest

    # -- after the verdict ----------------------------------------------------------------------------------------

    def commit(self, context: ForestContext, proposal: Forest, verdict: BeamVerdict, clock: Clock) -> None:
        """Let the beams of the layer that the round ended in live on; those that ended are finished."""
        facts, spoilt = BeamRound(proposal, verdict), self.spoilt().tolist()
        uniforms = context.uniforms_of_collapse.tolist()
        seconds = clock.seconds()
        for slot in range(len(self.rows)):
            if not self.busy[slot]:
                continue
            if not facts.valid[slot]:
                self._settle(slot)
                self.fail(slot)
                continue
            self._advance(slot, facts, context.held[slot])
            self._record(slot, facts, seconds)
            self._collapse(slot, uniforms[slot])
            beams = self.beams[slot]
            if self._at_limit(slot) or not beams.living or self._room(beams) <= 0:
                self._settle(slot)
                token_ids = self.rows[slot].generation.token_ids
                ended = "end" if token_ids[-1] in self.end_ids else "length"
                self.end(slot, "stop" if self._stops(slot, token_ids) else ended)
        self._forget()
        self.clear(spoilt)

    def _advance(self, slot: int, facts: BeamRound, held: int) -> None:
        """Replace the row's living beams by those of the layer that its round ended in."""
        beams = self.beams[slot]
        old, beams.living = beams.living, []

        def ends(parent: int, token: int) -> bool:
            return self._ends(slot, [*facts.path(slot, parent, old), token])

        for parent, token, score, last in facts.beams(slot, self.settings, ends):
            tokens = [*facts.path(slot, parent, old), token]
            if ends(parent, token):
                beams.finished.append(Beam(tokens, score))
            elif last:
                node, unread = facts.draft_position(slot, parent, old)
                draft_score = facts.draft_score(slot, parent, token, old)
                beams.living.append(Beam(tokens, score, held + parent, node, [*unread, token], draft_score))

    def _record(self, slot: int, facts: BeamRound, seconds: tuple[float, float]) -> None:
        """Note the round: its layers, counts and seconds."""
        widths = facts.widths(slot, self.settings.num_beams)
        length, num_drafted, num_calls = facts.length[slot], facts.num_drafted[slot], facts.num_calls[slot]
        bonus = length == facts.num_layers[slot]
        self.rows[slot].generation.rounds.append(
            Round(num_drafted, num_calls, length, len(widths), bonus, *seconds, widths=widths)
        )
        self.beams[slot].widths.extend(widths)

    def _limit(self, slot: int) -> int:
        """The most tokens of a slot's response."""
        return self.sampling.room(len(self.rows[slot].generation.prompt_ids))

    def _at_limit(self, slot: int) -> bool:
        """Whether the living beams of a slot have the most tokens that they may have."""
        living = self.beams[slot].living
        return bool(living) and len(living[0].tokens) >= self._limit(slot)

    def _collapse(self, slot: int, uniform: float) -> None:
        """Keep one beam, if the settings ask for it after this layer."""
        beams, after = self.beams[slot], self.settings.collapse_after
        if after is None or not (beams.since >= after or not beams.living or self._at_limit(slot)):
            return
        widths, beams.widths = beams.widths, []
        if self.settings.collapse_to == "best":
            beams.living = sorted(beams.living, key=_best_first)[:1]
            return
        choices = sorted(beams.living + beams.finished, key=lambda beam: beam.tokens)
        if self.settings.collapse_to == "draw":
            layers = [len(beam.tokens) - beams.length_then for beam in choices]
            probs = torch.tensor(_shares(layers, widths), dtype=torch.float64, device="cpu")
        else:
            gains = [beam.score - beams.score_then for beam in choices]
            probs = warp(torch.tensor(gains, dtype=torch.float64, device="cpu"), self.sampling, exactly=True)
        chosen = choices[int(draw(probs, torch.tensor(uniform, dtype=torch.float64, device="cpu")))]
        beams.score_then, beams.length_then = chosen.score, len(chosen.tokens)
        lives = any(chosen is beam for beam in beams.living)
        beams.living, beams.finished = ([chosen], []) if lives else ([], [chosen])

    def _room(self, beams: RowBeams) -> int:
        """How many more beams may end before the row is done; blocks of MTJD end with their last layer only."""
        return NEVER if self.settings.by_block else self.settings.num_beams - len(beams.finished)

    def _settle(self, slot: int) -> None:
        """The row's beams by score, the best one as its text; rounds count as produced what that text holds."""
        beams, generation = self.beams[slot], self.rows[slot].generation
        best = sorted(beams.finished + beams.living, key=_best_first)[: self.settings.num_beams]
        generation.beams = [beam.tokens for beam in best]
        generation.scores = [beam.mean for beam in best]
        generation.token_ids = list(best[0].tokens)
        left = len(generation.token_ids)
        for i, r in enumerate(generation.rounds):
            produced = min(r.num_produced, left)
            generation.rounds[i] = replace(r, num_produced=produced, num_accepted=min(r.num_accepted, produced))
            left -= produced

    def _forget(self) -> None:
        """Leave in the caches what living beams descend from."""
        for slot, row in enumerate(self.rows):
            if not self.busy[slot]:  # the slot decodes one token on, which is thrown away
                row.context = row.context[-1:]
                self.beams[slot] = _fresh(row.context[-1])
        new_ids = self._keep(self.target, [[beam.node for beam in beams.living] for beams in self.beams])
        for beams, nodes in zip(self.beams, new_ids, strict=True):
            for beam, node in zip(beams.living, nodes, strict=False):
                beam.node = node
        for draft in self.drafts:
            new_ids = self._keep(draft, [[beam.draft_node for beam in beams.living] for beams in self.beams])
            for beams, nodes in zip(self.beams, new_ids, strict=True):
                for beam, node in zip(beams.living, nodes, strict=False):
                    beam.draft_node = node

    def _keep(self, session: Session, ids: list[list[int]]) -> list[list[int]]:
        """Keep these nodes of each slot and what they descend from; returns their new ids, padded to one width."""
        width = max(map(len, ids))
        padded = [row + row[:1] * (width - len(row)) for row in ids]
        new_ids: list[list[int]] = session.keep(tensor_on(session.index.device, padded)).tolist()
        for slot in range(len(self.rows)):
            if not self.busy[slot]:
                session.reset(slot)
        return new_ids


def _codes(living: list[Beam], width: int) -> list[int]:
    """Numbers that compare as the texts of a row's beams do, padded to `width` with larger ones."""
    rank = {text: i for i, text in enumerate(sorted({tuple(beam.tokens) for beam in living}))}
    return [rank[tuple(beam.tokens)] for beam in living] + list(range(len(living), width))


def _best_first(beam: Beam) -> tuple[float, list[int]]:
    """Order beams by score, equal ones by their tokens."""
    return -beam.mean, beam.tokens


def _shares(layers: list[int], widths: list[int]) -> list[float]:
    """The probability of each beam of a block, from the layer that it has reached.

    In every layer one beam is drawn, each with the same probability, until the drawn one has ended or the block has.
    widths: beams of each layer, ended ones included; those end with their layer's share.
    """
    reached, shares = 1.0, [0.0] * len(layers)
    for layer, width in enumerate(widths, start=1):
        members = [i for i, of in enumerate(layers) if of == layer]
        for i in members:
            shares[i] = reached / width
        reached *= 1 - len(members) / width
    return shares


def _fresh(newest: int) -> RowBeams:
    """The one beam a row starts from; `newest` is the prompt's last token."""
    return RowBeams([Beam([], 0.0, draft_unread=[newest])])


@dataclass
class _Tails:
    """What the draft has not read of one row's beams, as nodes: tokens, parents, and which is each beam's newest."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    newest: list[int] = field(default_factory=list)


def _tails(living: list[Beam], held: int) -> _Tails:
    """The unread tails of beams; `held` nodes are in the draft's cache. Shared paths are read once, newest tokens never."""
    tails, node_of = _Tails(), dict[tuple[int, int], int]()
    for beam in living:
        *shared, newest = beam.draft_unread
        at = beam.draft_node
        for token in shared:
            if (at, token) not in node_of:
                node_of[at, token] = held + len(tails.tokens)
                tails.tokens.append(token)
                tails.parents.append(at)
            at = node_of[at, token]
        tails.newest.append(len(tails.tokens))
        tails.tokens.append(newest)
        tails.parents.append(at)
    return tails
