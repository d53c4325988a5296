"""What the first release (revision a8185bc) wrote is read by this one, or answered in one line.

`fixtures/first_release/` holds a tiny pair of checkpoints, prompts, responses, mixed data, a recording with hidden
states, a head of either kind with the Lightning checkpoints of its training, a finished decoding, and a user's own
config folder. The commands ran in that folder with relative paths.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from toolkit import ModelPair, generate
from toolkit.config import compose
from toolkit.config.files import searching
from toolkit.errors import InputError

FIXTURES = Path(__file__).parent / "fixtures" / "first_release"
PAIR = ["pair.target=pair/target", "pair.draft=pair/draft"]
PROMPTS = ["prompts=jsonl", "prompts.path=prompts.jsonl", "prompts.limit=3", "sampling.max_new_tokens=12"]
METHOD = ["method=specdec_pp", "method.policy.threshold=0.7", "head=train/head"]
DECODE = [*PAIR, *PROMPTS, *METHOD, "sampling.temperature=0.9"]


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder, as the working directory."""
    folder = tmp_path / "release"
    shutil.copytree(FIXTURES, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("method", "head"), [("specdec_pp", "train/head"), ("rate", "preread/head")])
def test_heads_of_either_kind_decode(release: Path, method: str, head: str) -> None:
    pair = ModelPair.from_pretrained(target="pair/target", draft="pair/draft")
    pair.costs = "assumed"  # as measured, these drafts may not pay
    results = generate(pair, ["the cat", "a dog"], method=method, head=head, max_new_tokens=12, temperature=0.9)
    assert all(0 < len(result.token_ids) <= 12 and result.counts.num_drafted > 0 for result in results)


def test_the_recording_trains_and_the_checkpoint_continues(release: Path) -> None:
    from toolkit.train import run

    head = ["model=preread_head", "head.width=8", "head.depth=1", "optimizer.lr=0.001", "logger=csv"]
    base = [*PAIR, *head, "data=traced", "data.path=traces"]
    for words in (["trainer.max_epochs=1"], ["trainer.max_epochs=2", "ckpt_path=preread/checkpoints/last.ckpt"]):
        folder = run(compose("train", [*base, *words, f"paths.output_dir=epochs-{len(words)}"]))
        assert (folder / "head" / "preread.safetensors").is_file()


def test_mixed_data_train_an_acceptance_head_from_the_old_one(release: Path) -> None:
    from toolkit.train import run

    keys = ["data.path=mix", "data.features=online", "head.depth=0", "trainer.max_epochs=1", "optimizer.lr=0.001"]
    overrides = [*PAIR, *keys, "logger=csv", "from_pretrained=train/head", "paths.output_dir=again"]
    assert (run(compose("train", overrides)) / "head" / "head.safetensors").is_file()


def test_a_finished_folder_is_found_or_refused_and_never_changed(release: Path) -> None:
    from toolkit.decode import run

    before = {path: path.read_bytes() for path in sorted((release / "decode").iterdir())}
    with suppress(InputError):  # of another revision: refused
        run(compose("decode", [*DECODE, "paths.output_dir=decode"]))
    assert {path: path.read_bytes() for path in sorted((release / "decode").iterdir())} == before
    again = run(compose("decode", [*DECODE, "paths.output_dir=again"]))
    old, new = ((folder / "generations.jsonl").read_text().splitlines() for folder in (release / "decode", again))
    assert [json.loads(line)["id"] for line in new] == [json.loads(line)["id"] for line in old]


def test_a_users_own_config_folder_decodes(release: Path) -> None:
    """Once its method names no key that is gone: one line says which."""
    from toolkit.decode import run

    words = ["method=mine", "head=preread/head", "paths.output_dir=mine"]
    with searching("conf"):
        with pytest.raises(InputError, match=r"^unknown key 'method\.policy\.estimator\.calibrated': "):
            compose("decode", [*PAIR, *PROMPTS, *words])
        run(compose("decode", [*PAIR, *PROMPTS, *words, "~method.policy.estimator.calibrated"]))
    assert len((release / "mine" / "generations.jsonl").read_text().splitlines()) == 3
