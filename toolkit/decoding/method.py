"""A method: a named combination of proposer, policy and rule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.proposers import ChainProposer
from toolkit.errors import InputError
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.verification import LayerRule, Rule


@dataclass(frozen=True)
class Method:
    """What the loop needs to decode with.

    policy             when to stop drafting
    rule               which drafted tokens are kept
    proposer           how drafts are drawn: a chain by default
    min_drafted, max_drafted  bounds of a round, inclusive
    draft_temperature  the draft's own temperature; None: the sampling's
    beams              several texts per row, and how they are chosen; None: one text
    """

    name: str
    policy: StoppingPolicy
    rule: Rule
    proposer: Any = field(default_factory=ChainProposer)
    min_drafted: int = 1
    max_drafted: int = 20
    draft_temperature: float | None = None
    beams: Beams | None = None

    def __post_init__(self) -> None:
        if self.proposer.drawing not in self.rule.drawing:
            raise InputError(
                f"method {self.name}: candidates are drawn {self.proposer.drawing}, but {type(self.rule).__name__} "
                f"is exact only for {', '.join(self.rule.drawing)}"
            )
        if self.policy.remembers and not self.proposer.teaches:
            raise InputError(
                f"method {self.name}: {type(self.policy).__name__} learns from rounds of chains, and a draft tree has "
                "none; expected a policy without memory (fixed, confidence, tail, survival, ...)"
            )
        if isinstance(self.rule, LayerRule) != (self.beams is not None):
            raise InputError(f"method {self.name}: a rule for layers of beams and `beams` need each other")

    def bind(self, pair: Any) -> Method:
        """Ready for one pair: heads loaded and checked, the policy bounded. Raises InputError."""
        bounded = Bounded(self.policy, self.min_drafted, self.max_drafted).bind(pair)
        method = replace(self, policy=bounded)
        if method.drafts and not pair.drafts:
            raise InputError(f"method {self.name} needs a draft model, the pair has none")
        if method.drafts and method.beams is not None:
            method.beams.check_drafts(method.proposer.fewest)
        return method

    @property
    def lossless(self) -> bool:
        """Whether what comes out follows the target's law (with several beams: that of plain beam sampling or search)."""
        return self.rule.lossless and (self.beams is None or self.beams.lossless)

    @property
    def drafts(self) -> bool:
        """Whether it ever asks a draft model."""
        return self._drafted > 0

    @property
    def max_nodes(self) -> int:
        """M of the uniforms' layout: the most nodes a round can propose, and at least one per beam."""
        return max(self._drafted, self.beams.num_beams if self.beams is not None else 0)

    @property
    def _drafted(self) -> int:
        assert isinstance(self.policy, Bounded), "bind the method to a pair first"
        return int(self.proposer.max_nodes(self.policy.limit))
