"""Do heads train well by default, whatever the draft's width? And are calibrated chances chances?

Everything goes through the commands: responses, mix, traces, train, calibration. What they make is kept below outputs/.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from analysis import calibration
from analysis.tables.files import markdown, read_table
from benchmarks.resized import resized, save
from data_gen import mix, responses, traces
from data_gen.frozen import load_frozen
from toolkit import ModelPair, train
from toolkit.acceptance import AcceptanceHead
from toolkit.config import compose
from toolkit.io import read_json
from toolkit.training.learning_rate import RATE_TIMES_WIDTH

ROOT = Path(__file__).resolve().parent.parent
FOLDER, FIGURES = ROOT / "outputs" / "heads", ROOT / "docs" / "evidence" / "figures"
DOMAINS = ("instruct", "math", "code")
WIDTHS = {64: "sliced", 96: "the toy draft", 768: "padded"}
FACTORS = (0.1, 1 / 3, 1.0, 3.0, 10.0)  # of the sweep, around the rate of the width
PROMPTS = 150  # per domain, of the learning-rate sweep
SHARED = [f"paths.root_dir={FOLDER}"]
QUIET = ["logger=csv", "head.depth=3", "loss.w_rej=6"]


def head_defaults() -> str:
    """The default training line against a sweep of learning rates, on drafts of 64, 96 and 768 dimensions."""
    torch.set_num_threads(1)
    texts = [
        run_stage(responses, "responses", [f"prompts=toy_{domain}", "prompts.split=train", f"prompts.limit={PROMPTS}"])
        for domain in DOMAINS
    ]
    lines = [line for width in WIDTHS for line in _width(width, texts)]
    table = pd.DataFrame(lines)
    gaps = ", ".join(f"{one['gap']:+.3f}" for one in lines if one["training"] == "default")
    return "\n".join([
        f"`python -m toolkit.train data.path=FOLDER head.depth=3 loss.w_rej=6` on {PROMPTS} training prompts of each domain;",
        "a tenth of the prompts are validation. The 64-wide draft is the toy draft cut to its principal directions (another,",
        "weaker draft), the 768-wide one is padded and computes the same function. A sweep sets `optimizer.lr` to a tenth, a",
        f"third, once, three and ten times {RATE_TIMES_WIDTH:g} / width and changes nothing else. The paper's settings are",
        "`+experiment=specdec_pp`. Log losses are calibrated (each scaled and shifted to its least). Gap: AUROC less the best",
        f"of the sweep; of the defaults: {gaps}.",
        "",
        markdown(table.drop(columns="gap").assign(gap=[f"{gap:+.4f}" for gap in table.gap])),
    ])  # fmt: skip


def _width(width: int, texts: Sequence[Path]) -> list[dict[str, Any]]:
    """The table's lines of one draft: default, paper's settings, the sweep's best; probe and confidence beside."""
    pair = [f"pair.draft={draft_of_width(width)}"]
    data = run_stage(mix, "mix", [f"responses=[{','.join(map(str, texts))}]", "batch_size=32", *pair])
    words = [f"data.path={data}", *QUIET, *pair]
    rates = [RATE_TIMES_WIDTH / width * factor for factor in FACTORS]
    swept = [_trained([*words, f"optimizer.lr={rate:.6g}"]) for rate in rates]
    best = max(swept, key=lambda one: float(one["AUROC"]))
    named = {
        "default": _trained(words),
        "paper's settings": _trained(["+experiment=specdec_pp", *words]),
        "best of the sweep": best,
        "worst of the sweep": min(swept, key=lambda one: float(one["AUROC"])),
    }
    about = {"width": width, "draft": WIDTHS[width]}
    return [{**about, "training": name, **line, "gap": line["AUROC"] - best["AUROC"]} for name, line in named.items()]


def _trained(words: Sequence[str]) -> dict[str, Any]:
    """Train by the command; what its summary says."""
    folder = run_stage(train, "train", words)
    scores = read_json(folder / "metrics.json")
    curve = pd.read_csv(folder / "metrics.csv")
    return {
        "rate": f"{AcceptanceHead.load(folder / 'head')[1]['learning_rate']:.2g}",
        "epochs": int(curve["val/auroc"].notna().sum()),
        "AUROC": round(scores["val/auroc"], 4),
        "log loss": round(scores["val/log_loss_calibrated"], 4),
        "probe": f"{scores['probe/auroc']:.3f}, {scores['probe/log_loss_calibrated']:.3f}",
        "confidence": f"{scores['confidence/auroc']:.3f}, {scores['confidence/log_loss_calibrated']:.3f}",
    }


def draft_of_width(width: int) -> str:
    """A checkpoint of the toy draft in this width, made if it is not there."""
    pair = ModelPair.toy()
    if width == pair.draft.config.hidden_size:
        return "toy/draft"
    folder = FOLDER / f"draft-{width}"
    if not (folder / "config.json").exists():
        known = [
            pair.tokenizer(example.prompt).input_ids
            for domain in DOMAINS
            for example in load_frozen(domain, "dev")[:60]
        ]
        save(resized(pair.draft, width, known), pair.tokenizer, folder)
    return str(folder)


