"""Training heads end to end on a tiny data set: results, resuming after any interruption, sweeps, refusals."""

import csv
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.offline_runs import inventory
from tests.toolkit.training.runs import curves, same_weights
from toolkit import train
from toolkit.acceptance import AcceptanceHead
from toolkit.config import compose
from toolkit.errors import InputError, StaleError
from toolkit.files.atomic import read_json, write_json
from toolkit.models.pair import load_draft
from toolkit.models.teacher import pad_right, states_of
from toolkit.training import Checkpoints, MixedData
from toolkit.training.batches import ExampleBatches, Examples
from toolkit.training.module import HeadTraining
from toolkit.training.schedule import cosine_factor
from toolkit.training.sweep_table import table_rows, write_table

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = [
    "head.depth=1", "optimizer.lr=1e-2", "trainer.max_epochs=3", "data.batch_size=8", "logger=csv",
    "trainer.log_every_n_steps=4", "callbacks.checkpoints.every_n_steps=2",
]  # fmt: skip


@pytest.fixture
def overrides(tiny_overrides, tiny_mix):
    return [*tiny_overrides, f"data.path={tiny_mix}", *SMALL]


@pytest.fixture(scope="module")
def trained(tiny_overrides, tiny_mix, tmp_path_factory):
    """An uninterrupted run."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    return train.run(compose("train", [*tiny_overrides, f"data.path={tiny_mix}", *SMALL, f"paths.output_dir={folder}"]))


def test_a_run_leaves_everything_behind(trained, overrides):
    files = {str(path.relative_to(trained)) for path in trained.rglob("*") if path.is_file()}
    assert files == {
        "checkpoints/best.ckpt", "checkpoints/last.ckpt", "head/config.json", "head/head.safetensors",
        "head/README.md", "head/custom_generate/generate.py", "MODEL_CARD.md",
        "config.yaml", "manifest.json", "metrics.csv", "metrics.json", "reliability.csv", "reliability.pdf",
        "reliability.png", "reliability.svg", "wandb_run_id.txt", ".written.jsonl",
    }  # fmt: skip
    scores = json.loads((trained / "metrics.json").read_text())
    names = {"log_loss", "log_loss_calibrated", "binary_kl", "brier", "ece", "auroc"}
    assert {f"val/{name}{suffix}" for name in names for suffix in ("", "_corrected")} < set(scores)
    rows = curves(trained)
    assert [int(row["step"]) for row in rows if row["val/ece"]] == [5, 11, 17]  # 47 rows in batches of 8
    best = min(float(row["val/log_loss_calibrated"]) for row in rows if row["val/log_loss_corrected"])
    assert scores["val/log_loss_calibrated"] == pytest.approx(best, rel=1e-6)
    assert all(row["train/loss"] for row in rows)
    assert float(rows[-1]["train/lr"]) < float(rows[0]["train/lr"]) < 1e-2
    _, about = AcceptanceHead.load(trained / "head")
    assert {"draft_fingerprint", "target_fingerprint", "sampling", "mixing_ratio", "revision", "metrics"} < set(about)
    assert about["w_rej"] == 6 and about["head"]["log_w_rej"] == pytest.approx(1.7918, abs=1e-4)
    config = compose("train", [*overrides, f"paths.output_dir={trained}"])
    assert train.score(config, trained) == scores["val/log_loss_calibrated"]
    config.optimized_metric = "val/nothing"
    for refused in (lambda: train.score(config, trained), lambda: train.run(config)):
        with pytest.raises(InputError, match="optimized_metric"):
            refused()


def test_the_line_of_an_epoch_has_its_own_scores(run, capsys):
    run("run", *SMALL, "trainer.check_val_every_n_epoch=2")
    lines = [line for line in capsys.readouterr().out.split("\n") if line.startswith("epoch ")]
    assert ["val/auroc" in line for line in lines] == [False, True, False]


def test_the_worst_score_is_not_taken_for_the_best_one(run):
    with pytest.raises(InputError, match="callbacks.checkpoints.mode: expected max for val/auroc, got min"):
        run("small", "optimized_metric=val/auroc")
    folder = run("large", "optimized_metric=val/auroc", "callbacks.checkpoints.mode=max")
    scored = [float(row["val/auroc"]) for row in curves(folder) if row["val/auroc"]]
    assert read_json(folder / "metrics.json")["val/auroc"] == pytest.approx(max(scored)) and min(scored) < max(scored)


def test_speed_is_that_of_the_positions_it_counts(run, monkeypatch):
    """A clock of 1 s per step and 50 s per batch of validation; whatever is validated or interrupted between two lines."""
    clock, steps = [0.0], [0]
    train_step, validation_step = HeadTraining.training_step, HeadTraining.validation_step

    def step(self, batch, batch_idx):
        steps[0] += 1
        if steps[0] == 8:
            raise RuntimeError("power cut")
        clock[0] += 1
        return train_step(self, batch, batch_idx)

    def validate(self, batch, batch_idx):
        clock[0] += 50
        return validation_step(self, batch, batch_idx)

    monkeypatch.setattr("toolkit.training.trainer.perf_counter", lambda: clock[0])
    monkeypatch.setattr(HeadTraining, "training_step", step)
    monkeypatch.setattr(HeadTraining, "validation_step", validate)
    words = [*SMALL, "+trainer.val_check_interval=.5", "callbacks.checkpoints.every_n_steps=5"]
    with pytest.raises(RuntimeError, match="power cut"):
        run("run", *words)
    clock[0] += 1000
    folder = run("run", *words)
    lines = [row for row in csv.DictReader((folder / "metrics.csv").read_text().split("\n")) if row["train/loss"]]
    ends = [0, *(int(row["step"]) + 1 for row in lines)]
    seen = [
        float(row["perf/tokens_per_second"]) * (last - first)
        for row, (first, last) in zip(lines, pairwise(ends), strict=True)
    ]
    _, about = AcceptanceHead.load(folder / "head")
    assert sum(seen) == pytest.approx(3 * about["num_positions"])


def test_heads_learn(run):
    """A big head on few positions: the loss comes down to what the labels' entropy leaves."""
    words = ["head.depth=2", "loss.w_rej=1", "optimizer.lr=2e-2", "trainer.max_epochs=25", "callbacks=none"]
    folder = run("run", "logger=csv", *words)
    losses = [float(row["train/loss"]) for row in curves(folder)]
    assert losses[-1] < 0.6 * losses[0]


