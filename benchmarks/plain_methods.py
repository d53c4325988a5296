"""The methods of conf/method/ built by hand: hydra is not everywhere."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.acceptance import AcceptanceHead, HeadEstimator, PrereadEstimator, PrereadHead
from toolkit.decoding import BeamChainProposer, Beams, ForestProposer, Method, TreeProposer
from toolkit.stopping import (
    AdaEdl,
    Confidence,
    DynamicConfidence,
    Fixed,
    Heuristic,
    Rate,
    StoppingPolicy,
    Survival,
    Svip,
    Tail,
)
from toolkit.verification import SelectionRule, get, names

UNDRAFTED = ("autoregressive", "beam_sampling", "beam_search", "mtjd")
SMALL_VOCABULARIES = "importance_lp"  # a rule that is no method


def fixed(num_drafted: int, rule: str = "rejection") -> Method:
    """A fixed number of drafted tokens; 0 is the target alone."""
    return Method(f"{rule} K={num_drafted}", Fixed(num_drafted), get(rule), max_drafted=num_drafted)


def tree(rule: str, k_config: str = "4x2x1") -> Method:
    """A draft tree under a rule, its candidates drawn as the rule wants them."""
    judge = get(rule)
    return Method(rule, Fixed(20), judge, TreeProposer(k_config, judge.drawing[0]))


def beams(num_layers: int, settings: Beams) -> Method:
    """Several texts per row, with up to so many drafted layers."""
    return Method("beams", Fixed(num_layers), get("beam_layer"), ForestProposer(), beams=settings)


def every_method(heads: Path | str) -> dict[str, Method]:
    """By name; `heads` is a folder with both kinds of head for the pair's draft."""
    policies: dict[str, StoppingPolicy] = {
        "confidence": Confidence(),
        "dynamic_confidence": DynamicConfidence(),
        "heuristic": Heuristic(),
        "tail": Tail(),
        "svip": Svip(),
        "adaedl": AdaEdl(),
        "specdec_pp": Survival(HeadEstimator(str(heads))),
        "specdec_pp lag=0": Survival(HeadEstimator(str(heads)), lag=0),
        "rate": Rate(PrereadEstimator(str(heads))),
    }
    rate, dynamic = policies["rate"], Beams(num_beams=6, threshold=0.9, min_width=2)
    rules = [name for name in names() if isinstance(get(name), SelectionRule) and name != SMALL_VOCABULARIES]
    return {
        "autoregressive": fixed(0),
        "speculative": fixed(4),
        "block": fixed(4, "block"),
        **{name: Method(name, policy, get("rejection")) for name, policy in policies.items()},
        **{name: tree(name) for name in rules},
        "bild": Method("bild", Confidence(0.9), get("bild"), max_drafted=10),
        "mtad": Method("mtad", Fixed(20), get("mtad"), BeamChainProposer()),
        "beam_sampling": beams(0, Beams()),
        "beam_search": beams(0, Beams(selection="top")),
        "mtjd": beams(0, Beams(num_beams=8, selection="top", collapse_after=4)),
        "speculative_beam": beams(20, Beams()),
        "dsbd": beams(20, dynamic),
        "dsbd_head": Method("dsbd_head", rate, get("beam_layer"), ForestProposer(num_layers=8), beams=dynamic),
        "mtad_head": Method("mtad_head", rate, get("mtad"), BeamChainProposer(num_tokens=12)),
    }


def random_heads(folder: Path | str, hidden_size: int, embedding_size: int) -> Path:
    """A random acceptance head and a random pre-read head, saved in one folder."""
    torch.manual_seed(0)
    AcceptanceHead(hidden_size, depth=1).save(folder)
    PrereadHead(hidden_size, embedding_size, width=8).save(folder)
    return Path(folder)
