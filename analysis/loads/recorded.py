"""One pair's settings on one recording of one prompt set, ready to be served by the simulator.

The target's responses are decoded once and kept, and so is one trace per draft temperature. Their folders are
named after everything that they depend on. So a second call with other costs or loads only replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.loads.simulator import Load, Served, serve
from analysis.replay.recorded_heads import with_recorded_heads
from analysis.tables.grid import PLAIN, YARDSTICKS, Setting
from analysis.tables.replayed_settings import Recording
from analysis.tables.workbench import Workbench, reads_head
from toolkit.costs.load import LoadCost
from toolkit.decoding import ChainProposer
from toolkit.errors import InputError
from toolkit.files.atomic import write_atomic
from toolkit.verification.rules.rejection import Rejection

HEADLESS = "needs a trained head"
COSTS = "policy.costs"  # the parameter of rules for a whole batch that names a cost table


class RecordedPair:
    """Settings of one pair that chains can be replayed for.

    settings  those given that can be simulated: chains judged token by token, and autoregressive decoding
    left_out  by method, why the others cannot
    costs     the cost table, and the file that holds it, which rules for a whole batch read: set before `serve`
    """

    def __init__(
        self, bench: Workbench, settings: Sequence[Setting], folder: Path, max_drafted: int, hidden: bool = True
    ):
        self.bench, self.left_out = bench, dict[str, str]()
        self.costs: tuple[LoadCost, Path] | None = None
        self.settings = [setting for setting in settings if self._takes(setting, max_drafted)]
        self.drafting = [setting for setting in self.settings if setting.method != PLAIN]
        if not self.drafting:
            raise InputError(f"no setting can be simulated: {'; '.join(f'{k}: {v}' for k, v in self.left_out.items())}")
        path = folder / "settings" / f"{bench.prepare(Setting(PLAIN))}.parquet"
        responses = self._responses(path)
        self.recording = Recording(bench, responses, path, self.drafting, max_drafted, hidden)
        self.prompt_tokens = [len(responses.prompt_ids.iloc[number]) for number in self.recording.usable]

    @property
    def num_texts(self) -> int:
        """Texts that can be served."""
        return len(self.prompt_tokens)

    def serve(self, setting: Setting, load: Load, requests: Sequence[int] | None = None) -> Served:
        """Serve these texts (None: each once) with a setting. Autoregressive decoding takes any trace."""
        assert self.costs is not None, "costs are set before anything is served"
        table, path = self.costs
        trace = self.recording.trace_for(setting if setting.method != PLAIN else self.drafting[0])
        assert trace is not None
        method = self.bench.methods[setting.name]
        if self.takes_costs(setting):
            rule: Any = method.policy  # a BatchRate
            method = replace(method, policy=replace(rule, costs=str(path)))
        policy = with_recorded_heads(method.bind(self.bench.pair).policy, self.recording.heads)
        return serve(trace, self.prompt_tokens, policy, table, load, requests or range(self.num_texts))

    def takes_costs(self, setting: Setting) -> bool:
        """Whether the setting decides for a whole batch by a cost table and names none."""
        policy = self.bench.methods[setting.name].policy
        return policy.couples_rows and getattr(policy, "costs", "") is None

    def overrides(self, setting: Setting) -> dict[str, object]:
        """The setting as keys of `toolkit.decode` and their values: parameters, head, cost table."""
        keys = {f"method.{name}": value for name, value in setting.parameters.items() if name != "head"}
        if setting.max_drafted is not None:
            keys["method.max_drafted"] = setting.max_drafted
        if self.takes_costs(setting):
            assert self.costs is not None
            keys[f"method.{COSTS}"] = str(self.costs[1].resolve())
        head = setting.head or (self.bench.pair.head if reads_head(setting) else None)
        return {"method": setting.method} | {k: v for k, v in (keys | {"head": head}).items() if v is not None}

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

    def _responses(self, path: Path) -> pd.DataFrame:
        """The rows of autoregressive decoding, from their file if it is there."""
        from tqdm.auto import tqdm

        if path.exists():
            return pd.read_parquet(path)
        with tqdm(total=len(self.bench.prompts), desc="responses", unit="prompt") as bar:
            rows = self.bench.decode(Setting(PLAIN), lambda generation: bar.update() and None)
        if rows.error.notna().all():
            raise InputError(f"every prompt failed, first: {rows.error.iloc[0]}")
        write_atomic(path, lambda temporary: rows.to_parquet(temporary))
        return rows
