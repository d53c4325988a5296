"""One pair's settings on one recording of one prompt set, ready to be served by the simulator.

The target's responses are decoded once and kept, and so is one trace per draft temperature. Their folders are
named after everything that they depend on. So a second call with other costs or loads only replays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from analysis.loads.simulator import Load, Served, serve
from analysis.replay.policies import replay_rounds
from analysis.tables.grid import PLAIN, YARDSTICKS, Setting
from analysis.tables.replayed_settings import Recording
from analysis.tables.workbench import Workbench, reads_head
from toolkit.acceptance.folder import head_hash
from toolkit.decoding import ChainProposer, Method
from toolkit.errors import InputError
from toolkit.io import write_atomic
from toolkit.load_cost import LoadCost, RuleSeconds
from toolkit.stopping import BatchRate, Bounded, Fixed, StoppingPolicy
from toolkit.trace import Trace
from toolkit.verification.rules.rejection import Rejection

HEADLESS = "needs a trained head"
GAINS = 0.5, 2.0  # bounds of a gain: with few texts, values beyond them are chance
TRUSTED = 100.0  # tries that a recorded acceptance rate counts for; an assumed one counts for 20 (`BatchRate.memory`)
MANY = 16  # rows in the simulation of `gain_many` and `kept_many`


class RecordedPair:
    """Settings of one pair that chains can be replayed for, and what serving them costs.

    settings  those of `wanted` that can be simulated: chains judged token by token, and plain decoding
    left_out  by method, why the others cannot
    known_by  the recording that batch rules take their parameters from (`told`); None: this one
    """

    def __init__(
        self,
        bench: Workbench,
        wanted: Sequence[Setting],
        folder: Path,
        max_drafted: int,
        hidden: bool = True,
        known_by: RecordedPair | None = None,
    ):
        self.bench, self.left_out, self.known_by = bench, dict[str, str](), known_by or self
        self._told: dict[tuple[str, str, int], tuple[LoadCost, dict[str, Any]]] = {}
        self.settings = [setting for setting in wanted if self._takes(setting, max_drafted)]
        if not any(setting.method != PLAIN for setting in self.settings):
            raise InputError(f"no setting can be simulated: {'; '.join(f'{k}: {v}' for k, v in self.left_out.items())}")
        plain = Setting(PLAIN)
        path = folder / "settings" / f"{bench.prepare(plain)}.parquet"
        self.responses = self._responses(plain, path)
        replayed = [setting for setting in self.settings if setting.method != PLAIN]
        self.recording = Recording(bench, self.responses, path, replayed, max_drafted, hidden)
        self.prompt_tokens = [len(self.responses.prompt_ids.iloc[number]) for number in self.recording.usable]

    @property
    def num_texts(self) -> int:
        """Texts that can be served."""
        return len(self.prompt_tokens)

    @cached_property
    def usual(self) -> dict[str, Any]:
        """What `BatchRate` starts from: how long texts are, and how often drafted tokens are accepted.

        context, longest  tokens before a forward: mean and 95th percentile over all positions of the texts
        prompt, response  tokens, mean over the texts
        made   tokens per round of every fixed length, up to the recording's
        first  acceptance rate of a round's first token;  later  of a token behind accepted ones: means over these rounds
        """
        texts = self.responses.token_ids.iloc[self.recording.usable]
        prompt, response = float(np.mean(self.prompt_tokens)), float(np.mean([len(ids) for ids in texts]))
        trace = self.recording.trace_for(self._traced(Setting(PLAIN)))
        assert trace is not None
        before = [np.arange(end - first) for first, end in pairwise(trace.text_first.tolist())]
        contexts = np.concatenate([one + tokens for one, tokens in zip(before, self.prompt_tokens, strict=True)])
        made, first, later = fixed_lengths(trace)
        return {
            "context": round(float(contexts.mean())),
            "longest": round(float(np.quantile(contexts, 0.95))),
            "prompt": max(round(prompt), 1),
            "response": max(round(response), 1),
            "first": first,
            "later": later,
            "made": made,
        }

    def told(self, setting: Setting, costs: LoadCost, drops: str = "half") -> dict[str, Any]:
        """Parameters of a batch rule that come from this recording: `usual`, its entry of `costs` (`own`), and its gains.

        drops  `Load.drops`: the rule gets `longest` only where a batch costs as much as its longest row

        Parameters that the setting names stay as they are. Other settings, and rules with a cost table of their own, get none.
        `memory` is `TRUSTED`. The gains are from simulated tokens/s of these texts, with one row (`gain`, `kept`) and with 16
        (`gain_many`, `kept_many`):

        kept  speed of the fixed lengths that `BatchRate` expects most of, over what it expects before it has seen a round
        gain  speed of the rule that asks its estimator in every round, over `kept` times what it expects of the best length
        """
        rule = self.bench.methods[setting.name].policy
        if not isinstance(rule, BatchRate) or rule.costs is not None:
            return {}
        key_of = setting.name, drops, id(costs)
        if key_of not in self._told:
            own = self.rule_name(setting)
            known = {**self.usual, "memory": TRUSTED, "own": own if own in costs.rules else None}
            left = {name.removeprefix("policy.") for name in setting.parameters}
            left |= {"longest"} if drops == "always" else set()
            left |= {"made"} if left & {"first", "later"} else set()  # the two rates that it goes with
            known = {name: value for name, value in known.items() if name not in left}
            loads = {("gain", "kept"): Load(1, drops=drops), ("gain_many", "kept_many"): Load(MANY, drops=drops)}
            for name, load in loads.items():
                found = self._gains(setting, known, costs, load)
                known |= {key: value for key, value in zip(name, found, strict=True) if key not in left}
            self._told[key_of] = costs, known  # the table is kept, so that no other one gets its id
        return self._told[key_of][1]

    def _gains(self, setting: Setting, known: Mapping[str, Any], costs: LoadCost, load: Load) -> tuple[float, float]:
        """What asking the estimator gains, and what is kept of fixed lengths' tokens: see `told`."""
        bounded = self.recording.policy_for(setting)
        assert isinstance(bounded, Bounded) and isinstance(bounded.policy, BatchRate)
        asking = replace(bounded.policy.asking(), table=costs, rests=False, **known)
        settled, asked = asking.expected(load.slots)
        trace, texts = self.recording.trace_for(self._traced(setting)), range(self.num_texts)
        assert trace is not None

        def served(policy: StoppingPolicy, rule: RuleSeconds | None) -> float:
            # prompts of one token: the rule gets the seconds of reading prompts as a parameter of its own
            return serve(trace, [1] * self.num_texts, policy, costs, load, texts, rule).tokens_per_second

        rule, plain = costs.rules.get(self.rule_name(setting)), served(self._policy(Setting(PLAIN), costs), None)
        unasked = rule and replace(rule, step=(0.0,) * len(rule.step))
        best = settled.index(max(settled))
        near = range(max(best - 1, 0), min(best + 2, len(settled)))  # the mean over several lengths is more certain
        fixed = {at: served(replace(bounded, policy=Fixed(at + 1)), unasked) / plain for at in near}
        kept = float(np.mean([speed / settled[at] for at, speed in fixed.items()]))
        gain = served(replace(bounded, policy=asking), rule) / plain / max(asked) / kept
        return round(float(np.clip(gain, *GAINS)), 3), round(float(np.clip(kept, *GAINS)), 3)

    def head_of(self, method: str) -> str | None:
        """Folder of the head that a method reads; None: it reads none."""
        setting = next(setting for setting in self.settings if setting.method == method)
        return setting.head or (self.bench.pair.head if reads_head(setting) else None)

    def serve(self, setting: Setting, costs: LoadCost, load: Load, requests: Sequence[int] | None = None) -> Served:
        """Serve these texts (None: each once) with a setting; batch rules without costs of their own get `costs` and `told`."""
        chosen = range(self.num_texts) if requests is None else requests
        trace = self.recording.trace_for(self._traced(setting))
        assert trace is not None
        rule = costs.rules.get(self.rule_name(setting))
        return serve(trace, self.prompt_tokens, self._policy(setting, costs, load.drops), costs, load, chosen, rule)

    @property
    def methods(self) -> dict[str, Method]:
        """The methods whose policies take seconds of their own, by `rule_name`."""
        found: dict[str, Method] = {}
        for setting in self.settings:
            if setting.method != PLAIN:
                found.setdefault(self.rule_name(setting), self.bench.methods[setting.name])
        return found

    def rule_name(self, setting: Setting) -> str:
        """What a policy's own seconds depend on: its method, the content of its head, and when it reads this head."""
        head = (setting.head or self.bench.pair.head) if reads_head(setting) else None
        parts = [setting.method, head and head_hash(head)[:16], setting.parameters.get("policy.lag")]
        return "-".join(str(part) for part in parts if part is not None)

    def _traced(self, setting: Setting) -> Setting:
        """The setting whose trace is replayed. Plain decoding can take any, and gets that of the first setting that drafts."""
        return setting if setting.method != PLAIN else next(s for s in self.settings if s.method != PLAIN)

    def _policy(self, setting: Setting, costs: LoadCost, drops: str = "half") -> StoppingPolicy:
        if setting.method == PLAIN:
            return self.bench.methods[PLAIN].bind(self.bench.pair).policy
        policy = self.recording.policy_for(setting)
        told = self.known_by.told(setting, costs, drops)
        if told and isinstance(policy, Bounded) and isinstance(policy.policy, BatchRate):
            return replace(policy, policy=replace(policy.policy, table=costs, known={}, **told))
        return policy

    def _takes(self, setting: Setting, max_drafted: int) -> bool:
        if setting.method in YARDSTICKS:
            self.left_out[setting.method] = "a bound, not a method"
            return False
        if self.bench.lacks_head(setting):
            self.left_out[setting.method] = HEADLESS
            return False
        self.bench.prepare(setting)
        method = self.bench.methods[setting.name]
        if setting.method == PLAIN:
            return True
        if type(method.proposer) is not ChainProposer or type(method.rule) is not Rejection:
            self.left_out[setting.method] = "only chains judged token by token are simulated"
            return False
        limit = method.bind(self.bench.pair).policy.limit
        if limit is None or limit > max_drafted:
            raise InputError(f"{setting.name} may draft {limit} tokens: expected at most max_drafted={max_drafted}")
        return True

    def _responses(self, plain: Setting, path: Path) -> pd.DataFrame:
        """Plain decoding's rows, from their file if it is there."""
        from tqdm.auto import tqdm

        if path.exists():
            return pd.read_parquet(path)
        with tqdm(total=len(self.bench.prompts), desc="responses", unit="prompt") as bar:
            rows = self.bench.decode(plain, lambda generation: bar.update() and None)
        if rows.error.notna().all():
            raise InputError(f"every prompt failed, first: {rows.error.iloc[0]}")
        write_atomic(path, lambda temporary: rows.to_parquet(temporary))
        return rows


