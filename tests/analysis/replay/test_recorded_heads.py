"""Heads on traces: whose logits are read, scored anew, judged and calibrated; and which are refused."""

import math
import warnings
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.replay import calibrating, head_folders
from analysis.replay.calibrating import Scored
from analysis.replay.head_scores import drawn_samples, head_scores
from analysis.replay.recorded_heads import RecordedScorer, scorer_of, threshold_policy, with_logits, with_recorded_heads
from analysis.tables.bootstrap import Bootstrap
from tests.analysis.replay.plain import Text, small_trace
from toolkit import testing
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead, from_states
from toolkit.acceptance.calibration.scores import CalibrationScores
from toolkit.acceptance.folder import head_hash
from toolkit.acceptance.preread import PrereadScorer, embedding_table
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json
from toolkit.models.fingerprint import sketch
from toolkit.runs.stage import checksum
from toolkit.stopping import Bounded, Confidence, Fixed, Rate, Survival
from toolkit.testing import tiny_model
from toolkit.trace.step import RecordedStep

SIZE = 9  # rows of the draft's table: its states


@pytest.fixture(scope="module")
def trace():
    return small_trace(hidden=True, upper_bound=True)


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(0)
    return AcceptanceHead(SIZE, log_w_rej=math.log(3.0)), PrereadHead(SIZE, 3, width=4, log_w_rej=math.log(2.0))


