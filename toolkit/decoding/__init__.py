"""The decoding engine: one loop for every method. Needs torch, transformers and safetensors only."""

from toolkit.decoding.beam_draft import BeamChainProposer
from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.forest import ForestProposer
from toolkit.decoding.loop import decode
from toolkit.decoding.method import Method
from toolkit.decoding.proposers import ChainProposer, DraftContext
from toolkit.decoding.tree import TreeProposer
from toolkit.sampling import Sampling

__all__ = [
    "BeamChainProposer",
    "Beams",
    "ChainProposer",
    "DraftContext",
    "ForestProposer",
    "Method",
    "Sampling",
    "TreeProposer",
    "decode",
]
