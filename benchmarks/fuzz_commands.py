"""Command lines with something wrong in them, for every command; those that are not refused are run on two prompts."""

from __future__ import annotations

import importlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fuzz_values import LINES, WORDS, misspelt, prompt_files, scratch_paths
from toolkit.config import choices, compose, flatten, use_folders
from toolkit.config.check import resolved
from toolkit.config.command_line import prepare
from toolkit.config.commands import COMMANDS, Command, OnPrompts, Tracked
from toolkit.errors import InputError

HEAD = Path(__file__).parents[1] / "toolkit/assets/toy/head"
TWO = ["prompts=toy_math", "prompts.limit=2", "sampling.max_new_tokens=4"]
LIVE = ["grid=quickstart_live", "max_drafted=4"]
# Good lines; "{name}" is the folder of an earlier one. Those of RUN are run, in this order, before anything is fuzzed.
GOOD: dict[str, list[str]] = {
    "decode": ["method=specdec_pp"],
    "responses": ["shard_size=1"],
    "mix": ["responses={responses}", "validation_fraction=.5"],
    "traces": ["responses={responses}", "hidden=true", "max_drafted=4"],
    "train": ["data.path={mix}", "trainer.max_epochs=1", "logger=none", "callbacks=none", "optimizer.lr=.001"],
    "train_heads": [
        "data.path={mix}",
        "data.features=hybrid",
        "depths=[0]",
        "w_rejs=[1]",
        "max_epochs=1",
        "optimizer.lr=.001",
    ],
    "sweep": ["prompts.split=dev", *LIVE],
    "quickstart_sweep": ["prompts.split=dev", *LIVE],
    "frontier": ["dev=[{sweep}]", "test=[{other}]", "resamples=20"],
    "standing": ["dev=[{sweep}]", "test=[{other}]", "resamples=20", "cost_ratios=[.2]"],
    "agreement": ["replayed=[{sweep}]", "live=[{live}]", "resamples=20"],
    "exact": ["target_probs=[.5,.25,.25]", "draft_probs=[[.5,.1,.4]]"],
    "acceptance": ["methods=[specinfer]", "num_drafts=[2]", "draws=8", "positions=2", "resamples=20"],
    "heads": ["traces={traces}", "heads=[{head}]", "dev={traces}", "resamples=20", "thresholds=[.5]"],
    "calibration": ["head={head}", "fit={{a:{traces}}}", "traces={{b:{traces}}}", "max_depth=3"],
    "price": ["traces={traces}", "head={head}"],
    "paper": ["table=specdecpp_table1", "runs={{alpaca: {frontier}}}"],
    "report": ["inputs=[{decode}]"],
    "export": ["folder={decode}"],
    "publish": ["report={report}", "dry_run=true"],
    "sync": ["folder={decode}", "dry_run=true"],
    "toy": ["target.steps=2", "draft.steps=2", "examples=20", "evaluation.prompts=1"],
    "compare": ["resamples=20", "warmup=0"],
    "timing": ["batch_sizes=[]", "num_drafted=[1,2]", "warm_up=0"],
    "advise": ["hardware=h100", "batch_sizes=[1]"],
    "observed": ["responses={answers}", "resamples=20"],
    "distill": ["responses=[{responses}]", "loss=lk"],
    "drafts": ["drafts={{a:toy/draft}}", "responses={{b:{responses}}}", "depth=2", "max_drafted=3", "resamples=20"],
    "serving": ["hardware=h100", "users=[1]", "requests=2"],
}
BEFORE = {
    "other": ("sweep", ["prompts.split=test", *LIVE]),
    "live": ("sweep", ["prompts.split=dev", "source=live", *LIVE]),
}
RUN = (
    "decode", "responses", "mix", "traces", "sweep", "frontier", "standing", "agreement", "price", "report", "export",
    "observed",
)  # fmt: skip
ANSWER = {
    "metrics": {
        "speculative_decoding": {
            "num_spec_tokens": 2, "num_spec_steps": 6, "num_draft_tokens": 12, "num_accepted_draft_tokens": 5,
            "acceptance_histogram": [3, 1, 2],
        }
    }
}  # fmt: skip
COMPOSED = tuple(name for name in GOOD if name not in RUN)


