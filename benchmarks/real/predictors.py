"""What predicts acceptance on the real pair, by replay: heads, statistics of q, and the other rows of docs/heads.md."""

from __future__ import annotations

from pathlib import Path

from benchmarks.real.folder import FOLDER, REPORTED, note, noted, pair_words, reads_target, stage, target_words
from benchmarks.real.pair import SIZES
from toolkit.files.atomic import read_json

PARTS = {  # where settings are chosen, and what is reported
    "dev": ("train.jsonl", "prompts.split=test", f"prompts.limit={SIZES.dev}", "sampling.seed=1"),
    "test": (REPORTED, "sampling.seed=2"),
}
ENDPOINTS = FOLDER / "endpoints.json"  # overrides of data_gen.responses: an engine that gives the answers
TABLES = FOLDER / "costs"  # cost tables, by name
DOMAINS = {1: "sampled", 0: "greedy"}
LEVELS = [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]


def answers(prompts: str, *words: str) -> Path:
    """The target's responses to a file of prompts; the draft has no part in them."""
    source = [
        "prompts=jsonl",
        f"prompts.path={FOLDER / prompts}",
        *(read_json(ENDPOINTS) if ENDPOINTS.exists() else []),
    ]
    return stage("data_gen.responses", *target_words(), "pair.draft=null", *source, "batch_size=32", *words)


def part_answers(part: str, temperature: int) -> Path:
    """Those to questions that settings are chosen on (dev), or to those that are reported (test)."""
    return answers(*PARTS[part], f"sampling.max_new_tokens={SIZES.tokens}", f"sampling.temperature={temperature}")


def recorded(responses: Path | str, max_drafted: int, *words: str) -> Path:
    """A recording of a draft on responses, with its states."""
    shared = [f"responses={responses}", f"max_drafted={max_drafted}", "hidden=true", "heads={}"]
    return stage("data_gen.traces", *pair_words(), *shared, *words)


def heads() -> None:
    """Both heads of this draft, and statistics of q, of the target's answers to training-side questions at T = 1."""
    words = ["prompts.split=dev", f"prompts.limit={SIZES.learn}"]  # no draft is trained on them
    note("answers", str(answers("train.jsonl", *words, f"sampling.max_new_tokens={SIZES.learn_tokens}")))
    learn = recorded(noted("answers"), 6 if reads_target() else 1)  # its states differ from depth to depth
    for name in ("acceptance", "preread"):
        run = stage("toolkit.train", f"model={name}_head", "data=traced", f"data.path={learn}", *pair_words())
        note(name, str(run / "head"))
    note("learn", str(learn))
    note("statistics", str(stage("analysis.heads", f"statistics=[{learn}]") / "statistics.json"))


def predictors() -> None:
    """The table of all that predicts acceptance, by replay (docs/heads.md), T = 0 and 1, at every cost table that there is.

    Settings are chosen on training-side questions, test questions are reported.
    """
    heads = f"heads=[{noted('acceptance')},{noted('preread')}]"
    words = [f"statistics=[{noted('learn')}]", heads, f"thresholds={LEVELS}"]
    words.append(f"costs={{{', '.join(f'{path.stem}: {path}' for path in sorted(TABLES.glob('*.json')))}}}")
    for key, part in {"tuning": "dev", "tests": "test"}.items():
        traces = [
            f"{name}: {recorded(part_answers(part, temperature), 10, 'upper_bound=true')}"
            for temperature, name in DOMAINS.items()
        ]
        words.append(f"{key}={{{', '.join(traces)}}}")
    folder = stage("analysis.heads", *pair_words(), *words, f"cost_ratio={SIZES.ratios[-1]}", "max_drafted=8")
    note("predictors", str(folder))
