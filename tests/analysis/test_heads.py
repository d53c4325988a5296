"""Commands on recorded heads: the table of heads replays the live policy, calibrations help elsewhere, prices are what is
reached at them.
"""

import numpy as np
import pytest
import torch

from analysis import heads, timing
from analysis.replay.head_folders import side_by_side
from analysis.replay.head_scores import drawn_samples
from analysis.tables.files import read_table
from data_gen import traces
from toolkit import ModelPair, config
from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.metrics import throughput
from toolkit.models.pair import fingerprint
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.trace.replay import replay
from toolkit.trace.store import read_traces
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


@pytest.fixture(scope="module")
def elsewhere(tiny_overrides, tiny_responses, tmp_path_factory):
    """The same texts with other acceptance draws, as stand-ins for other texts."""
    return record(
        tiny_overrides,
        tiny_responses,
        tmp_path_factory.mktemp("dev") / "dev",
        "hidden=true",
        "heads={}",
        "max_drafted=7",
    )


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


def total(replayed, sequences):
    return Counts(**{name: int(values[sequences].sum()) for name, values in replayed.counts.items()})


def test_every_line_is_the_policy_that_decodes_with_the_head(made, recorded, folders, pair):
    """The policy objects of the live loop on the recorded logits, one threshold at a time."""
    trace = read_traces(recorded["logits"])
    names = {str(folders["run"] / "head"): "run", **{str(folders[n]): n for n in ("linear", "preread")}}
    dev = dev_texts(trace.num_texts)
    table = read_table(made["logits"], "heads").set_index("head")
    curves = read_table(made["logits"], "thresholds")
    for folder, name in names.items():
        (line,) = (table.loc[key] for key in table.index if key.startswith(f"{name}@"))
        replays = {}
        for h in THRESHOLDS:
            rate = Rate(PrereadEstimator(folder), cost_ratio=1.0, rate=1 - h)
            policy, least = (rate, 1) if name == "preread" else (Survival(HeadEstimator(folder), h), 2)
            replays[h] = replay(trace, Bounded(policy.bind(pair), least, MAX))
        *_, text = drawn_samples(
            trace, trace.estimates["preread.preread" if name == "preread" else name], name == "preread"
        )
        assert line.tokens == int((~dev)[text.numpy()].sum()) > 100
        assert line.binary_kl_low <= line.binary_kl <= line.binary_kl_high
        best = max(replays, key=lambda h: throughput(total(replays[h], dev), 0.2))
        assert line.setting == f"h={best:g}"
        counts = total(replays[best], ~dev)
        assert line.throughput == pytest.approx(throughput(counts, 0.2))
        assert line.discard_rate == pytest.approx(counts.num_discarded / counts.num_generated)
        assert line.verification_rate == pytest.approx(counts.num_target_calls / counts.num_generated)
        assert line.throughput_low <= line.throughput <= line.throughput_high
        curve = curves[curves.method == line.name]
        assert curve.throughput.tolist() == pytest.approx([throughput(total(f, ~dev), 0.2) for f in replays.values()])


def test_states_and_recorded_logits_give_the_same_table(made):
    states, logits = (read_table(made[name], "heads") for name in ("states", "logits"))
    assert states["head"].tolist() == logits["head"].tolist() and len(states) == 4
    for name in ("binary_kl", "auroc", "throughput"):  # states are kept in half precision
        np.testing.assert_allclose(states[name], logits[name], rtol=0.02)


def test_settings_come_from_the_heads_own_folders(made):
    table = read_table(made["states"], "heads")
    run = table[table["head"].str.startswith("run@")].iloc[0]
    assert (run.depth, run.w_rej, run.mixing, run.validation_kl) == (2, 3.0, 0.15, 0.25)
    assert run.binary_kl != run.binary_kl_corrected
    assert table[table.kind == "preread"].validation_kl.isna().all()
    text = (made["states"] / "heads.md").read_text()
    assert "| run@" in text and "(pre-read) | preread |" in text and "| fixed K |" in text
    assert (made["states"] / "pareto.png").stat().st_size > 10_000


def test_finished_work_is_kept(made, tiny_overrides, recorded, folders):
    files = [made["states"] / name for name in ("heads.parquet", "thresholds.parquet")]
    times = [path.stat().st_mtime_ns for path in files]
    again = options(tiny_overrides, recorded["states"], folders.values(), f"paths.output_dir={made['states']}")
    assert heads.run(again) == made["states"] and [path.stat().st_mtime_ns for path in files] == times


def test_thresholds_from_other_traces(tiny_overrides, elsewhere, recorded, folders, tmp_path):
    words = [f"dev={elsewhere}", f"paths.output_dir={tmp_path}/o"]
    out = heads.run(options(tiny_overrides, recorded["states"], [folders["linear"]], *words))
    table, curves = read_table(out, "heads"), read_table(out, "thresholds")
    assert (table.texts == 40).all()
    curve = curves[curves.method == table["head"].iloc[1]]  # fixed lengths have a curve, too
    assert table.setting.iloc[1] == curve.setting[curve.dev_throughput.idxmax()]


def test_bad_input_is_one_line(tiny_overrides, recorded, folders, tmp_path):
    """What is wrong with heads and traces: tests/analysis/replay/test_head_folders.py."""
    assert side_by_side(tmp_path) == [tmp_path], "a folder of heads needs no manifest"
    states, linear = recorded["states"], [folders["linear"]]
    for given, more, message in (
        ([tmp_path], [], "expected an acceptance head"),
        (linear, [f"dev={states}"], "dev: expected traces of other texts"),
        (linear, ["thresholds=[2]"], "thresholds: expected a list of numbers in [0, 1], got [2]"),
    ):
        words = [*more, f"paths.output_dir={tmp_path}/bad", "overwrite=true"]
        with pytest.raises(InputError, match=r"^[^\n]*$") as error:
            heads.run(options(tiny_overrides, states, given, *words))
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("kind", "method", "ratios"), [("linear", "specdec_pp", [0.2]), ("preread", "rate", [0.1, 0.3])]
)
def test_prices_are_worth_what_the_table_says(kind, method, ratios, recorded, folders, pair, tiny_overrides, tmp_path):
    """What the table says is what the policy reaches when it is played at that price."""
    head = str(folders[kind])
    words = [
        *tiny_overrides, f"traces={recorded['logits']}", f"head={head}", f"cost_ratios={ratios}",
        f"paths.output_dir={tmp_path}/p",
    ]  # fmt: skip
    folder, trace = timing.run(compose("timing", words)), read_traces(recorded["logits"])
    lines = read_table(folder, "prices").to_dict("records")
    assert [line["c"] for line in lines] == ratios
    for line in lines:
        name, *overrides = (word.removeprefix("method") for word in line["override"].split())
        assert name == f"={method}"
        words = [word.removeprefix(".") for word in overrides]
        policy = config.method(method, words, head).bind(pair).policy
        reached = throughput(replay(trace, policy).total, line["c"])
        assert reached == pytest.approx(line["tokens per target time"], rel=1e-3)
    with pytest.raises(InputError, match="cost_ratios: expected a list of numbers above 0"):
        timing.run(compose("timing", [*tiny_overrides, "cost_ratios=[0.1,-1]"]))
