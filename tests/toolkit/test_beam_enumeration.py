"""Whole rounds of beams by enumeration: every draft of two layers, every way `judge` can decide, against i.i.d. draws."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from tests.slow_beams import FAULTS, Cells, Drafts, History, SlowRound, Tables
from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.beam_verdict import BeamVerdict, verify_forest
from toolkit.decoding.proposers.forest import Forest
from toolkit.decoding.text_order import TextOrder
from toolkit.sampling import Sampling
from toolkit.verification import get
from toolkit.verification.rules import beam_layer


def slow_round(vocab: int, inputs: int, drafts: int, beams: int, layers: int, seed: int = 0, **settings) -> SlowRound:
    """On random tables. `zeros`: some tokens are impossible."""
    tables = Tables.random(vocab, inputs, layers + 1, seed, settings.pop("zeros", False))
    return SlowRound(tables, layers, drafts, beams, **settings)


WARPED = Sampling(temperature=0.8, top_k=5, top_p=0.95)
SHAPES = {  # V, input beams, W_S, W_L, gamma; seeds; settings
    "one layer": ((3, 2, 3, 2, 1), (0,), {}),
    "one layer, dynamic": ((3, 2, 3, 2, 1), (1,), {"threshold": 0.5}),
    "one beam": ((2, 1, 2, 1, 2), (0, 1), {}),
    "one beam of three": ((3, 1, 3, 1, 2), (2,), {}),
    "none rejected": ((3, 1, 2, 2, 2), (0, 1), {}),
    "none rejected, two inputs": ((2, 2, 2, 2, 2), (0, 1), {}),
    "rejected": ((2, 1, 3, 2, 2), (0, 1, 2), {}),
    "rejected, three tokens": ((3, 1, 3, 2, 2), (0,), {}),
    "rejected, zeros": ((3, 1, 3, 2, 2), (5,), {"zeros": True}),
    "rejected, two inputs": ((2, 2, 3, 2, 2), (3,), {}),
    "dynamic": ((3, 1, 2, 2, 2), (1, 2, 3), {"threshold": 0.3}),
    "dynamic, two inputs": ((2, 2, 2, 2, 2), (3, 4), {"threshold": 0.7}),
    "dynamic, three drafts": ((2, 1, 3, 2, 2), (0, 4, 5), {"threshold": 0.4}),
    "dynamic, zeros": ((3, 1, 3, 2, 2), (0, 7), {"zeros": True, "threshold": 0.4}),
    "ends": ((2, 1, 3, 2, 2), (4, 5), {"end": 1, "room": 2}),
    "ends, dynamic": ((3, 1, 2, 2, 2), (2, 3), {"end": 2, "room": 2, "threshold": 0.4}),
    "warped": ((3, 1, 2, 2, 2), (0, 1), {"sampling": WARPED}),
    "warped, dynamic": ((3, 2, 2, 2, 2), (0, 1, 2), {"sampling": WARPED, "threshold": 0.4}),
}
ROUNDS = {
    f"{name} ({seed})": slow_round(*shape, seed, **settings)
    for name, (shape, seeds, settings) in SHAPES.items()
    for seed in seeds
}


def prob_of(codes: tuple[int, ...], p: list[float]) -> float:
    """Of i.i.d. draws."""
    return prod(p[code] for code in codes)


def lists(p: Tensor, width: int) -> list[tuple[int, ...]]:
    """Every ordered list of `width` draws that can happen."""
    return list(product(p.nonzero().squeeze(1).tolist(), repeat=width))


def completed(one: SlowRound, distribution: Counter[History]) -> Counter[History]:
    """Rounds that stopped before the last layer go on with i.i.d. draws, in layers as wide as the next round's first."""
    distribution = Counter(distribution)
    for layer in range(1, one.num_layers + 1):
        for history in [history for history in distribution if len(history) == layer]:
            p = one.next_distribution(history)
            if p is not None:
                prob, probs = distribution.pop(history), p.tolist()
                for codes in lists(p, one.next_width(history)):
                    distribution[*history, codes] += prob * prob_of(codes, probs)
    return distribution


