"""make gpu-check without a GPU: the whole of it runs, small, on a CPU; what is broken is reported as such."""

from __future__ import annotations

import pytest
import torch

from benchmarks import checks, gpu_check, gpu_exactness, gpu_speed
from toolkit import config
from toolkit.engine import capture
from toolkit.testing import tiny_model
from toolkit.verification.rules.rejection import Rejection

CPU = ["--device", "cpu", "--quick"]


@pytest.mark.slow
def test_a_smoke_run_passes_and_reports(tmp_path, capsys):
    out = tmp_path / "report.md"
    assert gpu_check.main([*CPU, "--out", str(out)]) == 0
    report = out.read_text()
    assert capsys.readouterr().out.strip() == report.strip()
    assert "FAILED" not in report
    assert report.count("checks passed.**") == 2
    parts = [
        "session: gemma3",
        "distribution: block",
        "decoding: rate",
        "outputs: specinfer",
        "no waiting while drafting",
    ]
    parts += ["transformers assisted K=4 |", "speculative K=8, eager |"]
    assert all(f"| {part}" in report for part in parts)
    assert "### Forwards" in report and "TB/s" in report and "### Decoding, batch 1" in report
    assert f"torch {torch.__version__}" in report


@pytest.fixture
def few_methods(monkeypatch):
    """All methods are decoded with in the smoke run."""
    monkeypatch.setattr(config, "choices", lambda group: [*gpu_exactness.FEW, "best_source", "specdec_pp"])


def test_a_wrong_rule_fails_it(few_methods, monkeypatch, capsys):
    def everything(self, target_probs, draft_probs, tokens, num_drafted, uniforms):
        return num_drafted, target_probs[torch.arange(len(num_drafted)), num_drafted]

    monkeypatch.setattr(Rejection, "accept", everything)
    assert gpu_check.main([*CPU, "--skip", "speed", "--only", "outputs"]) == 1
    report = capsys.readouterr().out
    assert "**1 of 3 checks FAILED:** outputs: speculative." in report
    assert "| outputs: block | passed |" in report


def test_captures_that_change_tokens_fail_it(few_methods, monkeypatch):
    def replay(self, inputs):
        logits, hidden = self.run()  # with the inputs of the call that was captured
        return logits.clone(), hidden.clone()

    monkeypatch.setattr(capture.StaticForward, "__call__", replay)
    monkeypatch.setattr(capture, "PROOFS", 0)  # which would notice
    named = gpu_exactness.checks(torch.device("cpu"), quick=True)
    (bad,) = checks.run({"decoding: speculative": named["decoding: speculative"]})
    assert bad.verdict == "FAILED"
    assert "differ; batch" in bad.finding.found


def test_weights_read_by_a_token_leave_out_what_is_looked_up():
    model = tiny_model("llama")  # untied: 61 x 32 input embeddings
    total = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert gpu_speed.bytes_read(model) == total - 61 * 32 * 4
    tied = tiny_model("gemma")
    assert gpu_speed.bytes_read(tied) == sum(parameter.numel() for parameter in tied.parameters()) * 4


def test_what_breaks_down_is_one_line_and_stops_nothing():
    def broken():
        raise RuntimeError("out of luck\nand more")

    bad, good = checks.run({"one": broken, "other": lambda: checks.Finding(True, "fine")})
    assert (bad.verdict, good.verdict) == ("FAILED", "passed")
    assert bad.finding.found.startswith("RuntimeError: out of luck (at") and "\n" not in bad.finding.found
