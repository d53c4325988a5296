"""Any stopping policy of this package, trained heads included, inside `model.generate(assistant_model=...)` of transformers.

    from toolkit.integrations.transformers import assistant
    target.generate(ids, assistant_model=assistant(draft, "specdec_pp", head=FOLDER), do_sample=True, ...)

transformers hands its assistant neither stopping criteria nor hidden states. So the draft is wrapped. The wrapper's
`generate` is the draft's own, called with one more criterion. It sees every drafted token with its state and logits
(hooks on the draft's forward) and asks the policy whether to pay another forward pass. Which token is drawn, what is kept of
the cache and which tokens are accepted is left to transformers. So outputs follow the target's distribution as far as
theirs do: a policy sees only the drafted prefix.

Written for transformers 5.23: texts one at a time, target and draft with one tokenizer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from toolkit import config
from toolkit.config.values import checked
from toolkit.decoding import Method
from toolkit.decoding.proposers import ChainProposer
from toolkit.engine.facts import unwrapped
from toolkit.engine.hidden_states import watched_states
from toolkit.errors import NOT_NUMBERS, InputError
from toolkit.integrations.custom_generate import custom_generate as custom_generate
from toolkit.models.pair import ModelPair
from toolkit.stopping import Bounded, StoppingPolicy
from toolkit.stopping.base import check_obeyed, in_context
from toolkit.types import DraftStep, RoundCounts


@checked
def assistant(
    draft: Any,
    method: str | Method = "specdec_pp",
    *,
    head: str | Path | None = None,
    overrides: Sequence[str] = (),
) -> StoppedDraft:
    """What to pass as `assistant_model`: the draft, stopped as a method of `conf/method/` stops it.

    method     a name, or a Method built by hand (then `head` and `overrides` have no meaning); its rule is not used:
               transformers verifies
    head       folder of a head, for methods that need one
    overrides  relative to the method: ["policy.threshold=.3", "max_drafted=12"]
    Raises InputError for methods that do not draft chains and for heads of other drafts.
    """
    built = config.method(method, overrides, None if head is None else str(head)) if isinstance(method, str) else method
    if type(built.proposer) is not ChainProposer:
        raise InputError(f"transformers verifies chains: expected a method that drafts them, got {built.name}")
    return StoppedDraft(draft, built.policy, built.min_drafted, built.max_drafted)


class StoppedDraft:
    """A causal language model of transformers with a stopping policy in its `generate`; everything else is the model's.

    draft   the model; policy: any of `toolkit.stopping` that decides after a token was drawn (`lag=0` does not)
    min_drafted, max_drafted  bounds of a round, inclusive. In transformers a round has at least one token: a policy
            that wants a round without a draft gets a round of one

    It decodes one text at a time, as transformers does; for several threads make several wrappers.
    """

    def __init__(self, draft: Any, policy: StoppingPolicy, min_drafted: int = 1, max_drafted: int = 20):
        if policy.reads:
            raise InputError(
                "transformers draws every token it has paid a forward pass for: expected a policy that decides after a draw "
                "(policy.lag=1), got one that decides before it"
            )
        check_obeyed(policy, ("begin", "step", "observe"), "transformers' assisted generation")
        if max_drafted < 1:
            raise InputError(f"max_drafted: expected at least 1, got {max_drafted}")
        if not hasattr(draft, "generation_config"):
            raise InputError(
                f"expected a causal language model of transformers as the draft, got {type(draft).__name__}"
            )
        self.draft = draft
        self.policy = Bounded(policy, min_drafted, max_drafted).bind(ModelPair(target=draft, draft=draft))
        if self.policy.num_history:
            raise InputError(
                "transformers keeps no earlier states of the draft: expected a head that reads the newest position alone "
                f"(head.earlier=0), got one with {self.policy.num_history}"
            )
        self.generation_config = copy.deepcopy(draft.generation_config)
        self.generation_config.num_assistant_tokens = self.policy.limit
        self.generation_config.num_assistant_tokens_schedule = "constant"
        self.generation_config.assistant_confidence_threshold = 0.0
        self._state = self.policy.init(1, self.draft.device)
        self._text, self._drafted = 0, 0  # tokens of the text before the last round, and of the round

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["draft"], name)

    def generate(self, *args: Any, stopping_criteria: Any = None, **kwargs: Any) -> Any:
        """The draft's own `generate`; within assisted generation the policy may end it earlier."""
        settings = kwargs.get("generation_config")
        if settings is None or not getattr(settings, "is_assistant", False):
            return self.draft.generate(*args, stopping_criteria=stopping_criteria, **kwargs)
        length = kwargs["input_ids"].shape[1]
        device = self.draft.device  # tell the policy how the last round went, or begin a text; then begin a round
        if kwargs.get("past_key_values") is None:
            self._state = self.policy.init(1, device)
        else:  # every round adds what it accepted and one token more
            drafted, accepted = self._drafted, min(max(length - self._text - 1, 0), self._drafted)
            outcome = RoundCounts(*(torch.tensor([n], device=device) for n in (drafted, drafted, accepted)))
            self._state = self.policy.observe(outcome, outcome, self._state)
        live = torch.ones(1, dtype=torch.bool, device=device)
        self._state = in_context(self.policy, self._state, torch.tensor([length], device=device))
        self._state, self._wanted = self.policy.begin(live, self._state)
        with _watched(self.draft) as seen:
            criterion = _Stop(self, seen, length, bool(settings.do_sample))
            every = StoppingCriteriaList([*(stopping_criteria or ()), criterion])
            output = self.draft.generate(*args, stopping_criteria=every, **kwargs)
        self._text, self._drafted = length, output.sequences.shape[1] - length
        return output

    def decide(self, step: DraftStep) -> Tensor:
        """Whether to end the round after this token [1]."""
        self._state, go_on = self.policy.step(step, self._state)
        return ~(go_on & self._wanted)


class _Stop(StoppingCriteria):
    """Ends a draft when its policy says so."""

    def __init__(self, owner: StoppedDraft, seen: dict[str, Tensor], length: int, samples: bool):
        self.owner, self.seen, self.length, self.samples = owner, seen, length, samples

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        tokens = input_ids[:, -1]
        probs = scores[-1].softmax(-1)
        if not self.samples:  # at temperature 0 the distribution a token is drawn from is one-hot
            probs = torch.nn.functional.one_hot(tokens, probs.shape[-1]).to(probs.dtype)
        live = torch.ones_like(tokens, dtype=torch.bool)
        depth = input_ids.shape[1] - self.length
        return self.owner.decide(DraftStep(depth, self.seen["logits"], probs, self.seen["hidden"], tokens, live))


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, Tensor]]:
    """The last position's unwarped logits [B, V] and final hidden state [B, D] of the newest forward pass, while it lasts."""
    model, seen = unwrapped(model), dict[str, Tensor]()

    with watched_states(model) as states:

        def keep(module: Any, args: Any, output: Any) -> None:
            seen["logits"], seen["hidden"] = output.logits[:, -1], states.pop()[:, -1]
            if not bool(seen["logits"].logsumexp(-1).isfinite().all()):
                raise InputError(f"the draft ({type(model).__name__}): {NOT_NUMBERS}")

        with model.register_forward_hook(keep):
            yield seen
