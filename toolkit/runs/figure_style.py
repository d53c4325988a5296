"""One look for every figure: colours, sizes for one and two columns, and files in three formats.

Signs that the usual font lacks (Chinese, Japanese, Korean names) come from an installed font that has them, or a line says so.
PNG is for the screen, PDF and SVG for print and editing. The same data give the same bytes. No global setting stays changed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import warn
from toolkit.files.atomic import write_atomic
from toolkit.files.text import visible

Width = Literal["column", "page"]
# Inches: one column of a two-column page, and both; and the type size that is readable there.
WIDTHS: dict[Width, float] = {"column": 3.4, "page": 7.0}
FONT_SIZES: dict[Width, float] = {"column": 7.5, "page": 9.5}
DPI = 200
# Pairwise distinct with normal sight, protanopia, deuteranopia and tritanopia; contrast to white above 3 (tested).
PALETTE = ("#0072B2", "#D55E00", "#2BA37C", "#B0266E", "#2E1A7A", "#5C4400")
INK, MUTED, GRID, REST = "#1A1A1A", "#6E6E6E", "#E3E3E3", "#B4B4B4"
USUAL = frozenset(map(chr, range(0x250)))  # Latin letters and signs, which every font has
PLACEHOLDERS = "Last Resort"  # fonts that have boxes for every sign
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": DPI, "metadata": {"Software": None}},
    "pdf": {"metadata": {"CreationDate": None, "Creator": None, "Producer": None}},
    "svg": {"metadata": {"Date": None, "Creator": None}},
}
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "legend.frameon": False,
    "pdf.fonttype": 3,  # a fifth of the time that 42 takes
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "figures",
}


@contextmanager
def figure(
    path: Path | str, width: Width = "page", aspect: float = 0.62, rows: int = 1, columns: int = 1, **subplots: Any
) -> Iterator[Any]:
    """Axes [rows, columns] to draw on; at the end they are saved as `path` (.png), and as .pdf and .svg beside it.

    width: one column of a two-column page, or both; aspect: height / width of the whole figure
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    inches, size = WIDTHS[width], FONT_SIZES[width]
    sizes: dict[Any, Any] = {
        "font.size": size,
        "axes.titlesize": size * 1.1,
        "legend.fontsize": size * 0.9,
        "axes.labelsize": size,
    }
    with matplotlib.rc_context({**STYLE, **sizes}):
        drawn = Figure(figsize=(inches, inches * aspect), dpi=DPI, layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn.subplots(rows, columns, squeeze=False, **subplots)
        make_legible(drawn)
        fonts = logging.getLogger("fontTools")  # tells every font table that it leaves out of a PDF
        level = fonts.level
        fonts.setLevel(logging.WARNING)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a line has said it
                for kind, options in FORMATS.items():
                    save = partial(drawn.savefig, format=kind, **options)
                    write_atomic(Path(path).with_suffix(f".{kind}"), save)
                    drawn.set_layout_engine("none")  # the first format's layout serves all
        finally:
            fonts.setLevel(level)


def make_legible(drawn: Any) -> None:
    """Give the texts of a figure fonts that have their signs, and show signs that would turn or hide others."""
    from matplotlib.text import Text

    texts = [text for text in drawn.findobj(Text) if text.get_text()]
    for text in texts:
        text.set_text(visible(text.get_text()))
    families = fonts_for([text.get_text() for text in texts])
    for text in texts if families else ():
        text.set_fontfamily(list(dict.fromkeys([*text.get_fontfamily(), *families])))


def fonts_for(texts: Iterable[str]) -> tuple[str, ...]:
    """Font families that these texts need beside the usual one; warns, once, of signs that no installed font has."""
    unusual = frozenset("".join(texts)) - USUAL
    return _families(unusual) if unusual else ()


@cache
def _families(signs: frozenset[str]) -> tuple[str, ...]:
    """Installed fonts that have the signs which the usual one lacks, as few as there need be; warns of what none has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    def signs_in(path: str) -> set[str]:
        return {sign for sign in missing if ord(sign) in get_font(path).get_charmap()}

    missing = set(signs)
    missing -= signs_in(findfont(FontProperties()))
    families: list[str] = []
    for font in _fonts():
        if not missing:
            break
        if not font.name.startswith(PLACEHOLDERS) and (present := signs_in(font.fname)):
            families.append(font.name)
            missing -= present
    if missing:
        warn(
            f"figures: no installed font has {''.join(sorted(missing))}, boxes are drawn; install one, as fonts-noto-core or "
            "(Chinese, Japanese, Korean) fonts-noto-cjk"
        )
    return tuple(families)


def _fonts() -> Iterator[Any]:
    """The fonts of matplotlib's kept list, then those that were installed since it was written."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    listed = [*fontManager.ttflist]
    yield from listed
    for path in sorted({*findSystemFonts()} - {font.fname for font in listed}):
        try:
            fontManager.addfont(path)
        except (OSError, RuntimeError):  # a file that is no font: matplotlib passes over it, too
            continue
        yield fontManager.ttflist[-1]
