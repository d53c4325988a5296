"""The decoding engine: one loop for every method. Needs torch, transformers and safetensors only."""

from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.decode import Decoded, decode, decode_measured
from toolkit.decoding.method import Method
from toolkit.decoding.proposers import (
    BeamChainProposer,
    BestFirstProposer,
    BestSourceProposer,
    BlockProposer,
    ChainProposer,
    DraftContext,
    ForestProposer,
    PromptLookupProposer,
    Proposer,
    SuffixProposer,
    TextProposer,
    TreeProposer,
)
from toolkit.sampling import Sampling

__all__ = [
    "BeamChainProposer",
    "Beams",
    "BestFirstProposer",
    "BestSourceProposer",
    "BlockProposer",
    "ChainProposer",
    "Decoded",
    "DraftContext",
    "ForestProposer",
    "Method",
    "PromptLookupProposer",
    "Proposer",
    "Sampling",
    "SuffixProposer",
    "TextProposer",
    "TreeProposer",
    "decode",
    "decode_measured",
]
