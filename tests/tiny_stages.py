"""Tiny models as local checkpoint folders, and what responses and mix make of them: folders for the stages that follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from toolkit.testing import save_checkpoint

PROMPTS = ["the cat", "a dog and the cat", "it sat on a mat", "the dog ran", "and it ran to the mat on a cat"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target and a tiny draft over one tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    return save_checkpoint(root / "target", 32, 0), save_checkpoint(root / "draft", 16, 1)


@pytest.fixture(scope="session")
def tiny_pair(checkpoints: tuple[Path, Path]) -> Path:
    """Folder with target/ and draft/: hidden sizes 32 and 16."""
    return checkpoints[0].parent


@pytest.fixture(scope="session")
def tiny_overrides(tiny_pair: Path) -> list[str]:
    """Hydra overrides that choose the tiny pair."""
    return [f"pair.target={tiny_pair}/target", f"pair.draft={tiny_pair}/draft"]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings draw no reliability diagram: a third of the time of so short a one."""
    monkeypatch.setattr(
        "toolkit.training.export.draw_reliability", lambda bins, path, title: Image.new("L", (1, 1)).save(path)
    )


@pytest.fixture(scope="session")
def tiny_responses(tiny_overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A responses folder: 60 different prompts; responses of at most 17 tokens, warped."""
    from data_gen.responses import run
    from toolkit.config import compose

    folder = tmp_path_factory.mktemp("responses")
    prompts = [f"{PROMPTS[i % 5]} {PROMPTS[i // 5 % 4]} {i}" for i in range(60)]
    lines = [json.dumps({"id": i, "prompt": prompt}) + "\n" for i, prompt in enumerate(prompts)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    overrides = [
        *tiny_overrides, "prompts=jsonl", f"prompts.path={folder}/prompts.jsonl", "sampling.max_new_tokens=17",
        "sampling.temperature=0.9", "sampling.top_k=20", f"paths.output_dir={folder}/responses",
    ]  # fmt: skip
    return run(compose("responses", overrides))


@pytest.fixture(scope="session")
def tiny_mix(tiny_overrides: list[str], tiny_responses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_gen.mix folder of the tiny responses: 48 rows to train and 12 to validate on."""
    from data_gen.mix import run
    from toolkit.config import compose

    folder = tmp_path_factory.mktemp("mix")
    overrides = [
        *tiny_overrides, f"responses={tiny_responses}", "validation_fraction=0.2", f"paths.output_dir={folder}/mix",
    ]  # fmt: skip
    return run(compose("mix", overrides))
