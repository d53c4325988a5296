"""python -m tests.analysis.diagnosis.planted --target T --separate D ...: planted mistakes on a real target and its drafts.

The small engine of the tests serves greedy texts of a responses folder with a mistake of each kind, `analysis.diagnose` reads
its counts, and planted.csv gets a line: equal rounds as it should be, under the named cause and the next best; acceptance of
position 1, counted and expected; what was named. Lines that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from analysis import diagnose
from benchmarks.evidence import ROOT, machine
from benchmarks.real.folder import rows_of
from data_gen.texts import read_responses
from tests.analysis.diagnosis.engine import BlockEngine, EagleEngine, Engine
from toolkit import ModelPair, config
from toolkit.decoding import ChainProposer, Method, Sampling, decode
from toolkit.decoding.proposers.base import DraftContext
from toolkit.decoding.proposers.copying import point_masses
from toolkit.errors import answer_signals
from toolkit.files.atomic import read_json, write_text
from toolkit.stopping.base import State, StoppingPolicy
from toolkit.types import Proposal
from toolkit.verification.rules.rejection import Rejection

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


class PointMasses(Rejection):
    """A rejection rule that takes every drafted token for the draft's only one."""

    def accept(
        self, target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, num_drafted: Tensor, uniforms: Tensor
    ) -> tuple[Tensor, Tensor]:
        masses = point_masses(tokens, draft_probs.shape[-1], draft_probs.dtype)
        return super().accept(target_probs, masses, tokens, num_drafted, uniforms)


class DraftTopP(ChainProposer):
    """A chain whose draft alone has a top-p."""

    def propose(self, context: DraftContext, policy: StoppingPolicy, state: State) -> tuple[Proposal, State]:
        return super().propose(replace(context, sampling=replace(context.sampling, top_p=0.5)), policy, state)


SAMPLING = "T = 1"  # the kind of these lines
CHAIN = config.method("speculative", ["policy.num_drafted=4"])
GREEDY = replace(CHAIN, draft_temperature=0.0)
SAMPLED: Mapping[str, tuple[Method, float]] = {  # and the temperature of the texts
    "none": (CHAIN, 1.0),
    "top tokens, accepted where the target draws them": (GREEDY, 1.0),
    "drawn, accepted only where the target draws the same": (replace(CHAIN, rule=PointMasses()), 1.0),
    "the draft's temperature halved": (replace(CHAIN, draft_temperature=0.5), 1.0),
    "top-p .5 of the draft alone": (replace(CHAIN, proposer=DraftTopP()), 1.0),
    "texts of temperature .6": (CHAIN, 0.6),
}


def decoded(pair: ModelPair, prompts: Sequence[Sequence[int]], planted: str, most: int, path: Path) -> Path:
    """Write answers of decoding here with a mistake; the first token comes without a draft. Returns the path."""
    method, temperature = SAMPLED[planted]
    sampling = Sampling(temperature, max_new_tokens=1, seed=1)
    firsts = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=len(prompts))
    texts = [[*prompt, *first.token_ids] for prompt, first in zip(prompts, firsts, strict=True)]
    lines = []
    for number, text in enumerate(
        decode(pair, texts, method, replace(sampling, max_new_tokens=most), batch_size=len(texts))
    ):
        counts = {
            "per_step_drafted": [each.num_drafted for each in text.rounds],
            "per_step_accepted": [each.num_accepted for each in text.rounds],
        }
        tokens = [*firsts[number].token_ids, *text.token_ids]
        lines.append({"prompt_token_ids": list(prompts[number]), "token_ids": tokens, **counts})
    return write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


class Templated(Engine):
    """Prompts without their chat template are the question alone."""

    def draft_prompt(self, prompt: list[int], question: str) -> list[int]:
        if self.prompt == "no template":
            return list(self.tokenizer(question).input_ids)
        return list(super().draft_prompt(prompt, question))


def line_of(kind: str, planted: str, answers: Path, words: list[str]) -> dict[str, Any]:
    """What a diagnosis says of a file of answers."""
    words = [f"responses={answers}", f"paths.root_dir={answers.parent}", *words]
    result = read_json(diagnose.run(config.compose("diagnose", words)) / "diagnosis.json")
    first = result["positions"][0]
    name = "log_likelihood_ratio" if kind == SAMPLING else "equal"
    equal = [round(each[name]) for each in result["causes"][:2]] + ["", ""]
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
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--only", nargs="*", help="mistakes whose name holds one of these")
    parser.add_argument(
        "--windows", default="[64]", help="[] of a large draft: contexts that are cut are read every round"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "planted")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "planted.csv"
    lines = pd.read_csv(path, dtype=str).to_dict("records") if path.exists() else []
    print(machine(), flush=True)

    def wanted(kind: str, name: str) -> bool:
        is_there = any((kind, name) == (line["draft"], line["planted"]) for line in lines)
        return not is_there and any(part in name for part in options.only or [""])

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
            if not wanted(kind, name):
                continue
            words = [
                f"pair.target={options.target}",
                f"pair.draft={draft}",
                f"windows={options.windows}",
                f"rounds={options.rounds}",
            ]
            served = (Templated if engine is Engine else engine)(pair, **mistake)
            answers = served.answer(written, options.out / f"{kind}-{len(lines)}.jsonl")
            lines.append(line_of(kind, name, answers, words))
            write_text(path, pd.DataFrame(lines).to_csv(index=False))
            print(lines[-1], flush=True)
        for name in SAMPLED if kind == "separate" else ():
            if not wanted(SAMPLING, name):
                continue
            prompts = [list(prompt) for _, _, prompt, _ in written]
            answers = decoded(pair, prompts, name, options.tokens, options.out / f"{kind}-{len(lines)}.jsonl")
            words = [f"pair.target={options.target}", f"pair.draft={draft}", "sampling.temperature=1", "windows=[]"]
            lines.append(line_of(SAMPLING, name, answers, words))
            write_text(path, pd.DataFrame(lines).to_csv(index=False))
            print(lines[-1], flush=True)


if __name__ == "__main__":
    answer_signals()
    main()
