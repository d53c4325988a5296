"""The matrix with dates: which engine served which kind of draft, when and on what, and whether its counts were equal.

    python -m benchmarks.engines.matrix FOLDER     rows of a run of `make engines`, into docs/tables/engines.csv and the page

A run writes rows.csv into its folder. A row of the table is an engine and a kind of draft; a later one takes its place.
What was tried with another version than the pinned one is shown as not tried.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from pathlib import Path

from benchmarks.engines.install import ENGINES
from benchmarks.evidence import ROOT, machine
from toolkit.errors import InputError
from toolkit.files.atomic import write_text

TABLE = ROOT / "docs" / "tables" / "engines.csv"
COLUMNS = ("engine", "kind", "version", "date", "machine", "served", "counts", "forecast")
KINDS = ("separate", "EAGLE-3", "DFlash", "DSpark", "lookup", "copies")
WRITTEN = {  # what `analysis.advise` writes, or how an engine is told
    "vLLM": {**dict.fromkeys(KINDS[:4], "`vllm.json`"), "lookup": "`ngram`", "copies": "`custom_class`"},
    "llama.cpp": {**dict.fromkeys(KINDS[:2], "`llama_cpp.txt`"), "lookup": "`ngram_simple`"},
    "SGLang": dict.fromkeys(KINDS[:2], "`sglang.txt`"),
    "TensorRT-LLM": dict.fromkeys(KINDS[:2], "`tensorrt_llm.yaml`"),
}
PINNED = {"vLLM": ENGINES["vllm"].version, "llama.cpp": ENGINES["llamacpp"].version}
TRAPS = {
    ("vLLM", "separate"): "0 tokens at a batch size: vllm#49548, #51510",
    ("vLLM", "EAGLE-3"): "prefix caching counts placeholders of K tokens as a draft",
    ("vLLM", "DFlash"): "`sliding_window_non_causal: false` makes all blocks causal; they have K + 1 tokens",
    ("vLLM", "DSpark"): "model runner V1 has none",
    ("vLLM", "lookup"): "first occurrence; copies go on beyond an end of text",
    ("llama.cpp", "separate"): "sums alone; 4-bit columns cost what tokens cost",
    ("llama.cpp", "EAGLE-3"): "its own converter makes the file (llama.cpp#18039)",
    ("SGLang", "separate"): "its adaptive file takes EAGLE drafts alone",
    ("TensorRT-LLM", "separate"): "accepts little after 0 tokens: TensorRT-LLM#16888",
}


def row(engine: str, kind: str, served: str, counts: str = "", forecast: str = "") -> dict[str, str]:
    """What was tried today, on this machine, with the pinned version."""
    values = (engine, kind, PINNED[engine], date.today().isoformat(), machine(), served, counts, forecast)
    return dict(zip(COLUMNS, values, strict=True))


def read(path: Path) -> list[dict[str, str]]:
    """The rows of a file. Raises InputError if there is none."""
    if not path.exists():
        raise InputError(f'expected rows of make engines in {path}, found none: make engines ARGS="page --out FOLDER"')
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def note(path: Path, rows: Sequence[Mapping[str, str]]) -> Path:
    """Put rows into a file, over those of the same engine and kind; of the same version, what a row does not say stays."""
    kept: dict[tuple[str, str], dict[str, str]] = {}
    for each in [*(read(path) if path.exists() else []), *rows]:
        earlier = kept.get((each["engine"], each["kind"]), {})
        same = earlier if earlier.get("version") == each["version"] else {}
        kept[each["engine"], each["kind"]] = {**same, **{name: value for name, value in each.items() if value}}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept.values())
    return write_text(path, text.getvalue())


def shown(rows: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    """The rows of the page: every engine and kind that something is written for, and what else was tried."""
    tried = {(each["engine"], each["kind"]): each for each in rows}
    named = [(engine, kind) for engine, by_kind in WRITTEN.items() for kind in KINDS if kind in by_kind]
    lines = []
    for engine, kind in dict.fromkeys([*named, *tried]):
        current = tried.get((engine, kind), {})
        if engine in PINNED and current.get("version") != PINNED[engine]:
            current = {}
        tried_at = f"{current['version']}, {current['date']}" if current else "not tried"
        about = {
            "tried": tried_at,
            "written": WRITTEN.get(engine, {}).get(kind, ""),
            "traps": TRAPS.get((engine, kind), ""),
        }
        lines.append({**dict.fromkeys(COLUMNS, ""), **current, "engine": engine, "kind": kind, **about})
    return lines


if __name__ == "__main__":
    from benchmarks.pages import main

    for folder in sys.argv[1:]:
        note(TABLE, read(Path(folder) / "rows.csv"))
    main()
