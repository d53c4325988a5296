"""What several beams and joint thresholds buy, on the toy pair: DSBD's and MTAD's figures, measured.

Quality and forwards come from the pair itself on many prompts. Seconds come from the same methods on the padded pair
(same distributions at a realistic cost). These run on fewer prompts, one at a time, settings taking turns.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis import compare, quality
from analysis.figures import plots
from analysis.quality.base import table as counted
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import markdown, read_table, with_interval
from data_gen.prompts import ToyPrompts
from toolkit import ModelPair, config, generate

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "figures"
WARP = ["sampling.top_k=10", "sampling.top_p=0.8", "sampling.max_new_tokens=96"]
QUALITY_PROMPTS, TIMED_PROMPTS, TIMED_TOKENS = 300, 8, 48
DISTINCT_PROMPTS = 20
GREEDY_PROMPTS, SAMPLED_PROMPTS = 80, 40


def compared(grid: str, domain: str, prompts: int, group: int, pair: str, *overrides: str) -> pd.DataFrame:
    """The table of one comparison on test prompts; in outputs/, so that it goes on where it was stopped."""
    words = [
        *([f"grid={grid}"] if grid else []), f"prompts=toy_{domain}", "prompts.split=test", f"prompts.limit={prompts}",
        f"pair={pair}", f"group_size={group}", "track=false", "idle_seconds=0",
        *WARP, *overrides,
    ]  # fmt: skip
    return read_table(compare.run(config.compose("compare", words)), "comparison")


def beams() -> str:
    """Exact match and perplexity of beams, joint decoding and plain sampling, against forwards and against seconds."""
    judged = compared("beams", "math", QUALITY_PROMPTS, 20, "toy")
    timed = compared(
        "beams", "math", TIMED_PROMPTS, 1, "toy_padded", "metrics=[]", f"sampling.max_new_tokens={TIMED_TOKENS}"
    )
    speed = ["tokens_per_second", "tokens_per_second_low", "tokens_per_second_high"]
    table = judged.drop(columns=[*speed, "cache_mib"]).join(timed[[*speed, "cache_mib"]])
    about = f"math, {QUALITY_PROMPTS} test prompts, T = 1, top-k 10, top-p .8"
    names = {"exact_match": "exact match", "throughput": "tokens per target-forward time, c = .2",
             "tokens_per_second": "tokens/s on the padded pair", "mean_width": "mean width"}  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        drawn = [
            plots.scatter(
                table, x, "exact_match", (names[x], names["exact_match"]), Path(scratch) / f"beams-{x}.png", about, more
            )
            for x, more in (("throughput", (True, True)), ("tokens_per_second", (True, True)), ("mean_width", None))
        ]
        FIGURES.mkdir(parents=True, exist_ok=True)
        for path in drawn:
            shutil.copy(path, FIGURES / path.name)
    columns = {
        "exact_match": "exact match", "perplexity": "perplexity", "throughput": "tokens per target time (c = .2)",
        "tokens_per_second": "tokens/s, padded", "block_efficiency": "block efficiency",
        "draft_calls": "draft forwards per token", "mean_width": "mean width",
    }  # fmt: skip
    lines = [
        f"{about}, at most 96 tokens; intervals over groups of 20 prompts. Seconds: padded pair (207 M), "
        f"{TIMED_PROMPTS} prompts, batch 1, at most {TIMED_TOKENS} tokens. No energy counter on this machine. How many "
        "distinct texts a row of beams ends with: [beam_texts](beam_texts.md).",
        "",
        shown(table, columns),
        "",
        *[f"![exact match](figures/{path.name})" for path in drawn],
    ]
    return "\n".join(lines)


def mtad() -> str:
    """MTAD's table 5 (block efficiency), table 7 (beams of the draft) and figure 3 (threshold), on three toy domains."""
    parts = []
    for domain in ("instruct", "math", "code"):
        metrics = "metrics=[perplexity]" if domain == "code" else "metrics=[exact_match,perplexity]"
        table = compared("mtad", domain, 120, 20, "toy", metrics)
        by_beams = table[table.method == "mtad"]
        others = pd.concat([table[table.method != "mtad"], by_beams[by_beams.setting.str.contains("WS=8")]])
        taus = ["~grid", "+grid.autoregressive={}", "+grid.mtad.rule.tau=[0,0.1,0.3,0.5,0.7,0.9,0.99]"]
        by_tau = compared("", domain, 120, 20, "toy", metrics, *taus)[1:]
        columns = {"block_efficiency": "block efficiency", "throughput": "tokens per target time (c = .2)",
                   "perplexity": "perplexity", **({} if domain == "code" else {"exact_match": "exact match"})}  # fmt: skip
        parts += [
            f"## {domain}",
            "",
            "Table 5 and the others:",
            "",
            shown(others, columns),
            "",
        ]
        parts += ["Table 7, beams of the draft (tau = .1):", "", shown(by_beams, columns), ""]
        parts += ["Figure 3, threshold (8 beams):", "", shown(by_tau, columns), ""]
    head = "120 test prompts per domain, T = 1, top-k 10, top-p .8, gamma = 4, at most 96 tokens; intervals over groups of 20."
    return "\n".join([head, "", *parts])


