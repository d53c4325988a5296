"""Copied drafts (prompt lookup, suffixes): what is copied, that it is exact, that no draft is asked, replay from texts."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from sklearn.metrics import roc_auc_score

from toolkit import ModelPair, config, generate
from toolkit.acceptance import match
from toolkit.costs.table import CostTable
from toolkit.decoding import Method, PromptLookupProposer, Sampling, SuffixProposer, decode
from toolkit.engine import TabularModel
from toolkit.errors import InputError
from toolkit.files.atomic import write_json
from toolkit.stopping import Confidence, Fixed, Heuristic, LookupRate
from toolkit.testing import llama_pair
from toolkit.trace.copies import Copies
from toolkit.trace.replay import replay
from toolkit.verification import get

END = 2


def slow_lookup(text, most, max_ngram, min_ngram, ends):
    """The longest n-gram first; of its earlier occurrences the last."""
    for size in range(max_ngram, min_ngram - 1, -1):
        starts = [
            start
            for start in range(len(text))
            if start + size < len(text) and text[start : start + size] == text[-size:]
        ]
        if len(text) > size and starts:
            copied = []
            for token in text[starts[-1] + size :][:most]:
                copied.append(token)
                if token in ends:
                    break
            return copied
    return []


@pytest.mark.parametrize("ngrams", [(1, 1), (1, 3), (2, 3)])
def test_lookup_is_the_slow_one_on_every_short_text(ngrams):
    proposer = PromptLookupProposer(max_ngram=ngrams[1], min_ngram=ngrams[0])
    for length in range(1, 7):
        for text in product(range(2 if length > 4 else 3), repeat=length):
            for most in (0, 1, 3):
                expected = slow_lookup(list(text), most, *ngrams[::-1], (END,)) if most else []
                assert proposer.lookup(list(text), most, (END,)).tokens == expected


def slow_suffix(text, most, ends, earlier=()):
    """The longest suffix that occurs before; then, of its occurrences that agree so far, the most frequent next token.

    earlier  whole responses, each of which is copied from as the text itself is
    """
    sequences = [*earlier, text]
    for size in range(len(text), 0, -1):
        after = [
            (number, end)
            for number, other in enumerate(sequences)
            for end in range(size, len(other) + (number < len(earlier)))
            if other[end - size : end] == text[len(text) - size :]
        ]
        if after:
            break
    else:
        return [], 0, []
    copied, shares = [], []
    while len(copied) < most and (going := [(n, i) for n, i in after if i < len(sequences[n])]):
        following = [sequences[n][i] for n, i in going]
        best = max(
            set(following),
            key=lambda token: (following.count(token), max(at for at in going if sequences[at[0]][at[1]] == token)),
        )
        copied.append(best)
        shares.append((len(going), following.count(best) / len(going)))
        after = [(n, i + 1) for n, i in going if sequences[n][i] == best]
        if best in ends:
            break
    return copied, size, shares


def test_suffixes_are_the_slow_ones_on_every_short_text():
    proposer = SuffixProposer()
    for length in range(1, 8):
        for text in product(range(2 if length > 4 else 3), repeat=length):
            for most in (1, 4):
                copied, size, shares = slow_suffix(list(text), most, (END,))
                copy = proposer.lookup(list(text), most, (END,))
                assert (copy.tokens, copy.length) == (copied, size)
                assert list(zip(copy.occurrences, copy.agreement, strict=True)) == shares


def test_with_earlier_responses_a_match_is_no_longer_than_the_text(tmp_path):
    """All short texts after responses with the same beginnings and ends: what stands before the text is no part of it."""
    path, earlier = tmp_path / "responses.jsonl", [[0, 1, 0], [1, 0, 1, 1], [0], [0, 1, 2, 0], [1, 0]]
    path.write_text("".join(json.dumps({"token_ids": tokens}) + "\n" for tokens in earlier))
    proposer, lengths = SuffixProposer(responses=str(path)), set()
    for length in range(1, 6):
        for text in product(range(3), repeat=length):
            copied, size, shares = slow_suffix(list(text), 4, (END,), earlier)
            copy = proposer.lookup(list(text), 4, (END,))
            assert (copy.tokens, copy.length) == (copied, size)
            assert list(zip(copy.occurrences, copy.agreement, strict=True)) == shares
            lengths.add((len(text), size))
    assert {(1, 1), (2, 2), (3, 3)} <= lengths


def test_earlier_responses_are_copied_from_and_never_across_their_ends(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text('{"token_ids": [5, 6, 7]}\n{"token_ids": [8, 5, 6]}\n{"other": 1}\n')
    proposer = SuffixProposer(responses=str(path))
    assert proposer.lookup([1, 5, 6], 9, ()).tokens == [7]
    assert proposer.lookup([7], 9, ()).tokens == []
    path.write_text("[]\n")
    with pytest.raises(InputError, match="JSON lines with token_ids"):
        SuffixProposer(responses=str(path)).lookup([1], 9, ())


@pytest.mark.parametrize("method, key", [("lookup_rate", "proposer"), ("best_source", "proposer.copies")])
def test_ids_that_are_no_tokens_of_the_pair_are_one_line_before_anything_is_decoded(method, key, tmp_path):
    pair = ModelPair.toy()
    size = pair.vocab_size
    bad = [
        "[5, -100]",
        "[-1]",
        f"[5, {size}]",
        f"[{2**63}]",
        "[1e300]",
        "[1.5]",
        "[true]",
        '["5"]',
        "[[5]]",
        "null",
        "7",
    ]
    path = tmp_path / "responses.jsonl"
    path.write_text(f'{{"token_ids": [5, {size - 1}]}}\n')
    built = config.method(method, [f"{key}.responses={path}", "max_drafted=7"])
    built.bind(pair)
    for ids in bad:
        path.write_text('{"token_ids": [5, 6]}\n{"token_ids": ' + ids + "}\n")
        with pytest.raises(InputError, match=r"^proposer.responses: .*expected .*token ids.* got .*$") as error:
            built.bind(pair)
        assert str(path) in str(error.value) and (f", {size})" in str(error.value) or "line 2" in str(error.value))


def table_pair(sharpness=1.0):
    return ModelPair(target=TabularModel.random(3, 2, torch.Generator().manual_seed(5), sharpness), end_ids=(END,))


FALLING = CostTable(1, (1, 2, 4), (0,), ((1.0, 1.3, 1.1),))
LOOKUP_RATE = replace(LookupRate(match.MatchEstimator(), column_cost=0.1), deepest=3).bind(None)


@pytest.mark.parametrize(
    "rule, proposer, policy",
    [
        ("rejection", PromptLookupProposer(), Fixed(3)),
        ("block", SuffixProposer(), Fixed(3)),
        ("rejection", SuffixProposer(), LOOKUP_RATE),
        ("rejection", SuffixProposer(), LookupRate(match.MatchEstimator(), costs=FALLING).bind(None)),
    ],
)
def test_whole_outputs_follow_the_targets_distribution(rule, proposer, policy):
    from scipy.stats import chisquare

    pair, runs = table_pair(), 3000
    method = Method("lookup", policy, get(rule), proposer, min_drafted=0, max_drafted=3)
    expected = pair.target.sequence_distribution([0, 1, 0], 4, END)
    generations = decode(pair, [[0, 1, 0]] * runs, method, Sampling(max_new_tokens=4), batch_size=500)
    seen = [tuple(g.token_ids) for g in generations]
    outputs = [output for output, prob in expected.items() if prob > 0]
    assert sum(g.counts.num_drafted for g in generations) > runs / 2
    assert chisquare([seen.count(o) for o in outputs], [expected[o] * runs for o in outputs]).pvalue > 1e-3


def test_no_draft_model_is_asked():
    pair = ModelPair.from_pretrained("toy/target")
    assert pair.draft is None
    prompt = "Q: Join with dashes: door summer harbor magnet carpet.\nA:"
    (copied,) = generate(pair, [prompt], "prompt_lookup", temperature=0.0)
    (plain,) = generate(pair, [prompt], "autoregressive", temperature=0.0)
    assert copied.token_ids == plain.token_ids
    assert copied.counts.num_draft_calls == 0
    assert copied.counts.num_target_calls < plain.counts.num_target_calls


@pytest.mark.parametrize(
    "proposer, policy",
    [
        (PromptLookupProposer(), Heuristic(2)),
        (SuffixProposer(), LookupRate(match.MatchEstimator(), column_cost=0.2)),
        (SuffixProposer(), LookupRate(match.MatchEstimator(), costs=FALLING)),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replay_from_the_text_alone_counts_what_decoding_counted(proposer, policy, temperature):
    """The text that was decoded determines every round."""
    pair = table_pair(2.0)
    prompts = [[0, 1, 0, 1], [1], [0, 0, 1, 1, 0], [1, 0]]
    method = Method("lookup", policy, get("rejection"), proposer, min_drafted=0, max_drafted=5).bind(pair)
    sampling = Sampling(max_new_tokens=24, temperature=temperature, seed=3)
    live = decode(pair, prompts, method, sampling, batch_size=3)
    sequences = [(g.prompt_ids, g.token_ids) for g in live]
    replayed = replay(Copies(method.proposer, sequences, method.limit, 24, (END,)), method.policy)
    for row, generation in enumerate(live):
        assert {name: int(values[row]) for name, values in replayed.counts.items()} == vars(generation.counts)
        lengths = [r.num_accepted for r in generation.rounds]
        assert replayed.accepted[row].tolist() == [lengths.count(n) for n in range(replayed.accepted.shape[1])]
    assert replayed.total.num_drafted > 0


def test_slots_without_a_text_copy_nothing():
    copies = Copies(PromptLookupProposer(), [([0, 1, 0, 1], [0, 1, 1, 0, 1, END])], 5, 24, (END,))
    starts, policy = torch.arange(copies.num_positions), Fixed(5)
    every, _, _ = copies.draft(starts, policy, {})
    busy = starts % 2 == 0
    some, forwards, _ = copies.draft(starts, policy, {}, busy)
    assert torch.equal(some, every * busy) and 0 < int(some.sum()) < int(every.sum()) and not bool(forwards.any())


def test_an_estimator_fitted_to_texts_is_calibrated_and_survives_its_file(tmp_path):
    pair = table_pair(3.0)
    method = Method("plain", Fixed(0), get("rejection"), SuffixProposer(), min_drafted=0)
    generations = decode(pair, [[0, 1, 0]] * 200, method, Sampling(max_new_tokens=24), batch_size=100)
    sequences = [(g.prompt_ids, g.token_ids) for g in generations]
    inputs, labels = match.examples(SuffixProposer(), sequences[:150], 5, (END,))
    estimator = match.fit(inputs, labels)
    kept = match.MatchEstimator(path=str(estimator.save(tmp_path / "match.json"))).bind(None)
    assert kept.weights == estimator.weights
    inputs, labels = match.examples(SuffixProposer(), sequences[150:], 5, (END,))
    bias, *weights = kept.weights
    estimates = (inputs @ torch.tensor(weights, dtype=inputs.dtype) + bias).sigmoid()
    accepted = labels.double().mean()
    assert abs(accepted - estimates.mean()) < 4 * (accepted * (1 - accepted) / len(labels)) ** 0.5
    assert roc_auc_score(labels, estimates) > 0.55
    with pytest.raises(InputError, match="of which some agree"):
        match.fit(inputs, torch.ones(len(labels), dtype=torch.bool))


@pytest.mark.parametrize(
    "weights", [None, "1234567", [0.1] * 6, [*[0.1] * 6, "x"], [*[0.1] * 6, float("nan")], [[]] * 7]
)
def test_a_match_file_without_its_weights_is_one_line(tmp_path, weights):
    path = write_json(tmp_path / "match.json", {"inputs": list(match.INPUTS), "weights": weights})
    with pytest.raises(InputError, match=r"^.*match.json: expected a bias and 6 weights, .*heads copies=.*writes one$"):
        match.MatchEstimator(path=str(path)).bind(None)


def test_policies_that_look_at_a_draft_are_refused():
    with pytest.raises(
        InputError, match="Confidence looks at a draft model's distribution or states, and PromptLookup"
    ):
        Method("lookup", Confidence(), get("rejection"), PromptLookupProposer())
    with pytest.raises(InputError, match="expected 1 <= min_ngram <= max_ngram, got min_ngram=4, max_ngram=3"):
        PromptLookupProposer(min_ngram=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["lookup_rate", "best_source", "confidence"])
def test_the_target_reads_no_column_that_no_row_sends(method, temperature):
    """One row: after the prompt, a forward pass reads the newest token and what is drafted. All texts repeat themselves."""
    pair, widths = llama_pair(), []
    prompt = [7, 8, 9, 10, 11, 12] * 5
    pair.target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    (text,) = generate(pair, [prompt], method, max_new_tokens=30, temperature=temperature)
    sent = [1 + round_.num_drafted for round_ in text.rounds]
    assert sum(width - 1 for width in sent) > 0
    assert widths[-len(sent) + 1 :] == sent[1:]
    assert sum(widths) == sum(sent) + len(prompt) - 1
