"""Acceptance from statistics of q: what the weights mean, live decoding against replay, and what takes whose place."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from data_gen.toy import load_frozen
from tests.toolkit.acceptance.live_rounds import lengths_alike
from toolkit import ModelPair, generate
from toolkit.acceptance import HeadEstimator, PrereadEstimator, StatisticsEstimator
from toolkit.acceptance.statistics import NUMBERS, SHIPPED, input_names, read_statistics, write_statistics
from toolkit.config import method
from toolkit.decoding import Sampling, decode
from toolkit.errors import InputError
from toolkit.models.fingerprint import Weights, fingerprint
from toolkit.stopping import Bounded, Rate
from toolkit.trace.record import Recorder
from toolkit.types import DraftStep


def step(logits, token, depth=1):
    logits = torch.as_tensor(logits)
    return DraftStep(depth, logits, logits.softmax(-1), torch.zeros(len(logits), 1), torch.tensor(token))


def written(folder, change=lambda outputs: None):
    """A file with a weight for every input, and an intercept for two depths."""
    outputs = {}
    for number, name in enumerate(("drawn", "position", "following")):
        names = input_names(NUMBERS[:-1] if name == "position" else NUMBERS)
        weights = {
            key: {"weight": 0.1 * (i + 1 + number), "mean": 0.3 * i - 1, "deviation": 2.0 + i}
            for i, key in enumerate(names)
        }
        outputs[name] = {"bias": 0.2, "weights": weights, "intercepts": [0.0, 0.7]}
    change(outputs)
    path = folder / "statistics.json"
    path.write_text(json.dumps({"outputs": outputs}))
    return str(path)


def slow(path, output, probs, token, depth):
    """The probability as one would work it out by hand, from the file's text."""
    first, second = sorted(probs, reverse=True)[:2]
    values = {
        "log odds": math.log(first / (1 - first)), "log ratio": math.log(first / second),
        "entropy": -sum(p * math.log(p) for p in probs), "log q": math.log(probs[token]),
    }  # fmt: skip
    facts = json.loads(Path(path).read_text())["outputs"][output]
    logit = facts["bias"] + facts["intercepts"][min(depth, 2) - 1]
    for name, entry in facts["weights"].items():
        value = math.prod(values[part] for part in name.split(" * "))
        logit += entry["weight"] * (value - entry["mean"]) / entry["deviation"]
    return 1 / (1 + math.exp(-logit))


@pytest.mark.parametrize("depth", [1, 2, 9])  # beyond the last one, its intercept stays
def test_the_outputs_are_what_the_file_says(tmp_path, depth):
    path, logits = written(tmp_path), [[1.0, 0.0, -2.0], [0.1, 0.3, 0.2], [9.0, 0.0, 0.0]]
    estimator, tokens = StatisticsEstimator(path).bind(None), [0, 2, 1]
    drafted = step(logits, tokens, depth)
    drawn, following = estimator.drawn_probs(drafted)
    for row, token in enumerate(tokens):
        probs = torch.tensor(logits[row], dtype=torch.float64).softmax(0).tolist()
        assert float(drawn[row]) == pytest.approx(slow(path, "drawn", probs, token, depth), abs=2e-5)
        assert float(following[row]) == pytest.approx(slow(path, "following", probs, token, depth), abs=2e-5)
        before = DraftStep(depth, drafted.logits, drafted.probs, drafted.hidden)  # no token yet
        position = estimator.position_prob(before)[row]
        assert float(position) == pytest.approx(slow(path, "position", probs, token, depth), abs=2e-5)


def test_certain_and_broken_distributions(tmp_path):
    estimator = StatisticsEstimator(written(tmp_path)).bind(None)
    certain = step([[200.0, 0.0, 0.0]], [0])
    assert all(bool(torch.isfinite(prob)) for prob in estimator.drawn_probs(certain))
    broken = step([[1.0, 0.0, 0.0], [math.nan, 0.0, 0.0]], [0, 0])
    for probs in (*estimator.drawn_probs(broken), estimator.position_prob(broken)):
        assert probs.isnan().tolist() == [False, True]  # it ends the row, and no other one


def test_live_rounds_are_replayed_rounds_in_any_batch():
    """Toy pair, temperature 0, where the text and every draft are certain; also in float64, which recordings round."""
    asked = [load_frozen(domain, "dev")[i].prompt for domain in ("instruct", "code") for i in range(2)]
    greedy, lengths = Sampling(temperature=0.0, max_new_tokens=20), set()
    for dtype, batch_size in (("float32", 4), ("float64", 1)):
        pair = ModelPair.toy(dtype=dtype)
        plain = decode(pair, asked, method("autoregressive"), greedy)
        trace = Recorder(pair, greedy, 6).record_all([(g.prompt_ids, g.token_ids) for g in plain], range(len(plain)))
        for rate in (1.5, 2.5) if dtype == "float32" else (2.0,):
            policy = Bounded(Rate(StatisticsEstimator(), 0.2, rate), 1, 6)
            lengths |= lengths_alike(pair, asked, plain, trace, policy, greedy, batch_size=batch_size)
    assert len(lengths) > 3


