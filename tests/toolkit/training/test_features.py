"""Where features come from: online, cached; what is missing, damaged, too large or of another draft."""

import copy
import json
import shutil
from types import SimpleNamespace

import datasets
import pytest
import torch

from toolkit import train
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.files.tensors import load_tensors, save_tensors
from toolkit.models.pair import load_draft
from toolkit.training import MixedData, cached, online
from toolkit.training.batches import ExampleBatches
from toolkit.training.cached import rounded
from toolkit.training.online import OnlineStates

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = ["head.depth=1", "optimizer.lr=1e-2", "trainer.max_epochs=3", "data.batch_size=8", "logger=none"]


@pytest.fixture
def mix(tiny_mix, tmp_path, monkeypatch):
    """A copy of the mixed data without files of states; ten examples in a file."""
    monkeypatch.setattr(online, "MOST_EXAMPLES", 10)
    folder = tmp_path / "mix"
    shutil.copytree(tiny_mix, folder, ignore=shutil.ignore_patterns("hidden-*"))
    return folder


@pytest.fixture
def draft(tiny_pair):
    return load_draft(tiny_pair / "draft")


def opened(mix, draft, **keys):
    data = MixedData(mix, draft, **keys)
    data.prepare_data()
    data.setup()
    return data


def files(data):
    return sorted(data.cache_folder.glob("*.safetensors"))


# -- cached -----------------------------------------------------------------------------------------------------------


def test_an_interrupted_cache_is_completed_with_the_same_bytes(mix, draft, monkeypatch):
    data, written = MixedData(mix, draft), []
    save = cached.save_tensors

    def dies_later(path, *arguments):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(path)
        save(path, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cached, "save_tensors", dies_later)
        with pytest.raises(KeyboardInterrupt):
            data.prepare_data()
    kept = {path: path.stat().st_mtime_ns for path in files(data)}
    assert len(kept) == 3
    again = MixedData(mix, draft)
    again.prepare_data()
    assert len(files(again)) == 7  # 48 + 12 examples in tens
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in kept.items())
    whole = {path.name: path.read_bytes() for path in files(again)}
    shutil.rmtree(again.cache_folder)
    opened(mix, draft)
    assert {path.name: path.read_bytes() for path in files(again)} == whole


def test_the_size_is_compared_with_the_disk_first(mix, draft, monkeypatch):
    def never(*arguments):
        raise AssertionError("computed before the disk was looked at")

    with monkeypatch.context() as patch:
        patch.setattr(cached.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100))
        patch.setattr(online, "states_and_logits_of", never)
        with pytest.raises(InputError, match="100 are free: make room, or train with data.features=online") as error:
            MixedData(mix, draft, features="cached").prepare_data()
        assert "\n" not in str(error.value)


def test_files_of_others_are_refused_and_only_they_are_made_again(mix, draft, tiny_pair):
    data = opened(mix, draft)
    path = files(data)[2]
    tensors, said = load_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    whole = path.read_bytes()
    labels = tensors["labels"].clone()
    labels[3] = 1.5
    for changed, about, message in (
        ({}, {"draft": "another"}, "states of another draft"),
        ({}, {"dtype": "bfloat16"}, "a draft in another number format"),
        ({}, {"data": "others"}, "states of other data"),
        ({"hidden": tensors["hidden"].float()}, {}, "torch.float32, expected torch.float16"),
        ({"labels": labels}, {}, r"numbers in \[0, 1\]; 1 of \d+ are not, the first is 1.5"),
        ({"labels": labels * torch.nan}, {}, "labels are probabilities"),
    ):
        save_tensors(path, {**tensors, **changed}, {**said, **about})
        with pytest.raises(InputError, match=message) as told:
            opened(mix, draft)
        assert path.name in str(told.value) and "\n" not in str(told.value)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="delete that file"):
        opened(mix, draft)
    others = {one: one.stat().st_mtime_ns for one in files(data) if one != path}
    path.unlink()
    opened(mix, draft)
    assert path.read_bytes() == whole and all(one.stat().st_mtime_ns == stamp for one, stamp in others.items())
    other = MixedData(mix, load_draft(tiny_pair / "draft", dtype="bfloat16"))
    assert other.cache_folder != data.cache_folder
    other = MixedData(mix, copy.deepcopy(draft))
    assert other.cache_folder == data.cache_folder
    other.draft.config.rope_parameters["rope_theta"] = 100.0
    assert other.cache_folder != data.cache_folder, "the same weights give other states"


