"""One pair's settings on one recording of one prompt set, ready for the simulator.

Responses, and a trace per draft temperature, are kept in files named after all they depend on. Methods that copy tokens, and
autoregressive decoding, need the responses alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from analysis.loads.simulator import Load, RequestResults, serve
from analysis.tables.grid import PLAIN, REFERENCES, Setting, bounded
from analysis.tables.sweep_context import Recording, SweepContext, reads_head
from toolkit.config import instantiate
from toolkit.costs.kept import weighs_costs
from toolkit.costs.load import LoadCost
from toolkit.decoding import ChainProposer
from toolkit.decoding.proposers.copying import CopyProposer
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash, parse_json_file, write_atomic, write_json
from toolkit.runs.token_bar import TokenBar
from toolkit.trace import CutError
from toolkit.trace.copies import Copies
from toolkit.trace.record_by_start import DEEPEST, PAYS, TEXTS, depth_that_pays
from toolkit.verification.rules.rejection import Rejection

HEADLESS = "needs a trained head"


class RecordedPair:
    """Settings of one pair that chains can be replayed for.

    settings  those given that can be simulated: chains verified token by token, and autoregressive decoding
    left_out  by method, why the others cannot
    ends      the most tokens that a published cost table knows the time of
    deepest   the most tokens that a setting may draft in a round
    costs     the cost table, and the file that holds it, which rules that weigh a batch read: set before `serve`
    """

    def __init__(
        self,
        context: SweepContext,
        settings: Sequence[Setting],
        folder: Path,
        max_drafted: int | Literal["auto"],
        hidden: bool = True,
        ends: int | None = None,
    ):
        self.context, self.left_out = context, dict[str, str]()
        self.costs: tuple[LoadCost, Path] | None = None
        self.copies: dict[CopyProposer | None, Copies] = {}
        self.settings = [setting for setting in settings if self._takes(setting)]
        alone = SweepContext(replace(context.pair, draft=None, drafts=(), head=None), *context.shared)
        kept = folder / "settings"
        path = kept / f"{alone.prepare(Setting(PLAIN))}.parquet"
        if any(setting.method != PLAIN for setting in self.settings):
            if path.exists():
                responses = pd.read_parquet(path)
            else:
                with TokenBar("responses", len(alone.prompts), alone.sampling.max_new_tokens) as bar:
                    responses = alone.decode(Setting(PLAIN), bar.row, bar.tokens)
                if responses.error.notna().all():
                    raise InputError(f"every prompt failed, first: {responses.error.iloc[0]}")
                write_atomic(path, lambda temporary: responses.to_parquet(temporary))
            self.max_drafted = self._depth(responses, kept) if max_drafted == "auto" else max_drafted
            self._bound(max_drafted, ends)
        drafting = [setting for setting in self.settings if setting.method != PLAIN]
        if not drafting:
            raise InputError(f"no setting can be simulated: {'; '.join(f'{k}: {v}' for k, v in self.left_out.items())}")
        self.recording = Recording(context, responses, kept, drafting, self.max_drafted, hidden, whole=False)
        self.sequences = self.recording.sequences
        self.prompt_tokens = [len(prompt) for prompt, _ in self.sequences]
        tokens, seconds = responses.num_generated.sum(), responses.setting_seconds.iloc[0]
        self.target_speed = float(tokens / seconds)  # tokens per second of the responses

    def serve(self, setting: Setting, load: Load, requests: Sequence[int] | None = None) -> RequestResults:
        """Serve these texts (None: each once) with a setting. Autoregressive decoding takes any trace.

        This package's loop (drops "half") takes the longest prompts of a call first, an engine takes them as they come. Texts
        that come again are those of another call.
        """
        assert self.costs is not None, "costs are set before anything is simulated"
        method = self.context.methods[setting.name]
        if weighed := self._weighed(setting, load.slots):
            policy: Any = method.policy
            method = replace(method, policy=replace(policy, **weighed))
        bound, costs = method.bind(self.context.pair), self.costs[0]
        if setting.method == PLAIN:
            trace: Any = self._copies(None, 0)
        elif isinstance(method.proposer, CopyProposer):
            trace, costs = self._copies(method.proposer, bound.limit), costs.copying
        else:
            trace = self.recording.trace_for(setting)
            costs = costs.apart("drafts that give blocks") if trace.blocks else costs
        chosen = range(len(self.sequences)) if requests is None else requests
        prompt_tokens = [1] * len(self.sequences) if costs.is_published else self.prompt_tokens  # no such times
        if load.drops == "half":
            calls, entries = Counter[int](), []
            for text in chosen:
                calls[text] += 1
                entries.append((calls[text], -self.prompt_tokens[text], text))
            chosen = [text for _, _, text in sorted(entries)]
        while True:
            try:
                return serve(trace, prompt_tokens, bound.policy, costs, load, chosen)
            except CutError as error:  # of rules that decide for a batch, or by costs: they were not asked before
                trace = self.recording.deepen(setting, error.positions)

    def overrides(self, setting: Setting, batch: int = 1) -> dict[str, object]:
        """The setting as keys of `toolkit.decode` and their values, for a batch size: parameters, head, cost table."""
        keys = setting.decode_keys()
        keys |= {f"method.policy.{name}": value for name, value in self._weighed(setting, batch).items()}
        if "head" not in keys and reads_head(setting) and self.context.pair.head is not None:
            keys["head"] = self.context.pair.head
        return keys

    def _weighed(self, setting: Setting, batch: int) -> dict[str, Any]:
        """What a policy that weighs costs takes: table and batch size; nothing if the setting names its costs."""
        policy: Any = self.context.methods[setting.name].policy
        filled: dict[str, Any] = {}
        if weighs_costs(policy):
            assert self.costs is not None
            filled["costs"] = str(self.costs[1].resolve())
            if hasattr(policy, "batch_size"):
                filled["batch_size"] = batch
        return filled

    def _copies(self, proposer: CopyProposer | None, most: int) -> Copies:
        """What these texts let a proposer copy: worked out once, as far as the longest of its settings asks."""
        copies = self.copies.get(proposer)
        if copies is None or copies.max_drafted < most:
            copies = self.copies[proposer] = self.recording.copies(proposer, most)
        return copies

    def _takes(self, setting: Setting) -> bool:
        if setting.method in REFERENCES:
            self.left_out[setting.method] = "a bound, not a method"
            return False
        if self.context.lacks_head(setting):
            self.left_out[setting.method] = HEADLESS
            return False
        self.context.prepare(setting)
        method = self.context.methods[setting.name]
        chains = type(method.proposer) is ChainProposer or isinstance(method.proposer, CopyProposer)
        if setting.method != PLAIN and (not chains or type(method.rule) is not Rejection):
            self.left_out[setting.method] = "only chains verified token by token are simulated"
            return False
        return True

    def _depth(self, responses: pd.DataFrame, folder: Path) -> int:
        """How deep this draft's roll-outs pay on the first texts: measured once, and kept beside the recording."""
        recorded = [setting for setting in self.settings if setting.method != PLAIN and not needs_no_draft(setting)]
        if not recorded:
            return DEEPEST
        temperatures = sorted({self.context.draft_temperature(setting) for setting in recorded}, key=str)
        draft = self.context.prepare(Setting(PLAIN))  # a hash of the texts and of the draft, too
        file = folder / f"depth-{content_hash([draft, temperatures], length=16)}.json"
        if not file.exists():
            readable = self.context.within_context(responses)
            readable = readable[readable.error.isna() & readable.token_ids.map(len).gt(0)]
            sequences = [(list(row.prompt_ids), list(row.token_ids)) for row in readable.head(TEXTS).itertuples()]
            write_json(file, depth_that_pays(self.context.pair, sequences, self.context.sampling, temperatures))
        return int(parse_json_file(file))

    def _bound(self, max_drafted: int | str, ends: int | None) -> None:
        """Bound settings that name no bound. Deeper ones are left out; with a depth of the user's own, InputError is raised."""
        fitting, self.deepest = [], 0
        self.max_drafted = min(self.max_drafted, ends or self.max_drafted)
        for setting in self.settings:
            by_depth = max_drafted == "auto" and setting.method != PLAIN and not needs_no_draft(setting)
            if (limit := self.max_drafted if by_depth else ends) is not None:
                setting = bounded(setting, limit, copies=ends is not None)
                self.context.prepare(setting)
            method = self.context.methods[setting.name].bind(self.context.pair)
            deep = not isinstance(method.proposer, CopyProposer) and method.limit > self.max_drafted
            if ends is not None and method.limit > ends:
                self.left_out[f"{setting.method} {setting.label}"] = f"beyond {ends} a round, where the cost table ends"
            elif deep and max_drafted == "auto":
                self.left_out[setting.method] = (
                    f"beyond {self.max_drafted} a round, of which the last is accepted in under {PAYS:.0%} of rounds"
                )
            elif deep:
                raise InputError(
                    f"{setting.name} may draft {method.limit} tokens: expected at most max_drafted={self.max_drafted}"
                )
            else:
                fitting.append(setting)
                self.deepest = max(self.deepest, method.limit)
        self.settings = fitting


def needs_no_draft(setting: Setting) -> bool:
    """Whether a setting decodes without a draft model: it copies tokens, or is autoregressive decoding."""
    if setting.method in REFERENCES:
        return False
    return setting.method == PLAIN or isinstance(instantiate(setting.method_config()).proposer, CopyProposer)
