"""Heads for advice: trained on one part of the prompts, calibrated on another, for every draft of a target.

The target answers both parts once. A draft's pre-read head (rate rules) is trained on a recording of the training part.
If a method of the grid reads an acceptance head (SpecDec++), this head is trained, too. Its data is mixed from the same
answers. The calibration is fitted to a recording of its own part, which no head was trained on. Every step runs an ordinary
command, and the finished work of each command is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.utils import get_method

from analysis.replay.calibrating import Scored, fit_beside
from analysis.replay.head_folders import find_contenders
from analysis.tables.grid import PARAMETERS, Setting
from toolkit.acceptance.folder import KINDS
from toolkit.config import commands, flatten, plain
from toolkit.errors import InputError
from toolkit.files.atomic import copy_file, write_text
from toolkit.models.pair import load_draft
from toolkit.models.prompts import Prompt
from toolkit.runs.pipeline import compose_for
from toolkit.trace.folders import read_traces
from toolkit.training.export import HEAD

CALIBRATED = "policy.estimator.calibrated"
MAPS = "isotonic"  # maps of the calibration
DEEPEST = 8  # the calibration is fitted to products of up to this many acceptance probabilities of a round
TRAINING, CALIBRATION = "train", "calibration"  # the parts


@dataclass(frozen=True)
class HeadTrainer:
    """Trains and calibrates the heads of drafts.

    cfg       the advice's config: its pair, sampling and output root
    folder    the advice's output folder, with the parts of the prompts and the joint folders of heads
    parts     prompts by part, disjoint
    settings  the settings to choose from; they determine which kinds of heads are needed
    """

    cfg: commands.Advise
    folder: Path
    parts: Mapping[str, Sequence[Prompt]]
    settings: Sequence[Setting]

    def heads(self, drafts: Sequence[str]) -> list[str]:
        """The folder of each draft's heads, calibration included."""
        answers = {name: self._answers(name, number) for number, name in enumerate(self.parts, start=2)}
        return [str(self._heads_of(draft, number, answers)) for number, draft in enumerate(drafts)]

    def _answers(self, part: str, seed: int) -> Path:
        """The target's responses to a part, drawn with a seed of their own."""
        path = self.folder / "parts" / f"{part}.jsonl"
        lines = []
        for prompt in self.parts[part]:
            content = {"prompt": prompt.prompt} if prompt.messages is None else {"messages": list(prompt.messages)}
            lines.append(json.dumps({"id": prompt.id, **content}, ensure_ascii=False) + "\n")
        write_text(path, "".join(lines))
        sampling = plain(self.cfg.sampling)
        changes = {"sampling": {**sampling, "seed": sampling["seed"] + seed}}
        words = ["prompts=jsonl", 'prompts.path="{part}"']
        return self._run("data_gen.responses", f"answers, {part}", words, {"part": path}, None, **changes)

    def _heads_of(self, draft: str, number: int, answers: Mapping[str, Path]) -> Path:
        # No roll-outs: a pre-read head is trained on clean positions alone.
        words = ["heads={}", "hidden=true", "max_drafted=1", "replicates=2", 'responses="{of}"']
        traces = self._run("data_gen.traces", "recording to train on", words, {"of": answers[TRAINING]}, draft)
        trained = {"preread": self._train("pre-read head", ["model=preread_head", "data=traced"], traces, draft)}
        estimators = [_config_of(setting).get("policy.estimator._target_", "") for setting in self.settings]
        if any(str(estimator).endswith(".HeadEstimator") for estimator in estimators):
            mix = self._run("data_gen.mix", "mixed data", ['responses="{of}"'], {"of": answers[TRAINING]}, draft)
            trained["survival"] = self._train("acceptance head", [], mix, draft)
        joint = self.folder / "heads" / str(number)
        for kind, folder in trained.items():
            for name in (KINDS[kind].weights_file, KINDS[kind].config_file):
                copy_file(folder / HEAD / name, joint / name)
        words = ["heads={}", "hidden=true", f"max_drafted={DEEPEST + 2}", 'responses="{of}"']
        traces = self._run(
            "data_gen.traces", "recording for the calibration", words, {"of": answers[CALIBRATION]}, draft
        )
        recorded, model = read_traces(traces), load_draft(draft, dtype=plain(self.cfg.pair).get("dtype", "float32"))
        for contender in find_contenders([joint], [traces]):
            job = {CALIBRATION: recorded.about["job"]}
            fit_beside(contender, [Scored.of(contender, recorded, model)], joint, MAPS, DEEPEST, job)
        return joint

    def _train(self, title: str, words: Sequence[str], data: Path, draft: str) -> Path:
        logger = [] if self.cfg.track else ["logger=csv"]
        words = [*words, *logger, 'data.path="{data}"', f"seed={self.cfg.seed}"]
        return self._run("toolkit.train", title, words, {"data": data}, draft)

    def _run(
        self,
        module: str,
        title: str,
        words: Sequence[str],
        folders: Mapping[str, Path],
        draft: str | None,
        **changes: Any,
    ) -> Path:
        """One command on the target and one draft, or none; returns its folder."""
        print(f"\n== {title}{'' if draft is None else f' of {draft}'}", flush=True)
        config = compose_for(module.rpartition(".")[2], words, folders, self.cfg.paths.root_dir)
        for key, value in {"pair": {**plain(self.cfg.pair), "draft": draft}, **changes}.items():
            config[key] = value
        return Path(get_method(f"{module}.run")(config))


def with_calibrated(settings: Sequence[Setting]) -> list[Setting]:
    """The settings, with a second, calibrated version of those that read a head. The dev prompts decide between them."""
    calibrated = [
        replace(setting, parameters={**setting.parameters, CALIBRATED: True})
        for setting in settings
        if CALIBRATED not in setting.parameters and CALIBRATED in _config_of(setting)
    ]
    return [*settings, *calibrated]


def named_drafts(cfg: commands.Advise) -> list[str]:
    """The drafts of a config by the names that other commands know them by. Raises InputError if it has none."""
    pair = plain(cfg.pair)
    source = pair.get("draft") or pair.get("drafts") or []
    names = [source] if isinstance(source, str) else source
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InputError("train_heads=true needs models by name: expected pair.target=NAME pair.draft=[NAME, NAME]")
    return names


# -- inside -----------------------------------------------------------------------------------------------------------


def _config_of(setting: Setting) -> dict[str, Any]:
    """The keys of a setting's method, flat; empty for a setting that is no method of conf/method/."""
    return {} if setting.method in PARAMETERS else flatten(plain(setting.method_config()))
