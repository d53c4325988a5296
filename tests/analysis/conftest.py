"""A dev and a test sweep of a table pair, made once."""

import pytest
import torch

from analysis import sweep
from tests.analysis.table_sweeps import ORDER, VOCAB, sweep_config
from toolkit.acceptance.head import AcceptanceHead


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tables are too small for threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def head(tmp_path_factory):
    """Folder of a random acceptance head for the table pair's hidden states."""
    torch.manual_seed(0)
    return str(AcceptanceHead(VOCAB**ORDER).save(tmp_path_factory.mktemp("heads") / "head"))


@pytest.fixture(scope="session")
def grid(head):
    """Baselines, a policy with a head, and the oracle."""
    return {
        "autoregressive": {},
        "speculative": {"policy": {"num_drafted": [1, 3, 5]}},
        "specdec_pp": {"policy.threshold": [0.2, 0.8], "head": [head]},
        "oracle": {"max_drafted": [None, 2]},
    }


@pytest.fixture(scope="session")
def sweeps(tmp_path_factory, grid):
    """Output folders of a dev and a test sweep of the same grid."""
    root = tmp_path_factory.mktemp("sweeps")
    return {
        split: sweep.run(sweep_config(root, grid=grid, split=split, limit=9, track=split == "dev"))
        for split in ("dev", "test")
    }
