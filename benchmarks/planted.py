"""python -m benchmarks.planted --target T --separate D --eagle3 D --dflash D ...: planted mistakes on a real target.

The small engine of the tests serves greedy texts of a responses folder with a mistake of each kind, `analysis.diagnose` reads
its counts, and planted.csv gets a line: equal rounds as it should be, under the named cause and the next best; acceptance of
position 1, counted and expected; what was named. Lines that are there are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from analysis import diagnose
from benchmarks.evidence import ROOT, machine
from benchmarks.real.folder import rows_of
from data_gen.texts import read_responses
from tests.analysis.diagnosis.engine import BlockEngine, EagleEngine, Engine
from toolkit import ModelPair, config
from toolkit.errors import answer_signals
from toolkit.files.atomic import read_json, write_text

Mistakes = Mapping[str, Mapping[str, Any]]
SEPARATE: Mistakes = {
    "none": {},
    "draft's cache keeps one rejected token of a round": {"stale": 1},
    "draft's cache keeps all rejected tokens": {"stale": 9},
    "positions after the prompt one too high": {"shift": 1},
    "positions after the prompt one too low": {"shift": -1},
    "prompt without its begin token": {"prompt": "no begin"},
    "prompt with two begin tokens": {"prompt": "two begins"},
    "prompt without its chat template": {"prompt": "no template"},
    "context cut to 64 tokens": {"window": 64},
}
EAGLE3: Mistakes = {
    "none": {},
    "accepted tokens stay as they were drafted": {"guessed": True},
    "state handed on after the last norm": {"normed": True},
    "states read one layer early": {"early": 1},
    "the last state, three times": {"last": True},
    "vocabulary map off by one row": {"rows": 1},
    "positions after the prompt one too high": {"shift": 1},
}
DFLASH: Mistakes = {
    "none": {},
    "causal blocks": {"causal": True},
    "positions of the block one too high": {"shift": 1},
    "states read one layer early": {"early": 1},
    "vocabulary map off by one row": {"rows": 1},
}
KINDS: Mapping[str, tuple[type[Engine], Mistakes]] = {
    "separate": (Engine, SEPARATE), "eagle3": (EagleEngine, EAGLE3), "dflash": (BlockEngine, DFLASH),
}  # fmt: skip


class Templated(Engine):
    """Prompts without their chat template are the question alone."""

    def draft_prompt(self, prompt: list[int], question: str) -> list[int]:
        if self.prompt == "no template":
            return list(self.tokenizer(question).input_ids)
        return list(super().draft_prompt(prompt, question))


def line_of(kind: str, planted: str, answers: Path, words: list[str]) -> dict[str, Any]:
    """What a diagnosis says of a file of answers."""
    words = [f"responses={answers}", f"paths.root_dir={answers.parent}", "windows=[64]", *words]
    result = read_json(diagnose.run(config.compose("diagnose", words)) / "diagnosis.json")
    first = result["positions"][0]
    equal = [each["equal"] for each in result["causes"][:2]] + ["", ""]
    return {
        "draft": kind,
        "planted": planted,
        "rounds": result["rounds"],
        "as it should be": result["equal"],
        "the cause": equal[0],
        "next best": equal[1],
        "counted": f"{first['accepted']:.2f}",
        "expected": f"{first['expected']:.2f}",
        "named": "; ".join(result["explained_by"]) or result["sentence"].partition(":")[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--responses", required=True, help="a folder of greedy ones")
    parser.add_argument("--prompts", type=Path, required=True, help="their questions, with `category`")
    for kind in KINDS:
        parser.add_argument(f"--{kind}")
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--only", help="mistakes whose name holds this")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "planted")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "planted.csv"
    lines = pd.read_csv(path, dtype=str).to_dict("records") if path.exists() else []
    print(machine(), flush=True)
    for kind, (engine, mistakes) in KINDS.items():
        if (draft := getattr(options, kind)) is None:
            continue
        pair = ModelPair.from_pretrained(options.target, draft, writable=False)
        questions = {row["id"]: row for row in rows_of(options.prompts)}
        rows = read_responses(options.responses).rows[: options.texts]
        written = [
            (asked["category"], asked["messages"][-1]["content"], row["prompt_ids"], row["token_ids"][: options.tokens])
            for row in rows
            for asked in [questions[row["id"]]]
        ]
        for name, mistake in mistakes.items():
            if (options.only or "") not in name or any((kind, name) == (e["draft"], e["planted"]) for e in lines):
                continue
            served = (Templated if engine is Engine else engine)(pair, **mistake)
            answers = served.answer(written, options.out / f"{kind}-{name.replace(' ', '-')}.jsonl")
            lines.append(line_of(kind, name, answers, [f"pair.target={options.target}", f"pair.draft={draft}"]))
            write_text(path, pd.DataFrame(lines).to_csv(index=False))
            print(lines[-1], flush=True)


if __name__ == "__main__":
    answer_signals()
    main()
