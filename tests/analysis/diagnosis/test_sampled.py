"""Above temperature 0: the terms of every scheme by enumeration, planted mistakes named, clean runs not accused."""

import json

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.diagnosis.answers import beyond_end, read_answers
from analysis.diagnosis.compare import sampled_explanations
from analysis.diagnosis.replay import Terms
from analysis.diagnosis.sentence import of_rounds
from analysis.tables.bootstrap import Bootstrap
from tests.analysis.diagnosis.engine import questions
from tests.analysis.diagnosis.sampling_engine import SamplingEngine
from tests.analysis.diagnosis.test_diagnose import diagnosed
from toolkit import ModelPair, decode
from toolkit.config import compose
from toolkit.drafts.causes import AS_IT_SHOULD_BE, Cause, by_ratio
from toolkit.drafts.causes.sampled import drawn_twice, top_tokens, top_tokens_by_ratio


def enumerated(p, q, greedy, as_greedy):
    """P(accepted and x), P(rejected and x) of every token x, from every drafted token."""
    size = len(p)
    accepted, rejected = torch.zeros(size).double(), torch.zeros(size).double()
    for token in range(size):
        drafted = float(token == int(q.argmax())) if greedy else float(q[token])
        draft = torch.eye(size).double()[token] if as_greedy else q
        keep = min(1.0, float(p[token] / draft[token]))
        residual = (p - draft).clamp(min=0)
        accepted[token] += drafted * keep
        if keep < 1:
            rejected += drafted * (1 - keep) * residual / residual.sum()
    return accepted, rejected


@pytest.mark.parametrize(
    ("scheme", "greedy", "as_greedy"),
    [
        (by_ratio, False, False),
        (top_tokens, True, True),
        (drawn_twice, False, True),
        (top_tokens_by_ratio, True, False),
    ],
)
def test_the_terms_of_a_scheme_are_what_an_engine_does(scheme, greedy, as_greedy):
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        p, q = (torch.rand(5, generator=generator).double().softmax(-1) ** 2 for _ in range(2))
        p, q = p / p.sum(), q / q.sum()
        terms = scheme(p.expand(5, -1), q.expand(5, -1), torch.arange(5))
        wanted = enumerated(p, q, greedy, as_greedy)
        assert all(torch.allclose(own, slow) for own, slow in zip(terms, wanted, strict=True))


@pytest.fixture(scope="module")
def toy():
    return ModelPair.toy()


def result_of(toy, tmp_path, count=24, most=40, beginning=1.5, first=0, words=(), **mistake):
    path = SamplingEngine(toy, **mistake).answer(questions(count, first), toy.encode, most, tmp_path / "answers.jsonl")
    return diagnosed(path, f"sampling.temperature={beginning}", *words)


PLANTED = {
    "the draft's top tokens are taken, and accepted where": {"greedy": True, "as_greedy": True},
    "drafts are drawn, and accepted only where": {"as_greedy": True},
    "the draft's top tokens are taken, and tested": {"greedy": True},
    "the draft's temperature is 0.75": {"draft_temperature": 0.75},
    "top-p is the draft's alone, 0.5": {"top_p": 0.5},
    "the texts were drawn at temperature 0.9": {"temperature": 0.9},
}


def drawn_rounds(prob, generator):
    """A line per round of texts of 15, whose position k is accepted with probability prob[r, k]."""
    kept = generator.random(prob.shape) < prob
    accepted = np.cumprod(kept, 1).sum(1)
    names = {"text": np.arange(len(prob)) // 15, "start": 1, "drafted": prob.shape[1], "accepted": accepted}
    return pd.DataFrame({**names, "third": 1, "category": ""})


def terms_of(prob, text):
    return Terms(prob * text, (1 - prob) * text, text)


@pytest.mark.parametrize("planted", [True, False])
def test_likelihoods_name_what_the_counts_were_drawn_from(planted):
    generator = np.random.default_rng(0)
    right, other, text = (generator.uniform(0.1, 0.9, (600, 4)) for _ in range(3))
    rounds = drawn_rounds(other if planted else right, generator)
    cause = Cause("another scheme")
    several = sampled_explanations(rounds, {AS_IT_SHOULD_BE: terms_of(right, text), cause: terms_of(other, text)})
    result = of_rounds(rounds, several, Bootstrap(200))
    assert result["explained_by"] == (["another scheme"] if planted else []) and result["different"] == []
    beginning = "explained by: another scheme (log-likelihood ratio" if planted else "as it should be: 600 rounds"
    assert beginning in result["sentence"]
    names = {AS_IT_SHOULD_BE: terms_of(right, text)}
    alone = of_rounds(rounds, sampled_explanations(rounds, names), Bootstrap(200))
    assert alone["positions"][0]["expected"] == pytest.approx(right[:, 0].mean())


def test_what_nothing_explains_above_temperature_0_is_said():
    prob = np.full((600, 4), 0.7)
    rounds = drawn_rounds(np.full((600, 4), 0.4), np.random.default_rng(0))
    several = sampled_explanations(rounds, {AS_IT_SHOULD_BE: terms_of(prob, prob)})
    assert "none of the 0 causes explains it (600 rounds" in of_rounds(rounds, several, Bootstrap(200))["sentence"]


@pytest.mark.slow
def test_planted_mistakes_are_named_and_clean_runs_are_not_accused(toy, tmp_path):
    for name, mistake in PLANTED.items():
        (cause,) = result_of(toy, tmp_path, **{"temperature": 1.5, **mistake})["explained_by"]
        assert cause.startswith(name)
    for number, temperature in enumerate((0.7, 1.0, 1.5, 1.0)):
        clean = {"temperature": temperature, "beginning": temperature, "seed": 1 + number, "first": 14 * number}
        assert result_of(toy, tmp_path, **clean)["sentence"].startswith("as it should be")


def test_generations_of_decode_are_as_they_should_be(tmp_path):
    words = ["prompts=toy_math", "prompts.limit=12", "sampling.max_new_tokens=24", "sampling.temperature=.7"]
    words += ["method=speculative", "track=false", f"paths.root_dir={tmp_path}"]
    path = decode.run(compose("decode", words)) / "generations.jsonl"
    result = diagnosed(path, "sampling.temperature=.7")
    assert result["sentence"].startswith("as it should be") and result["rounds"] > 40
    assert result["positions"][0]["expected"] == pytest.approx(result["positions"][0]["accepted"], abs=0.15)


def test_counts_beyond_the_end_of_a_text_are_counted(toy, tmp_path):
    path = tmp_path / "answers.jsonl"
    line = {"prompt_token_ids": [1, 5], "token_ids": [7, 8, 9], "per_step_drafted": [4], "per_step_accepted": [4]}
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "token_ids": [7, 8, 9, 10, 11, 12]}) + "\n")
    assert beyond_end(read_answers(path, toy)[0]) == {"tokens": 2, "texts": 1}