@pytest.fixture(scope="module")
def scored(trace):
    """Made-up logits: of an acceptance head [S], and of a pre-read one [S, 2]."""
    return torch.randn(trace.num_steps, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def every_start(trace):
    for number in range(trace.num_texts):
        text = Text(trace, number)
        for start in range(text.first, text.end):
            yield text, start


# -- logits -----------------------------------------------------------------------------------------------------------


def test_a_recorded_scorer_reads_its_own_name_from_steps_of_a_trace(trace, scored):
    told = replace(trace, estimates={"mine": scored[:, 0], "other": scored[:, 1]})
    index = torch.tensor([3, 1])
    assert torch.equal(RecordedScorer("other")(RecordedStep(told, 1, index)), scored[index, 1])
    with pytest.raises(InputError, match=r"^recorded logits \(mine\) belong to the steps of a trace, got a Simple"):
        RecordedScorer("mine")(SimpleNamespace())


@pytest.mark.parametrize("chunk", [7, 16384])
def test_logits_are_those_of_the_head_on_every_state(trace, heads, monkeypatch, chunk):
    monkeypatch.setattr(from_states, "CHUNK", chunk)
    draft = testing.table_pair().draft
    acceptance, preread = heads
    found = with_logits(trace, "x", scorer_of(acceptance, draft))
    assert list(found.estimates) == ["x"] and found.estimates["x"].dtype == torch.float32
    assert torch.allclose(found.estimates["x"], acceptance(trace.hidden.float()), atol=1e-6)
    found = with_logits(trace, "y", scorer_of(preread, draft)).estimates["y"]
    step = RecordedStep(trace, 1, torch.arange(trace.num_steps))
    known = PrereadScorer(preread, embedding_table(draft).cpu())(step)
    assert found.shape == (trace.num_steps, 2) and torch.allclose(found, known.float(), atol=1e-6)
    assert not found.requires_grad


@pytest.mark.parametrize("corrected", [True, False])
def test_the_policy_that_is_swept_is_that_of_the_kind_of_head(heads, corrected):
    acceptance, preread = heads
    policy = threshold_policy(acceptance, "x", corrected)
    assert isinstance(policy, Survival) and policy.estimator.corrected == corrected
    assert (policy.estimator.scorer, policy.estimator.log_w_rej) == (RecordedScorer("x"), pytest.approx(math.log(3)))
    policy = threshold_policy(preread, "x", corrected)
    assert isinstance(policy, Rate) and policy.rate == 1.0
    assert (policy.estimator.scorer, policy.estimator.log_w_rej) == (RecordedScorer("x"), pytest.approx(math.log(2)))


def test_policies_read_the_logits_of_their_own_head():
    survival = Survival(HeadEstimator("folder/a", log_w_rej=0.5), 0.3)
    found = with_recorded_heads(Bounded(survival, 2, 4), {"folder/a": "a", "folder/b": "b"})
    assert (found.min_drafted, found.max_drafted, found.policy.threshold) == (2, 4, 0.3)
    assert found.policy.estimator.scorer == RecordedScorer("a") and found.policy.estimator.log_w_rej == 0.5
    rate = with_recorded_heads(Rate(PrereadEstimator("folder/b"), rate=0.7), {"folder/b": "b"})
    assert rate.estimator.scorer == RecordedScorer("b.preread") and rate.rate == 0.7
    for plain in (Confidence(0.2), Fixed(3)):
        assert with_recorded_heads(plain, {}) is plain
    own = SimpleNamespace(estimator=SimpleNamespace())  # an estimator that has no head
    assert with_recorded_heads(own, {}) is own
    for names, held in (({}, "none"), ({"x": "1", "y": "2"}, "x, y")):
        words = rf"^the trace holds no estimates of the head in folder/a \(held: {held}\)$"
        with pytest.raises(InputError, match=words):
            with_recorded_heads(survival, names)


# -- samples and scores -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preread", [True, False])
def test_samples_are_tokens_that_the_draft_has_read(trace, scored, preread):
    given, known = scored if preread else scored[:, 0], []
    found = drawn_samples(trace, given, preread)
    assert all(map(torch.equal, Scored(trace, given, preread).positions(), found[:2]))
    for text, start in every_start(trace):
        steps = text.visited(start)
        if len(steps) > 1:
            known.append((scored[start if preread else steps[1], 0], trace.accept_prob[start], text.number))
    for values, column in zip(found, zip(*known, strict=True), strict=True):
        assert values.tolist() == [float(value) for value in column]
    assert len(known) > 50


@pytest.mark.parametrize("preread", [False, True])
def test_scores_of_a_head_with_and_without_its_class_weight(trace, heads, scored, preread):
    head = heads[preread]
    told = replace(trace, estimates={"x": scored if preread else scored[:, 0]})
    chosen = np.arange(trace.num_texts) % 3 != 0
    bootstrap = Bootstrap(200, 0.9, seed=1)
    found = head_scores(told, chosen, head, "x", bootstrap)
    logits, labels, text = drawn_samples(trace, told.estimates["x"], preread)
    mine = torch.tensor([number % 3 != 0 for number in text.tolist()])
    z, p, texts = logits[mine].double(), labels[mine].double(), text[mine]
    q = torch.sigmoid(z)
    loss = -(p * q.log() + (1 - p) * (1 - q).log())
    kl = loss - (torch.special.entr(p) + torch.special.entr(1 - p))
    shifted = torch.sigmoid(z + math.log(2.0 if preread else 3.0))
    assert found["tokens"] == len(z)
    assert found["log_loss"] == pytest.approx(float(loss.mean())) and found["binary_kl"] == pytest.approx(
        float(kl.mean())
    )
    corrected = -(p * shifted.log() + (1 - p) * (1 - shifted).log()).mean()
    assert found["log_loss_corrected"] == pytest.approx(float(corrected))
    scores = CalibrationScores()
    scores.update(z, p)
    assert found["auroc"] == pytest.approx(float(scores.compute()["auroc"]))
    assert found["ece"] == pytest.approx(float(scores.compute()["ece"])) and found["ece_corrected"] != found["ece"]
    sums = np.array([
        [float(kl[texts == number].sum()), int((texts == number).sum())] for number in np.flatnonzero(chosen)
    ])  # fmt: skip
    _, low, high = bootstrap.interval(sums, lambda totals: totals[..., 0] / totals[..., 1])
    assert (found["binary_kl_low"], found["binary_kl_high"]) == (pytest.approx(low), pytest.approx(high))
    assert low < found["binary_kl"] < high
    names = {"tokens", "auroc", "binary_kl_low", "binary_kl_high"}
    names |= {f"{name}{suffix}" for name in ("log_loss", "binary_kl", "ece") for suffix in ("", "_corrected")}
    assert set(found) == names


def test_without_samples_there_are_no_scores(heads):
    trace = small_trace(count=4, most=1)
    logits = torch.zeros(trace.num_steps)
    alone = replace(trace, accepted=torch.zeros_like(trace.accepted), estimates={"x": logits})
    identity = SimpleNamespace(token_probs=torch.sigmoid, probs=torch.sigmoid)
    for score in (
        lambda: head_scores(alone, np.ones(4, dtype=bool), heads[0], "x", Bootstrap(10)),
        lambda: calibrating.judge(Scored(alone, logits, False), identity, 0.0, 2),
    ):
        with pytest.raises(InputError, match="^no drafted token was read after its position: record .*max_drafted"):
            score()


@pytest.mark.parametrize("preread", [True, False])
def test_products_are_those_of_rounds_from_every_start(trace, scored, preread):
    """Walked slowly: along the text up to the first rejected position, then along its roll-out."""
    depths = range(1, 5)
    products = Scored(trace, scored if preread else scored[:, 0], preread).products(torch.sigmoid, depths[-1])
    found = {depth: (product.tolist(), label.tolist()) for depth, product, label in products}
    slow = {depth: ([], []) for depth in depths}
    for text, start in every_start(trace):
        steps, product = text.visited(start), 1.0
        for depth in depths:
            read = depth - 1 if preread else depth
            if read >= len(steps):
                break
            product *= float(torch.sigmoid(scored[steps[read], 0]))
            alive = depth - 1 <= text.run(start)
            slow[depth][0].append(product)
            slow[depth][1].append(float(trace.accept_prob[steps[depth - 1]]) if alive else 0.0)
    assert sum(len(product) for product, _ in slow.values()) > 100
    for depth in depths:
        assert found[depth] == (pytest.approx(slow[depth][0]), pytest.approx(slow[depth][1]))


# -- calibrations -----------------------------------------------------------------------------------------------------


def test_following_positions_are_those_behind_accepted_tokens_of_the_same_text(trace, scored):
    logits, labels = Scored(trace, scored, True).following()
    known = [
        (float(scored[start, 1]), float(trace.alpha[start + 1]))
        for text, start in every_start(trace)
        if trace.accepted[start] and start + 1 < text.end
    ]
    assert list(zip(logits.tolist(), labels.tolist(), strict=True)) == known and len(known) > 20


def test_a_contender_is_scored_on_the_trace(trace, heads):
    draft = testing.table_pair().draft
    computed = Scored.of(head_folders.Contender("n", "kind", Path(), heads[1], {}, None), trace, draft)
    assert computed.preread and torch.equal(
        computed.logits, with_logits(trace, "x", scorer_of(heads[1], draft)).estimates["x"]
    )
    for head, name in zip(heads, (None, "mine"), strict=True):
        told = replace(trace, estimates={"mine": torch.zeros(trace.num_steps, 2)})
        contender = head_folders.Contender("n", "kind", Path(), head, {}, name)
        one = Scored.of(contender, told, draft)
        assert one.preread == isinstance(head, PrereadHead)
        known = told.estimates["mine"] if name else head(trace.hidden.float())
        assert torch.allclose(one.logits, known, atol=1e-6) and torch.equal(one.trace.tokens, trace.tokens)


def test_a_calibration_mends_what_is_wrong(trace):
    """Logits of the true probabilities, scaled and shifted: the fit takes that back, with the class weight's shift."""
    truth = torch.logit(trace.accept_prob.double().clamp(1e-3, 1 - 1e-3))
    said = torch.zeros(trace.num_steps, dtype=torch.float64)
    for text, start in every_start(trace):
        steps = text.visited(start)
        for one, other in pairwise(steps):
            said[other] = truth[one]
    wrong = Scored(trace, 0.5 * said - 0.7, False)
    fitted = calibrating.fit([wrong, wrong], 0.4, "platt", 3)
    logits, labels = wrong.positions()
    error = {
        name: float((own(logits.double()) - labels).abs().mean())
        for name, (own, _) in calibrating.versions(fitted, 0.4).items()
    }
    assert error["calibrated"] < 0.6 * error["raw"]
    z = torch.tensor([0.3, -1.0], dtype=torch.float64)
    for name, known in (("raw", torch.sigmoid(z)), ("corrected", torch.sigmoid(z + 0.4))):
        for chances in calibrating.versions(fitted, 0.4)[name]:
            assert torch.allclose(chances(z), known)
    own, multiplied = calibrating.versions(fitted, 0.4)["calibrated"]
    assert torch.equal(own(z), fitted.token_probs(z + 0.4)) and torch.equal(multiplied(z), fitted.probs(z + 0.4))


@pytest.mark.parametrize("preread", [True, False])
def test_lines_of_a_judgement_are_scores_of_its_scopes(trace, scored, preread):
    one = Scored(trace, scored if preread else scored[:, 0], preread)
    fitted = calibrating.fit([one], 0.2, "platt", 2)
    lines, bins = calibrating.judge(one, fitted, 0.2, 2)
    scopes = ["position", *(["following"] if preread else []), "product 1", "product 2", "product"]
    assert [(line["version"], line["scope"]) for line in lines] == [
        (version, scope) for version in ("raw", "corrected", "calibrated") for scope in scopes
    ]
    found = {(line["version"], line["scope"]): line for line in lines}

    def scores(probs, labels):
        judged = CalibrationScores()
        judged.update(torch.logit(probs.double(), eps=calibrating.SMALLEST), labels)
        return judged

    logits, labels = one.positions()
    for version, z in (("raw", logits), ("corrected", logits + 0.2)):
        known = scores(torch.sigmoid(z), labels)
        line = found[version, "position"]
        assert line["samples"] == len(z) and line["log_loss"] == pytest.approx(float(known.compute()["log_loss"]))
        mine = [row for row in bins if (row["version"], row["scope"]) == (version, "position")]
        assert [row["count"] if "count" in row else len(row) for row in mine] == [
            row["count"] if "count" in row else len(row) + 2 for row in known.reliability()
        ]
    if preread:
        following, alphas = one.following()
        known = scores(torch.sigmoid(following + 0.2), alphas).compute()["log_loss"]
        assert found["corrected", "following"]["log_loss"] == pytest.approx(float(known))
        calibrated = fitted.token_probs(torch.stack([following, following], -1).double() + 0.2)[:, 1]
        known = scores(calibrated, alphas).compute()["log_loss"]
        assert found["calibrated", "following"]["log_loss"] == pytest.approx(float(known))
    parts = list(one.products(torch.sigmoid, 2))
    for depth, product, label in parts:
        line = found["raw", f"product {depth}"]
        assert (line["samples"], line["log_loss"]) == (
            len(product), pytest.approx(float(scores(product, label).compute()["log_loss"])),
        )  # fmt: skip
    whole = scores(torch.cat([p for _, p, _ in parts]), torch.cat([label for *_, label in parts]))
    assert found["raw", "product"]["log_loss"] == pytest.approx(float(whole.compute()["log_loss"]))
    assert found["raw", "product"]["samples"] == sum(len(p) for _, p, _ in parts)


def test_certain_probabilities_are_judged_as_nearly_certain():
    found = calibrating._judged(torch.tensor([0.0, 1.0]), torch.tensor([0.25, 0.25])).compute()
    assert float(found["log_loss"]) == pytest.approx(0.5 * -math.log(calibrating.SMALLEST), rel=1e-6)


# -- folders of heads -------------------------------------------------------------------------------------------------


def traces_folder(path, heads=(), hidden=True, fingerprint="f"):
    path.mkdir()
    write_json(path / "summary.json", {"heads": dict(heads), "draft_fingerprint": fingerprint})
    manifest = {"stage": "traces", "config": {"hidden": hidden}}
    write_json(path / "manifest.json", {**manifest, "checksum": checksum(manifest)})
    return path


def test_every_head_of_the_folders_is_found(tmp_path, heads):
    acceptance, preread = heads
    run = tmp_path / "run" / "head"
    acceptance.save(run, {"draft_fingerprint": "f", "metrics": {"train/binary_kl": 0.125}})
    preread.save(tmp_path / "both", {"draft_fingerprint": "f", "metrics": {"val/binary_kl_accepted": 0.5}})
    acceptance.save(tmp_path / "both", {"draft_fingerprint": "f"})
    digest, other = head_hash(run), head_hash(tmp_path / "both")
    one = traces_folder(tmp_path / "one", {"a": digest, "b": other})
    two = traces_folder(tmp_path / "two", {"x": digest, "b": other}, hidden=True)
    found = head_folders.find_contenders([tmp_path / "run", str(tmp_path / "both")], [one, two])
    assert [(each.name, each.kind, each.folder, each.recorded) for each in found] == [
        (f"run@{digest[:6]}", "survival", run, None),
        (f"both@{other[:6]}", "survival", tmp_path / "both", "b"),
        (f"both@{other[:6]} (pre-read)", "preread", tmp_path / "both", "b.preread"),
    ]
    assert [each.estimate for each in found] == ["head", "b", "b.preread"]
    assert [each.needs_draft for each in found] == [False, False, False]
    (alone,) = head_folders.find_contenders([run], [one])
    assert (alone.name, alone.recorded) == (f"run@{digest[:6]}", "a")
    assert [path.exists() for path in alone.files] == [True, True] and len(set(alone.files)) == 2
    assert {path.parent for path in alone.files} == {run}
    assert (alone.settings["tied"], alone.settings["train_kl"]) == (False, 0.125)
    names = ("kind", "w_rej", "mixing", "validation_kl", "tied", "depth")
    assert [found[2].settings[name] for name in names] == ["preread", 2.0, None, 0.5, None, preread.depth]
    unknown = traces_folder(tmp_path / "unknown")
    computed = head_folders.find_contenders([tmp_path / "both"], [unknown])
    assert [each.needs_draft for each in computed] == [False, True]


def test_a_head_for_another_target_than_the_recorded_one_is_named(tmp_path, heads):
    acceptance, _ = heads
    mine, other = (
        {"target_fingerprint": name, "target_weights": sketch(tiny_model(name))} for name in ("llama", "qwen2")
    )
    head = acceptance.save(tmp_path / "head", {"draft_fingerprint": "f", **mine})
    same, traces = traces_folder(tmp_path / "same"), traces_folder(tmp_path / "traces")
    for folder, target in ((same, mine), (traces, other)):
        write_json(folder / "summary.json", {**read_json(folder / "summary.json"), **target})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head_folders.find_contenders([head], [same])
    with pytest.warns(RuntimeWarning, match=f"the head in {head} predicts .* than that of the traces in {traces} "):
        head_folders.find_contenders([head], [traces])


def test_heads_that_cannot_be_replayed_are_named(tmp_path, heads):
    head = heads[0].save(tmp_path / "head", {"draft_fingerprint": "f"})
    states, other = traces_folder(tmp_path / "states"), traces_folder(tmp_path / "other", fingerprint="g")
    blind = traces_folder(tmp_path / "blind", hidden=False)
    for folders, places, words in (
        ([], [states], r"^heads: expected folders of heads, heads=\[FOLDER,...\], got none$"),
        ("head", [states], "expected folders of heads.*got head$"),
        ([head, head], [states], f"{head} holds the same head as {head}; give it once$"),
        ([head], [states, other], f"{head} was trained for another draft than the traces in {other} .*f.*g"),
        ([head], [blind], f"neither states nor logits of the head in {head}: record them with hidden=true"),
        ([head], [states, blind], "neither states nor logits"),
    ):
        with pytest.raises(InputError, match=words):
            head_folders.find_contenders(folders, places)
    named = traces_folder(tmp_path / "named", {"a": head_hash(head)}, hidden=False)
    assert head_folders.find_contenders([head], [named])[0].recorded == "a"
    unsaid = traces_folder(tmp_path / "unsaid", fingerprint=None)
    assert len(head_folders.find_contenders([head], [unsaid])) == 1
