"""The client against real servers.

`transformers serve` (the extra `serving`) takes texts and returns texts. vLLM takes and returns token ids; it needs an
environment of its own, whose program the variable VLLM names: `VLLM=FOLDER/bin/vllm pytest -m slow -k vllm`.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import torch
from scipy.stats import chisquare

from data_gen import responses
from toolkit import ModelPair
from toolkit.config import compose
from toolkit.runs.stage import read_manifest
from toolkit.sampling import Sampling, warp

MISSING = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.slow
serving = pytest.mark.skipif(bool(MISSING), reason=f"the extra serving is not installed ({', '.join(MISSING)})")
vllm = pytest.mark.skipif("VLLM" not in os.environ, reason="the variable VLLM names no vLLM")
SERVE = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"


@contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[str]:
    """A server of the toy target; its base address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [*command, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    with log.open("wb") as file:
        process = subprocess.Popen(said, stdout=file, stderr=file, env={**os.environ, **environment})
    try:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
                break
            except (URLError, OSError):
                time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-2000:])
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("serve") / "log"
    with running([sys.executable, "-c", SERVE, "serve", target(), "--device", "cpu"], log) as address:
        yield address


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "log"
    said = ["serve", target(), "--served-model-name", "toy", "--max-model-len", "512", "--enforce-eager"]
    with running([os.environ["VLLM"], *said], log, VLLM_CPU_KVCACHE_SPACE="1", PYTHONPATH="") as address:
        yield address


def target() -> str:
    import toolkit

    return str(Path(toolkit.__file__).parent / "assets" / "toy" / "target")


def words(folder: Path, *more: str) -> list[str]:
    return ["prompts=toy_math", "prompts.limit=24", "sampling.max_new_tokens=40", f"paths.output_dir={folder}", *more]


def served(address: str) -> list[str]:
    return [f"endpoints=[{address}]", "served.engine=transformers", f"served.model={target()}", "served.concurrency=2"]


@serving
def test_greedy_responses_are_those_of_decoding_here(server, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    greedy = "sampling.temperature=0"
    remote = responses.run(compose("responses", words(tmp_path / "there", greedy, *served(server))))
    decoded = responses.run(compose("responses", words(tmp_path / "here", greedy)))
    local = {row["row"]: row for row in responses.read_rows(decoded)}
    got = list(responses.read_rows(remote))
    about = read_manifest(remote)
    assert about["rows"]["failed"] == 0 and len(got) >= 20
    equal = sum(row["token_ids"] == local[row["row"]]["token_ids"] for row in got)
    assert equal == len(got)
    assert all(row["prompt_ids"] == local[row["row"]]["prompt_ids"] for row in got)
    assert about["served"]["ids"]["encoded again"] == len(got)


@vllm
def test_vllms_greedy_responses_are_those_of_decoding_here(vllm_server, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    said = [f"endpoints=[{vllm_server}]", "served.model=toy", "sampling.temperature=0"]
    remote = responses.run(compose("responses", words(tmp_path / "there", *said)))
    decoded = responses.run(compose("responses", words(tmp_path / "here", "sampling.temperature=0")))
    assert list(responses.read_rows(remote)) == list(responses.read_rows(decoded))
    assert read_manifest(remote)["served"]["ids"] == {"returned": 24}


@vllm
def test_vllm_draws_from_our_distribution(vllm_server, tmp_path, monkeypatch):
    """One prompt, many times: the first tokens' frequencies against the target's warped probabilities."""
    monkeypatch.setenv("no_proxy", "*")
    pair, prompt, count = ModelPair.toy(), "Q:", 600
    path = tmp_path / "same.jsonl"
    path.write_text("".join(json.dumps({"id": i, "prompt": prompt}) + "\n" for i in range(count)))
    sampling = Sampling(temperature=1.5, top_k=40, top_p=0.95, min_p=0.002, repetition_penalty=1.3)
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    said = [f"sampling.{name}={getattr(sampling, name)}" for name in names]
    asked = [f"endpoints=[{vllm_server}]", "served.model=toy", "prompts=jsonl", f"prompts.path={path}"]
    end = ["sampling.max_new_tokens=1", f"paths.output_dir={tmp_path / 'out'}"]
    folder = responses.run(compose("responses", [*asked, *said, *end]))
    ids = pair.encode(prompt)
    seen = torch.zeros(pair.vocab_size, dtype=torch.bool)
    seen[ids] = True
    probs = warp(pair.target(torch.tensor([ids])).logits[0, -1], sampling, seen).double()
    drawn = torch.bincount(
        torch.tensor([row["token_ids"][0] for row in responses.read_rows(folder)]), minlength=pair.vocab_size
    )
    assert int(drawn.sum()) == count and (probs > 0).sum() > 3
    assert (drawn[probs == 0] == 0).all()
    usual = probs * count >= 5
    observed = [*drawn[usual].tolist(), int(drawn[~usual].sum())]
    wanted = [*(probs[usual] * count).tolist(), float(probs[~usual].sum() * count)]
    kept = [(o, w) for o, w in zip(observed, wanted, strict=True) if w > 0]
    expected = [w * count / sum(w for _, w in kept) for _, w in kept]
    assert chisquare([o for o, _ in kept], expected).pvalue > 1e-4
