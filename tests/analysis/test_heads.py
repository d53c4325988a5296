"""The table of heads: what is replayed is the live policy, scores are what a loop finds, thresholds are chosen elsewhere."""

import numpy as np
import pytest
import torch

from analysis import heads
from analysis.replay.head_folders import side_by_side
from analysis.replay.policies import replay
from analysis.replay.recorded_heads import with_recorded_heads
from analysis.tables.files import read_table
from data_gen import traces
from toolkit import ModelPair
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.metrics import throughput
from toolkit.models.pair import fingerprint
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.trace.folders import read_traces
from toolkit.types import Counts

MAX, SHARE = 6, 0.4
THRESHOLDS = [0.2, 0.5, 0.8, 0.95]


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return ModelPair.from_pretrained(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))


@pytest.fixture(scope="module")
def folders(pair, tmp_path_factory):
    """Random heads of three kinds; the first one lies as toolkit.train leaves it, with its settings."""
    root, about = tmp_path_factory.mktemp("heads"), {"draft_fingerprint": fingerprint(pair.draft)}
    torch.manual_seed(0)
    trained = {**about, "w_rej": 3.0, "mixing_ratio": 0.15, "metrics": {"val/binary_kl": 0.25}}
    AcceptanceHead(16, depth=2, log_w_rej=float(np.log(3.0))).save(root / "run" / "head", trained)
    AcceptanceHead(16).save(root / "linear", about)
    PrereadHead(16, 16, width=8).save(root / "preread", about)
    return {"run": root / "run", "linear": root / "linear", "preread": root / "preread"}


def record(tiny_overrides, tiny_responses, folder, *options):
    options = [f"responses={tiny_responses}", f"max_drafted={MAX}", "limit=40", "upper_bound=false", *options]
    return traces.run(compose("traces", [*tiny_overrides, *options, f"paths.output_dir={folder}"]))


@pytest.fixture(scope="module")
def recorded(tiny_overrides, tiny_responses, folders, tmp_path_factory):
    """Traces with states, and traces with the logits of all heads instead."""
    root = tmp_path_factory.mktemp("traces")
    named = f"heads={{run: {folders['run']}/head, linear: {folders['linear']}, preread: {folders['preread']}}}"
    return {
        "states": record(tiny_overrides, tiny_responses, root / "states", "hidden=true", "heads={}"),
        "logits": record(tiny_overrides, tiny_responses, root / "logits", named),
    }


def options(tiny_overrides, traces_folder, folders, *more):
    listed = ",".join(map(str, folders))
    thresholds = ",".join(map(str, THRESHOLDS))
    return compose("heads", [
        *tiny_overrides, f"traces={traces_folder}", f"heads=[{listed}]", f"thresholds=[{thresholds}]", "track=false",
        f"dev_share={SHARE}", "resamples=300", *more,
    ])  # fmt: skip


