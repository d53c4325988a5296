"""The acceptance head: its function, its weights on disk, the published format, the class weight's correction."""

import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file
from torch import nn

from toolkit import generate, testing
from toolkit.acceptance import AcceptanceHead, PrereadHead
from toolkit.acceptance.folder import check_draft, head_hash, inside, scorer, scorers
from toolkit.errors import InputError
from toolkit.files.atomic import read_json, write_json
from toolkit.files.tensors import save_tensors
from toolkit.models.pair import ModelPair, fingerprint

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
    odd = {
        ("linear.net." if "linear" in name else "net.") + name: value for name, value in published.state_dict().items()
    }
    other = AcceptanceHead.from_published(dict(reversed(odd.items())), depth=3)  # other names, in another order
    assert torch.equal(other(hidden), AcceptanceHead.from_published(published.state_dict(), depth=3)(hidden))
    linear = nn.Sequential(nn.Linear(D, 2))
    head = AcceptanceHead.from_published(linear.state_dict(), depth=0)
    assert torch.allclose(torch.sigmoid(head(hidden)), linear(hidden).softmax(-1)[..., 1], atol=1e-6)


def test_the_correction_multiplies_the_odds(hidden):
    head = AcceptanceHead(D, 1, log_w_rej=math.log(6))
    raw, corrected = torch.sigmoid(head(hidden)), torch.sigmoid(head.corrected(head(hidden)))
    assert torch.allclose(corrected / (1 - corrected), 6 * raw / (1 - raw), rtol=1e-4)


def test_heads_of_other_drafts_are_refused(tiny_pair):
    from toolkit.models.pair import load_draft

    draft = load_draft(tiny_pair / "draft")
    head = AcceptanceHead(16)
    check_draft({"head": head.config, "draft_fingerprint": fingerprint(draft)}, draft, "here")
    with pytest.raises(InputError, match="another draft"):
        check_draft({"head": head.config, "draft_fingerprint": "other"}, draft, "here")
    with pytest.raises(InputError, match="size 13"):
        check_draft({"head": AcceptanceHead(D).config}, draft, "here")


# -- the Hub's ways -----------------------------------------------------------------------------------------------------