@pytest.mark.parametrize("wrong", [1.25, float("nan")])
def test_labels_of_the_data_that_are_no_probabilities_are_one_line(mix, draft, wrong):
    data = datasets.load_from_disk(str(mix / "dataset"))
    rows = data["train"].to_dict()
    place = rows["mask"][5].index(True)
    rows["labels"][5][place] = wrong
    data["train"] = datasets.Dataset.from_dict(rows, features=data["train"].features)
    data.save_to_disk(str(mix / "changed"))
    shutil.rmtree(mix / "dataset")
    (mix / "changed").rename(mix / "dataset")
    (mix / ".written.jsonl").unlink()  # the files were changed on purpose
    for features in ("online", "cached"):
        with pytest.raises(InputError, match=r"\(train\): labels are probabilities of acceptance.*; 1 of") as told:
            opened(mix, draft, features=features)
        assert "\n" not in str(told.value)


def test_what_float16_cannot_hold_is_one_line(mix, draft, monkeypatch):
    states = torch.randn(20, 8)
    kept, lost = rounded(states)
    assert 0 < lost < 2.0**-11 and torch.equal(kept, states.half())
    assert rounded(states.bfloat16())[1] == 0 == rounded(torch.zeros(2, 8))[1]
    for value, message in ((7e4, "got 70000"), (float("inf"), "got inf"), (float("nan"), "got nan")):
        with pytest.raises(InputError, match=f"{message}; train with data.features=online"):
            rounded(states.index_fill(0, torch.tensor([3]), value))
    with pytest.raises(InputError, match="would lose 100.0%"):
        rounded(states * 1e-9)
    forward = online.states_and_logits_of

    def large(model, tokens):
        hidden, logits = forward(model, tokens)
        return hidden * 1e5, logits

    monkeypatch.setattr(online, "states_and_logits_of", large)
    with pytest.raises(InputError, match="at most 65,504"):
        opened(mix, draft, features="cached")
    assert opened(mix, draft, features="online").states["train"].batch([0]).hidden.abs().max() > 65504


def epoch_of(data, epoch, start=0):
    batches = ExampleBatches(
        data.states["train"], 8, shuffle=True, seed=3, position=lambda: (epoch, start if epoch == 0 else 0)
    )
    return list(batches)


# -- online -----------------------------------------------------------------------------------------------------------


def test_rows_of_several_batches_share_forwards_and_nothing_else_changes(mix, draft, monkeypatch):
    monkeypatch.setattr(online, "MOST_EXAMPLES", 512)
    data = opened(mix, draft.double(), features="online", draft_batch_size=4)
    together = epoch_of(data, 0)
    read, computed = data.states["train"].tokens_read, data.states["train"].tokens_computed
    assert read <= computed < 1.05 * read
    monkeypatch.setattr(OnlineStates, "groups", lambda self, parts, start=0: enumerate([part] for part in parts))
    alone = opened(mix, draft, features="online", draft_batch_size=4)
    for one, other in zip(together, epoch_of(alone, 0), strict=True):
        assert torch.allclose(one.hidden, other.hidden, atol=1e-10) and torch.equal(one.labels, other.labels)
        assert torch.allclose(one.confidence, other.confidence, atol=1e-6)
    assert alone.states["train"].tokens_read == read and alone.states["train"].tokens_computed > computed


def test_the_rest_of_an_epoch_has_the_same_bits(mix, draft):
    for features in ("online", "cached"):
        data = opened(mix, draft, features=features)
        whole, rest = epoch_of(data, 0), epoch_of(opened(mix, draft, features=features), 0, start=3)
        assert len(rest) == len(whole) - 3
        for one, other in zip(whole[3:], rest, strict=True):
            assert all(map(torch.equal, one, other))


def test_the_manifest_tells_features_apart(mix, tiny_overrides, tmp_path):
    words = [*tiny_overrides, f"data.path={mix}", *SMALL, "trainer.max_epochs=1", f"paths.root_dir={tmp_path}/out"]
    folders = {one: train.run(compose("train", [*words, f"data.features={one}"])) for one in ("online", "cached")}
    assert folders["online"] != folders["cached"]
    scores = [json.loads((folder / "metrics.json").read_text())["val/log_loss"] for folder in folders.values()]
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