def beam_depths() -> str:
    """MTAD and DSBD with every fixed gamma, and with heads that say how deep to draft, on three toy domains."""
    depths = "[2,3,4,6,8,12]"
    grid = [
        "~grid", "+grid.autoregressive={}", f"+grid.mtad.proposer.num_tokens={depths}", "+grid.mtad_head={}",
        "+grid.dsbd.proposer.num_layers=[1,2,3,4,6]", "+grid.dsbd_head={}",
    ]  # fmt: skip
    columns = {
        "throughput": "tokens per target time (c = .2)", "block_efficiency": "block efficiency",
        "draft_calls": "draft forwards per token", "discard_rate": "discard rate", "perplexity": "perplexity",
    }  # fmt: skip
    parts = []
    for domain in ("instruct", "math", "code"):
        table = compared("", domain, 120, 10, "toy", "metrics=[perplexity]", *grid)[1:]
        parts += [f"## {domain}", "", shown(table, columns), ""]
    head = (
        "120 test prompts per domain, T = 1, top-k 10, top-p .8, at most 96 tokens; intervals over groups of 10 prompts. DSBD: "
        "t = .9, W_min = 2. The heads were trained on other prompts and for one drafted token at a time."
    )
    return "\n".join([head, "", *parts])


def mtjd() -> str:
    """MTAD's figure 1: perplexity of MTJD over gamma, sampled and greedy, and what a cut to the W likeliest blocks does."""
    pair, metric = ModelPair.toy(), quality.get("perplexity")
    sampled = [
        "| domain | method | perplexity | nats per token less than plain sampling | of which truncation |",
        "|---|---|---|---|---|",
    ]
    searched = [
        "| domain | method | perplexity | nats per token less than greedy | texts better / equal / worse |",
        "|---|---|---|---|---|",
    ]
    for domain in ("instruct", "math", "code"):
        prompts = ToyPrompts(domain, "test", limit=GREEDY_PROMPTS).load()
        sampled += _sampled_blocks(pair, metric, domain, prompts[:SAMPLED_PROMPTS])
        searched += _searched_blocks(pair, metric, domain, prompts)
    head = "At most 96 tokens, W = 8; intervals: bootstrap over prompts, paired."
    return "\n".join([
        head,
        "",
        f"T = 1, {SAMPLED_PROMPTS} test prompts per domain. `mtjd` draws one of 8 sampled blocks: at gamma = 1 that is plain "
        "sampling. Draws from the exact joint distribution, not warped, would be plain sampling at any gamma (chain rule). "
        "At larger gamma `mtjd` gains by beam sampling's sharpening: a beam is drawn by its likelihood and weighed by "
        "it again in the next layer. `mtjd_top` draws among the 8 likeliest blocks. "
        "What it gains at gamma = 1 is top-8 truncation alone; the last column is that gain's share.",
        "",
        *sampled,
        "",
        f"T = 0, {GREEDY_PROMPTS} test prompts per domain: both methods are one, the likeliest block that beam search finds.",
        "",
        *searched,
    ])  # fmt: skip


