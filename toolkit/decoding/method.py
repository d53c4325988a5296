"""A method: a named combination of proposer, policy and rule."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

from toolkit.config.notes import AtLeast, Between
from toolkit.config.values import check_ranges
from toolkit.decoding.beam_settings import Beams
from toolkit.decoding.proposers import ChainProposer, ForestProposer, Proposer, TextProposer, TreeProposer
from toolkit.decoding.proposers.best_first import BestFirstProposer
from toolkit.drafts.kinds import all_kinds, block_length, kind_of, reads_states
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.stopping.base import check_obeyed
from toolkit.verification import LayerRule, Rule, TextRule
from toolkit.verification.rules.mcsd_naive import NaiveMCSD


@dataclass(frozen=True)
class Method:
    """What the loop needs to decode with.

    name               how tables and messages call the method
    policy             when to stop drafting
    rule               which drafted tokens are kept
    proposer           how drafts are drawn: a chain by default
    min_drafted        fewest tokens of a round, whatever the policy says
    max_drafted        most tokens of a round
    draft_temperature  of the draft alone; None: the sampling's
    beams              several texts per row, and how they are chosen; None: one text
    Raises InputError for parts that do not go together.
    """

    name: str
    policy: StoppingPolicy
    rule: Rule
    proposer: Proposer = field(default_factory=ChainProposer)
    min_drafted: Annotated[int, AtLeast(0)] = 1
    max_drafted: Annotated[int, Between(0, 4096)] = 20
    draft_temperature: Annotated[float, AtLeast(0)] | None = None
    beams: Beams | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if isinstance(self.rule, LayerRule) != (self.beams is not None):
            raise InputError(f"method {self.name}: a rule for layers of beams and `beams` need each other")
        for part, kinds in ((self.rule, (TextRule, LayerRule)), (self.proposer, (TextProposer, ForestProposer))):
            expected = kinds[0] if self.beams is None else kinds[1]
            if not isinstance(part, expected):
                what = "one text per row" if self.beams is None else "several beams"
                raise InputError(
                    f"method {self.name}: expected a {expected.__name__} for {what}, got {type(part).__name__}"
                )
        policy, rule, proposer = (type(part).__name__ for part in (self.policy, self.rule, self.proposer))
        if self.proposer.scheme not in self.rule.schemes:
            raise InputError(
                f"method {self.name}: {proposer} draws candidates by the scheme {self.proposer.scheme}, but {rule} "
                f"is exact only for {', '.join(self.rule.schemes)}"
            )
        if self.policy.couples_rows and not self.proposer.shows_live_rows:
            raise InputError(
                f"method {self.name}: {policy} decides for the rows of a batch together, which only chains do; got {proposer}"
            )
        if self.policy.chooses_nodes != self.proposer.chooses_nodes:
            raise InputError(
                f"method {self.name}: a policy that chooses nodes (tree_rate) and the proposer best_first need each other, got "
                f"{policy} and {proposer}"
            )
        if self.policy.uses_history and "observe" not in self.proposer.obeys:
            raise InputError(
                f"method {self.name}: {policy} learns from rounds of chains, and {proposer} has none; expected a policy "
                "without memory (fixed, confidence, tail, survival, ...)"
            )
        if self.policy.reads_matches and not self.proposer.shows_matches:
            raise InputError(
                f"method {self.name}: {policy} decides on copied tokens, and {proposer} draws from a draft model; expected "
                "a proposer that copies (suffix, prompt_lookup, best_source)"
            )
        chooses = self.policy.reads_matches and self.policy.needs_draft_model
        if self.proposer.shows_matches and self.proposer.needs_draft_model and not chooses:
            raise InputError(
                f"method {self.name}: {proposer} has two sources, and {policy} does not choose between them; expected "
                "the policy best_source"
            )
        if self.policy.needs_draft_model and not self.proposer.needs_draft_model:
            raise InputError(
                f"method {self.name}: {policy} looks at a draft model's distribution or states, and {proposer} has no "
                "draft model; expected another policy (fixed, heuristic)"
            )

    def bind(self, pair: ModelPair) -> Method:
        """The method for one pair: heads loaded and checked, the policy bounded. Raises InputError.

        Chains are drafted by the proposer of the draft's kind; where that gives blocks, of at most as many tokens.
        """
        own_proposer = kind_of(pair.draft).part("proposer")
        if type(self.proposer) is ChainProposer and own_proposer is not ChainProposer:
            return replace(self, proposer=own_proposer()).bind(pair)
        length = block_length(pair.draft)
        most = self.max_drafted if length is None else min(self.max_drafted, length)
        bounded = Bounded(self.policy, self.min_drafted, most).bind(pair)
        method = replace(self, policy=bounded)
        check_obeyed(bounded, self.proposer.obeys, f"method {self.name}: {type(self.proposer).__name__}")
        if method.drafts and self.proposer.needs_draft_model:
            self._check_reads(pair, length)
            pair.check_has_draft(f"method {self.name}")
        self.proposer.check(pair.vocab_size)
        if self.policy.reads_states and method.num_drafts(len(pair.drafts)) > 1:
            raise InputError(
                f"method {self.name}: {type(self.policy).__name__} reads the states of one draft model, and "
                f"{method.num_drafts(len(pair.drafts))} take part; expected a policy that does not, or one draft"
            )
        if bounded.num_history and not self.proposer.keeps_history:
            raise InputError(
                f"method {self.name}: its head reads {bounded.num_history} earlier positions of the text, and "
                f"{type(self.proposer).__name__} keeps none; expected a method of chains, or a head with "
                "head.earlier=0"
            )
        if method.drafts and any(map(reads_states, pair.drafts)):
            if self.beams is not None:
                raise InputError(
                    f"method {self.name}: its beams need a separate draft, got one that reads the target's states"
                )
            if bounded.num_history:
                raise InputError(
                    f"method {self.name}: its head reads earlier positions, which a draft that reads the target's states "
                    "computes again in every round; expected a head with head.earlier=0"
                )
        if method.drafts and isinstance(self.proposer, ForestProposer) and self.beams is not None:
            self.beams.check_drafts(self.proposer.fewest)
        return method

    def _check_reads(self, pair: ModelPair, length: int | None) -> None:
        """Raises InputError unless the proposer reads the pair's draft as it drafts; length: of its blocks, None: none."""
        blocks, proposer = self.proposer.reads_blocks, type(self.proposer).__name__
        if length is not None and not blocks:
            raise InputError(
                f"method {self.name}: {proposer} reads a draft token by token, and {type(pair.draft).__name__} gives a block "
                "at once; expected a method of chains (speculative, block, confidence, rate, ...)"
            )
        if blocks and pair.drafts and length is None:
            names = " or ".join(kind.name for kind in all_kinds() if kind.forwards == "block")
            raise InputError(
                f"method {self.name}: expected a draft that gives blocks, got {type(pair.draft).__name__}; toolkit.distill "
                f"kind={names} trains one"
            )

    def at(self, sampling: Sampling) -> Method:
        """The method at these settings. Raises InputError for settings that it cannot do.

        At temperature 0 the children of a tree's node are the draft's most probable tokens, whatever the scheme. The walk
        goes on iff the target's most probable token is among them, whatever the rule (MCSD, arXiv:2401.06706, section 3).
        Blocks of which one is drawn (MTJD) are searched for the most probable.
        """
        if self.beams is not None:
            if sampling.repetition_penalty != 1.0:
                raise InputError("repetition_penalty is not available with several beams; leave it out")
            searches = sampling.temperature == 0 and isinstance(self.policy, Bounded) and not self.drafts
            return replace(self, beams=self.beams.greedy()) if searches else self
        if sampling.temperature > 0 or not isinstance(self.proposer, TreeProposer | BestFirstProposer):
            return self
        return replace(self, proposer=self.proposer.greedy(), rule=NaiveMCSD())

    @property
    def lossless(self) -> bool:
        """Whether what comes out follows the target's distribution (with several beams: that of plain beam sampling or
        search)."""
        return self.rule.lossless and (self.beams is None or self.beams.lossless)

    @property
    def couples_rows(self) -> bool:
        """Whether a row's text depends on its neighbours in the batch (its distribution does not)."""
        return self.policy.couples_rows

    @property
    def limit(self) -> int:
        """The most tokens (levels, layers) that the bound policy asks for in a round."""
        assert isinstance(self.policy, Bounded), "bind the method to a pair first"
        return self.policy.limit

    @property
    def drafts(self) -> bool:
        """Whether it ever drafts a token."""
        return self.proposer.max_nodes(self.limit) > 0

    def num_drafts(self, available: int) -> int:
        """How many of a pair's draft models take part."""
        if not self.drafts or not self.proposer.needs_draft_model:
            return 0
        return self.proposer.num_drafts(available)

    @property
    def max_nodes(self) -> int:
        """M of the uniforms' layout: the most nodes a round can propose, and at least one per beam."""
        return max(self.proposer.max_nodes(self.limit), self.beams.num_beams if self.beams is not None else 0)
