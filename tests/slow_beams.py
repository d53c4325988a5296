"""A round of speculative beams in slow motion: every draft, and every way its tests and draws can fall.

Paper: Dynamic-Width Speculative Beam Decoding (arXiv:2409.16560), Algorithm 1, written down in probabilities instead of
logarithms. A **path** is an input beam and the tokens after it, as one number: beam * V^d + the tokens in base V. A **code**
is a beam of the layer before, by its number, and a token: number * V + token. A **history** is, per layer, the codes of
its output beams in their order: kept candidates, one beam from the residual, the rest from p.

Shapes: n input beams, W_S draft beams, D drafts, R cells, M pairs of a layer, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from toolkit.sampling import Sampling, warp
from toolkit.verification.width import layer_width

History = tuple[tuple[int, ...], ...]
EDGE = 1e-12  # how far from the ends of its cell a uniform is placed
FAULTS = ("q subtracted twice", "q renormalised for the test alone", "width from the candidates with a living parent")


@dataclass(frozen=True)
class Tables:
    """weights [n] of the input beams by the target; p and q after every path, per depth d [n V^d, V]."""

    weights: Tensor
    p: list[Tensor]
    q: list[Tensor]

    @staticmethod
    def random(vocab_size: int, num_inputs: int, depth: int, seed: int, zeros: bool = False) -> Tables:
        """In float64; with `zeros`, one token of about every other distribution is impossible."""
        generator = torch.Generator().manual_seed(seed)

        def distribution(num_rows: int, size: int) -> Tensor:
            values = torch.rand(num_rows, size, generator=generator, dtype=torch.float64) ** 2 + 0.02
            if zeros:
                at = torch.randint(size, (num_rows, 1), generator=generator)
                lost = torch.rand(num_rows, 1, generator=generator) < 0.5
                values = torch.where(lost, values.scatter(1, at, 0.0), values)
            return values / values.sum(1, keepdim=True)

        sizes = [num_inputs * vocab_size**d for d in range(depth)]
        weights = torch.rand(num_inputs, generator=generator, dtype=torch.float64) + 0.1
        return Tables(
            weights,
            [distribution(size, vocab_size) for size in sizes],
            [distribution(size, vocab_size) for size in sizes],
        )


@dataclass(frozen=True)
class Drafts:
    """Drafts that share their distributions: all of one layer, or all with the same first layer.

    distributions    per layer q [M]
    pairs   per layer the candidates [D, W_S]; paths [D, W_S] theirs
    probability  [D]
    """

    distributions: list[Tensor]
    pairs: list[Tensor]
    paths: list[Tensor]
    prob: Tensor


@dataclass
class Cells:
    """Boxes of uniforms within which a round goes one way.

    draft [R], probability [R]   of the draft and the box together
    low, high [R, 3 m + 1]  uniforms at its ends, in the layout of every rule
    kept [R, N]             candidates kept
    length [R]              layers passed
    width, ended [R]        of the last layer; beams that ended so far
    num_extra [R], extra [R, W]   pairs that were drawn on top, -1: none
    """

    draft: Tensor
    prob: Tensor
    low: Tensor
    high: Tensor
    kept: Tensor
    length: Tensor
    width: Tensor
    ended: Tensor
    num_extra: Tensor
    extra: Tensor

    def take(self, index: Tensor) -> Cells:
        return Cells(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def split(self, slot: int, probs: Tensor) -> tuple[Cells, Tensor, Tensor]:
        """Cut every box along one uniform, by probabilities [R, C]: the boxes, which one each is of, and its place among C."""
        row, cell = (probs > 4 * EDGE).nonzero(as_tuple=True)
        above, new = probs.cumsum(1)[row, cell], self.take(row)
        size = probs[row, cell]
        new.prob *= size
        new.low[:, slot], new.high[:, slot] = above - size + EDGE, above - EDGE
        return new, row, cell

    @staticmethod
    def joined(parts: list[Cells]) -> Cells:
        return Cells(**{f.name: torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Cells)})


@dataclass(frozen=True)
class SlowRound:
    """num_layers gamma, num_drafts W_S, num_beams W_L (the most, with a threshold), min_width 1.

    room   the row is done once so many beams have ended
    fault  one of FAULTS, for negative controls
    """

    tables: Tables
    num_layers: int
    num_drafts: int
    num_beams: int
    threshold: float | None = None
    end: int | None = None
    room: int = 2**31
    sampling: Sampling = field(default_factory=Sampling)
    fault: str = ""

    @property
    def vocab_size(self) -> int:
        return self.tables.p[0].shape[1]

    @property
    def num_inputs(self) -> int:
        return len(self.tables.weights)

    @cached_property
    def weights(self) -> list[Tensor]:
        """Likelihoods of all paths by the target, per depth [n V^d]."""
        likelihoods = [self.tables.weights]
        for table in self.tables.p:
            likelihoods.append((likelihoods[-1].unsqueeze(1) * table).flatten())
        return likelihoods

    def pair_distribution(self, weights: Tensor, table: Tensor) -> Tensor:
        """The distribution over beams x tokens [..., M] from weights [..., n] and the distributions after the beams
        [..., n, V]; of equal pairs at the edge of top-k the first ones are kept.
        """
        pairs = (weights.unsqueeze(-1) * table).flatten(-2).log()
        order = pairs.sort(dim=-1, descending=True, stable=True).indices
        cut = order[..., self.sampling.top_k or pairs.shape[-1] :]
        return warp(pairs.scatter(-1, cut, -torch.inf), self.sampling)

    def ends(self, tokens: Tensor) -> Tensor:
        return torch.zeros_like(tokens, dtype=torch.bool) if self.end is None else tokens % self.vocab_size == self.end

    # -- drafting -------------------------------------------------------------------------------------------------

    def drafts(self) -> Iterator[Drafts]:
        """Every draft: i.i.d. candidates of q, in which a beam that ended has no mass."""
        if not self.num_layers:
            yield Drafts([], [], [], torch.ones(1, dtype=torch.float64))
            return
        q = self.pair_distribution(self.tables.weights, self.tables.q[0])
        firsts = self._tuples(q)
        if self.num_layers == 1:
            yield Drafts([q], [firsts], [firsts], q[firsts].prod(1))
            return
        for first in firsts:
            drafts = Drafts([q], [first.unsqueeze(0)], [first.unsqueeze(0)], q[first].prod().unsqueeze(0))
            weights = (self.tables.weights.unsqueeze(1) * self.tables.q[0]).flatten()[first]
            weights = weights.masked_fill(self.ends(first), 0.0)
            if not bool(weights.any()):
                yield drafts
                continue
            following = self.pair_distribution(weights, self.tables.q[1][first])
            second = self._tuples(following)
            paths = first[second // self.vocab_size] * self.vocab_size + second % self.vocab_size
            repeated, prob = first.expand_as(second), drafts.prob * following[second].prod(1)
            yield Drafts([q, following], [repeated, second], [repeated, paths], prob)

    def _tuples(self, distribution: Tensor) -> Tensor:
        """[T, W_S] of pairs that q can draw."""
        return torch.cartesian_prod(*[distribution.nonzero().squeeze(1)] * self.num_drafts).reshape(-1, self.num_drafts)

    # -- the verdict ----------------------------------------------------------------------------------------------

    def cells(self, drafts: Drafts) -> Cells:
        """Every way the round can go after these drafts; their probabilities sum to the drafts'."""
        cells, finished = self._start(drafts), []
        paths = torch.arange(self.num_inputs).expand(len(cells.draft), -1)
        weights = self.tables.weights.expand_as(paths)
        for layer in range(len(drafts.pairs)):
            p = self.pair_distribution(weights, self.tables.p[layer][paths])
            cells, p, left, num_kept = self._walk(cells, p, drafts, layer)
            passes = num_kept == cells.width
            failed = cells.take(~passes)
            finished.append(self._filled(failed, left[~passes], p[~passes], (failed.width - num_kept[~passes])))
            cells = cells.take(passes)
            cells.length += 1
            paths = drafts.paths[layer][cells.draft]
            kept, ends = cells.kept[:, layer * self.num_drafts :][:, : self.num_drafts], self.ends(paths)
            cells.ended += (kept & ends).sum(1)
            goes_on = (kept & ~ends).any(1) & (cells.ended < self.room)
            finished.append(cells.take(~goes_on))
            weights = self.weights[layer + 1][paths].masked_fill(~kept | ends, 0.0)
            cells, paths, weights = cells.take(goes_on), paths[goes_on], weights[goes_on]
        if len(cells.draft):
            p = self.pair_distribution(weights, self.tables.p[len(drafts.pairs)][paths])
            finished.append(self._filled(cells, p, p, cells.width))
        return Cells.joined(finished)

    def _start(self, drafts: Drafts) -> Cells:
        num, most = len(drafts.prob), max(self.num_layers, 1) * self.num_drafts
        zeros = torch.zeros(num, dtype=torch.long)
        low = torch.zeros(num, 3 * most + 1, dtype=torch.float64)
        return Cells(
            draft=torch.arange(num),
            prob=drafts.prob.clone(),
            low=low,
            high=low + (1 - EDGE),
            kept=torch.zeros(num, len(drafts.pairs) * self.num_drafts, dtype=torch.bool),
            length=zeros,
            width=zeros + self.num_beams,
            ended=zeros,
            num_extra=zeros,
            extra=torch.full((num, self.num_beams), -1),
        )

    def _walk(self, cells: Cells, p: Tensor, drafts: Drafts, layer: int) -> tuple[Cells, Tensor, Tensor, Tensor]:
        """One layer: the boxes, and p, p' and the number kept in each of them."""
        cells = replace(cells, width=self._width(p, drafts, layer, cells.draft))
        most = (cells.low.shape[1] - 1) // 3
        left, num_kept = p, torch.zeros_like(cells.width)
        for k in range(self.num_drafts):
            node, q = layer * self.num_drafts + k, drafts.distributions[layer].expand_as(p)
            tested = num_kept < cells.width
            token = drafts.pairs[layer][cells.draft, k].unsqueeze(1)
            prob = self._acceptance(p, left, q).gather(1, token).squeeze(1)
            prob = torch.where(tested, prob, 0.0)
            reduced = torch.where(tested.unsqueeze(1), self._reduced(left, q), left)
            cells, row, cell = cells.split(most + node, torch.stack([prob, 1 - prob], 1))
            accepted = cell == 0
            p = p[row]
            left = torch.where(accepted.unsqueeze(1), p, reduced[row])
            num_kept = num_kept[row] + accepted
            cells.kept[:, node] = accepted
        return cells, p, left, num_kept

    def _acceptance(self, p: Tensor, left: Tensor, q: Tensor) -> Tensor:
        """min(1, p'/q) of every pair [R, M]."""
        if self.fault == "q renormalised for the test alone":
            q = torch.where(p > 0, q, 0.0)
            q = q / q.sum(1, keepdim=True)
        return torch.where(q > 0, left / q, 0.0).clamp(max=1.0)

    def _reduced(self, left: Tensor, q: Tensor) -> Tensor:
        """norm((p' - q)+); p' where nothing is left."""
        for _ in range(2 if self.fault == "q subtracted twice" else 1):
            rest = (left - q).clamp(min=0.0)
            total = rest.sum(1, keepdim=True)
            left = torch.where(total > 0, rest / total, left)
        return left

    def _width(self, p: Tensor, drafts: Drafts, layer: int, draft: Tensor) -> Tensor:
        counts = None
        if self.fault == "width from the candidates with a living parent":
            counts = (p.gather(1, drafts.pairs[layer][draft]) > 0).sum(1).clamp(min=1)
        return self._computed(p, drafts.distributions[layer].expand_as(p), counts)

    def _computed(self, p: Tensor, q: Tensor, counts: Tensor | None = None) -> Tensor:
        """The width of a layer [R] from its distributions [R, M]."""
        if self.threshold is None:
            return torch.full_like(p[:, 0], self.num_beams, dtype=torch.long)
        return layer_width(p, q, self.num_drafts, self.threshold, 1, counts).clamp(max=self.num_beams)

    def _filled(self, cells: Cells, one: Tensor, rest: Tensor, needed: Tensor) -> Cells:
        """The beams a layer lacks [R]: the first from `one` [R, M], the others from `rest`."""
        first = 2 * ((cells.low.shape[1] - 1) // 3)
        anything = torch.eye(1, one.shape[1], dtype=one.dtype)
        for e in range(self.num_beams):
            distribution, wanted = (one if e == 0 else rest), needed > e
            cells, row, pair = cells.split(first + e, torch.where(wanted.unsqueeze(1), distribution, anything))
            one, rest, needed, wanted = one[row], rest[row], needed[row], wanted[row]
            cells.extra[:, e] = torch.where(wanted, pair, -1)
        return replace(cells, num_extra=needed)

    # -- what comes out -------------------------------------------------------------------------------------------

    def histories(self, drafts: Drafts, cells: Cells) -> Counter[History]:
        """P(history), these drafts and that history."""
        num_layers, num_cells = len(drafts.pairs), len(cells.draft)
        codes = torch.zeros(num_cells, num_layers + 1, self.num_beams, dtype=torch.long)  # 0: none, else code + 1
        places = torch.arange(self.num_inputs).expand(num_cells, -1)

        def put(where: Tensor, layer: int, rank: Tensor, pair: Tensor) -> None:
            row = where.nonzero().squeeze(1)
            pair = pair[row]
            place = places[row, pair // self.vocab_size]
            codes[row, layer, rank[row]] = place * self.vocab_size + pair % self.vocab_size + 1

        for layer in range(num_layers + 1):
            kept = cells.kept[:, layer * self.num_drafts :][:, : self.num_drafts]
            rank = kept.cumsum(1) - 1
            for k in range(kept.shape[1]):
                put(kept[:, k], layer, rank[:, k], drafts.pairs[layer][cells.draft, k])
            for e in range(self.num_beams):
                extra = (cells.length == layer) & (cells.num_extra > e)
                put(extra, layer, kept.sum(1) + e, cells.extra[:, e])
            places = rank
        base = max(self.num_inputs, self.num_drafts) * self.vocab_size + 1
        scale = base ** torch.arange(codes[0].numel()).flip(0)
        which, index = _unique(codes.flatten(1) @ scale)
        probs = torch.zeros(len(which), dtype=torch.float64).index_add(0, index, cells.prob)
        probabilities: Counter[History] = Counter()
        for layers, prob in zip(codes[which].tolist(), probs.tolist(), strict=True):
            history = [tuple(code - 1 for code in layer if code) for layer in layers]
            probabilities[tuple(layer for layer in history if layer)] += prob
        return probabilities

    def distribution(self) -> Counter[History]:
        """P(history of the round)."""
        probabilities: Counter[History] = Counter()
        for drafts in self.drafts():
            probabilities.update(self.histories(drafts, self.cells(drafts)))
        return probabilities

    def beams(self, history: History) -> tuple[Tensor, Tensor] | None:
        """Paths of the newest beams and their weights, 0 for those that ended; None if the row is done."""
        paths, ended = torch.arange(self.num_inputs), torch.zeros(0, dtype=torch.bool)
        total = 0
        for layer in history:
            codes = torch.tensor(layer)
            paths = paths[codes // self.vocab_size] * self.vocab_size + codes % self.vocab_size
            ended = self.ends(paths)
            total += int(ended.sum())
        weights = self.weights[len(history)][paths]
        weights = weights.masked_fill(ended, 0.0) if history else weights
        return (paths, weights) if bool(weights.any()) and total < self.room else None

    def next_distribution(self, history: History) -> Tensor | None:
        """p_beam over codes; None if the row is done."""
        beams = self.beams(history)
        return None if beams is None else self.pair_distribution(beams[1], self.tables.p[len(history)][beams[0]])

    def next_width(self, history: History) -> int:
        """The width of the first layer of the round after."""
        beams = self.beams(history)
        assert beams is not None
        paths, weights = beams
        p, q = (self.pair_distribution(weights, table[len(history)][paths]) for table in (self.tables.p, self.tables.q))
        return int(self._computed(p.unsqueeze(0), q.unsqueeze(0)))


def _unique(values: Tensor) -> tuple[Tensor, Tensor]:
    """For each distinct value a place that holds it; for each place which distinct value that is."""
    distinct, index = values.unique(return_inverse=True)
    return torch.zeros_like(distinct).scatter(0, index, torch.arange(len(values))), index
