"""Stopping policies, one per file: estimates become stop or go."""

from toolkit.stopping.adaedl import AdaEdl
from toolkit.stopping.always import Always
from toolkit.stopping.base import State, StoppingPolicy, Thresholded
from toolkit.stopping.batch_best_source import BatchBestSource
from toolkit.stopping.batch_lookup_rate import BatchLookupRate
from toolkit.stopping.batch_rate import BatchRate
from toolkit.stopping.best_source import BestSource
from toolkit.stopping.block_budget import BlockBudget
from toolkit.stopping.block_draft_rate import BlockDraftRate
from toolkit.stopping.bounded import Bounded
from toolkit.stopping.confidence import Confidence
from toolkit.stopping.dynamic_confidence import DynamicConfidence
from toolkit.stopping.fixed import Fixed
from toolkit.stopping.heuristic import Heuristic
from toolkit.stopping.largest import Largest
from toolkit.stopping.lookup_rate import LookupRate
from toolkit.stopping.online_rate import OnlineRate
from toolkit.stopping.rate import Rate
from toolkit.stopping.survival import Survival
from toolkit.stopping.svip import Svip
from toolkit.stopping.tail import Tail
from toolkit.stopping.tree_rate import TreeRate

__all__ = [
    "AdaEdl",
    "Always",
    "BatchBestSource",
    "BatchLookupRate",
    "BatchRate",
    "BestSource",
    "BlockBudget",
    "BlockDraftRate",
    "Bounded",
    "Confidence",
    "DynamicConfidence",
    "Fixed",
    "Heuristic",
    "Largest",
    "LookupRate",
    "OnlineRate",
    "Rate",
    "State",
    "StoppingPolicy",
    "Survival",
    "Svip",
    "Tail",
    "Thresholded",
    "TreeRate",
]
