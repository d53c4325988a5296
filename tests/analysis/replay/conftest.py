"""A small recording of a table pair, with states, and a head of each kind that reads them."""

import math

import pytest
import torch

from tests.toolkit.trace.plain import small_trace
from toolkit.acceptance import AcceptanceHead, PrereadHead

SIZE = 9  # rows of the draft's table: its states


@pytest.fixture(scope="package")
def trace():
    return small_trace(hidden=True, upper_bound=True)


@pytest.fixture(scope="module")
def heads():
    torch.manual_seed(0)
    return AcceptanceHead(SIZE, log_w_rej=math.log(3.0)), PrereadHead(SIZE, 3, width=4, log_w_rej=math.log(2.0))
