"""Methods with several beams: their distributions by enumeration, their caches by recomputation, beam search
against transformers'.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from tests.methods import others_slow
from tests.slow_beams import SlowRound, Tables
from toolkit import ModelPair, config
from toolkit.decoding import Beams, ForestProposer, Method, Sampling, decode
from toolkit.engine import TabularModel
from toolkit.engine.hf import HFSession
from toolkit.errors import InputError
from toolkit.sampling import warp
from toolkit.stopping import Confidence, Fixed
from toolkit.testing import tiny_llama
from toolkit.types import DraftStep
from toolkit.verification import get

BEAMS = [name for name in config.choices("method") if config.method(name).beams is not None]
RUNS = 3000  # responses of a chi-square test
Living = tuple[tuple[int, ...], ...]


def method(
    num_beams: int = 2,
    drafted: int = 0,
    layers: int = 2,
    policy: Any = None,
    min_beams: int | None = None,
    **settings: Any,
) -> Method:
    """Beam sampling, speculative with `drafted` draft beams."""
    return Method(
        "beams",
        policy or Fixed(layers if drafted else 0),
        get("beam_layer"),
        ForestProposer(max(drafted, 1), layers, min_beams),
        beams=Beams(num_beams, **settings),
    )


def score(model: TabularModel, prompt: list[int], text: tuple[int, ...]) -> float:
    """Log-likelihood of a response."""
    rows = [model.state(prompt + list(text[:i])) for i in range(len(text))]
    return float(sum(model.probs[row, token].log() for row, token in zip(rows, text, strict=True)))


def next_pairs(
    model: TabularModel, prompt: list[int], living: Living, sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """p_beam over the living beams and their next tokens, as texts (equal texts' probabilities added up).

    Exactly k pairs are kept: of equal ones those whose text comes first.
    """
    pairs = [(-score(model, prompt, (*text, t)), (*text, t)) for text in living for t in range(model.vocab_size)]
    scores, sequences = zip(*sorted(pairs)[: sampling.top_k or None], strict=True)
    distribution = warp(-torch.tensor(scores, dtype=torch.float64), replace(sampling, top_k=0))
    pairs: Counter[tuple[int, ...]] = Counter()
    for text, prob in zip(sequences, distribution.tolist(), strict=True):
        pairs[text] += prob
    return pairs


def beam_distribution(
    model: TabularModel,
    prompt: list[int],
    num_beams: int,
    length: int,
    end: int,
    sampling: Sampling,
    stop: tuple[int, ...] = (),
) -> dict[Living, float]:
    """P(the row's beams, as a sorted multiset): the slow and obvious way, every draw of every layer.

    stop  tokens that end a text together
    """  # fmt: skip

    def over(text: tuple[int, ...]) -> bool:
        return text[-1] == end or bool(stop and text[-len(stop) :] == stop)

    distribution: Counter[Living] = Counter()
    states: Counter[tuple[Living, Living]] = Counter({(((),), ()): 1.0})
    for depth in range(1, length + 1):
        following: Counter[tuple[Living, Living]] = Counter()
        for (living, finished), prob in states.items():
            pairs = {text: p for text, p in next_pairs(model, prompt, living, sampling).items() if p > 0}
            for drawn in product(pairs, repeat=num_beams):
                p = prob
                for text in drawn:
                    p *= pairs[text]
                alive = tuple(sorted(text for text in drawn if not over(text)))
                done = tuple(sorted((*finished, *filter(over, drawn))))
                if not alive or len(done) >= num_beams or depth == length:
                    best = sorted((*done, *alive), key=lambda t: (-round(score(model, prompt, t) / len(t), 9), t))
                    distribution[tuple(sorted(best[:num_beams]))] += p
                else:
                    following[alive, done] += p
        states = following
    return distribution


def sampled(
    pair: ModelPair, built: Method, runs: int, length: int, sampling: Sampling, batch_size: int
) -> Counter[Living]:
    """How often each multiset of beams came out."""
    generations = decode(pair, [[0, 1]] * runs, built, sampling, batch_size=batch_size)
    return Counter(tuple(sorted(map(tuple, g.beams or []))) for g in generations)


def by_draft(num_beams: int, drafted: int, layers: int, policy: Any = None) -> Method:
    """Speculative beams whose draft weighs the input beams itself."""
    plain = method(num_beams, drafted, layers, policy)
    return replace(plain, proposer=replace(plain.proposer, weights="draft"))


class Foreseeing(Confidence):
    """Sees acceptance coming, right or wrong: the number of candidates then differs from row to row and layer to layer."""

    def foresee(self, step: DraftStep) -> torch.Tensor:
        return step.top_probs[:, 0]


CASES = {
    "beam_sampling": method(2),
    "three_beams": method(3),
    "speculative": method(2, drafted=3),
    "speculative_shallow": method(2, drafted=2, layers=1),
    "adaptive_depth": method(2, drafted=3, policy=Confidence(0.45)),
    "adaptive_width": method(2, drafted=4, policy=Foreseeing(0.0), min_beams=2),
    "weighed_by_draft": by_draft(2, 3, 1, Confidence(0.45)),
}


WARPED = pytest.mark.parametrize("warped", [
    {"temperature": 0.8, "top_k": 3, "min_p": 0.1},
    *(pytest.param(w, marks=pytest.mark.slow) for w in ({}, {"temperature": 0.8, "top_k": 3, "top_p": 0.9})),
])  # fmt: skip


@WARPED
@pytest.mark.parametrize(
    "name", others_slow([*CASES], ("three_beams", "speculative", "adaptive_width", "weighed_by_draft"))
)
def test_beams_follow_the_distribution_of_beam_sampling(name, warped, table_pair):
    """Chi-square over all multisets of output beams of at most 3 tokens; end of text inside. Level: Bonferroni."""
    sampling = Sampling(max_new_tokens=3, seed=4, **warped)
    built = CASES[name]
    distribution = beam_distribution(table_pair.target, [0, 1], built.beams.num_beams, 3, 2, sampling)
    assert abs(sum(distribution.values()) - 1) < 1e-9
    seen = sampled(table_pair, built, RUNS, 3, sampling, RUNS)
    assert p_value(seen, distribution) > 0.001 / (3 * len(CASES))


def p_value(seen: Counter[Living], distribution: dict[Living, float]) -> float:
    """The p-value of a chi-square test; rare outcomes together. 0 if an outcome cannot happen."""
    if not set(seen) <= set(distribution):
        return 0.0
    runs = sum(seen.values())
    rare = [key for key, prob in distribution.items() if prob * runs < 5]
    common = [key for key in distribution if key not in set(rare)]
    counts = [seen[key] for key in common] + [sum(seen[key] for key in rare)]
    expected = [distribution[key] * runs for key in common] + [sum(distribution[key] for key in rare) * runs]
    if expected[-1] < 5:
        counts, expected = [*counts[:-2], counts[-2] + counts[-1]], [*expected[:-2], expected[-2] + expected[-1]]
    return float(chisquare(counts, expected).pvalue)


def tables(pair: ModelPair, prompt: list[int], living: Living, depth: int) -> Tables:
    """The pair's distributions after every text of up to `depth` tokens that goes on from a living beam."""

    def distributions(model: TabularModel, d: int) -> torch.Tensor:
        sequences = [[*prompt, *text, *more] for text in living for more in product(range(model.vocab_size), repeat=d)]
        return torch.stack([model.probs[model.state(text)] for text in sequences])

    weights = torch.tensor([score(pair.target, prompt, text) for text in living], dtype=torch.float64).exp()
    p, q = ([distributions(model, d) for d in range(depth + 1)] for model in (pair.target, pair.draft))
    return Tables(weights, p, q)


def dynamic_distribution(
    pair: ModelPair, prompt: list[int], built: Method, length: int, end: int, sampling: Sampling
) -> dict[Living, float]:
    """As `beam_law`, with widths that depend on what was drafted: round after round, every draft and every verdict."""
    assert built.beams is not None
    distribution: Counter[Living] = Counter()
    states: list[Counter[tuple[Living, Living]]] = [Counter() for _ in range(length)]
    states[0][((),), ()] = 1.0
    for depth in range(length):
        for (living, finished), prob in states[depth].items():
            layers = min(built.proposer.num_layers, length - depth - 1)
            one = SlowRound(
                tables(pair, prompt, living, layers),
                layers,
                built.proposer.num_beams,
                built.beams.num_beams,
                threshold=built.beams.threshold,
                end=end,
                room=built.beams.num_beams - len(finished),
                sampling=sampling,
            )
            for history, p in one.distribution().items():
                sequences, done = living, finished
                for layer in history:
                    sequences = tuple((*sequences[code // one.vocab_size], code % one.vocab_size) for code in layer)
                    done = (*done, *(text for text in sequences if text[-1] == end))
                alive = tuple(sorted(text for text in sequences if text[-1] != end))
                if not alive or len(done) >= built.beams.num_beams or depth + len(history) == length:
                    best = sorted((*done, *alive), key=lambda t: (-round(score(pair.target, prompt, t) / len(t), 9), t))
                    distribution[tuple(sorted(best[: built.beams.num_beams]))] += prob * p
                else:
                    states[depth + len(history)][alive, tuple(sorted(done))] += prob * p
    return distribution


DYNAMIC = {
    "two_beams": method(2, drafted=2, threshold=0.2),
    "two_of_three": method(2, drafted=3, layers=1, threshold=0.4),
    "three_beams": method(3, drafted=3, threshold=0.3),
}


@WARPED
@pytest.mark.parametrize("name", DYNAMIC)
def test_beams_of_dynamic_width_follow_their_distribution(name, warped, table_pair):
    """The same where layers are as wide as the draft can be trusted: the distribution mixes over what was drafted."""
    sampling = Sampling(max_new_tokens=3, seed=5, **warped)
    distribution = dynamic_distribution(table_pair, [0, 1], DYNAMIC[name], 3, 2, sampling)
    assert abs(sum(distribution.values()) - 1) < 1e-9
    assert {1, 2} <= {len(beams) for beams in distribution}
    seen = sampled(table_pair, DYNAMIC[name], RUNS, 3, sampling, RUNS)
    assert p_value(seen, distribution) > 0.001 / (3 * len(DYNAMIC))


def tabulated(model: Any, prompt: list[int], length: int) -> TabularModel:
    """A model's next-token distributions after a prompt and fewer than `length` tokens, in float64."""
    vocab_size, order = model.config.vocab_size, len(prompt) + length - 1
    table = TabularModel(torch.full((vocab_size**order, vocab_size), 1 / vocab_size, dtype=torch.float64))
    for depth in range(length):
        for more in product(range(vocab_size), repeat=depth):
            text = [*prompt, *more]
            table.probs[table.state(text)] = model(torch.tensor([text])).logits[0, -1].double().softmax(-1)
    return table


@pytest.fixture(scope="module")
def float32_pair() -> ModelPair:
    """Random Llamas over four tokens."""
    target, draft = (tiny_llama(32, 2, seed, torch.float32, vocab_size=4) for seed in (1, 4))
    return ModelPair(target=target, draft=draft, end_ids=())


FLOAT32 = {
    "untruncated": {},
    "top_k": {"top_k": 3},
    "top_k of pairs": {"top_k": 5},
    "top_k and top_p": {"top_k": 3, "top_p": 0.8},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
}


@pytest.mark.parametrize(("truncation", "noise"), [
    ("top_k and top_p", 1e-6), pytest.param("top_k and top_p", 0.0, marks=pytest.mark.slow),
    *(pytest.param(name, 1e-6, marks=pytest.mark.slow) for name in FLOAT32 if name != "top_k and top_p"),
])  # fmt: skip
def test_equal_beams_are_cut_alike_whatever_rounding_does(truncation, noise, float32_pair, monkeypatch):
    """Whole outputs of real float32 forwards, plain and speculative, against the enumeration and each other.

    Sampled beams coincide, and copies of one text share its probability: their pairs tie at the edge of a cut. With
    `noise`, logits are off by some 1e-6 in each slot, as another kernel's may be.
    """
    extend, generator = HFSession.extend, torch.Generator().manual_seed(0)

    def off(self, *args, **options):
        reading = extend(self, *args, **options)
        errors = torch.randn(reading.logits.shape[1:], generator=generator)
        return replace(reading, logits=reading.logits + noise * errors)

    monkeypatch.setattr(HFSession, "extend", off)
    sampling, runs = Sampling(max_new_tokens=3, seed=9, **FLOAT32[truncation]), 3000
    distribution = beam_distribution(tabulated(float32_pair.target, [0, 1], 3), [0, 1], 2, 3, -1, sampling)
    level = 0.001 / (8 * len(FLOAT32))
    seen = [
        sampled(float32_pair, built, runs, 3, sampling, 1000)
        for built in (method(2), method(2, drafted=3), method(2, drafted=3, threshold=0.0, min_width=2))
    ]
    for counts in seen:
        assert p_value(counts, distribution) > level
    keys = [key for key in distribution if min(counts[key] for counts in seen) >= 5]
    assert len(keys) > 3
    assert chi2_contingency([[counts[key] for key in keys] for counts in seen]).pvalue > level


def test_both_references_agree(table_pair):
    """With a fixed width, rounds in slow motion are beam sampling: exactly, over whole responses."""
    built, sampling = CASES["speculative_shallow"], Sampling()
    distribution = beam_distribution(table_pair.target, [0, 1], 2, 3, 2, sampling)
    rounds = dynamic_distribution(table_pair, [0, 1], built, 3, 2, sampling)
    assert max(abs(distribution[key] - rounds[key]) for key in {*distribution, *rounds}) < 1e-10


def test_the_beam_test_catches_the_published_scheme(table_pair):
    """Negative control: a walk that accepts every candidate follows q instead of p, and is seen."""
    from toolkit.verification.rules.beam_layer import BeamLayer

    class Credulous(BeamLayer):
        def walk(self, target_probs, draft_probs, candidates, real, width, uniforms):
            kept = real & (torch.arange(candidates.shape[1]) < width.unsqueeze(1))
            return kept, target_probs

    sampling = Sampling(max_new_tokens=3, seed=4)
    wrong = Method("wrong", Fixed(2), Credulous(), ForestProposer(3, 2), beams=Beams(2))
    distribution = beam_distribution(table_pair.target, [0, 1], 2, 3, 2, sampling)
    seen = sampled(table_pair, wrong, RUNS, 3, sampling, RUNS)
    common = [key for key, prob in distribution.items() if prob > 1e-3]
    observed, expected = [seen[key] for key in common], [distribution[key] for key in common]
    scale = sum(observed) / sum(expected)
    assert chisquare(observed, [e * scale for e in expected]).pvalue < 1e-6


@pytest.mark.parametrize("name", others_slow(BEAMS))
def test_scores_are_the_likelihoods_of_the_texts(name, exact_pair, prompts):
    """Every beam's score against one uncached run over its whole text: the caches hold what they should."""
    built, sampling = config.method(name), Sampling(max_new_tokens=20, seed=1)
    for generation in decode(exact_pair, prompts, built, sampling, batch_size=4):
        assert generation.beams is not None
        assert generation.token_ids == generation.beams[0]
        assert generation.scores == sorted(generation.scores, reverse=True)
        for tokens, score in zip(generation.beams, generation.scores, strict=True):
            text = torch.tensor([generation.prompt_ids + tokens])
            logps = exact_pair.target(text).logits[0].log_softmax(-1)[len(generation.prompt_ids) - 1 : -1]
            expected = logps.gather(1, torch.tensor(tokens).unsqueeze(1)).mean()
            assert abs(score - float(expected)) < 1e-6  # Llama's norms compute in float32


def test_the_draft_reads_what_the_beams_hold(exact_pair, prompts):
    """A draft equal to the target: q_beam is p_beam, every candidate is accepted. A cache gone wrong would show."""
    pair = ModelPair(target=exact_pair.target, draft=exact_pair.target, end_ids=())
    for generation in decode(pair, prompts, method(2, drafted=2, layers=3), Sampling(max_new_tokens=24), batch_size=3):
        assert [r.num_accepted for r in generation.rounds] == [3] * 6
        assert all(r.bonus for r in generation.rounds)


@pytest.mark.parametrize("policy", [Fixed(2), Confidence(0.3)])
def test_a_draft_that_weighs_beams_knows_its_likelihood_of_every_response(policy, exact_pair, prompts, monkeypatch):
    """q_beam of each round's first layer, against one uncached run of the draft over every input beam's whole text."""
    from toolkit.decoding import beams

    original, checked = beams.BeamBatch.propose, []

    def compared(self, context):
        forest, state = original(self, context)
        if forest.pairs:
            for slot, row in enumerate(self.beams):
                if not self.busy[slot] or not forest.num_layers[slot]:
                    continue
                prompt = self.rows[slot].generation.prompt_ids
                joint = []
                for beam in row.living:
                    logps = (
                        self.pair.draft(torch.tensor([prompt + beam.tokens]))
                        .logits[0]
                        .log_softmax(-1)[len(prompt) - 1 :]
                    )
                    joint.append(logps[-1] + sum(logps[i, token] for i, token in enumerate(beam.tokens)))
                expected = torch.stack(joint).flatten().softmax(0)
                error = (forest.draft_probs[0][slot][: len(expected)] - expected).abs().max()
                checked.append((float(error), len(row.living[0].tokens)))
        return forest, state

    monkeypatch.setattr(beams.BeamBatch, "propose", compared)
    decode(exact_pair, prompts, by_draft(2, 3, 2, policy), Sampling(max_new_tokens=12), batch_size=3)
    assert max(error for error, _ in checked) < 1e-5
    assert max(length for _, length in checked) > 6


@pytest.mark.parametrize("num_beams", [1, 2, 4])
@pytest.mark.parametrize("end", [None, 5])
def test_beam_search_is_transformers(num_beams, end, prompts):
    """Deterministic beams with early_stopping=True; with and without texts that end."""
    target = tiny_llama(32, 3, 0, torch.float64)
    target.config.eos_token_id = target.generation_config.eos_token_id = end
    if end is not None:
        target.lm_head.weight[end] *= 2.5  # ends happen
    pair = ModelPair(target=target, end_ids=() if end is None else (end,))
    built = config.method("beam_search", [f"beams.num_beams={num_beams}"])
    ended = 0
    for generation in decode(pair, prompts, built, Sampling(max_new_tokens=12), batch_size=3):
        reference = target.generate(
            torch.tensor([generation.prompt_ids]), max_new_tokens=12, num_beams=num_beams, do_sample=False,
            early_stopping=True, length_penalty=1.0, num_return_sequences=1, pad_token_id=0, eos_token_id=end,
        )[0, len(generation.prompt_ids) :].tolist()  # fmt: skip
        reference = reference[: reference.index(end) + 1] if end in reference else reference
        ended += end in reference
        assert generation.token_ids == reference
    assert ended or end is None


def test_a_block_from_enough_beams_is_drawn_from_its_joint_distribution(table_pair):
    """MTJD by beam search with W = V^gamma beams enumerates the block: exact, warped as one distribution."""
    pair = ModelPair(target=table_pair.target, end_ids=())
    built = method(9, selection="top", collapse_after=2, collapse_to="distribution")
    sampling = Sampling(max_new_tokens=2, seed=6, temperature=0.7, top_k=3)
    blocks = list(product(range(3), repeat=2))
    distribution = warp(
        torch.tensor([score(pair.target, [0, 1], block) for block in blocks], dtype=torch.float64), sampling
    )
    runs = 6000
    seen = Counter(tuple(g.token_ids) for g in decode(pair, [[0, 1]] * runs, built, sampling, batch_size=3000))
    probs = dict(zip(blocks, distribution.tolist(), strict=True))
    kept = [block for block in blocks if probs[block] > 0]
    assert len(kept) == 3
    assert set(seen) <= set(kept)
    assert chisquare([seen[b] for b in kept], [probs[b] * runs for b in kept]).pvalue > 0.001
    greedy = decode(pair, [[0, 1]], built, Sampling(max_new_tokens=2, temperature=0))[0]
    assert tuple(greedy.token_ids) == max(blocks, key=lambda block: score(pair.target, [0, 1], block))


@pytest.mark.parametrize("warped", [
    {"top_k": 2},
    *(pytest.param(w, marks=pytest.mark.slow) for w in ({}, {"top_p": 0.6}, {"temperature": 0.7, "min_p": 0.2})),
])  # fmt: skip
def test_blocks_of_one_token_are_plain_sampling(table_pair, warped):
    """MTJD at gamma = 1 is multinomial sampling, ends included, however the distribution is warped."""
    built = config.method("mtjd", ["beams.collapse_after=1", "beams.num_beams=3"])
    assert built.lossless and not config.method("mtjd").lossless and not config.method("mtjd_top").lossless
    sampling, runs = Sampling(max_new_tokens=3, seed=4, **warped), 6000
    exact: Counter[tuple[int, ...]] = Counter()
    waiting = {(): 1.0}
    while waiting:
        text, prob = waiting.popitem()
        if len(text) == 3 or (text and text[-1] in table_pair.end_ids):
            exact[text] += prob
            continue
        probs = warp(table_pair.target.probs[table_pair.target.state([0, 1, *text])].log(), sampling)
        waiting |= {(*text, token): prob * float(p) for token, p in enumerate(probs) if p > 0}
    seen = Counter(tuple(g.token_ids) for g in decode(table_pair, [[0, 1]] * runs, built, sampling, batch_size=3000))
    assert set(seen) <= set(exact)
    assert chisquare([seen[t] for t in exact], [exact[t] * runs for t in exact]).pvalue > 0.001


@pytest.mark.parametrize(("warped", "end"), [({}, 2), ({"top_k": 2}, None)])
def test_a_sampled_block_is_one_of_the_beams(table_pair, end, warped):
    """Two layers of two beams, by enumeration: beams are drawn layer by layer from p_beam, then one of them, all alike."""
    pair = ModelPair(target=table_pair.target, end_ids=() if end is None else (end,))
    built = method(selection="sample", collapse_after=2, collapse_to="draw")
    sampling = Sampling(max_new_tokens=2, seed=8, temperature=1.2, **warped)
    first = next_pairs(pair.target, [0, 1], ((),), sampling)
    exact: Counter[tuple[int, ...]] = Counter()
    for beams in product(first, repeat=2):
        prob = first[beams[0]] * first[beams[1]]
        living = tuple(text for text in beams if text[-1] != end)
        for text in set(beams) - set(living):
            exact[text] += prob * beams.count(text) / 2
        for text, share in next_pairs(pair.target, [0, 1], living, sampling).items() if living else ():
            exact[text] += prob * share * len(living) / 2
    assert sum(exact.values()) == pytest.approx(1)
    runs = 8000
    seen = Counter(tuple(g.token_ids) for g in decode(pair, [[0, 1]] * runs, built, sampling, batch_size=4000))
    assert chisquare([seen[t] for t in exact], [exact[t] * runs for t in exact]).pvalue > 0.001


def test_blocks_are_searched_at_temperature_0(exact_pair, prompts):
    greedy = Sampling(temperature=0, max_new_tokens=12)
    drawn, top = (decode(exact_pair, prompts, config.method(name), greedy) for name in ("mtjd", "mtjd_top"))
    assert [g.token_ids for g in drawn] == [g.token_ids for g in top]


def test_one_cache_keeps_one_beam_after_every_round(exact_pair, prompts, monkeypatch):
    """Then the cache holds the beam's own tokens and nothing else."""
    from toolkit.engine.hf import HFSession

    original, kept = HFSession.keep, []
    monkeypatch.setattr(HFSession, "keep", lambda self, nodes: kept.append(original(self, nodes)) or kept[-1])
    built = config.method("dsbd_one_cache")
    decode(exact_pair, prompts, built, Sampling(max_new_tokens=16), batch_size=3)
    targets = kept[::2]
    assert targets
    assert all(nodes.shape[1] == 1 and bool((nodes == -1).all()) for nodes in targets)


def test_published_drafts_need_their_own_rule():
    assert not config.method("dsbd_published").lossless
    with pytest.raises(InputError, match="by the scheme without_replacement, but BeamLayer is exact only for iid"):
        config.instantiate(config.method_config("dsbd", ["proposer.scheme=without_replacement"]))
    with pytest.raises(
        InputError, match="by the scheme iid, but PublishedBeamLayer is exact only for without_replacement"
    ):
        config.instantiate(config.method_config("dsbd_published", ["proposer.scheme=iid"]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["beams.num_beams=7"], "beams.num_beams: expected 1 to 6, the number of draft beams, got 7"),
        (["beams.threshold=.5", "beams.min_width=5"], "beams.min_width: expected 1 to 4"),
        (["beams.selection=top"], "drafted beams are accepted with a probability, expected sample, got top"),
        (
            ["beams.collapse_to=draw", "beams.selection=top"],
            "draw needs sampled beams, expected beams.selection=sample",
        ),
        (["proposer.min_beams=7"], "proposer.min_beams: expected 1 to 6 (num_beams) or null, got 7"),
        (["proposer.min_beams=3"], "beams.num_beams: expected 1 to 3, the number of draft beams, got 4"),
        (["beams=null"], "a rule for layers of beams and `beams` need each other"),
    ],
)
def test_settings_that_cannot_work_are_refused(overrides, words, exact_pair):
    with pytest.raises(InputError) as caught:
        decode(exact_pair, [[7]], config.method("speculative_beam", overrides), Sampling())
    assert words in str(caught.value)


def test_what_beams_do_not_offer_is_said(exact_pair):
    with pytest.raises(InputError, match="repetition_penalty is not available with several beams"):
        decode(exact_pair, [[7]], config.method("beam_sampling"), Sampling(repetition_penalty=1.2))


def test_distributions_that_are_not_numbers_end_their_row_only(table_pair):
    broken = TabularModel(table_pair.target.probs.clone())
    broken.probs[8] = torch.nan
    for pair, built in (
        (ModelPair(target=broken, draft=table_pair.draft, end_ids=()), method(2, drafted=3)),
        (ModelPair(target=table_pair.target, draft=broken, end_ids=()), method(2, drafted=3)),
        (ModelPair(target=broken, end_ids=()), method(2, selection="top")),
    ):
        good, bad = decode(pair, [[0, 0], [2, 2]], built, Sampling(max_new_tokens=2, temperature=0))
        assert good.error is None
        assert len(good.token_ids) == 2
        assert bad.error == "prompt 1: the models' distributions hold values that are not numbers"


def test_the_cache_grows_with_the_beams_and_holds_shared_prefixes_once(exact_pair, prompts, monkeypatch):
    from toolkit.engine.hf import HFSession

    held: list[tuple[int, int]] = []
    original = HFSession.keep

    def spy(self, nodes):
        kept = original(self, nodes)
        if self.model is exact_pair.target:
            held.append((max(self.lengths), self.index.capacity))
        return kept

    monkeypatch.setattr(HFSession, "keep", spy)
    (generation,) = decode(exact_pair, [prompts[4]], method(4), Sampling(max_new_tokens=60))
    longest = len(prompts[4]) + len(generation.rounds)
    assert all(length <= capacity for length, capacity in held)
    assert max(length for length, _ in held) < 2 * longest  # four separate caches would hold 4 * longest
