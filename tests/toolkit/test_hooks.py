"""Every hook of a policy under every proposer: what it decides is done, or the method refuses the policy."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
import torch

from analysis.loads.simulator import Load, serve
from tests.toolkit.test_best_source import tables, whole_outputs
from tests.toolkit.trace.plain import small_trace
from toolkit import config
from toolkit.costs.load import LoadCost
from toolkit.decoding import BlockProposer, Method, PromptLookupProposer, Proposer, Sampling, decode
from toolkit.decoding import proposers as package
from toolkit.errors import InputError
from toolkit.integrations.transformers import StoppedDraft
from toolkit.stopping import Bounded, Confidence, Fixed, StoppingPolicy
from toolkit.stopping.base import HOOKS, Thresholded, check_obeyed
from toolkit.testing import check_anticipation, llama_pair, table_pair
from toolkit.testing.batches import coupled_error
from toolkit.testing.blocks import block_pair
from toolkit.trace.copies import Copies
from toolkit.trace.replay import by_starts, replay, sweep_levels
from toolkit.verification import get
from toolkit.verification.chain_enumeration import PrefixTables

ROOT = Path(__file__).parents[2]
END = 2
PROMPTS = [[0, 1, 0, 1, 1, 0, 1], [1, 1, 0, 1, 1]]
SAMPLING = Sampling(max_new_tokens=24, seed=1)


@pytest.fixture(scope="module")
def trace():
    return small_trace()


def concrete_proposers():
    """The proposers of the package, whatever module they are in."""
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        for kind in vars(import_module(module.name)).values():
            own = isinstance(kind, type) and issubclass(kind, Proposer) and kind.__module__ == module.name
            if own and not inspect.isabstract(kind):
                yield kind


PROPOSERS = sorted(concrete_proposers(), key=lambda kind: kind.__name__)


@dataclass(frozen=True)
class Free(StoppingPolicy):
    """Draft whatever there is room for. Of two sources choose the draft model, or the copies if it plans them."""

    needs_draft_model: bool = True
    reads_matches: bool = False
    uses_history: bool = False
    plans_copies: bool = False
    chooses_nodes: bool = False

    def init(self, num_rows, device):
        return {"rounds": torch.zeros(num_rows, device=device)}

    def begin(self, live, state):
        copies = self.plans_copies and self.needs_draft_model
        return state, live & (state["rounds"] == 0) & (not copies)

    def judge(self, children):
        return torch.full_like(children.probs, 0.5)

    def choose(self, nodes, state):
        return state, torch.full_like(nodes.depths[:, 0], 9), nodes.readable


class Begins(Free):
    def begin(self, live, state):
        return state, torch.zeros_like(live)


class Reads(Free):
    reads = True

    def read(self, step, state):
        return state, torch.full_like(state["rounds"], step.depth == 1, dtype=torch.bool)


class Steps(Free):
    def step(self, step, state):
        return state, torch.zeros_like(step.tokens, dtype=torch.bool)


class Sends(Free):
    def sent(self, num_drafted, state):
        return num_drafted.clamp(max=1)


class Plans(Free):
    def plan(self, match, available, live, state):
        return state, available.clamp(max=1)


class Chooses(Free):
    def choose(self, nodes, state):
        return state, torch.ones_like(nodes.depths[:, 0]), nodes.readable


class Observes(Free):
    def observe(self, proposal, verdict, state):
        return {"rounds": state["rounds"] + 1}


PROBES = dict(zip(HOOKS, (Begins, Reads, Steps, Sends, Plans, Chooses, Observes), strict=True))


def method_of(kind, policy_class, hook=None):
    """A method with this proposer, of those that are shipped if there is one, and the policy; and a pair for it."""
    shipped = [config.method(name) for name in config.choices("method")]
    method = next((method for method in shipped if type(method.proposer) is kind), None)
    method = method or Method("probe", Fixed(1), get("rejection"), kind())
    proposer = method.proposer
    chooses = proposer.chooses_nodes or hook == "choose"
    policy = policy_class(
        proposer.needs_draft_model, proposer.shows_matches, hook == "observe", hook == "plan", chooses
    )
    pair = block_pair(3, vocab_size=3) if kind is BlockProposer else table_pair()
    return replace(method, policy=policy, min_drafted=0, max_drafted=4), pair


def rounds_of(kind, policy_class, hook):
    method, pair = method_of(kind, policy_class, hook)
    generations = decode(pair, PROMPTS * 4, method, SAMPLING, batch_size=3)
    return [generation.rounds for generation in generations]


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", PROPOSERS)
def test_every_hook_is_obeyed_or_refused(kind, hook):
    if hook not in kind.obeys:
        with pytest.raises(InputError) as error:
            rounds_of(kind, PROBES[hook], hook)
        message = str(error.value)
        assert PROBES[hook].__name__ in message and kind.__name__ in message and "\n" not in message
        return

    def drafts(round_):
        return round_.num_draft_calls if kind.needs_draft_model else round_.num_drafted

    free, changed = (rounds_of(kind, policy, hook) for policy in (Free, PROBES[hook]))
    longest, shortened = (max(round_.num_drafted for rounds in side for round_ in rounds) for side in (free, changed))
    assert longest > 1, "the probe shows nothing: no round could be shorter"
    if hook == "begin":
        assert not any(drafts(round_) for rounds in changed for round_ in rounds)
    elif hook == "observe":
        assert any(drafts(round_) for rounds in free for round_ in rounds[1:])
        assert any(drafts(rounds[0]) for rounds in changed)
        assert not any(drafts(round_) for rounds in changed for round_ in rounds[1:])
    else:
        assert 0 < shortened < longest


def test_the_page_has_every_proposers_hooks():
    lines = [
        line.split("|")[1:3] for line in (ROOT / "docs/extending.md").read_text().split("\n") if "Proposer` |" in line
    ]
    stated = {name: hooks.split() for names, hooks in lines for name in names.split()}
    assert stated == {f"`{kind.__name__}`": [f"`{hook}`" for hook in kind.obeys] for kind in PROPOSERS}


def test_a_proposer_says_what_it_obeys():
    class Silent(Proposer):
        def max_nodes(self, limit):
            return limit

    with pytest.raises(TypeError, match="obeys"):
        Silent()


# -- policies that hold others ----------------------------------------------------------------------------------------


class AtMostOne(Bounded):
    """A wrapper with a hook of its own."""

    def sent(self, num_drafted, state):
        return super().sent(num_drafted, state).clamp(max=1)


class BoundedAgain(Bounded):
    """A wrapper that leaves all hooks to `Bounded`."""


@dataclass(frozen=True)
class Handing(StoppingPolicy):
    """A wrapper that is not derived from `Bounded`."""

    policy: StoppingPolicy
    uses_history: bool = False
    passes_on = True

    def begin(self, live, state):
        return self.policy.begin(live, state)

    def step(self, step, state):
        return self.policy.step(step, state)

    def sent(self, num_drafted, state):
        return self.policy.sent(num_drafted, state)


@dataclass(frozen=True)
class Opaque(Handing):
    """The same, in the dark about whose hooks they are."""

    def sent(self, num_drafted, state):
        return self.policy.sent(num_drafted, state)


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (Bounded(Sends(), 0, 3), "Sends"),
        (Handing(BoundedAgain(Sends(), 0, 3)), "Sends"),
        (AtMostOne(Fixed(2), 0, 3), "AtMostOne"),
        (Opaque(Fixed(2)), "Opaque"),
        (Bounded(Fixed(2), 0, 3), None),
        (BoundedAgain(Bounded(Fixed(2)), 0, 3), None),
        (Handing(Fixed(2)), None),
    ],
)
def test_the_hooks_of_policies_inside_of_others_count(policy, name):
    method = replace(config.method("mcsd"), policy=policy)
    if name is None:
        method.bind(table_pair())
    else:
        with pytest.raises(InputError, match=f"method mcsd: TreeProposer does not obey `sent`, which {name} overrides"):
            method.bind(table_pair())


def test_a_wrapper_keeps_its_own_hooks_when_it_is_bound():
    method = replace(config.method("speculative"), policy=AtMostOne(Fixed(4), 0, 4))
    (text,) = decode(table_pair(), PROMPTS[:1], method, SAMPLING)
    assert max(round_.num_drafted for round_ in text.rounds) == 1


@pytest.mark.parametrize("name", config.choices("method"))
def test_shipped_policies_are_obeyed(name):
    method = config.method(name)
    check_obeyed(method.policy, method.proposer.obeys, name)


# -- policies that are handed to others than a method -------------------------------------------------------------------


@dataclass(frozen=True)
class SendsByScore(Thresholded):
    level = 0.2
    sent = Sends.sent

    def score(self, step, state):
        return state, step.margin


def test_replays_and_integrations_refuse_what_they_do_not_obey(trace):
    copies = Copies(PromptLookupProposer(), [([0, 1, 0, 1], [0, 1, 1, 0, 1, END])], 3, 24, (END,))
    planning = Bounded(Plans(plans_copies=True), 0, 3)
    learning = Bounded(Plans(plans_copies=True, uses_history=True), 0, 3)
    refused = [
        (lambda: replay(trace, planning), "plan", "Plans"),
        (lambda: replay(trace, learning), "plan", "Plans"),
        (lambda: replay(trace, Bounded(Sends(), 0, 3), copies), "sent", "Sends"),
        (lambda: sweep_levels(trace, SendsByScore(), [0.1]), "sent", "SendsByScore"),
        (lambda: StoppedDraft(llama_pair().draft, Sends()), "sent", "Sends"),
        (lambda: StoppedDraft(llama_pair().draft, Plans(plans_copies=True)), "plan", "Plans"),
        (lambda: coupled_error(planning, get("rejection"), [PrefixTables(2, 2, 0)], {}), "plan", "Plans"),
        (
            lambda: serve(trace, [4] * trace.num_texts, planning, LoadCost.ratio(0.2, 0.0), Load(1), [0]),
            "plan",
            "Plans",
        ),
    ]
    for call, hook, name in refused:
        with pytest.raises(InputError, match=f"does not obey `{hook}`, which {name} overrides"):
            call()


def test_a_sweep_of_levels_begins_no_round_that_its_policy_does_not_begin(trace):
    class Declines(Confidence):
        def begin(self, live, state):
            return state, live & (torch.arange(len(live)) % 2 == 0)

    policy = Declines(0.3)
    (swept,) = sweep_levels(trace, policy, [0.3], max_drafted=2)
    assert swept.counts["num_drafted"].sum() == by_starts(trace, Bounded(policy, 1, 2)).counts["num_drafted"].sum()


# -- copies of which fewer are sent -------------------------------------------------------------------------------------


class SendsByRank(Free):
    """Send the whole copy of the row that may send most, and one token of the others."""

    couples_rows = True

    def sent(self, num_drafted, state):
        longest = torch.arange(len(num_drafted)) == num_drafted.argmax()
        return torch.where(longest, num_drafted, num_drafted.clamp(max=1))


COPYING = {"needs_draft_model": False, "reads_matches": True}


@pytest.mark.parametrize("policy", [Sends(**COPYING), SendsByRank(**COPYING)])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_whole_outputs_of_cut_copies_are_the_targets_by_enumeration(policy, rule):
    pair = tables()
    method = Method("copies", policy, get(rule), PromptLookupProposer(), min_drafted=0, max_drafted=3)
    outputs, sources = whole_outputs(pair, method, [0, 1, 0, 1], 5, Sampling())
    expected = pair.target.sequence_distribution([0, 1, 0, 1], 5, END)
    assert sum(abs(outputs[output] - expected.get(output, 0.0)) for output in {*outputs, *expected}) / 2 < 1e-12
    assert sources["copy"] and not sources["draft"]


@pytest.mark.parametrize("policy", [Sends(**COPYING), SendsByRank(**COPYING)])
def test_cut_copies_do_not_depend_on_what_is_not_sent(policy):
    assert check_anticipation(policy, PromptLookupProposer()) < 1e-12


def test_cut_copies_are_replayed_as_they_were_decoded():
    policy = Sends(**COPYING)
    method = Method("copies", policy, get("rejection"), PromptLookupProposer(), 0, 4).bind(table_pair())
    live = decode(table_pair(), PROMPTS, method, SAMPLING)
    texts = [(generation.prompt_ids, generation.token_ids) for generation in live]
    replayed = replay(Copies(method.proposer, texts, method.limit, SAMPLING.max_new_tokens, (END,)), method.policy)
    for row, generation in enumerate(live):
        assert {name: int(values[row]) for name, values in replayed.counts.items()} == vars(generation.counts)
    assert replayed.lengths[1] and not replayed.lengths[2:].any()
