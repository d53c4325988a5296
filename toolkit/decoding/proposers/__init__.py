"""Proposers: how drafts are drawn, one kind per file."""

from toolkit.decoding.proposers.base import DraftContext, Proposer, TextProposer
from toolkit.decoding.proposers.beam_chain import BeamChainProposer
from toolkit.decoding.proposers.best_first import BestFirstProposer
from toolkit.decoding.proposers.best_source import BestSourceProposer
from toolkit.decoding.proposers.block import BlockProposer
from toolkit.decoding.proposers.chain import ChainProposer
from toolkit.decoding.proposers.forest import ForestProposer
from toolkit.decoding.proposers.prompt_lookup import PromptLookupProposer
from toolkit.decoding.proposers.suffix import SuffixProposer
from toolkit.decoding.proposers.tree import TreeProposer

__all__ = [
    "BeamChainProposer",
    "BestFirstProposer",
    "BestSourceProposer",
    "BlockProposer",
    "ChainProposer",
    "DraftContext",
    "ForestProposer",
    "PromptLookupProposer",
    "Proposer",
    "SuffixProposer",
    "TextProposer",
    "TreeProposer",
]
