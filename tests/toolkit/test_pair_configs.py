"""Every pair config composes and names arguments that its loader takes."""

import inspect
from pathlib import Path

import pytest
from hydra.utils import get_class, get_method

from toolkit.config import compose

PAIRS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "pair").glob("*.yaml"))


@pytest.mark.parametrize("name", PAIRS)
def test_pair_configs_name_arguments_of_their_loader(name):
    cfg = dict(compose("decode", [f"pair={name}", "method=speculative"]).pair)
    target = cfg.pop("_target_")
    loader = (
        get_method(target) if target.endswith("padded_pair") else get_class(target.rpartition(".")[0]).from_pretrained
    )
    inspect.signature(loader).bind(**cfg)
    assert {"target", "draft"} <= cfg.keys()


def test_the_papers_pairs_are_there():
    assert {
        "toy",
        "toy_padded",
        "llama2_7b_70b",
        "llama3_1b_8b",
        "opt_125m_13b",
        "gemma_2b_27b",
        "gemma11_2b_gemma2_27b",
        "llama_68m_vicuna_13b",
        "llama_68m_vicuna_33b",
        "llama_160m_vicuna_13b",
        "llama_160m_vicuna_33b",
        "llama_2x68m_2_13b",
        "opt_125m_30b",
        "opt_125m_iml_30b",
        "opt_350m_30b",
    } <= set(PAIRS)
    assert any(name.startswith("qwen") for name in PAIRS)
