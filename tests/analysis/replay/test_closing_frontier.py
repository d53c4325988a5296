"""A training's last act: its head is replayed at every threshold, and what cannot be replayed is said before the training."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pytorch_lightning.loggers import WandbLogger

from analysis.replay.closing_frontier import LEVELS, ReplayedFrontier, _best, replayed
from analysis.replay.head_folders import threshold_policy
from tests.toolkit.trace.plain import MOST
from toolkit import metrics, testing
from toolkit.acceptance import AcceptanceHead
from toolkit.acceptance.folder import scorer_with
from toolkit.errors import InputError
from toolkit.files.atomic import write_json
from toolkit.models.fingerprint import Weights
from toolkit.runs import stage
from toolkit.stopping import Bounded, Rate, Survival
from toolkit.trace.replay import replay
from toolkit.trace.score import with_logits
from toolkit.trace.store import SUMMARY, file_name
from toolkit.training.checkpoints import BEST, folder_of


def test_a_frontier_has_a_line_for_every_threshold(trace, heads):
    for head, kind in zip(heads, (Survival, Rate), strict=True):
        draft = testing.table_pair().draft
        table = replayed(trace, head, draft, 0.3, min_drafted=2)
        assert table.threshold.tolist() == list(LEVELS) and (LEVELS[0], LEVELS[-1], len(LEVELS)) == (0.05, 0.95, 19)
        assert table.setting.tolist()[1] == "h=0.1" and set(table.method) == {head.method}
        assert table.lossless.all() and table.undominated.all()
        told = with_logits(trace, {head.key: scorer_with(head, draft, "cpu")})
        policy = threshold_policy(head, corrected=True)
        assert isinstance(policy, kind)
        for row in (4, 15):
            words = {"threshold": LEVELS[row]} if kind is Survival else {"rate": 1 - LEVELS[row], "cost_ratio": 1.0}
            counts = replay(told, Bounded(replace(policy, **words), 2, MOST)).total
            line = table.iloc[row]
            assert {name: line[name] for name in vars(counts)} == vars(counts)
            assert line.throughput == pytest.approx(metrics.throughput(counts, 0.3))
            assert line.discard_rate == pytest.approx(metrics.discard_rate(counts))
            assert line.verification_rate == pytest.approx(metrics.verification_rate(counts))


def test_the_best_state_of_a_head_is_replayed(tmp_path, heads):
    module = SimpleNamespace(head=heads[0])
    same = _best(module, tmp_path)
    assert same is not heads[0] and not same.training
    assert torch.equal(same.readout.weight, heads[0].readout.weight)
    path = folder_of(tmp_path) / BEST
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {f"head.{key}": value + 1 for key, value in heads[0].state_dict().items()}
    torch.save({"about": {}, "state_dict": {**state, "other.weight": torch.zeros(1)}}, path)
    best = _best(module, tmp_path)
    assert torch.equal(best.readout.weight, heads[0].readout.weight + 1)
    assert best.readout.weight.dtype == torch.float32


class Shown(WandbLogger):
    """A run of W&B that keeps what it is told."""

    def __init__(self):
        self.told = []

    def log_metrics(self, values, step):
        self.told.append((values, step))

    def log_table(self, key, dataframe):
        self.told.append((key, dataframe))

    def log_image(self, key, images):
        self.told.append((key, images))


@pytest.fixture
def recorded_folder(tmp_path, trace):
    """A folder of traces as data_gen.traces leaves it."""

    def make(name, hidden=True, fingerprint="f"):
        opened = stage.open_stage("traces", {"paths": {"output_dir": str(tmp_path / name)}})
        one = replace(trace, about={"job": "j"}, hidden=trace.hidden if hidden else None)
        one.save(opened.folder / file_name(0, 0))
        write_json(opened.folder / SUMMARY, {"draft_fingerprint": fingerprint})
        return opened.finish(job="j", replicates=1, num_shards=1)

    return make


def test_a_trained_head_is_replayed_and_its_best_threshold_told(recorded_folder, tmp_path, heads, trace):
    draft, shown = testing.table_pair().draft, Shown()
    trainer = SimpleNamespace(
        is_global_zero=True, default_root_dir=str(tmp_path), datamodule=SimpleNamespace(draft=draft),
        loggers=[shown], global_step=7,
    )  # fmt: skip
    closing = ReplayedFrontier(str(recorded_folder("t")), cost_ratio=0.3, min_drafted=2)
    assert closing.results == {}
    closing.on_fit_end(trainer, SimpleNamespace(head=heads[0]))
    table = replayed(trace, heads[0], draft, 0.3, 2)
    best = table.loc[table.throughput.idxmax()]
    known = {"replay/throughput": best.throughput, "replay/threshold": best.threshold}
    assert closing.results == pytest.approx(known)
    assert (tmp_path / "replayed.csv").is_file() and (tmp_path / "replayed.png").stat().st_size > 1000
    assert shown.told[0] == (closing.results, 6)
    name, frame = shown.told[1]
    assert name == "replay/frontier" and frame.equals(table)
    assert shown.told[2] == ("replay/pareto", [str(tmp_path / "replayed.png")]) and len(shown.told) == 3
    trainer.global_step = 0
    closing.on_fit_end(trainer, SimpleNamespace(head=heads[0]))
    assert shown.told[3] == (closing.results, 0)
    other = ReplayedFrontier("nowhere")
    other.on_fit_end(SimpleNamespace(is_global_zero=False), None)
    assert (other.results, other.cost_ratio, other.min_drafted) == ({}, 0.2, 1)


def test_what_cannot_be_replayed_is_said_before_the_training(recorded_folder):
    trainer = SimpleNamespace(datamodule=SimpleNamespace(weights=Weights("f")))
    plain, good = AcceptanceHead(8), recorded_folder("good")
    for folder in (good, recorded_folder("unsaid", fingerprint=None)):
        ReplayedFrontier(str(folder)).on_fit_start(trainer, SimpleNamespace(head=plain))
    other, blind = recorded_folder("other", fingerprint="g"), recorded_folder("blind", hidden=False)
    for folder, head, words in (
        (
            other,
            plain,
            rf"^callbacks.frontier.traces: {other} was recorded with another draft \(fingerprint g, this one f",
        ),
        (blind, plain, f"{blind} holds no hidden states; record it with hidden"),
    ):
        with pytest.raises(InputError, match=words):
            ReplayedFrontier(str(folder)).on_fit_start(trainer, SimpleNamespace(head=head))
