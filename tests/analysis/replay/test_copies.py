"""analysis.heads copies=RESPONSES: a fit by the public command, scored on other texts, used by both methods."""

import json

import pytest
import torch

from analysis.heads import run
from analysis.replay import copies
from analysis.tables.files import read_table
from data_gen import responses
from toolkit import config, generate
from toolkit.acceptance.match import MatchEstimator, examples
from toolkit.decoding import SuffixProposer
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair


def answered(folder, limit, *words):
    words = ["prompts=toy_code", "prompts.split=train", f"prompts.limit={limit}", "sampling.max_new_tokens=32", *words]
    return responses.run(config.compose("responses", [*words, f"paths.root_dir={folder}"]))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    return answered(tmp_path_factory.mktemp("answers"), 24)


def fitted(answers, folder, *words):
    return run(config.compose("heads", [f"copies={answers}", f"paths.root_dir={folder}", "track=false", *words]))


def test_the_fit_is_scored_on_texts_that_it_has_not_seen(answers, tmp_path, capsys):
    folder = fitted(answers, tmp_path, "dev_share=.25", "max_drafted=6")
    table = read_table(folder, "scores").set_index("estimator")
    estimator = MatchEstimator(path=str(folder / "match.json")).bind(None)
    rows = list(responses.read_rows(answers))
    own, others = copies.split(rows, 0.25, 0)
    assert (len(own), len(others)) == (18, 6)
    assert {tuple(p) for p, _ in own}.isdisjoint(tuple(p) for p, _ in others)
    ends = {row["token_ids"][-1] for row in rows if row["finish_reason"] == "end"}
    assert ends == {*ModelPair.toy().end_ids}
    inputs, labels = examples(SuffixProposer(), others, 6, sorted(ends))
    probs, truth = estimator.logits(inputs).sigmoid(), labels.double()
    slow = -(truth * probs.log() + (1 - truth) * (1 - probs).log()).mean()
    assert table.log_loss["fitted"] == pytest.approx(float(slow), abs=1e-6)
    assert table.log_loss["fitted"] < min(table.log_loss["untrained"], table.log_loss["one rate"])
    assert table.accepted["fitted"] == pytest.approx(float(truth.mean()), abs=1e-9)
    said = capsys.readouterr().out
    assert "fitted to 18 texts" in said and str(folder / "match.json") in said
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["copied_tokens"][1] == len(labels)
    before = (folder / "match.json").stat().st_mtime_ns
    assert fitted(answers, tmp_path, "dev_share=.25", "max_drafted=6") == folder
    assert (folder / "match.json").stat().st_mtime_ns == before
    assert fitted(answers, tmp_path, "dev_share=.25", "max_drafted=5") != folder


def test_both_methods_take_the_estimator_and_earlier_responses(answers, tmp_path):
    path = fitted(answers, tmp_path) / "match.json"
    prompt = next(iter(responses.read_rows(answers)))["prompt_ids"]
    for name, words in (
        ("lookup_rate", [f"policy.estimator.path={path}", f"proposer.responses={answers}"]),
        ("best_source", [f"policy.copies.path={path}", f"proposer.copies.responses={answers}", "policy.cost_ratio=9"]),
    ):
        (plain,), (copied,) = (
            generate(ModelPair.toy(), [prompt], method, overrides=overrides, temperature=0.0, max_new_tokens=24)
            for method, overrides in (("autoregressive", []), (name, words))
        )
        assert copied.token_ids == plain.token_ids and copied.counts.num_draft_calls == 0
        assert copied.counts.num_target_calls < plain.counts.num_target_calls
    folder, lines = SuffixProposer(responses=str(answers)), tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"token_ids": r["token_ids"]}) + "\n" for r in responses.read_rows(answers)))
    assert folder.earlier.tolist() == SuffixProposer(responses=str(lines)).earlier.tolist()


def test_what_cannot_be_fitted_is_one_line(answers, tmp_path):
    with pytest.raises(InputError, match="earlier: 2. of 24 texts of `copies` are among them"):
        fitted(answers, tmp_path, f"earlier={answers}")
    with pytest.raises(InputError, match="expected texts to fit to and some to hold out"):
        fitted(answers, tmp_path, "limit=1")
    other = answered(tmp_path / "others", 6, "prompts.split=dev")
    assert (fitted(answers, tmp_path, f"earlier={other}") / "match.json").exists()


def test_one_rate_is_the_rate_of_the_texts_that_were_fitted_to():
    inputs, labels = torch.zeros(4, 6, dtype=torch.float64), torch.tensor([True, False, False, False])
    table = copies.scores(MatchEstimator(), inputs, labels, inputs, torch.tensor([True, True, False, False]))
    assert table.set_index("estimator").mean_estimate["one rate"] == pytest.approx(0.25)


def test_the_responses_to_a_prompt_are_held_out_together():
    rows = [{"prompt_ids": [number % 5], "token_ids": [number]} for number in range(20)]
    fitted_to, held_out = copies.split(rows, 0.4, seed=0)
    prompts, others = ({prompt[0] for prompt, _ in part} for part in (fitted_to, held_out))
    assert (len(fitted_to), len(held_out)) == (12, 8) and not prompts & others