def _sampled_blocks(pair: ModelPair, metric: Any, domain: str, prompts: Sequence[Any]) -> list[str]:
    """Rows at temperature 1: plain sampling, and both methods at every gamma."""
    plain = _nats(pair, metric, prompts, "autoregressive", temperature=1)
    lines = [f"| {domain} | plain sampling | {float(metric.value(plain.sum(0))):.3f} | | |"]
    for name in ("mtjd", "mtjd_top"):
        truncation = None
        for gamma in (1, 2, 4, 8):
            joint = _nats(pair, metric, prompts, name, f"beams.collapse_after={gamma}", temperature=1)
            gain, said = _gain(plain, joint)
            truncation = gain if name == "mtjd_top" and gamma == 1 else truncation
            share = "" if truncation is None or gain <= 0 else f"{min(1.0, truncation / gain):.0%}"
            lines.append(
                f"| {domain} | {name}, gamma = {gamma} | {float(metric.value(joint.sum(0))):.3f} | {said} | {share} |"
            )
    return lines


def _searched_blocks(pair: ModelPair, metric: Any, domain: str, prompts: Sequence[Any]) -> list[str]:
    """Rows at temperature 0: greedy decoding, and the likeliest blocks."""
    greedy = _nats(pair, metric, prompts, "autoregressive")
    lines = [f"| {domain} | greedy | {float(metric.value(greedy.sum(0))):.4f} | | |"]
    for gamma in (2, 4, 8):
        joint = _nats(pair, metric, prompts, "mtjd", f"beams.collapse_after={gamma}")
        each = greedy[:, 0] / greedy[:, 1] - joint[:, 0] / joint[:, 1]
        tally = [int((each > 1e-6).sum()), int((abs(each) <= 1e-6).sum()), int((each < -1e-6).sum())]
        lines.append(
            f"| {domain} | mtjd, gamma = {gamma} | {float(metric.value(joint.sum(0))):.4f} | {_gain(greedy, joint)[1]} "
            f"| {' / '.join(map(str, tally))} |"
        )
    return lines


def _gain(plain: np.ndarray, joint: np.ndarray) -> tuple[float, str]:
    """Nats per token that the second saves, and the same with its interval; both [n, 2]: nats and tokens of each text."""
    drawn = Bootstrap().totals(np.concatenate([plain, joint], 1))
    low, high = Bootstrap().interval(drawn[:, 0] / drawn[:, 1] - drawn[:, 2] / drawn[:, 3])
    whole = plain[:, 0].sum() / plain[:, 1].sum() - joint[:, 0].sum() / joint[:, 1].sum()
    return float(whole), f"{whole:+.4f} [{low:+.4f}, {high:+.4f}]"


def _nats(
    pair: ModelPair, metric: Any, prompts: Sequence[Any], method: str, *overrides: str, temperature: float = 0
) -> np.ndarray:
    """Nats and tokens of texts [n, 2]."""
    contents = [prompt.content for prompt in prompts]
    made = generate(
        pair, contents, method, temperature=temperature, max_new_tokens=96, batch_size=20, overrides=overrides
    )
    return counted(metric, metric.measure(prompts, made, pair))


