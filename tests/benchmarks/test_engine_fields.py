"""Names of serving engines' parsers, read from wheels that are not installed."""

from __future__ import annotations

import json
import zipfile

from benchmarks.engine_fields import fields_of, write


def test_names_are_read_from_a_wheel(tmp_path):
    lines = (
        "Other = Literal['no']\nDraftSampleMethod = Literal['greedy']\nSpeculativeMethod = Literal['a', Union['b']]\n"
    )
    lines += "class Base:\n    no: int = 1\nclass SpeculativeConfig:\n    model: str\n    def f(self): ...\n"
    with zipfile.ZipFile(tmp_path / "vllm-9.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm/config/speculative.py", lines)
    with zipfile.ZipFile(tmp_path / "sglang-9.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "sglang/srt/arg_groups/fields/spec.py", "class X:\n    speculative_num_steps: int\n    other: int\n"
        )
    found = dict(fields_of(path) for path in tmp_path.glob("*.whl"))
    assert found == {
        "vllm": {"version": "9.1", "fields": ["model"], "method": ["a", "b"], "draft_sample_method": ["greedy"]},
        "sglang": {"version": "9.2", "flags": ["--speculative-num-steps"]},
    }


def test_other_engines_are_kept(tmp_path):
    path = tmp_path / "fields.json"
    write({"vllm": {"version": "1"}, "sglang": {"version": "1"}}, path)
    write({"vllm": {"version": "2"}}, path)
    assert json.loads(path.read_text()) == {"vllm": {"version": "2"}, "sglang": {"version": "1"}}
