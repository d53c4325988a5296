"""Heads as the published SpecDec++ code writes them: read from the command line, and refused where they are not that."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from toolkit import decode
from toolkit.acceptance import AcceptanceHead
from toolkit.acceptance.folder import head_hash, inside
from toolkit.acceptance.published import is_published
from toolkit.config import compose
from toolkit.errors import InputError

pytestmark = pytest.mark.usefixtures("undrawn")

SIZE, DEPTH = 16, 3


class Block(nn.Module):
    """As in the published code: x + SiLU(linear(x))."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + nn.functional.silu(self.linear(x))


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*([Block()] * DEPTH), nn.Linear(SIZE, 2))


@pytest.fixture(params=["shared once", "all names", "pickle"])
def folder(request, tmp_path):
    """A fabricated head in that layout."""
    place = tmp_path / "acchead-tiny"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"hidden_size": SIZE, "num_layers": DEPTH}))
    state = {f"model.{name}": value.clone() for name, value in model().state_dict().items()}
    if request.param == "shared once":
        state = {name: value for name, value in state.items() if ".1." not in name and ".2." not in name}
    if request.param == "pickle":
        torch.save(state, place / "pytorch_model.bin")
    else:
        save_file(state, place / "model.safetensors")
    return place


def test_a_published_head_is_the_same_function(folder):
    place = inside(folder)
    assert place == inside(folder)  # once
    head, about = AcceptanceHead.load(place)
    states = torch.randn(50, SIZE)
    assert torch.allclose(torch.sigmoid(head(states)), model()(states).softmax(-1)[:, 1], atol=1e-6)
    assert torch.equal(head.corrected(head(states)), head(states)) and about["head"]["tied"]
    assert sorted(path.name for path in folder.iterdir() if path.suffix != ".json") == [
        "pytorch_model.bin" if (folder / "pytorch_model.bin").exists() else "model.safetensors"
    ]


def test_it_decodes_from_the_command_line(folder, tiny_overrides, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where it has not been read before
    words = [*tiny_overrides, f"head={folder}", "method=specdec_pp", "sampling.max_new_tokens=6", "prompts.limit=1"]
    decode.run(compose("decode", [*words, f"paths.root_dir={tmp_path}"]))
    assert "published SpecDec++ code" in capsys.readouterr().out
    assert len(head_hash(folder)) > 8


def test_a_training_can_begin_from_it(folder, tiny_overrides, tiny_mix, tmp_path):
    from toolkit import train

    words = [
        *tiny_overrides, f"data.path={tiny_mix}", f"from_pretrained={folder}", f"head.depth={DEPTH}", "logger=none",
        "trainer.max_epochs=1", "optimizer.lr=1e-3", f"paths.root_dir={tmp_path}",
    ]  # fmt: skip
    with pytest.raises(InputError, match="tied=False"):
        train.run(compose("train", words))
    assert (train.run(compose("train", [*words, "head.tied=true"])) / "head").is_dir()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("model.3.bias"), r"expected model.3.bias, found"),
        (lambda state: state.update({"model.3.weight": torch.zeros(3, SIZE)}), r"expected shape \(2, 16\)"),
        (
            lambda state: state.update({"lm_head.weight": torch.zeros(3, SIZE)}),
            "the tensors of 3 blocks and a read-out",
        ),
        (lambda state: state.update({"model.2.linear.bias": torch.zeros(SIZE)}), "model.2.linear.bias differs"),
    ],
)
def test_other_weights_are_refused(tmp_path, change, message):
    state = {f"model.{name}": value.clone() for name, value in model().state_dict().items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": SIZE, "num_layers": DEPTH}))
    with pytest.raises(InputError, match=message):
        inside(tmp_path)


def test_other_configs_are_not_taken_for_one(tmp_path, tiny_pair):
    assert not is_published(tiny_pair / "draft")
    save_file({"model.0.weight": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    assert not is_published(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": "4"}))
    with pytest.raises(InputError, match="expected whole numbers"):
        inside(tmp_path)
