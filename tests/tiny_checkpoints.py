"""Tiny models and tokenizers as local checkpoint folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.testing import save_checkpoint


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target and a tiny draft over one tokenizer."""
    root = tmp_path_factory.mktemp("pair")
    return save_checkpoint(root / "target", 32, 0), save_checkpoint(root / "draft", 16, 1)
