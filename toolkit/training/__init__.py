"""Training on frozen models: the parts of `python -m toolkit.train`."""

from toolkit.training.checkpoints import Checkpoints, EarlyStop
from toolkit.training.data import MixedData
from toolkit.training.losses import WeightedBCE
from toolkit.training.module import HeadTraining, PrereadTraining
from toolkit.training.recorded import TracedData

__all__ = ["Checkpoints", "EarlyStop", "HeadTraining", "MixedData", "PrereadTraining", "TracedData", "WeightedBCE"]
