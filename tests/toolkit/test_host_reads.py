"""Drafting never makes the host wait for the device, gates apart; the detector sees what would."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from benchmarks import gpu_exactness
from benchmarks.gpu_exactness import PLAIN, UNDRAFTED, tiny_pair, waiting
from benchmarks.host_reads import HostRead, no_host_reads
from tests.methods import one_of_each, others_slow
from toolkit import config
from toolkit.decoding import Method
from toolkit.engine.device import Gate, tensor_on
from toolkit.stopping import StoppingPolicy
from toolkit.testing import random_heads
from toolkit.verification import get

CPU = torch.device("cpu")
METHODS = {name: config.method(name) for name in config.choices("method") if name not in UNDRAFTED}
METHODS["specdec_pp lag=0"] = config.method("specdec_pp", ["policy.lag=0"])
DRAFTED = {  # one that drafts so
    (repr(method.proposer), repr(method.policy)): name for name, method in METHODS.items()
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    pair = tiny_pair(CPU)
    pair.head = str(random_heads(tmp_path_factory.mktemp("heads"), 16, 16))
    return pair


@pytest.mark.parametrize("name", others_slow([*DRAFTED.values()], one_of_each() | {"specdec_pp", "specdec_pp lag=0"}))
def test_no_method_waits_while_it_drafts(name, pair, monkeypatch):
    """Every method without captured forward passes; with them, in the test below, one of a kind."""
    monkeypatch.setattr(gpu_exactness, "capturing", lambda pair: pair)
    monkeypatch.setattr(gpu_exactness, "CALLS", 0)
    finding = waiting(pair, METHODS[name])
    assert finding.passed, finding.text


@pytest.mark.parametrize("name", ["specdec_pp", "mcsd", "mtad", "speculative_beam"])
def test_nor_where_the_host_runs_ahead_of_the_answers(name, pair, monkeypatch):
    for module in ("chain", "tree", "beam_chain", "forest"):
        monkeypatch.setattr(f"toolkit.decoding.proposers.{module}.Gate", lambda device: Gate(device, ahead=1))
    finding = waiting(pair, METHODS[name], PLAIN)
    assert finding.passed, finding.text


@dataclass(frozen=True)
class Curious(StoppingPolicy):
    """A policy that looks at values."""

    limit = 4

    def step(self, step, state):
        return state, torch.full_like(step.tokens, float(step.entropy.mean()) > -1, dtype=torch.bool)


def test_a_policy_that_looks_is_found_with_its_line(pair):
    finding = waiting(pair, Method("curious", Curious(), get("rejection"), max_drafted=4))
    assert finding.passed is False
    assert "the host reads a value" in finding.text
    assert "toolkit/stopping/bounded.py" in finding.text  # the innermost line of the toolkit: it called the policy


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_would_wait_is_seen(mode):
    values = torch.arange(4.0)
    looks = (
        lambda: bool(values.any()),
        lambda: values.sum().item(),
        lambda: float(values.mean()),
        lambda: range(values[1].long()),
        lambda: values.numpy(),
        lambda: values.tolist(),
        lambda: values[values > 1],
        lambda: values.nonzero(),
        lambda: torch.masked_select(values, values > 1),
        lambda: torch.tensor([1, 2], device=CPU),
        lambda: torch.equal(values, values),
    )
    for look in looks:
        with no_host_reads(CPU), mode(), pytest.raises(HostRead):
            look()
        look()
    with no_host_reads(CPU):
        gate = Gate(CPU)
        assert gate.passes(values > 1)
        assert tensor_on(CPU, [1, 2]).shape == (2,)
        assert torch.where(values > 1, values, 0).sum().shape == ()
