"""Stopping policies, one per file: estimates become stop or go."""

from toolkit.stopping.base import State, StoppingPolicy
from toolkit.stopping.bounded import Bounded
from toolkit.stopping.fixed import Fixed
from toolkit.stopping.survival import Survival

__all__ = ["Bounded", "Fixed", "State", "StoppingPolicy", "Survival"]
