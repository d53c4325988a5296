"""A method: a named combination of proposer, policy and rule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.decoding.proposers import ChainProposer
from toolkit.errors import InputError
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.verification.base import Rule


@dataclass(frozen=True)
class Method:
    """What the loop needs to decode with.

    policy             when to stop drafting
    rule               which drafted tokens are kept
    proposer           how drafts are drawn: a chain by default
    min_drafted, max_drafted  bounds of a round, inclusive
    draft_temperature  the draft's own temperature; None: the sampling's
    """

    name: str
    policy: StoppingPolicy
    rule: Rule
    proposer: Any = field(default_factory=ChainProposer)
    min_drafted: int = 1
    max_drafted: int = 20
    draft_temperature: float | None = None

    def __post_init__(self) -> None:
        if self.proposer.drawing not in self.rule.drawing:
            raise InputError(
                f"method {self.name}: candidates are drawn {self.proposer.drawing}, but {type(self.rule).__name__} "
                f"is exact only for {', '.join(self.rule.drawing)}"
            )

    def bind(self, pair: Any) -> Method:
        """Ready for one pair: heads loaded and checked, the policy bounded. Raises InputError."""
        bounded = Bounded(self.policy, self.min_drafted, self.max_drafted).bind(pair)
        method = replace(self, policy=bounded)
        if method.max_nodes and not pair.drafts:
            raise InputError(f"method {self.name} needs a draft model, the pair has none")
        return method

    @property
    def max_nodes(self) -> int:
        """The most nodes a round can propose (M of the uniforms' layout)."""
        assert isinstance(self.policy, Bounded), "bind the method to a pair first"
        return self.proposer.max_nodes(self.policy.limit)
