"""One pair's settings on one recording of one prompt set, ready to be served by the simulator.

The target's responses are decoded once and kept, and so is one trace per draft temperature. Their folders are
named after everything that they depend on. So a second call with other costs or loads only replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.loads.simulator import Load, Served, serve
from analysis.tables.grid import PLAIN, YARDSTICKS, Setting
from analysis.tables.replayed_settings import Recording
from analysis.tables.workbench import Workbench, reads_head
from toolkit.acceptance.folder import head_hash
from toolkit.decoding import ChainProposer, Method
from toolkit.errors import InputError
from toolkit.io import write_atomic
from toolkit.load_cost import LoadCost
from toolkit.stopping import BatchRate, Bounded, StoppingPolicy
from toolkit.verification.rules.rejection import Rejection

HEADLESS = "needs a trained head"
TRUSTED = 100.0  # tokens that a recorded acceptance rate counts for; an assumed one counts for 20 (`BatchRate.memory`)


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
    def acceptance(self) -> float:
        """Share of the texts' positions where a drafted token is accepted, strictly between 0 and 1."""
        trace = self.recording.trace_for(self._traced(Setting(PLAIN)))
        assert trace is not None
        accepted = int(trace.accepted.sum())
        return round((accepted + 1) / (trace.num_positions + 2), 3)

    def told(self, setting: Setting) -> dict[str, Any]:
        """Parameters of a batch rule that come from this recording: `acceptance`, which counts for `TRUSTED` tokens.

        Parameters that the setting names stay as they are. Other settings, and rules with a cost table of their own, get none.
        """
        rule = self.bench.methods[setting.name].policy
        if not isinstance(rule, BatchRate) or rule.costs is not None:
            return {}
        known = {"acceptance": self.acceptance, "memory": TRUSTED}
        return {name: value for name, value in known.items() if f"policy.{name}" not in setting.parameters}

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
        return serve(trace, self.prompt_tokens, self._policy(setting, costs), costs, load, chosen, rule)

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

    def _policy(self, setting: Setting, costs: LoadCost) -> StoppingPolicy:
        if setting.method == PLAIN:
            return self.bench.methods[PLAIN].bind(self.bench.pair).policy
        policy = self.recording.policy_for(setting)
        if (
            not isinstance(policy, Bounded)
            or not isinstance(policy.policy, BatchRate)
            or policy.policy.costs is not None
        ):
            return policy
        return replace(policy, policy=replace(policy.policy, table=costs, **self.known_by.told(setting)))

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
