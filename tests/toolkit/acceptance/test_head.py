"""The acceptance head: its function, its weights on disk, the published format, the class weight's correction."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from toolkit.acceptance import AcceptanceHead
from toolkit.acceptance.folder import check_draft
from toolkit.errors import InputError
from toolkit.io import read_json, write_json
from toolkit.pair import fingerprint

D = 13


@pytest.fixture
def hidden():
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_head_is_residual_blocks_and_a_linear_readout(hidden, depth, tied):
    head = AcceptanceHead(D, depth, tied)
    x = hidden
    for i in range(depth):
        linear = head.blocks[0 if tied else i].linear
        y = x @ linear.weight.T + linear.bias
        x = x + y * torch.sigmoid(y)
    expected = (x @ head.readout.weight.T + head.readout.bias)[..., 0]
    assert head(hidden).shape == (2, 5)
    assert torch.allclose(head(hidden), expected, atol=1e-5)
    blocks = min(depth, 1) if tied else depth
    assert sum(p.numel() for p in head.parameters()) == blocks * (D * D + D) + D + 1


@pytest.mark.parametrize("tied", [False, True])
def test_saved_heads_load_as_they_were(hidden, tmp_path, tied):
    head = AcceptanceHead(D, 2, tied, log_w_rej=1.5)
    head.save(tmp_path, {"draft_fingerprint": "abc"})
    loaded, about = AcceptanceHead.load(tmp_path)
    assert torch.equal(loaded(hidden), head(hidden))
    assert loaded.config == head.config == about["head"]
    assert about["draft_fingerprint"] == "abc"


def test_incomplete_heads_are_refused(tmp_path):
    with pytest.raises(InputError, match="found none"):
        AcceptanceHead.load(tmp_path)
    AcceptanceHead(D, 2).save(tmp_path)
    about = read_json(tmp_path / AcceptanceHead.config_file)
    write_json(tmp_path / AcceptanceHead.config_file, {"head": {**about["head"], "depth": 3}})
    with pytest.raises(InputError, match="config.json is damaged: its checksum does not match"):
        AcceptanceHead.load(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / AcceptanceHead.weights_file)
    with pytest.raises(InputError, match="an acceptance head as a whole"):
        AcceptanceHead.load(tmp_path)
    with pytest.raises(InputError, match="depth: expected at least 0, got -1"):
        AcceptanceHead(D, -1)


class PublishedBlock(nn.Module):
    """As in the released code."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.act = nn.SiLU()

    def forward(self, x):
        return x + self.act(self.linear(x))


def test_published_weights_mean_the_same_function(hidden):
    published = nn.Sequential(*([PublishedBlock()] * 3), nn.Linear(D, 2))
    head = AcceptanceHead.from_published(published.state_dict(), depth=3)
    assert torch.allclose(torch.sigmoid(head(hidden)), published(hidden).softmax(-1)[..., 1], atol=1e-6)
    linear = nn.Sequential(nn.Linear(D, 2))
    head = AcceptanceHead.from_published(linear.state_dict(), depth=0)
    assert torch.allclose(torch.sigmoid(head(hidden)), linear(hidden).softmax(-1)[..., 1], atol=1e-6)


def test_the_correction_multiplies_the_odds(hidden):
    head = AcceptanceHead(D, 1, log_w_rej=math.log(6))
    raw, corrected = torch.sigmoid(head(hidden)), torch.sigmoid(head.corrected(head(hidden)))
    assert torch.allclose(corrected / (1 - corrected), 6 * raw / (1 - raw), rtol=1e-4)


def test_heads_of_other_drafts_are_refused(tiny_pair):
    from toolkit.pair import load_draft

    draft = load_draft(tiny_pair / "draft")
    head = AcceptanceHead(16)
    check_draft({"head": head.config, "draft_fingerprint": fingerprint(draft)}, draft, "here")
    with pytest.raises(InputError, match="another draft"):
        check_draft({"head": head.config, "draft_fingerprint": "other"}, draft, "here")
    with pytest.raises(InputError, match="size 13"):
        check_draft({"head": AcceptanceHead(D).config}, draft, "here")
