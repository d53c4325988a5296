"""Training on frozen models: what `python -m toolkit.train` is made of."""

from toolkit.training.checkpoints import Checkpoints
from toolkit.training.data import MixedData
from toolkit.training.losses import WeightedBCE
from toolkit.training.module import HeadTraining
from toolkit.training.preread import PrereadTraining
from toolkit.training.traced import TracedData

__all__ = ["Checkpoints", "HeadTraining", "MixedData", "PrereadTraining", "TracedData", "WeightedBCE"]
