"""The table of architectures: every family is decoded right or refused in one line, and nothing is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.evidence import FIGURES
from benchmarks.families import VARIANTS, Row, rows, table

HANDFUL = {
    "llama": "right", "gemma2": "right", "gpt_oss": "right", "llama4_text": "right", "gemma3n_text": "right",
    "phi3 (long rope)": "right", "llama (dynamic rope)": "right", "whisper": "right", "mamba2": "refused", "bloom": "refused",
    "bert": "refused", "pegasus": "refused", "mpt": "refused", "xlnet": "refused", "openai-gpt": "refused", "cpmant": "refused",
}  # fmt: skip


def test_a_handful_of_families():
    assert {row.family: row.verdict for row in rows(list(HANDFUL))} == HANDFUL


def test_the_table_counts_and_escapes():
    shown = table(
        [Row("a", "A", "right"), Row("b", "B", "refused", "the target (B) cannot be decoded: x | y; self_check=off z")]
    )
    assert shown.startswith("2 families: right 1, refused 1, wrong 0, crash 0, unbuilt 0.")
    assert "| b | `B` | refused | x \\| y |" in shown
    assert "families" in FIGURES


@pytest.mark.slow
def test_every_causal_architecture_is_decoded_right_or_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = rows()
    assert len(found) == len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) + len(VARIANTS)
    assert [row for row in found if row.verdict not in ("right", "refused", "unbuilt")] == []
    assert all(row.reason and "\n" not in row.reason for row in found if row.verdict == "refused")
    assert sum(row.verdict == "right" for row in found) > 100
    assert sum(row.verdict == "unbuilt" for row in found) < 10
    left = [path for path in Path(tmp_path).rglob("*") if path.is_file()]
    assert [path.name for path in left] == ["architectures.json"], os.listdir(tmp_path)