@pytest.fixture(scope="module")
def made(tiny_overrides, recorded, folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    return {
        name: heads.run(options(tiny_overrides, folder, folders.values(), f"paths.output_dir={out}/{name}"))
        for name, folder in recorded.items()
    }


def dev_texts(num_texts):
    chosen = np.zeros(num_texts, dtype=bool)
    chosen[np.random.default_rng(0).permutation(num_texts)[: round(SHARE * num_texts)]] = True
    return chosen


def total(replayed, texts):
    return Counts(**{name: int(values[texts].sum()) for name, values in replayed.counts.items()})


def test_every_line_is_the_policy_that_decodes_with_the_head(made, recorded, folders, pair):
    """The policy objects of the live loop on the recorded logits, one threshold at a time."""
    trace = read_traces(recorded["logits"])
    names = {str(folders["run"] / "head"): "run", **{str(folders[n]): n for n in ("linear", "preread")}}
    dev = dev_texts(trace.num_texts)
    table = read_table(made["logits"], "heads").set_index("head")
    curves = read_table(made["logits"], "thresholds")
    for folder, name in names.items():
        (line,) = (table.loc[key] for key in table.index if key.startswith(f"{name}@"))
        found = {}
        for h in THRESHOLDS:
            policy = (
                Rate(PrereadEstimator(folder), cost_ratio=1.0, rate=1 - h)
                if name == "preread"
                else Survival(HeadEstimator(folder), h)
            )
            found[h] = replay(
                trace, with_recorded_heads(Bounded(policy.bind(pair), 1 if name == "preread" else 2, MAX), names)
            )
        best = max(found, key=lambda h: throughput(total(found[h], dev), 0.2))
        assert line.setting == f"h={best:g}"
        counts = total(found[best], ~dev)
        assert line.throughput == pytest.approx(throughput(counts, 0.2))
        assert line.discard_rate == pytest.approx(counts.num_discarded / counts.num_generated)
        assert line.verification_rate == pytest.approx(counts.num_target_calls / counts.num_generated)
        assert line.throughput_low <= line.throughput <= line.throughput_high
        mine = curves[curves.method == line.name]
        assert mine.throughput.tolist() == pytest.approx([throughput(total(f, ~dev), 0.2) for f in found.values()])


def test_states_and_recorded_logits_give_the_same_table(made):
    states, logits = (read_table(made[name], "heads") for name in ("states", "logits"))
    assert states["head"].tolist() == logits["head"].tolist() and len(states) == 4
    for name in ("binary_kl", "auroc", "throughput"):  # states are kept in half precision
        np.testing.assert_allclose(states[name], logits[name], rtol=0.02)


def test_scores_against_a_loop(made, recorded):
    trace = read_traces(recorded["logits"])
    dev, text = dev_texts(trace.num_texts), torch.repeat_interleave(torch.arange(trace.num_texts), trace.lengths())
    said: dict[str, list[float]] = {"run": [], "preread": []}
    labels = []
    for i in range(trace.num_positions):
        last = i + 1 == trace.num_positions or text[i + 1] != text[i]
        if dev[text[i]] or (last if trace.accepted[i] else trace.roll_length[i] == 0):
            continue  # not reported on, or the draft never read the token
        reading = i + 1 if trace.accepted[i] else int(trace.roll_first[i])
        said["run"].append(float(trace.estimates["run"][reading]))
        said["preread"].append(float(trace.estimates["preread.preread"][i, 0]))
        labels.append(float(trace.accept_prob[i]))
    p = np.clip(np.array(labels), 1e-12, 1 - 1e-12)
    table = read_table(made["logits"], "heads").set_index("head")
    assert len(p) > 100
    for name, logits in said.items():
        (line,) = (table.loc[key] for key in table.index if key.startswith(f"{name}@"))
        q = 1 / (1 + np.exp(-np.array(logits)))
        assert line.tokens == len(p)
        assert line.binary_kl == pytest.approx(
            (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean(), rel=1e-4
        )
        wins = [(p[i] * (1 - p[q < q[i]])).sum() + p[i] * (1 - p[q == q[i]]).sum() / 2 for i in range(len(p))]
        assert line.auroc == pytest.approx(sum(wins) / (p.sum() * (1 - p).sum()), abs=2e-3)
        assert line.binary_kl_low <= line.binary_kl <= line.binary_kl_high


def test_settings_come_from_the_heads_own_folders(made):
    table = read_table(made["states"], "heads")
    run = table[table["head"].str.startswith("run@")].iloc[0]
    assert (run.depth, run.w_rej, run.mixing, run.validation_kl) == (2, 3.0, 0.15, 0.25)
    assert run.binary_kl != run.binary_kl_corrected
    assert table[table.kind == "preread"].validation_kl.isna().all()
    text = (made["states"] / "heads.md").read_text()
    assert "| run@" in text and "(pre-read) | preread |" in text and "| fixed K |" in text
    assert (made["states"] / "pareto.png").stat().st_size > 10_000


def test_finished_work_is_kept(made, tiny_overrides, recorded, folders, monkeypatch):
    monkeypatch.setattr(heads, "_study", None)
    again = options(tiny_overrides, recorded["states"], folders.values(), f"paths.output_dir={made['states']}")
    assert heads.run(again) == made["states"]


def test_thresholds_from_other_traces(tiny_overrides, tiny_responses, recorded, folders, tmp_path):
    dev = record(tiny_overrides, tiny_responses, tmp_path / "dev", "hidden=true", "heads={}", "limit=20")
    out = heads.run(
        options(tiny_overrides, recorded["states"], [folders["linear"]], f"dev={dev}", f"paths.output_dir={tmp_path}/o")
    )
    table, curves = read_table(out, "heads"), read_table(out, "thresholds")
    assert (table.texts == 40).all()
    mine = curves[curves.method == table["head"].iloc[1]]  # fixed lengths have a curve, too
    assert table.setting.iloc[1] == mine.setting[mine.dev_throughput.idxmax()]


def test_bad_input_is_one_line(tiny_overrides, tiny_responses, recorded, folders, tmp_path):
    other = AcceptanceHead(16).save(tmp_path / "other", {"draft_fingerprint": "of another"})
    stranger = AcceptanceHead(16).save(tmp_path / "stranger")
    states, logits = recorded["states"], recorded["logits"]
    for traces_folder, given, more, message in (
        (states, [other], [], "(fingerprint of another, this one "),
        (logits, [stranger], [], "hold neither states nor logits"),
        (states, [folders["linear"]] * 2, [], "holds the same head as"),
        (states, [tmp_path], [], "expected an acceptance head"),
        (states, [], [], "heads: expected folders of heads"),
        (states, [folders["linear"]], [f"dev={states}"], "dev: expected traces of other texts"),
        (states, [folders["linear"]], ["dev_share=1"], "dev_share: expected a number in (0, 1), got 1"),
        (states, [folders["linear"]], ["thresholds=[2]"], "thresholds: expected a list of numbers in [0, 1], got [2]"),
        (tmp_path, [folders["linear"]], [], "expected a folder of data_gen.traces"),
    ):
        words = [*more, f"paths.output_dir={tmp_path}/bad", "overwrite=true"]
        with pytest.raises(InputError, match=r"^[^\n]*$") as error:
            heads.run(options(tiny_overrides, traces_folder, given, *words))
        assert message in str(error.value)


def test_a_folder_of_heads_needs_no_manifest(tmp_path):
    assert side_by_side(tmp_path) == [tmp_path]