def files_of(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", [AcceptanceHead, PrereadHead])
def test_the_hubs_ways_read_and_write_the_toolkits_files(tmp_path, kind):
    head = random_head(kind, log_w_rej=0.5)
    ours = head.save(tmp_path / "ours", {"draft": "some/draft", "metrics": {"val/auroc": 0.5}})
    loaded = kind.from_pretrained(ours)
    assert loaded.about == {"draft": "some/draft", "metrics": {"val/auroc": 0.5}} and not loaded.training
    loaded.save_pretrained(tmp_path / "hub")
    assert files_of(tmp_path / "hub") == files_of(ours) == sorted([
        kind.weights_file, kind.config_file, "README.md", "custom_generate/generate.py"
    ])  # fmt: skip
    for name in files_of(ours):
        assert (tmp_path / "hub" / name).read_bytes() == (ours / name).read_bytes()
    again, about = kind.load(tmp_path / "hub")
    assert again.config == head.config and about["draft"] == "some/draft"
    assert all(torch.equal(one, other) for one, other in zip(again.parameters(), head.parameters(), strict=True))


def random_head(kind, **more):
    return kind(D, **more) if kind is AcceptanceHead else kind(D, D, width=4, **more)


def test_heads_of_two_kinds_share_a_folder_and_its_card(tmp_path):
    AcceptanceHead(D).save_pretrained(tmp_path)
    PrereadHead(D, D, width=4).save_pretrained(tmp_path)
    assert (
        AcceptanceHead.from_pretrained(tmp_path).hidden_size == PrereadHead.from_pretrained(tmp_path).hidden_size == D
    )
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "acceptance-toolkit" and "speculative-decoding" in card.data.tags
    assert "# Acceptance head" in card.text and "# Pre-read head" in card.text


def test_the_card_says_what_is_recorded():
    from toolkit.models.pair import TOY

    head = AcceptanceHead.from_pretrained(TOY / "head")
    text = str(head.generate_model_card())
    assert head.about["draft_fingerprint"] in text and f"{head.about['metrics']['val/auroc']:.4f}" in text
    assert "base_model" not in text  # the toy draft is not on the Hub
    head.about["draft"] = "owner/draft"
    assert head.generate_model_card().data.base_model == ["owner/draft"]


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_loading_is_strict(tmp_path, change):
    head = AcceptanceHead(D, 1)
    head.save(tmp_path)
    tensors = dict(head.state_dict())
    if change == "missing":
        del tensors["readout.bias"]
    else:
        tensors["blocks.7.linear.bias" if change == "extra" else "readout.bias"] = torch.zeros(3)
    save_tensors(tmp_path / AcceptanceHead.weights_file, tensors, {"what": head.what})
    with pytest.raises(InputError, match="does not hold an acceptance head as a whole"):
        AcceptanceHead.from_pretrained(tmp_path)
    with pytest.raises(InputError, match="strict=True"):
        AcceptanceHead.from_pretrained(tmp_path, strict=False)


def test_heads_come_from_and_go_to_the_hub(tmp_path, monkeypatch):
    """By a hub that is a folder: the client's two calls are replaced, what they carry is not."""
    sent = {}

    def upload(self, *, repo_id, folder_path, **options):
        sent[repo_id] = {name: (folder_path / name).read_bytes() for name in files_of(folder_path)}
        return "address"

    def download(name, *, allow_patterns, **options):
        folder = tmp_path / "cache"
        folder.mkdir()
        for file in set(allow_patterns) & set(sent[name]):
            (folder / file).write_bytes(sent[name][file])
        return str(folder)

    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda self, repo_id, **_: SimpleNamespace(repo_id=repo_id)
    )
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    monkeypatch.setattr("toolkit.acceptance.saved.snapshot_download", download)
    head = AcceptanceHead(D, 1)
    assert head.push_to_hub("owner/name") == "address"
    assert head.save_pretrained(tmp_path / "kept", repo_id="owner/other", push_to_hub=True) == "address"
    assert sent["owner/name"] == sent["owner/other"] and sorted(sent["owner/name"]) == files_of(tmp_path / "kept")
    loaded = AcceptanceHead.from_pretrained("owner/name")
    assert torch.equal(loaded.readout.weight, head.readout.weight)
    with pytest.raises(InputError, match="on the Hub under owner/missing, found none"):
        AcceptanceHead.from_pretrained("owner/missing")


def test_the_output_folder_of_a_training_stands_for_its_head(tmp_path):
    pair = ModelPair.toy()
    shutil.copytree(pair.head, tmp_path / "head")
    for folder in (tmp_path, tmp_path / "head"):
        assert inside(folder) == tmp_path / "head"
        (generation,) = generate(pair, ["Q: 1 + 1 =\nA:"], method="specdec_pp", head=str(folder), max_new_tokens=4)
        assert generation.counts.num_drafted > 0
    assert head_hash(tmp_path) == head_hash(tmp_path / "head")
    assert set(scorers(pair, tmp_path)) == set(scorers(pair, tmp_path / "head")) == {"survival", "preread"}


def test_a_head_of_the_same_name_in_another_working_directory_is_another_head(tmp_path, monkeypatch):
    """Though its files have the same times, as those of a copied archive have."""
    pair, logits = testing.table_pair(), []
    for bias in (-1.0, 1.0):
        head = AcceptanceHead(pair.draft.probs.shape[0])
        head.readout.bias.data.fill_(bias)
        folder = head.save(tmp_path / str(bias) / "head")
        for path in folder.iterdir():
            os.utime(path, (1_000_000_000,) * 2)
        monkeypatch.chdir(folder.parent)
        logits.append(float(scorer(pair, "head", "survival").module.readout.bias[0]))
    assert logits == [-1.0, 1.0]
