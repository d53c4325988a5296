"""Small models and pairs that many tests share."""

from __future__ import annotations

import gc
import os
import tempfile
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import pytest
import torch

from tests.tiny_stages import checkpoints, tiny_mix, tiny_overrides, tiny_pair, tiny_responses, undrawn  # noqa: F401
from toolkit import ModelPair, testing
from toolkit.acceptance import AcceptanceHead

gc.disable()  # until all is imported and collected: those objects stay, and half of that time would go into looking at them

CORE = (  # rules, sampling, the loop and its batches, policies, recording and replay: `-m core`, and first in every run
    "verification/",
    "stopping/",
    "test_sampling",
    "test_recorded_texts",
    "test_decoding",
    "test_text_rounds",
    "test_tree_index",
    "test_beam",
    "test_trace",
    "toolkit/trace/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the core's tests, and put them first."""
    for item in items:
        path = item.path.as_posix()
        if any(part in path.rpartition("/tests/")[2] for part in CORE) and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.core)
    items.sort(key=lambda item: item.get_closest_marker("core") is None)


THREADS = torch.get_num_threads()


def pytest_runtest_teardown() -> None:
    """Threads that a test has set would wait for each other in all later tests."""
    if torch.get_num_threads() > THREADS:
        torch.set_num_threads(THREADS)


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of all collections of garbage."""
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is remembered from other runs, nor for them: several runs in one process are several as well."""
    cache = tempfile.TemporaryDirectory(prefix="acceptance-cache-")
    config.add_cleanup(cache.cleanup)
    os.environ["XDG_CACHE_HOME"] = cache.name
    with suppress(
        ImportError
    ):  # a metric imports it; when Hydra shuts handlers down, it would close what pytest prints to
        from absl import logging

        logging.get_absl_handler().python_handler.close = lambda: None


OUTPUTS = Path(__file__).parents[1] / "outputs"
BEFORE = {*os.listdir(OUTPUTS)} if OUTPUTS.is_dir() else set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run that has left something in the checkout's outputs: tests write into temporary folders."""
    left = {*os.listdir(OUTPUTS)} - BEFORE if OUTPUTS.is_dir() else set()
    if left and not hasattr(session.config, "workerinput"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\n{OUTPUTS} holds what was not there before the tests: {', '.join(sorted(left))}")


@pytest.fixture(scope="session")
def exact_pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """Random Llamas in float64 (equal computations are equal), with a random acceptance head and a pre-read head."""
    pair = testing.llama_pair()
    pair.head = str(testing.random_heads(tmp_path_factory.mktemp("exact") / "head", 16, 16, depth=0))
    return pair


@pytest.fixture(scope="session")
def table_pair(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """Tables over 3 tokens in float64, with a random acceptance head of their own; token 2 ends a text."""
    pair = testing.table_pair()
    torch.manual_seed(1)
    pair.head = str(AcceptanceHead(3**2).save(tmp_path_factory.mktemp("table") / "head"))
    return pair


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of very different lengths."""
    return testing.ragged_prompts(7)


@pytest.fixture(scope="session")
def toy_prompt() -> tuple[ModelPair, str]:
    """The embedded pair and a prompt of its own."""
    return ModelPair.toy(), "Q: Repeat coral 5 times.\nA:"