def test_finished_runs_are_kept_and_other_work_is_not_overwritten(trained, overrides, capsys):
    stamp = (trained / "metrics.json").stat().st_mtime_ns
    train.run(compose("train", [*overrides, f"paths.output_dir={trained}"]))
    assert (trained / "metrics.json").stat().st_mtime_ns == stamp
    with pytest.raises(StaleError, match="head.depth"):
        train.run(compose("train", [*overrides, f"paths.output_dir={trained}", "head.depth=2"]))


# -- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("features", ["online", "cached"])
def test_positions_are_states_that_have_read_the_drafted_token(tiny_mix, tiny_pair, features):
    import datasets

    draft = load_draft(tiny_pair / "draft")
    data = MixedData(tiny_mix, draft, features=features, draft_batch_size=5)
    data.prepare_data()
    data.setup()
    split = datasets.load_from_disk(str(tiny_mix / "dataset"))["train"]
    kept = [row for row in split if any(row["mask"])]
    states = data.states["train"]
    assert states.num_examples == len(kept) and states.num_positions == sum(sum(row["mask"]) for row in kept)
    rows = [3, 11, 0, 40]
    batch = states.batch(rows)
    hidden, labels = [], []
    for row in rows:
        model_inputs = torch.tensor([kept[row]["input_ids"]])
        final = draft.model(input_ids=model_inputs).last_hidden_state[0]
        for position, from_draft in enumerate(kept[row]["mask"]):
            if from_draft:
                hidden.append(final[position])
                labels.append(kept[row]["labels"][position])
    rounding = 1e-4 if features == "online" else 2.0**-9  # float16 has 11 bits, and states are below 4
    assert torch.allclose(batch.hidden.float(), torch.stack(hidden), atol=rounding)
    assert torch.equal(batch.labels, torch.tensor(labels))