def calibrations(prompts: int = 200) -> str:
    """AUROC and ECE of single tokens and of products, raw, corrected and calibrated, in and out of distribution."""
    torch.set_num_threads(1)
    found = {split: {domain: _recorded(domain, split, prompts) for domain in DOMAINS} for split in ("dev", "test")}
    parts = []
    for title, heads, known in (
        ("Heads trained on `instruct` alone", _instruct_heads(), ("instruct",)),
        ("The heads that ship with the toy pair, trained on all three domains", ModelPair.toy().head, DOMAINS),
    ):
        fitted = {domain: found["dev"][domain] for domain in known}
        words = [f"head={heads}", f"fit={_mapping(fitted)}", f"traces={_mapping(found['test'])}"]
        folder = run_stage(calibration, "calibration", words)
        parts += [f"## {title}", "", *_tables(folder), ""]
        for figure in sorted(folder.glob("reliability-*.png")):
            name = f"{figure.stem}-{'instruct' if len(known) == 1 else 'all'}.png"
            FIGURES.mkdir(parents=True, exist_ok=True)
            shutil.copy(figure, FIGURES / name)
            parts += [f"![{name}](figures/{name})", ""]
    about = f"""\
Isotonic maps and a temperature of the running product are fitted to {prompts} dev prompts of the domains in distribution, none
of them trained on. They are judged on {prompts} test prompts per domain; T = 1, at most 96 tokens. *position*: single
drafted tokens behind accepted text. *product*: the chance that all of the first 1 to 8 tokens of a round are accepted; the
round starts anywhere. *following*: the token after an accepted one, before it is drawn. Labels are exact chances, not
outcomes. ECE over 15 bins of equal width. A monotone map leaves the AUROC of single tokens as it is, ties aside.
"""
    return "\n".join([about, *parts])


def _tables(folder: Path) -> list[str]:
    """Scores of the main scopes, and the products' ECE by depth."""
    scores = read_table(folder, "scores")
    rows = []
    for (head, dataset, scope), lines in scores.groupby(["head", "dataset", "scope"], sort=False):
        if scope in ("position", "following", "product"):
            by = lines.set_index("version")
            rows.append({
                "head": head, "domain": dataset, "in distribution": "yes" if lines.in_distribution.iloc[0] else "no",
                "scope": scope, "samples": int(lines.samples.iloc[0]), "AUROC corrected": round(by.auroc["corrected"], 4),
                "AUROC calibrated": round(by.auroc["calibrated"], 4),
                **{f"ECE {version}": round(by.ece[version], 4) for version in ("raw", "corrected", "calibrated")},
                "log loss corrected": round(by.log_loss["corrected"], 4),
                "log loss calibrated": round(by.log_loss["calibrated"], 4),
                "Brier calibrated": round(by.brier["calibrated"], 4),
            })  # fmt: skip
    deep = scores[scores.scope.str.startswith("product ") & (scores.version == "calibrated")]
    depths = (
        deep.pivot_table(index=["head", "dataset"], columns="scope", values="ece", sort=False).round(4).reset_index()
    )
    return [markdown(pd.DataFrame(rows)), "", "ECE of calibrated products by depth:", "", markdown(depths)]


def _instruct_heads() -> Path:
    """A folder of both heads, trained by default on training prompts of `instruct`."""
    texts = run_stage(responses, "responses", ["prompts=toy_instruct", "prompts.split=train", "prompts.limit=1000"])
    mixed = run_stage(mix, "mix", [f"responses={texts}", "batch_size=32"])
    recorded = run_stage(
        traces,
        "traces",
        [f"responses={texts}", "hidden=true", "max_drafted=1", "replicates=2", "heads={}", "batch_size=16"],
    )
    heads = FOLDER / "instruct"
    for words in (
        [f"data.path={mixed}", "head.depth=3"],
        ["model=preread_head", "data=traced", f"data.path={recorded}"],
    ):
        folder = run_stage(train, "train", [*words, "logger=csv"])
        shutil.copytree(folder / "head", heads, dirs_exist_ok=True)
    return heads


def _recorded(domain: str, split: str, count: int) -> Path:
    """Traces of frozen prompts, with states."""
    words = [f"prompts=toy_{domain}", f"prompts.split={split}", f"prompts.limit={count}", "batch_size=64"]
    seed = 1 + ("dev", "test").index(split)
    texts = run_stage(responses, "responses", [*words, f"sampling.seed={seed}", "sampling.max_new_tokens=96"])
    return run_stage(
        traces, "traces", [f"responses={texts}", "hidden=true", "max_drafted=10", "heads={}", "batch_size=16"]
    )


def run_stage(module: Any, name: str, words: Sequence[str]) -> Path:
    """A stage below FOLDER."""
    folder: Path = module.run(compose(name, [*words, *SHARED]))
    return folder


def _mapping(folders: dict[str, Path]) -> str:
    return "{" + ", ".join(f"{name}: {folder}" for name, folder in folders.items()) + "}"