def beam_memory() -> str:
    """Bytes of one tree cache for all beams of a row against one cache per beam, at 256 new tokens."""
    pair = ModelPair.toy()
    pair.end_ids = ()  # so that texts reach the length
    prompt = ToyPrompts("instruct", "test", limit=1).load()[0].content
    length = len(pair.encode(prompt)) + 256
    lines = [
        "| method | W | one tree, bytes | one cache per beam, bytes | share | distinct tokens at most |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    about = pair.target.config
    per_token = 2 * about.num_hidden_layers * about.num_key_value_heads * about.head_dim * pair.target.dtype.itemsize
    for name, overrides in (("beam_sampling", []), ("beam_search", []), ("speculative_beam", []), ("dsbd", [])):
        for width in (2, 4):
            words = overrides if name == "dsbd" else [*overrides, f"beams.num_beams={width}"]
            if name == "dsbd" and width == 2:
                continue
            held = _held(pair, prompt, name, words)
            beams = 6 if name == "dsbd" else width
            separate = beams * (length + 1) * per_token
            lines.append(f"| {name} | {beams} | {held[0]:,} | {separate:,} | {held[0] / separate:.2f} | {held[1]:,} |")
    head = (
        f"One prompt, 256 new tokens, T = 1; the target's cache as allocated at the end, spare slots included, against "
        f"{length + 1} slots per beam. dsbd keeps up to 6 beams."
    )
    return "\n".join([head, "", *lines])


def beam_texts() -> str:
    """How many distinct texts a row of beams ends with, and how often two beams are one: with and without truncation."""
    pair, lines = (
        ModelPair.toy(),
        ["| domain | sampling | method | beams | distinct texts |", "|---|---|---|---:|---:|"],
    )
    about = {"top-k 10, top-p .8": {"top_k": 10, "top_p": 0.8}, "none": {}}
    for domain in ("instruct", "math", "code"):
        prompts = [prompt.content for prompt in ToyPrompts(domain, "test", limit=DISTINCT_PROMPTS).load()]
        for said, warped in about.items():
            for name in ("beam_sampling", "speculative_beam", "dsbd", "beam_search"):
                made = generate(pair, prompts, name, max_new_tokens=96, batch_size=20, **warped)
                counts = [(len(g.beams), len({tuple(beam) for beam in g.beams})) for g in made]
                held, distinct = (float(np.mean(column)) for column in zip(*counts, strict=True))
                lines.append(f"| {domain} | {said} | {name} | {held:.2f} | {distinct:.2f} |")
    head = (
        f"{DISTINCT_PROMPTS} test prompts per domain, T = 1, at most 96 tokens, methods as in conf/method/. Beams are i.i.d. "
        "draws, so they coincide, the more so the more p_beam is peaked; beam search keeps the likeliest pairs, which differ. "
        "What sampled beams gain in quality they gain with so few texts to choose from."
    )
    return "\n".join([head, "", *lines])


def _held(pair: ModelPair, prompt: Any, name: str, overrides: Sequence[str]) -> tuple[int, int]:
    """Bytes of the target's cache at the end, and the most tokens it held after a round."""
    from toolkit.session.hf import HFSession

    most, sizes = [0], [0]
    keep = HFSession.keep

    def watched(session: HFSession, nodes: Any) -> Any:
        kept = keep(session, nodes)
        if session.model is pair.target:
            most[0], sizes[0] = max(most[0], *session.lengths), session.cache_bytes
        return kept

    HFSession.keep = watched  # type: ignore[method-assign]
    try:
        generate(pair, [prompt], name, max_new_tokens=256, overrides=overrides)
    finally:
        HFSession.keep = keep  # type: ignore[method-assign]
    return sizes[0], most[0]


def shown(table: pd.DataFrame, columns: dict[str, str]) -> str:
    """Some columns of a comparison, intervals in brackets."""
    text = pd.DataFrame({"method": [plots.label(m) for m in table.method], "setting": list(table.setting)})
    for name, title in columns.items():
        ends = zip(table[name], table[f"{name}_low"], table[f"{name}_high"], strict=True)
        text[title] = [with_interval(*numbers) for numbers in ends]
    return markdown(text)