def plain(one: SlowRound, distribution: Counter[History]) -> Counter[History]:
    """Beam sampling: layers of i.i.d. draws from p_beam. Widths, if they are dynamic, as `distribution` has them
    after each history.
    """
    expected: Counter[History] = Counter({(): 1.0})
    for layer in range(one.num_layers + 1):
        widths: Counter[tuple[History, int]] = Counter()
        for history, prob in distribution.items():
            if len(history) > layer:
                widths[history[:layer], len(history[layer])] += prob
        for history in [history for history in expected if len(history) == layer]:
            p = one.next_distribution(history)
            if p is None:
                continue
            prob, probs = expected.pop(history), p.tolist()
            weights = {width: widths[history, width] for width in range(1, one.num_beams + 1)}
            if one.threshold is None:
                weights = {one.num_beams: 1.0}
            for width, weight in weights.items():
                for codes in lists(p, width) if weight else ():
                    share = weight / sum(weights.values())
                    expected[*history, codes] += prob * share * prob_of(codes, probs)
    return expected


def distance(one: SlowRound, distribution: Counter[History]) -> float:
    """Total variation of whole histories from beam sampling's."""
    distribution = completed(one, distribution)
    expected = plain(one, distribution)
    return sum(abs(distribution[history] - expected[history]) for history in {*distribution, *expected}) / 2


