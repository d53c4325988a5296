"""python -m benchmarks.engine_fields vllm-*.whl sglang-*.whl: the names that engines' own parsers know, from their wheels.

Fetch the wheels with `pip download --no-deps vllm sglang`. Their sources are parsed (ast), nothing is imported or installed.
Writes `tests/analysis/loads/engine_fields.json`, with the versions, which the exported files are tested against:

    vllm    fields of SpeculativeConfig, and the values of `method` and `draft_sample_method`
    sglang  command-line flags of speculative decoding
"""

from __future__ import annotations

import argparse
import ast
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from toolkit.io import write_text

KEPT = Path(__file__).parents[1] / "tests" / "analysis" / "loads" / "engine_fields.json"
VLLM, SGLANG = "vllm/config/speculative.py", "sglang/srt/arg_groups/fields/spec.py"
METHODS = {"method": "SpeculativeMethod", "draft_sample_method": "DraftSampleMethod"}


def fields_of(wheel: Path) -> tuple[str, dict[str, Any]]:
    """Engine, and what its wheel says. Raises KeyError if the source lies elsewhere in this version."""
    engine, version = wheel.name.split("-")[:2]
    with zipfile.ZipFile(wheel) as archive:
        source = ast.parse(archive.read(VLLM if engine == "vllm" else SGLANG).decode("utf-8"))
    if engine == "vllm":
        names = _annotated(source, "SpeculativeConfig")
        values = {key: _literals(source, name) for key, name in METHODS.items()}
        return engine, {"version": version, "fields": names, **values}
    flags = [f"--{name.replace('_', '-')}" for name in _annotated(source) if name.startswith("speculative_")]
    return engine, {"version": version, "flags": flags}


def _annotated(source: ast.Module, name: str | None = None) -> list[str]:
    """Names of the annotated fields of a class; None: of the only ones there are."""
    classes = [node for node in source.body if isinstance(node, ast.ClassDef) and name in (None, node.name)]
    return sorted(
        node.target.id
        for one in classes
        for node in one.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


def _literals(source: ast.Module, name: str) -> list[str]:
    """The strings of `name = Literal[...]`."""
    (value,) = (
        node.value for node in source.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
    )
    return sorted(set(_strings(value)))


def _strings(node: ast.AST) -> Iterator[str]:
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            yield one.value


def write(found: Mapping[str, Any], path: Path = KEPT) -> Path:
    """Keep them, other engines' as they are."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return write_text(path, json.dumps({**known, **found}, indent=1, sort_keys=True) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    path = write(dict(fields_of(wheel) for wheel in parser.parse_args(words).wheels))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
