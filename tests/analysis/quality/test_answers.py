"""Metrics by name, exact match, F1, ROUGE-L and BLEU: against values worked out by hand, and against the libraries."""

import numpy as np
import pytest

from analysis import quality
from analysis.quality.base import reasons, table
from analysis.quality.exact_match import ExactMatch, TokenF1, f1, normalise
from analysis.quality.overlap import Bleu, RougeL
from analysis.tables.bootstrap import resampled_totals, resampling_weights
from data_gen.prompts import ToyPrompts
from toolkit.errors import InputError
from toolkit.models.prompts import Prompt
from toolkit.types import Generation


def generations(texts):
    return [Generation(i, [1], [2], text) for i, text in enumerate(texts)]


def squad(*answers, id="squad-test-00001"):
    return Prompt(id, "Question:", answers[0], extra={"answers": {"text": list(answers), "answer_start": [0]}})


# -- by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quality.names())
def test_every_yaml_makes_a_metric(name, tmp_path):
    options = {"execution": {"databases": str(tmp_path)}, "pass_at_k": {"allow_code_execution": True}}
    options["judge"] = {"model": "toy/target"}
    metric = quality.get(name, **options.get(name, {}))
    assert metric.label and metric.value(np.zeros((2, 3, len(metric.columns)))).shape == (2, 3)
    assert np.isnan(metric.value(np.zeros(len(metric.columns))))


def test_a_list_of_names_and_options_builds_metrics():
    metrics = quality.build(["exact_match", {"perplexity": {"batch_size": 3}}, {"f1": None}])
    assert list(metrics) == ["exact_match", "perplexity", "f1"] and metrics["perplexity"].batch_size == 3
    for wanted, message in (
        (["exact_mach"], "unknown quality metric 'exact_mach': did you mean exact_match"),
        ([{"bleu": {"tokeniser": "13a"}}], "unknown option of the quality metric bleu 'tokeniser'"),
        (["f1", "f1"], "every metric once, got f1 twice"),
    ):
        with pytest.raises(InputError, match=message):
            quality.build(wanted)


def test_texts_that_cannot_be_scored_are_left_out_and_counted():
    metric = ExactMatch()
    answers = generations(["yes", "yes", "no", "yes"])
    answers[3].error = "not a number"
    scores = metric.measure([squad("yes"), Prompt("x", "no answer"), squad("yes"), squad("yes")], answers)
    assert [score.counts for score in scores] == [(1, 1), None, (0, 1), None]
    assert metric.value(table(metric, scores).sum(0)) == pytest.approx(0.5)
    assert reasons(scores) == {"no answer is known": 1, "decoding failed: not a number": 1}
    with pytest.raises(InputError, match="one prompt per generation, got 1 for 4"):
        metric.measure([squad("yes")], answers)


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("domain", ["math", "instruct"])
def test_toy_domains_judge_their_own(domain):
    prompts = ToyPrompts(domain, limit=40).load()
    right = [prompt.extra["response"] for prompt in prompts]
    metric = ExactMatch()
    assert metric.value(table(metric, metric.measure(prompts, generations(right))).sum(0)) == 1
    moved = [right[-1], *right[:-1]]  # somebody else's answers: right only where they happen to agree
    agree = [a.answer == b.answer for a, b in zip(prompts, [prompts[-1], *prompts[:-1]], strict=True)]
    scores = metric.measure(prompts, generations(moved))
    assert [bool(score.counts[0]) for score in scores] == agree and not all(agree)


def test_the_judge_goes_by_the_id_unless_told():
    answer = "The answer: so #### 42"
    assert ExactMatch().score(answer, Prompt("math-test-0-00007", "Q", "42")).counts == (1, 1)
    assert ExactMatch().score(answer, Prompt("math-7", "Q", "42")).counts == (0, 1)
    assert ExactMatch("math").score(answer, Prompt("7", "Q", "42")).counts == (1, 1)
    assert ExactMatch("math").score("42", Prompt("7", "Q", "42")).counts == (0, 1)
    assert ExactMatch("instruct").score(" In order: a b.", Prompt("7", "Q", "a b")).counts == (1, 1)