def verdict(one: SlowRound, drafts: Drafts, cells: Cells, uniforms: Tensor) -> BeamVerdict:
    """What the engine's `judge` makes of every cell."""
    layers, inputs, draft = range(len(drafts.pairs)), one.num_inputs, cells.draft
    parents = [pairs // one.vocab_size for pairs in drafts.pairs]
    parents = [index + (inputs + (layer - 1) * one.num_drafts if layer else 0) for layer, index in enumerate(parents)]
    rows, numbers = len(draft), torch.zeros(len(draft), dtype=torch.long)
    forest = Forest(
        tokens=torch.cat([pairs % one.vocab_size for pairs in drafts.pairs], 1)[draft],
        parents=torch.cat(parents, 1)[draft],
        draft_probs=[distribution.expand(rows, -1) for distribution in drafts.distributions],
        pairs=[pairs[draft] for pairs in drafts.pairs],
        counts=[numbers + one.num_drafts for _ in layers],
        num_layers=numbers + len(layers),
        num_calls=numbers,
        scores=one.tables.weights.log().expand(rows, -1),
        sequences=TextOrder.of(torch.arange(inputs).expand(rows, -1)),
        newest_ids=numbers.unsqueeze(1).expand(-1, inputs),
        node_ids=numbers.unsqueeze(1)[:, :0],
        num_read=0,
        was_read=False,
    )
    logits = block(one, drafts)[0][draft]
    beams = Beams(one.num_beams, threshold=one.threshold, min_width=1)
    ends = () if one.end is None else (one.end,)
    return verify_forest(get("beam_layer"), beams, forest, logits, uniforms, one.sampling, ends, numbers + one.room)


def block(one: SlowRound, drafts: Drafts) -> tuple[Tensor, Tensor]:
    """Of the input beams and the nodes: log p after them [D, n + N, V], and their log-likelihoods [D, n + N]."""
    paths = [torch.arange(one.num_inputs).expand(len(drafts.prob), -1), *drafts.paths]
    logps = [one.tables.p[depth][index].log() for depth, index in enumerate(paths)]
    return torch.cat(logps, 1), torch.cat([one.weights[depth][index].log() for depth, index in enumerate(paths)], 1)


def agreement(one: SlowRound, drafts: Drafts, cells: Cells, verdict: BeamVerdict) -> Tensor:
    """In which cells `judge` did what the cells say [R]: nodes kept, layers, beams on top, and all their scores."""
    logps, scores = (value[cells.draft] for value in block(one, drafts))
    nodes, first = scores[:, one.num_inputs :], one.num_inputs + (cells.length - 1) * one.num_drafts
    good = verdict.valid & (verdict.kept == cells.kept).all(1)
    good &= (verdict.length == cells.length) & (verdict.num_extra == cells.num_extra)
    good &= (~cells.kept | ((verdict.node_scores - nodes).abs() < 1e-9)).all(1)
    first = torch.where(cells.length > 0, first, 0).unsqueeze(1)
    parents, tokens = first + cells.extra // one.vocab_size, cells.extra % one.vocab_size
    right = (verdict.extra_parents == parents) & (verdict.extra_tokens == tokens)
    rows = torch.arange(len(good)).unsqueeze(1)
    extra_scores = scores.gather(1, verdict.extra_parents) + logps[rows, verdict.extra_parents, verdict.extra_tokens]
    right &= (verdict.extra_scores - extra_scores).abs() < 1e-9
    return good & (right | (cells.extra < 0)).all(1)


HEAVY = ("rejected, three tokens (0)", "rejected, two inputs (3)")
FAST = [f"{name} ({seeds[0]})" for name, (_, seeds, _) in SHAPES.items()]


@pytest.mark.parametrize(
    "name",
    [name if name in FAST and name not in HEAVY else pytest.param(name, marks=pytest.mark.slow) for name in ROUNDS],
)
def test_output_beams_are_those_of_beam_sampling(name):
    """Every draft, every cell of the uniforms, at both of its ends: then the cells' sizes are the probabilities of `judge`."""
    one, distribution = ROUNDS[name], Counter()
    for drafts in one.drafts():
        cells = one.cells(drafts)
        twice, uniforms = Cells.joined([cells, cells]), torch.cat([cells.low, cells.high])
        assert bool(agreement(one, drafts, twice, verdict(one, drafts, twice, uniforms)).all())
        distribution.update(one.histories(drafts, cells))
    assert abs(sum(distribution.values()) - 1) < 1e-10
    assert {len(history) for history in distribution} == set(range(1, one.num_layers + 2))
    assert distance(one, distribution) < 1e-10


@pytest.mark.parametrize(
    "name", ["dynamic (2)", "dynamic (3)", "dynamic, zeros (0)", "ends, dynamic (3)", "warped, dynamic (0)"]
)
def test_widths_are_mixed(name):
    """After the same first layer, the second one is narrow or wide, depending on what was drafted."""
    widths: Counter[tuple[tuple[int, ...], int]] = Counter()
    for history, prob in ROUNDS[name].distribution().items():
        if len(history) > 1:
            widths[history[0], len(history[1])] += prob
    assert max(min(widths[first, 1], widths[first, 2]) for first, _ in list(widths)) > 0.01


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        *product(FAULTS[:2], ("rejected (1)", "dynamic (2)")),
        *product(FAULTS[2:], ("dynamic (2)", "dynamic, three drafts (4)", "dynamic, three drafts (5)")),
    ],
)
def test_faults_are_seen(fault, name):
    """Negative controls: each is far off, by the same measure."""
    one = replace(ROUNDS[name], fault=fault)
    distribution = one.distribution()
    assert abs(sum(distribution.values()) - 1) < 1e-10
    assert distance(one, distribution) > 0.01


def test_a_faulty_verdict_is_seen(monkeypatch):
    """Negative control: q subtracted twice in the engine's rule."""
    once = beam_layer.residual
    monkeypatch.setattr(beam_layer, "residual", lambda p, q: once(once(p, q), q))
    one = ROUNDS["one layer (0)"]
    (drafts,) = one.drafts()
    cells = one.cells(drafts)
    assert not bool(agreement(one, drafts, cells, verdict(one, drafts, cells, cells.low)).all())
