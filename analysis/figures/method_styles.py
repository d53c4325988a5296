"""What a method looks like and is called, in every figure and table: one colour and marker each."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from analysis.tables.grid import ORACLE, PER_PROMPT, PLAIN, UPPER_BOUND
from toolkit.runs.figure_style import INK, MUTED, PALETTE

MARKERS = ("o", "s", "D", "^")
# The order fixes colours and markers; methods that share many figures come first.
METHODS = (
    "speculative", "specdec_pp", "rate", "confidence", "block", "svip",
    "tail", "heuristic", "adaedl", "dynamic_confidence", "specinfer", "bild",
    "spectr", "mcsd", "mcsd_naive", "importance", "greedy_multi", "mtad",
    "mtjd", "beam_sampling", "speculative_beam", "dsbd", "dsbd_head", "mtad_head",
)  # fmt: skip
LABELS = {
    "speculative": "fixed K",
    "specdec_pp": "SpecDec++",
    "svip": "SVIP",
    "adaedl": "AdaEDL",
    "block": "block verification",
    "autoregressive": "plain decoding",
    "mtad": "MTAD",
    "mtjd": "MTJD",
    "mtjd_top": "MTJD, top W",
    "bild": "BiLD",
    "dsbd": "DSBD",
    "dsbd_head": "DSBD with heads",
    "dsbd_one_cache": "DSBD, one cache",
    "dsbd_published": "DSBD as published",
    "mtad_head": "MTAD with heads",
    PER_PROMPT: "fixed K per prompt",
    UPPER_BOUND: "upper bound: p and q known",
    ORACLE: "oracle: acceptance draws known",
}
SHORT = {UPPER_BOUND: "upper bound", ORACLE: "oracle"}  # where room is scarce and the caption explains


@dataclass(frozen=True)
class Look:
    color: str
    marker: str


def look(method: str) -> Look:
    """The look of a method, the same in every figure; names outside the list get theirs from a hash."""
    fixed = {ORACLE: Look(INK, "*"), UPPER_BOUND: Look(INK, "P"), PLAIN: Look(MUTED, "o"), PER_PROMPT: Look(MUTED, "s")}
    if method in fixed:
        return fixed[method]
    number = METHODS.index(method) if method in METHODS else zlib.crc32(method.encode())
    # Six colours and four markers repeat together every twelve methods; the shift makes 24 different looks.
    return Look(PALETTE[number % 6], MARKERS[(number + number // 12) % 4])


def label(method: str) -> str:
    """A method's name in figures and tables; what follows a blank tells settings of one method apart."""
    name, blank, rest = method.partition(" ")
    return LABELS.get(name, name.replace("_", " ")) + blank + rest


def short(method: str) -> str:
    return SHORT.get(method, label(method))


def setting_name(method: str, setting: str) -> str:
    """A method with its setting, without the head: "fixed K=4", "SpecDec++ min=2 h=0.7"."""
    bare = setting.split(" head=")[0]
    name = "fixed" if method == "speculative" and bare.startswith("K=") else short(method)
    return f"{name} {bare}".strip()