def test_states_are_what_the_output_embedding_reads(tiny_pair):
    draft = load_draft(tiny_pair / "draft")
    tokens = pad_right([[4, 5, 6, 7, 8], [9, 10]])
    states = states_of(draft, tokens)
    assert torch.allclose(draft.lm_head(states), draft(input_ids=tokens).logits, atol=1e-5)
    assert torch.allclose(states[1, :2], states_of(draft, tokens[1:, :2])[0], atol=1e-5)  # padding is not read


class Counted(Examples):
    """Stands in for States."""

    num_examples, num_positions = 23, 23

    def batch(self, rows):
        return tuple(rows)


def test_the_order_of_rows_is_a_function_of_seed_and_epoch():
    def epoch(number, start=0, **options):
        return list(ExampleBatches(Counted(), 5, shuffle=True, position=lambda: (number, start), **options))

    assert epoch(0) == epoch(0) != epoch(1) and epoch(0, seed=1) != epoch(0)
    assert sorted(row for batch in epoch(2) for row in batch) == list(range(23))
    assert epoch(3, start=2) == epoch(3)[2:]
    for even in (True, False):  # what even shares are: test_processes.py
        shares = [[row for batch in epoch(1, rank=rank, world=2, even=even) for row in batch] for rank in range(2)]
        assert [len(share) for share in shares] == [12, 11]
        assert set(shares[0]) | set(shares[1]) == set(range(23))


def test_orders_of_small_seeds_stay_and_those_of_large_ones_differ():
    """The first three are written out: a training of an earlier version can be repeated."""

    def order(seed, epoch, count=7):
        examples = Counted()
        examples.num_examples = count
        return ExampleBatches(examples, 5, shuffle=True, seed=seed).order(epoch)

    assert order(0, 0) == [4, 0, 5, 3, 2, 6, 1]
    assert order(3, 1) == [4, 3, 0, 2, 1, 6, 5]
    assert order(4095, 2) == [3, 4, 0, 2, 6, 5, 1]
    large = [(seed, epoch) for seed in (0, 1, 4096, 4097, 2**20, 2**32, 2**63 - 1) for epoch in range(20)]
    assert len({tuple(order(*key, count=50)) for key in large}) == len(large)


def test_data_of_another_draft_and_unfinished_data_are_refused(overrides, tiny_mix, tiny_pair, tmp_path):
    with pytest.raises(InputError, match="another draft"):
        train.run(compose("train", [*overrides, f"pair.draft={tiny_pair}/target", f"paths.output_dir={tmp_path}/a"]))
    copy = tmp_path / "mix"
    shutil.copytree(tiny_mix, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))
    with pytest.raises(InputError, match="not finished"):
        train.run(compose("train", [*overrides, f"data.path={copy}", f"paths.root_dir={tmp_path}"]))
    with pytest.raises(InputError, match="expected data.path"):
        train.run(compose("train", []))


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_a_half_written_checkpoint_is_never_seen(overrides, tmp_path, monkeypatch):
    from toolkit.training import checkpoints

    folder, saved = tmp_path / "run", torch.save

    def dies_in_the_middle(value, path):
        if (folder / "checkpoints" / "last.ckpt").exists():
            Path(path).write_bytes(b"half a check")
            raise KeyboardInterrupt
        saved(value, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.torch, "save", dies_in_the_middle)
        with pytest.raises(BaseException):  # noqa: B017, PT011 (Lightning turns an interrupt into an exit)
            train.run(compose("train", [*overrides, f"paths.output_dir={folder}"]))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last.ckpt"]
    assert checkpoints.read_checkpoint(folder / "checkpoints" / "last.ckpt")["global_step"] == 2