@dataclass(frozen=True)
class Line:
    """One command line; `how` says what was done to the good one."""

    command: str
    words: tuple[str, ...]
    how: str

    def __str__(self) -> str:
        return " ".join(map(repr, self.words))[:300]


@dataclass
class Commands:
    """Draws lines and tries them. folders: of finished stages, by name; without them everything is refused or composed."""

    root: Path
    chance: random.Random
    folders: dict[str, str] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.files = prompt_files(self.root)
        self.answers = str(self.root / "answers.jsonl")
        Path(self.answers).write_text(json.dumps(ANSWER) + "\n", encoding="utf-8")
        self.paths = scratch_paths(self.root)
        self.folders["head"] = str(shutil.copytree(HEAD, self.root / "head", dirs_exist_ok=True))  # to be written into

    def finish_stages(self) -> None:
        """Run the good lines, so that others have folders to read. Raises if one of them is refused."""
        for name in RUN:
            for part, (command, words) in [*BEFORE.items()] if name == "frontier" else []:
                self.folders[part] = str(self._stage(part, command, words))
            self.folders[name] = str(self._stage(name, name, GOOD[name]))
        self.paths = scratch_paths(self.root, [Path(self.folders["mix"])])

    def _stage(self, part: str, command: str, words: Sequence[str]) -> Path:
        folder = self.root / "stages" / part
        run_line(command, [*self._filled(command, words), f"paths.output_dir={folder}"], self.root)
        return folder

    def _filled(self, command: str, words: Sequence[str]) -> list[str]:
        """A good line whole: small, untracked, on folders that exist if there are any."""
        kind = COMMANDS[command]
        small = [*(TWO if issubclass(kind, OnPrompts) else []), *(["track=false"] if issubclass(kind, Tracked) else [])]
        known = {**dict.fromkeys((*GOOD, *BEFORE), str(self.root / "missing")), **self.folders, "answers": self.answers}
        return [*small, *(word.format_map(known) for word in words)]

    def keys_of(self, command: str) -> list[str]:
        """Dotted keys of the composed config."""
        if command not in self.keys:
            plain = resolved(compose(command, self._filled(command, GOOD[command])), command)
            self.keys[command] = [key for key in flatten(plain) if "_target_" not in key and "_partial_" not in key]
        return self.keys[command]

    def draw(self, command: str) -> Line:
        """A good line with one thing wrong, now and then two."""
        words = self._filled(command, GOOD[command])
        how = []
        for _ in range(1 if self.chance.random() < 0.85 else 2):
            way = self.chance.choice(WAYS)
            if way is _prompts_file and not issubclass(COMMANDS[command], OnPrompts):
                way = _value
            words = way(self, command, words)
            how.append(way.__name__.strip("_").replace("_", " "))
        return Line(command, tuple(words), " and ".join(how))

    def word(self) -> str:
        """An odd value."""
        text = self.chance.choice(WORDS)
        return self.paths.get(text.strip("{}"), text)

    def run(self, line: Line) -> str:
        """Check the line as its command does; of RUN, then run it. Returns how far it went. Raises what is raised."""
        self.count += 1
        folder = self.root / "runs" / str(self.count)
        words = [*line.words]
        if line.command not in RUN or not self.folders:
            prepare(line.command, words)
            return "composed"
        if not any("paths" in word for word in words):
            words.append(f"paths.output_dir={folder}")
        run_line(line.command, words, self.root)
        return "run"


def run_line(command: str, words: Sequence[str], root: Path) -> None:
    """`python -m MODULE WORDS` within this process, in a fresh working folder."""
    from toolkit.stage import command as main

    module = importlib.import_module(_module(command))
    (root / "cwd").mkdir(exist_ok=True)
    with _as_process(module.__name__, words, Path(tempfile.mkdtemp(dir=root / "cwd"))):
        main(command, module.run)


