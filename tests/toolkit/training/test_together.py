"""Many heads on one stream of features: each comes out as if trained alone, also after an interruption."""

import json

import pytest
import torch

from toolkit import train, train_heads
from toolkit.acceptance import AcceptanceHead
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.models.pair import load_draft
from toolkit.training import MixedData, together

pytestmark = pytest.mark.usefixtures("undrawn")

FEW = ["depths=[0,2]", "w_rejs=[1,6]", "max_epochs=6", "patience=2", "data.batch_size=8"]


def heads_of(folder, prefix=""):
    """Name -> the head and what it remembers."""
    return {
        path.parent.parent.name: AcceptanceHead.load(path.parent) for path in folder.glob(f"{prefix}*/head/config.json")
    }


def test_each_head_is_the_one_that_is_trained_alone(tiny_overrides, tiny_mix, tmp_path):
    words = [*tiny_overrides, f"data.path={tiny_mix}"]
    folder = train_heads.run(compose("train_heads", [*words, *FEW, f"paths.output_dir={tmp_path}/all"]))
    heads = heads_of(folder)
    assert set(heads) == {f"depth-{d}_w_rej-{w}" for d in (0, 2) for w in (1, 6)}
    for depth, w_rej in ((0, 6), (2, 1)):
        name = f"depth-{depth}_w_rej-{w_rej}"
        head, about = heads[name]
        alone = train.run(
            compose(
                "train",
                [
                    *words, f"head.depth={depth}", f"loss.w_rej={w_rej}", "trainer.max_epochs=6", "data.batch_size=8",
                    "callbacks.early_stopping.patience=2", "logger=none", f"paths.output_dir={tmp_path}/{name}",
                ],
            )
        )  # fmt: skip
        other, said = AcceptanceHead.load(alone / "head")
        assert about["learning_rate"] == said["learning_rate"]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(head.parameters(), other.parameters(), strict=True))
        assert about["metrics"]["val/auroc"] == pytest.approx(said["metrics"]["val/auroc"], abs=1e-6)
    assert (folder / "table.csv").read_text().count("\n") == 5
    with pytest.raises(InputError, match="model: expected acceptance_head"):
        train_heads.run(compose("train_heads", [*words, "model=preread_head", "data=traced"]))
    with pytest.raises(InputError, match="optimized_metric: expected a score that is to be small"):
        train_heads.run(compose("train_heads", [*words, "optimized_metric=val/auroc"]))
    with pytest.raises(InputError, match="twice"):
        train_heads.run(compose("train_heads", [*words, "depths=[1,1]", f"paths.output_dir={tmp_path}/twice"]))


@pytest.fixture
def data(tiny_mix, tiny_pair):
    """In float64, where sums in another order agree to 1e-8."""
    opened = MixedData(tiny_mix, load_draft(tiny_pair / "draft", dtype="float64"), batch_size=8)
    opened.prepare_data()
    opened.setup()
    return opened


def modules(data, names=None):
    config = compose("train_heads", [f"data.path={data.path}", "depths=[0,1,3]", "w_rejs=[1,6]"])
    by_name = {name: module.double() for name, module in train_heads.modules_of(config, data).items()}
    return {name: module for name, module in by_name.items() if names is None or name in names}


def test_in_float64_alone_and_together_agree(data, tmp_path):
    """The slow and obvious reference: each head by itself through the same loop; rates, stops and states of its own."""
    options = {"max_epochs": 8, "patience": 2, "metric": "val/log_loss_calibrated"}
    all_of_them = together.train_together(modules(data), data, tmp_path / "all", **options)
    assert len({member.epochs for member in all_of_them}) > 1  # each stops on its own
    for member in all_of_them[::2]:
        (alone,) = together.train_together(modules(data, [member.name]), data, tmp_path / member.name, **options)
        assert alone.epochs == member.epochs and alone.best_score == pytest.approx(member.best_score, abs=1e-8)
        assert alone.module.about["learning_rate"] == member.module.about["learning_rate"]
        states = [one.module.head.state_dict() for one in (member, alone)]
        assert all(torch.allclose(states[0][name], states[1][name], atol=1e-8, rtol=0) for name in states[0])


def test_an_interrupted_training_goes_on(data, tmp_path, monkeypatch):
    options = {"max_epochs": 4, "patience": 9, "metric": "val/log_loss_calibrated"}
    whole = together.train_together(modules(data), data, tmp_path / "whole", **options)
    epoch, done = together._epoch, []

    def dies_later(*arguments):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        epoch(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(together, "_epoch", dies_later)
        with pytest.raises(KeyboardInterrupt):
            together.train_together(modules(data), data, tmp_path / "cut", **options)
    resumed = together.train_together(modules(data), data, tmp_path / "cut", **options)
    for one, other in zip(whole, resumed, strict=True):
        states = one.module.head.state_dict(), other.module.head.state_dict()
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]) and one.epochs == other.epochs


def test_the_table_is_one_of_scores(tiny_overrides, tiny_mix, tmp_path):
    words = [*tiny_overrides, f"data.path={tiny_mix}", "depths=[0]", "w_rejs=[3]", "max_epochs=1"]
    folder = train_heads.run(compose("train_heads", [*words, f"paths.output_dir={tmp_path}/one"]))
    scores = json.loads((folder / "depth-0_w_rej-3" / "metrics.json").read_text())
    header, line = (row.split(",") for row in (folder / "table.csv").read_text().splitlines())
    row = dict(zip(header, line, strict=True))
    assert float(row["auroc"]) == pytest.approx(scores["val/auroc"], abs=1e-4) and row["epochs"] == "1"
    assert "probe/auroc" in scores
