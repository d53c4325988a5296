"""The decoding engine: one loop for every method. Needs torch, transformers and safetensors only."""

from toolkit.decoding.loop import decode
from toolkit.decoding.method import Method
from toolkit.decoding.proposers import ChainProposer, DraftContext
from toolkit.decoding.tree import TreeProposer
from toolkit.sampling import Sampling

__all__ = ["ChainProposer", "DraftContext", "Method", "Sampling", "TreeProposer", "decode"]