def per_request(served: Served) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Tokens and seconds of every request [Q, 2]; a round's seconds are shared by the requests in it."""
    return np.stack([served.tokens.astype(np.float64), served.seconds], axis=1)


def fixed_lengths(trace: Trace) -> tuple[list[float], float, float]:
    """Tokens per round of fixed draft lengths 1 .. max_drafted on a recording; acceptance rates of first and later tokens.

    Both rates are over the rounds of all lengths. As in decoding, a round starts where the one before has ended.
    """
    made, counts = list[float](), np.zeros(4)  # first tokens accepted, tried; later ones
    for length in range(1, trace.max_drafted + 1):
        rounds = [torch.stack(columns) for columns in replay_rounds(trace, Fixed(length))]
        _, _, drafted, _, accepted, produced = torch.cat(rounds, dim=1).numpy()
        made.append(round(float(produced.mean()), 3))
        later = np.maximum(accepted - 1, 0).sum(), np.maximum(np.minimum(accepted + 1, drafted) - 1, 0).sum()
        counts += [(accepted > 0).sum(), (drafted > 0).sum(), *later]
    return made, _share(counts[0], counts[1]), _share(counts[2], counts[3])


def _share(count: float, of: float) -> float:
    """A share, strictly between 0 and 1."""
    return float(np.clip(round((count + 1) / (of + 2), 3), 0.001, 0.999))