def test_a_head_comes_first_then_statistics_then_the_weights_that_ship(tmp_path, capsys, toy_prompt):
    path, toy = written(tmp_path), toy_prompt[0]
    headless = ModelPair(toy.target, toy.draft, toy.tokenizer)
    assert isinstance(PrereadEstimator(toy.head, path).bind(headless), PrereadEstimator)
    assert isinstance(PrereadEstimator(None, path).bind(toy), PrereadEstimator)
    named, shipped = PrereadEstimator(None, path).bind(headless), PrereadEstimator().bind(headless)
    assert isinstance(named, StatisticsEstimator) and named.path == path
    assert isinstance(shipped, StatisticsEstimator)
    assert shipped.outputs == StatisticsEstimator(str(SHIPPED)).bind(None).outputs != named.outputs
    with pytest.raises(InputError, match="needs an acceptance head"):
        HeadEstimator().bind(headless)
    assert f"not by statistics={path}" in capsys.readouterr().err


def test_methods_decode_with_statistics_and_keep_the_targets_text(tmp_path, toy_prompt):
    toy, prompt = toy_prompt
    headless = ModelPair(toy.target, toy.draft, toy.tokenizer, costs="assumed")
    estimator = "{_target_: toolkit.acceptance.StatisticsEstimator, path: '" + written(tmp_path) + "'}"
    chosen = ["~policy.estimator", f"+policy.estimator={estimator}"]
    (plain,) = generate(headless, [prompt], "autoregressive", temperature=0.0)
    for name, options in (
        ("rate", {}),
        ("rate", {"statistics": str(SHIPPED)}),
        ("batch_rate", {}),
        ("best_source", {"overrides": chosen}),
    ):
        (produced,) = generate(headless, [prompt], name, temperature=0.0, **options)
        assert produced.token_ids == plain.token_ids and produced.counts.num_draft_calls > 0


def test_a_call_reads_the_drafts_weights_at_most_once_per_pair(toy_prompt):
    """Never for the weights that ship; a digest of a real draft costs as much as many forward passes."""

    class Weights(torch.nn.Module):
        def state_dict(self, *args, **kwargs):
            raise AssertionError("all weights were read")

    headless = ModelPair(toy_prompt[0].target, toy_prompt[0].draft, toy_prompt[0].tokenizer)
    StatisticsEstimator(str(SHIPPED)).bind(headless)
    headless.draft.state_dict = Weights().state_dict
    try:
        assert StatisticsEstimator(str(SHIPPED)).bind(headless).outputs
        assert StatisticsEstimator().bind(ModelPair(headless.target, headless.draft, headless.tokenizer)).outputs
    finally:
        del headless.draft.state_dict


def test_the_same_draft_in_another_number_format_is_not_warned_of(tmp_path, toy_prompt):
    toy, low = toy_prompt[0], ModelPair.toy(dtype="bfloat16")
    weights = Weights.of(toy.draft)
    assert fingerprint(low.draft) != weights.fingerprint
    outputs, _ = read_statistics(SHIPPED)
    record = {"drafts": [weights.fingerprint], "draft_weights": {weights.fingerprint: weights.sketch}}
    path = str(write_statistics(tmp_path / "statistics.json", outputs, record))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert StatisticsEstimator(path).bind(low).outputs
    with pytest.warns(RuntimeWarning, match="fitted to another draft"):
        StatisticsEstimator(path).bind(ModelPair(low.target, low.target, low.tokenizer))


def test_another_draft_is_warned_of_and_other_files_are_refused(tmp_path, toy_prompt):
    toy = toy_prompt[0]
    other = ModelPair(toy.target, toy.target, toy.tokenizer)
    with pytest.warns(RuntimeWarning, match="fitted to another draft"):
        StatisticsEstimator(str(SHIPPED)).bind(other)

    def not_a_number(outputs):
        outputs["drawn"]["weights"]["log odds"]["weight"] = math.nan

    def misspelt(outputs):
        outputs["position"]["weights"]["log q"] = {"weight": 1.0, "mean": 0.0, "deviation": 1.0}

    for change, message in (
        (not_a_number, "not numbers"),
        (misspelt, "unknown inputs log q"),
        (dict.clear, "holds no"),
    ):
        with pytest.raises(InputError, match=message):
            StatisticsEstimator(written(tmp_path, change)).bind(None)
