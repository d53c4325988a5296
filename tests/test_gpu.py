"""make gpu without a GPU: the whole of it runs, small, on a CPU; what is broken is reported as such."""

from __future__ import annotations

import pytest
import torch

from benchmarks import checks, gpu, gpu_exactness, gpu_speed
from toolkit import config
from toolkit.engine import capture
from toolkit.models.pair import TOY
from toolkit.testing import tiny_model
from toolkit.verification.rules.rejection import Rejection

CPU = ["--device", "cpu", "--quick"]


@pytest.mark.slow
def test_a_smoke_run_passes_and_is_gone_on_with(tmp_path, capsys):
    words = [*CPU, "--out", str(tmp_path)]
    assert gpu.main(words) == 0
    report = (tmp_path / "index.md").read_text()
    assert capsys.readouterr().out.strip() == report.strip()
    assert "FAILED" not in report and report.count("checks passed.**") == 1
    parts = [
        "session: gemma3",
        "distribution: block",
        "decoding: rate",
        "outputs: specinfer",
        "no waiting while drafting",
    ]
    parts += [
        "transformers assisted K=4 |",
        "speculative K=4, eager |",
        "tree 2 x 2, captured |",
        "lookup_rate, eager |",
    ]
    assert all(f"| {part}" in report for part in parts)
    assert "| 64 | 16 |" in report and "TB/s" in report and f"torch {torch.__version__}" in report
    (tmp_path / "decoding_8.json").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}
    assert gpu.main(words) == 0 and "decoding_8" in (tmp_path / "index.md").read_text()
    assert before.items() <= {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.json")}.items()


@pytest.mark.slow
def test_a_real_target_is_decoded_alone(tmp_path, capsys):
    assert (
        gpu.main([*CPU, "real_1", "--dtype", "float32", "--target", str(TOY / "target"), "--out", str(tmp_path)]) == 0
    )
    report = capsys.readouterr().out
    assert "| transformers lookup |" in report and "| lookup_rate, captured |" in report and "speculative" not in report


@pytest.fixture
def few_methods(monkeypatch):
    """All methods are decoded with in the smoke run."""
    monkeypatch.setattr(config, "choices", lambda group: [*gpu_exactness.FEW, "best_source", "specdec_pp"])


def test_a_wrong_rule_fails_it(few_methods, monkeypatch, capsys, tmp_path):
    def everything(self, target_probs, draft_probs, tokens, num_drafted, uniforms):
        return num_drafted, target_probs[torch.arange(len(num_drafted)), num_drafted]

    monkeypatch.setattr(Rejection, "accept", everything)
    assert gpu.main([*CPU, "exactness", "--only", "outputs", "--out", str(tmp_path)]) == 1
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
    assert "differ; batch" in bad.finding.text


def test_what_breaks_down_is_one_line_stops_nothing_and_is_tried_again(monkeypatch, capsys, tmp_path):
    def broken(*args):
        raise RuntimeError("out of luck\nand more")

    monkeypatch.setattr(gpu_speed, "forwards", broken)
    monkeypatch.setattr(gpu_speed, "decoding", lambda pair, sizes, size: f"a table of {size}")
    words = [*CPU, "costs", "decoding_8", "--out", str(tmp_path)]
    assert gpu.main(words) == 1
    report = capsys.readouterr().out
    assert "| costs | FAILED | RuntimeError: out of luck (at outside of the toolkit) |" in report
    assert "## decoding_8" in report and "a table of 8" in report
    monkeypatch.setattr(gpu_speed, "forwards", lambda *args: "forwards")
    assert gpu.main(words) == 0 and "forwards" in capsys.readouterr().out


def test_weights_read_by_a_token_leave_out_what_is_looked_up():
    model = tiny_model("llama")  # untied: 61 x 32 input embeddings
    total = sum(parameter.numel() for parameter in model.parameters()) * 4
    assert gpu_speed.bytes_read(model) == total - 61 * 32 * 4
    tied = tiny_model("gemma")
    assert gpu_speed.bytes_read(tied) == sum(parameter.numel() for parameter in tied.parameters()) * 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as caught:
        gpu.main([])
    assert caught.value.code == 2
    assert "no CUDA device is visible to torch" in capsys.readouterr().err
