"""The client against a real server: `transformers serve` (extra `serving`), which takes texts and returns texts."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from data_gen import responses
from toolkit.config import compose
from toolkit.stage import read_manifest

MISSING = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the extra serving is not installed ({', '.join(MISSING)})"),
]
SERVE = "import sys; from transformers.cli.transformers import main; sys.argv[0] = 'transformers'; main()"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The toy target, served; its base address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    said = ["serve", target(), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with log.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", SERVE, *said], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 180
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


def target() -> str:
    import toolkit

    return str(Path(toolkit.__file__).parent / "assets" / "toy" / "target")


def words(folder: Path, *more: str) -> list[str]:
    return ["prompts=toy_math", "prompts.limit=24", "sampling.max_new_tokens=40", f"paths.output_dir={folder}", *more]


def served(address: str) -> list[str]:
    return [f"endpoints=[{address}]", "served.engine=transformers", f"served.model={target()}", "served.concurrency=2"]


def test_greedy_responses_are_those_of_decoding_here(server, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    greedy = "sampling.temperature=0"
    there = responses.run(compose("responses", words(tmp_path / "there", greedy, *served(server))))
    here = responses.run(compose("responses", words(tmp_path / "here", greedy)))
    local = {row["row"]: row for row in responses.read_rows(here)}
    got = list(responses.read_rows(there))
    about = read_manifest(there)
    assert about["rows"]["failed"] == 0 and len(got) >= 20
    equal = sum(row["token_ids"] == local[row["row"]]["token_ids"] for row in got)
    assert equal == len(got)
    assert all(row["prompt_ids"] == local[row["row"]]["prompt_ids"] for row in got)
    assert about["served"]["ids"]["encoded again"] == len(got)


def test_sampled_responses_are_read_and_every_row_is_accounted_for(server, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    folder = responses.run(compose("responses", words(tmp_path / "there", "sampling.top_k=20", *served(server))))
    rows = read_manifest(folder)["rows"]
    assert rows["input"] == 24 == rows["done"] + rows["skipped"] and rows["done"] >= 12