def test_warm_starts_and_their_refusals(trained, overrides, tmp_path):
    config = compose("train", [*overrides, f"from_pretrained={trained}/head", f"paths.output_dir={tmp_path}/warm"])
    warm = train.run(config)
    first, cold = float(curves(warm)[0]["train/loss"]), float(curves(trained)[0]["train/loss"])
    assert first < cold
    checkpoint = f"ckpt_path={trained}/checkpoints/last.ckpt"
    with pytest.raises(InputError, match="set only one"):
        train.run(compose("train", [*overrides, f"from_pretrained={trained}/head", checkpoint]))
    deeper = ["head.depth=2", f"paths.output_dir={tmp_path}/deeper"]
    with pytest.raises(InputError, match="depth=2"):
        train.run(compose("train", [*overrides, f"from_pretrained={trained}/head", *deeper]))
    with pytest.raises(InputError, match="found none"):
        train.run(compose("train", [*overrides, f"from_pretrained={tmp_path}"]))


def test_damaged_curves_of_a_training_that_goes_on_are_named(trained, overrides, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))
    (folder / "metrics.csv").write_text("step,epoch\nx,1\n")
    again = compose("train", [*overrides, f"paths.output_dir={folder}"])
    with pytest.raises(InputError, match="metrics.csv is .*; delete it to go on without the lines before"):
        train.run(again)
    (folder / "metrics.csv").unlink()
    assert same_weights(train.run(again), trained)


def test_checkpoints_that_do_not_fit_are_refused(trained, overrides, tmp_path):
    def resume(path, *more):
        options = [*overrides, f"ckpt_path={path}", f"paths.output_dir={tmp_path}/{len(list(tmp_path.iterdir()))}"]
        return train.run(compose("train", [*options, *more]))

    checkpoint = torch.load(trained / "checkpoints" / "last.ckpt", weights_only=True)
    checkpoint["about"] |= {"draft_fingerprint": "another", "draft_weights": None}
    torch.save(checkpoint, tmp_path / "other.ckpt")
    (tmp_path / "broken.ckpt").write_bytes(b"PK\x03\x04 half a zip file")
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    with pytest.raises(InputError, match="another draft"):
        resume(tmp_path / "other.ckpt")
    with pytest.raises(InputError, match="not a checkpoint"):
        resume(tmp_path / "broken.ckpt")
    with pytest.raises(InputError, match="was not written by"):
        resume(tmp_path / "foreign.ckpt")
    with pytest.raises(InputError, match="found none"):
        resume(tmp_path / "missing.ckpt")
    with pytest.raises(InputError, match="batch_size was 8, is 7"):
        resume(trained / "checkpoints" / "last.ckpt", "data.batch_size=7")
    with pytest.raises(InputError, match="expected depth=2, got 1"):
        resume(trained / "checkpoints" / "last.ckpt", "head.depth=2")


# -- learning rate and early stopping ---------------------------------------------------------------------------------


NO_RATE = [word for word in SMALL if not word.startswith(("optimizer.lr", "trainer.max_epochs"))]


def test_a_rate_that_was_found_is_kept_over_interruptions(tiny_overrides, tiny_mix, tmp_path, monkeypatch, capsys):
    """Without a rate in the config a trial finds one; a resumed training asks for none and goes on with the same."""
    overrides = [*tiny_overrides, f"data.path={tiny_mix}", *NO_RATE, "trainer.max_epochs=2"]
    whole = train.run(compose("train", [*overrides, f"paths.output_dir={tmp_path}/whole"]))
    _, about = AcceptanceHead.load(whole / "head")
    assert "learning rate" in capsys.readouterr().out
    highest = about["learning_rate"] * cosine_factor(3, 12)  # the first line is that of the fourth step of twelve
    assert max(float(row["train/lr"]) for row in curves(whole)) == pytest.approx(highest)
    first = copy_of_checkpoint_at(whole, tmp_path, 6, overrides, monkeypatch)
    capsys.readouterr()
    resumed = train.run(compose("train", [*overrides, f"paths.output_dir={tmp_path}/resumed", f"ckpt_path={first}"]))
    assert "learning rate" not in capsys.readouterr().out
    assert same_weights(whole, resumed)