@contextmanager
def _as_process(name: str, words: Sequence[str], folder: Path) -> Iterator[None]:
    """The command line and the working folder of a process of its own; errors come out as they are."""
    argv, cwd, environment = sys.argv, Path.cwd(), dict(os.environ)
    sys.argv = [name, *words]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    os.chdir(folder)
    try:
        yield
    finally:
        sys.argv = argv
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        use_folders()


def _module(command: str) -> str:
    kind = COMMANDS[command]
    if not issubclass(kind, Command):
        raise InputError(f"expected a command, got {command}")
    return kind.module


# -- what is done to a good line --------------------------------------------------------------------------------------


def _value(self: Commands, command: str, words: list[str]) -> list[str]:
    return [*words, f"{self.chance.choice(self.keys_of(command))}={self.word()}"]


def _value_of_another_key(self: Commands, command: str, words: list[str]) -> list[str]:
    plain: Mapping[str, Any] = flatten(resolved(compose(command, self._filled(command, GOOD[command])), command))
    key, other = self.chance.sample(self.keys_of(command), 2)
    return [*words, f"{key}={plain.get(other)}"]


def _misspelt_key(self: Commands, command: str, words: list[str]) -> list[str]:
    key = misspelt(self.chance.choice(self.keys_of(command)), self.chance)
    return [*words, f"{self.chance.choice(['', '', '+', '++', '~'])}{key}={self.word()}"]


def _misspelt_choice(self: Commands, command: str, words: list[str]) -> list[str]:
    group = self.chance.choice(
        ["method", "pair", "prompts", "sampling", "grid", "model", "trainer", "experiment", "debug"]
    )
    if self.chance.random() < 0.5:
        name = misspelt(self.chance.choice(choices(group)), self.chance)
    else:
        group, name = misspelt(group, self.chance), self.chance.choice(choices(group))
    return [*words, f"{self.chance.choice(['', '+', '++', '~'])}{group}={name}"]


def _missing_key(self: Commands, command: str, words: list[str]) -> list[str]:
    dropped = self.chance.choice([word for word in words if word not in TWO] or words)
    kept = [word for word in words if word != dropped]
    return [*kept, f"~{self.chance.choice(self.keys_of(command))}"] if self.chance.random() < 0.5 else kept


def _twice(self: Commands, command: str, words: list[str]) -> list[str]:
    word = self.chance.choice(words)
    return [*words, f"{word.partition('=')[0]}={self.word()}"]


def _prefix(self: Commands, command: str, words: list[str]) -> list[str]:
    at = self.chance.randrange(len(words))
    return [*words[:at], self.chance.choice(["+", "~", "++", "+++", "-", "~+", "@", "."]) + words[at], *words[at + 1 :]]


def _folder(self: Commands, command: str, words: list[str]) -> list[str]:
    own = [word for word in words if "/" in word] or words
    word, path = self.chance.choice(own), self.chance.choice([*self.paths.values(), *self.folders.values()])
    value = f"[{path}]" if "=[" in word else path
    return [*(one for one in words if one != word), f"{word.partition('=')[0]}={value}"]


def _odd_word(self: Commands, command: str, words: list[str]) -> list[str]:
    return self.chance.sample([*words, self.chance.choice(LINES)], len(words) + 1)


def _prompts_file(self: Commands, command: str, words: list[str]) -> list[str]:
    kind = self.chance.choice(["prompts=jsonl", "prompts=toy_math", "prompts=gsm8k"])
    return [*words, kind, f'prompts.path="{self.chance.choice(self.files)}"']


WAYS: tuple[Callable[[Commands, str, list[str]], list[str]], ...] = (
    _value, _value, _value, _value_of_another_key, _misspelt_key, _misspelt_choice, _missing_key, _twice, _prefix, _folder,
    _odd_word, _prompts_file,
)  # fmt: skip
