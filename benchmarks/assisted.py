"""Trained heads inside transformers' assisted generation: forwards counted by hooks, sampled texts by chi-square.

Settings are chosen on dev prompts and reported on test prompts, all domains, those where a head loses included.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from data_gen.frozen import load_frozen
from toolkit import ModelPair
from toolkit.integrations.transformers import assistant
from toolkit.testing import chi_square

DOMAINS, TOKENS, COST = ("instruct", "math", "code"), 64, 0.2  # COST: a draft forward in target forwards
DEV, TEST, RUNS, PROMPT = 16, 40, 1200, ("code", 3)
GREEDY: dict[str, Any] = {"do_sample": False}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0}
LENGTHS, THRESHOLDS, LEVELS = (2, 3, 4, 6), (0.7, 0.8, 0.9, 0.95), (0.2, 0.25, 0.3, 0.4, 0.5, 0.6)


@dataclass(frozen=True)
class Found:
    """Forwards of both models, and tokens, of some prompts."""

    target: int
    draft: int
    tokens: int

    @property
    def worth(self) -> float:
        """Tokens per target-forward time at COST."""
        return self.tokens / (self.target + COST * self.draft)

    def per_token(self, count: int) -> float:
        """Per 100 tokens."""
        return 100 * count / self.tokens


def assisted() -> str:
    """Trained heads inside `generate(assistant_model=...)` of transformers, the toy pair, one text at a time."""
    pair = ModelPair.toy()
    lines = [
        "| T | domain | assistant | target forwards | draft forwards | tokens | accepted per round | target / 100 tokens |"
        " draft / 100 tokens | tokens per time |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    settings = {domain: chosen(pair, domain) for domain in DOMAINS}
    for temperature, options in ((0, GREEDY), (1, SAMPLED)):
        for domain in DOMAINS:
            for name, setting in settings[domain].items():
                found = measured(pair, setting(), domain, "test", TEST, options)
                accepted = (found.tokens - found.target) / found.target
                lines.append(
                    f"| {temperature} | `{domain}` | {name} | {found.target} | {found.draft} | {found.tokens} | "
                    f"{accepted:.2f} | {found.per_token(found.target):.1f} | {found.per_token(found.draft):.1f} | "
                    f"{found.worth:.2f} |"
                )
    return "\n".join([ABOUT, "", *lines, "", EXACT, "", *exactness(pair)])


ABOUT = f"""{TEST} test prompts per domain, at most {TOKENS} tokens. "transformers": its own defaults (20 tokens, threshold
.4 on the draft's probability, adapted to the rounds so far). Settings are chosen on {DEV} dev prompts at temperature 0, per
domain. The best fixed K is the one with most tokens per time there, a draft forward counted as {COST:g} target forwards. For
each head, the settings with no more target forwards there than the defaults are compared. The one with fewest draft
forwards is taken. If there is none, the one with the fewest target forwards is taken, marked (none). The acceptance head
stops by a threshold h, as SpecDec++ does. The pre-read head stops by the rate rule at a fixed level of lambda c. At
temperature 0 all texts are equal; at temperature 1 they are other samples of one distribution."""
EXACT = f"""Sampled texts: {RUNS} runs of one `{PROMPT[0]}` prompt, three new tokens, against the target's exact distribution
(texts expected fewer than five times are one class). "target alone" is `generate` without an assistant."""


def chosen(pair: ModelPair, domain: str) -> dict[str, Callable[[], Any]]:
    """The assistants that are compared, by what the table calls them; at temperature 0 all write the same texts."""
    default = fresh(pair)
    bar = measured(pair, default(), domain, "dev", DEV, GREEDY)
    families = {
        "fixed K": {f"{k}": stopped(pair, "speculative", f"policy.num_drafted={k}") for k in LENGTHS},
        "acceptance head, h": {f"{h:g}": stopped(pair, "specdec_pp", f"policy.threshold={h}") for h in THRESHOLDS},
        "pre-read head, level": {
            f"{level:g}": stopped(pair, "rate", "policy.rate=1", f"policy.cost_ratio={level}") for level in LEVELS
        },
    }
    found: dict[str, Callable[[], Any]] = {"transformers": default}
    for family, settings in families.items():
        seen = {name: measured(pair, make(), domain, "dev", DEV, GREEDY) for name, make in settings.items()}
        allowed = [name for name, one in seen.items() if one.target <= bar.target]
        if family == "fixed K":
            best, mark = max(seen, key=lambda name: seen[name].worth), ""
        elif allowed:
            best, mark = min(allowed, key=lambda name: seen[name].draft), ""
        else:
            best, mark = min(seen, key=lambda name: seen[name].target), " (none)"
        found[f"{family} {best}{mark}"] = settings[best]
    return found


def fresh(pair: ModelPair) -> Callable[[], Any]:
    """The draft as transformers takes it, its settings as they were: it adapts them while it runs."""
    before = copy.deepcopy(pair.draft.generation_config)

    def make() -> Any:
        pair.draft.generation_config = copy.deepcopy(before)
        return pair.draft

    return make


def stopped(pair: ModelPair, method: str, *overrides: str) -> Callable[[], Any]:
    """The draft stopped by a method of this package."""
    return lambda: assistant(pair.draft, method, head=pair.head, overrides=list(overrides))


def measured(pair: ModelPair, helper: Any, domain: str, split: str, count: int, options: dict[str, Any]) -> Found:
    """Forwards and tokens of the first prompts of a split."""
    tokens = 0
    with counted(pair) as calls:
        for seed, example in enumerate(load_frozen(domain, split)[:count]):
            ids = pair.encode(example.prompt)
            torch.manual_seed(seed)
            tokens += len(generated(pair, ids, helper, TOKENS, options))
    return Found(calls["target"], calls["draft"], tokens)


def generated(pair: ModelPair, ids: list[int], helper: Any, count: int, options: dict[str, Any]) -> list[int]:
    """New tokens of one text."""
    out = pair.target.generate(
        torch.tensor([ids]), assistant_model=helper, max_new_tokens=count, pad_token_id=0, **options
    )
    return list(out[0, len(ids) :].tolist())


@contextmanager
def counted(pair: ModelPair) -> Iterator[Counter[str]]:
    """Forwards of both models, by role, while it lasts."""
    calls: Counter[str] = Counter()
    hooks = [
        model.register_forward_pre_hook(lambda *_, role=role: calls.update([role]))
        for role, model in (("target", pair.target), ("draft", pair.draft))
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


# -- sampled texts ------------------------------------------------------------------------------------------------------


def exactness(pair: ModelPair) -> list[str]:
    """p-values of sampled texts, one line per assistant."""
    domain, number = PROMPT
    ids = pair.encode(load_frozen(domain, "test")[number].prompt)
    classes = likely(pair, ids, 5 / RUNS)
    helpers: dict[str, Callable[[], Any]] = {
        "target alone": lambda: None,
        "transformers": fresh(pair),
        "acceptance head, h 0.7": stopped(pair, "specdec_pp", "policy.threshold=.7", "min_drafted=1"),
        "pre-read head, level 0.3": stopped(pair, "rate", "policy.rate=1", "policy.cost_ratio=.3"),
    }
    lines = ["| assistant | classes | p | draft forwards per run |", "|---|---:|---:|---:|"]
    for name, make in helpers.items():
        helper = make()
        with counted(pair) as calls:
            torch.manual_seed(0)
            seen = Counter(tuple(generated(pair, ids, helper, 3, SAMPLED)) for _ in range(RUNS))
        known = [seen[text] for text in classes]
        expected = [prob * RUNS for prob in classes.values()]
        counts = torch.tensor([*known, RUNS - sum(known)]).double()
        p = chi_square(counts, torch.tensor([*expected, RUNS - sum(expected)]).double())
        lines.append(f"| {name} | {len(counts)} | {p:.3f} | {calls['draft'] / RUNS:.2f} |")
    return lines


@torch.inference_mode()
def likely(pair: ModelPair, ids: list[int], least: float) -> dict[tuple[int, ...], float]:
    """The target's texts of three tokens (fewer if they end) of at least this probability, with it."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        open_ = [text for text in found if not set(text) & set(pair.end_ids or ())]
        logits = pair.target(torch.tensor([[*ids, *text] for text in open_])).logits[:, -1].double()
        for text, probs in zip(open_, logits.softmax(-1), strict=True):
            before = found.pop(text)
            found |= {
                (*text, token): before * float(probs[token])
                for token in (probs * before >= least).nonzero()[:, 0].tolist()
            }
    return found