def copy_of_checkpoint_at(whole, tmp_path, step, overrides, monkeypatch):
    """The checkpoint of the same training at an earlier step."""
    save, kept = Checkpoints._save, tmp_path / f"{step}.ckpt"

    def save_and_copy(self, trainer, name):
        save(self, trainer, name)
        if name == "last.ckpt" and trainer.global_step == step:
            shutil.copy(self.folder / name, kept)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_save", save_and_copy)
        again = train.run(compose("train", [*overrides, f"paths.output_dir={tmp_path}/again"]))
    assert same_weights(whole, again)
    return kept


def test_training_stops_when_validation_gets_no_better_and_does_not_go_on_when_resumed(
    tiny_overrides, tiny_mix, tmp_path
):
    overrides = [
        *tiny_overrides, f"data.path={tiny_mix}", *NO_RATE, "optimizer.lr=.1", "trainer.max_epochs=40", "scheduler=null",
        "callbacks.early_stopping.patience=2",
    ]  # fmt: skip
    folder = train.run(compose("train", [*overrides, f"paths.output_dir={tmp_path}/run"]))
    losses = [float(row["val/log_loss_calibrated"]) for row in curves(folder) if row["val/log_loss_calibrated"]]
    best = losses.index(min(losses))
    assert len(losses) == best + 3 < 40
    last = folder / "checkpoints" / "last.ckpt"
    again = train.run(compose("train", [*overrides, f"paths.output_dir={tmp_path}/again", f"ckpt_path={last}"]))
    steps = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] for run in (folder,)]
    assert not (again / "checkpoints" / "last.ckpt").exists() and steps == [len(losses) * 6]


def test_a_failing_training_ends_its_run_as_failed_and_publishes_no_head(overrides, tmp_path, monkeypatch):
    """The run that goes on is the same one, ends well, and has the head."""
    words = [*overrides, "logger=wandb", "logger.wandb.log_head=true", f"paths.output_dir={tmp_path}/run"]
    step, made = HeadTraining.training_step, []

    def fails_later(self, batch, batch_idx):
        made.append(batch_idx)
        if len(made) == 5:
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(HeadTraining, "training_step", fails_later)
    with pytest.raises(RuntimeError, match="power cut"):
        train.run(compose("train", words))
    run = inventory(tmp_path / "run")
    assert run["exit"] == 1 and run["artifacts"] == [] and not (tmp_path / "run" / "head").exists()
    first = read_json(tmp_path / "run" / "wandb_run.json")["id"]
    monkeypatch.setattr(HeadTraining, "training_step", step)
    train.run(compose("train", words))
    run = inventory(tmp_path / "run")
    assert run["exit"] == 0 and run["artifacts"] == ["head-run"] and "best/auroc" in run["scalars"]
    assert read_json(tmp_path / "run" / "wandb_run.json")["id"] == first


# -- commands ---------------------------------------------------------------------------------------------------------


def test_a_failed_job_has_its_line_in_the_table(tmp_path):
    jobs = [
        {"job": 0, "overrides": ["a=1", "b=x"], "status": "done", "folder": "out/0", "scores": {"val/ece": 0.125}},
        {"job": 1, "overrides": ["a=2", "b=x"], "status": "failed", "error": "no room"},
    ]
    for job in jobs:
        write_json(tmp_path / str(job["job"]) / "job.json", job)
    write_table(tmp_path, table_rows(tmp_path))
    assert (tmp_path / "table.csv").read_text().splitlines() == [
        "job,a,val/ece,status,folder", "0,1,0.125,done,out/0", "1,2,,failed: no room,",
    ]  # fmt: skip
    assert (tmp_path / "table.md").read_text().startswith("| job | a | val/ece | status | folder |\n| --- |")


@pytest.mark.parametrize("debug", ["fdr", "limit"])
def test_debug_configs_run(tiny_overrides, tiny_mix, tmp_path, debug):
    config = compose(
        "train", [*tiny_overrides, f"data.path={tiny_mix}", f"paths.root_dir={tmp_path}", f"+debug={debug}"]
    )
    folder = train.run(config)
    assert (folder / "head" / "head.safetensors").exists()
    assert not (folder / "wandb").exists()