@pytest.mark.parametrize("text, exact, common", [
    ("the Eiffel  Tower!", 1, 1.0),
    ("  Eiffel Tower\nQuestion: Who?", 1, 1.0),
    ("Big Eiffel tower", 0, 4 / 5),  # 2 common of 3 and 2
    ("tower of Paris", 0, 2 / 5),  # 1 common of 3 and 2
    ("anthem", 0, 0.0),  # an article inside a word is none
    ("", 0, 0.0),
])  # fmt: skip
def test_answers_are_compared_as_squad_does(text, exact, common):
    prompt = squad("Eiffel Tower")
    assert ExactMatch().score(text, prompt).counts == (exact, 1)
    assert TokenF1().score(text, prompt).counts == (pytest.approx(common), 1)


def test_words_are_counted_as_often_as_they_occur_and_the_best_reference_counts():
    prompt = squad("1999", "the year 1999")
    assert ExactMatch().score("The Year 1999.", prompt).counts == (1, 1)
    assert TokenF1().score("year", prompt).counts == (pytest.approx(2 / 3), 1)
    assert f1("to be or not to be", "to be") == pytest.approx(2 * 2 / 8)
    assert f1("a the", "an") == 1.0 and f1("a", "cat") == 0.0
    assert normalise("The cat's  A-team, theirs") == "cats ateam theirs"


# -- overlap ----------------------------------------------------------------------------------------------------------


def test_rouge_l_by_hand():
    metric = RougeL()
    # Longest common subsequence of 'police kill the gunman' and 'police killed the gunman': 4 stemmed, 3 unstemmed.
    prompt = Prompt("1", "Summarize", "police killed the gunman")
    assert metric.score("police kill the gunman", prompt).counts[0] == pytest.approx(1.0)
    assert RougeL(stem=False).score("police kill the gunman", prompt).counts[0] == pytest.approx(3 / 4)
    # 'the gunman kill police': 2 in order, of 4 and 4.
    assert metric.score("the gunman kill police", prompt).counts[0] == pytest.approx(2 / 4)
    # 'police gunman' in order, of 2 and 4: precision 1, recall 1/2.
    assert metric.score("police gunman", prompt).counts[0] == pytest.approx(2 / 3)
    assert metric.score("", prompt).counts == (0, 1)
    assert metric.score("x", Prompt("1", "Summarize")).counts is None


PAIRS = [
    ("The cat sat on the mat today.", "The cat sat on the mat."),
    ("There is a small house behind the hill", "There is a small house on the hill."),
    ("completely different words here", "Nothing is shared with it."),
    ("He went home early because it rained", "He went home early because of the rain."),
    ("short", "A much longer reference than that."),
]


def test_bleu_by_hand():
    metric = Bleu()
    score = metric.score("the cat sat on mats", Prompt("1", "Translate", "the cat sat on the mat"))
    # 5 words of 6; matches 4 of 5, 3 of 4, 2 of 3, 1 of 2.
    assert score.counts == (5, 6, 4, 3, 2, 1, 5, 4, 3, 2)
    by_hand = 100 * np.exp(1 - 6 / 5) * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert metric.value(np.array(score.counts)) == pytest.approx(by_hand, rel=1e-12)
    assert metric.value(np.array(metric.score("", Prompt("1", "T", "the cat")).counts)) == 0


def test_a_bootstrap_sample_has_its_own_corpus_bleu():
    import sacrebleu

    metric = Bleu()
    prompts = [Prompt(str(i), "Translate", reference) for i, (_, reference) in enumerate(PAIRS)]
    counts = table(metric, metric.measure(prompts, generations([text for text, _ in PAIRS])))
    values = metric.value(resampled_totals(counts, 20, seed=3))
    (weights,) = resampling_weights(len(PAIRS), 20, seed=3)
    for value, often in zip(values, weights.astype(int), strict=True):
        drawn = [pair for pair, times in zip(PAIRS, often, strict=True) for _ in range(times)]
        expected = sacrebleu.corpus_bleu([text for text, _ in drawn], [[reference for _, reference in drawn]]).score
        assert value == pytest.approx(expected, rel=1e-9)
    assert np.std(values) > 1
