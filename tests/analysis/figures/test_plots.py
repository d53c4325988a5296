"""Figures: a palette that everybody can tell apart, and curves that group settings as one reads them."""

import warnings
from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from analysis.figures import plots
from analysis.figures.plots import PLAIN, curves_of, highlighted

# Machado, Oliveira & Fernandes (2009), severity 1; linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(color):
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def oklab(rgb):
    lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
           [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
           [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return lab @ np.cbrt(lms @ np.clip(rgb, 0, 1))


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_differ_for_every_kind_of_sight(sight):
    seen = {color: oklab(np.array(SIGHT[sight]) @ linear(color)) for color in (*plots.PALETTE, plots.INK)}
    for one, two in combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[two]) > 0.095, (one, two)


def test_colours_stand_out_from_white():
    for color in (*plots.PALETTE, plots.INK, plots.MUTED):
        luminance = np.array([0.2126, 0.7152, 0.0722]) @ linear(color)
        assert 1.05 / (luminance + 0.05) > 3


def test_every_method_has_its_own_look():
    looks = [plots.look(method) for method in (*plots.METHODS, "oracle", "autoregressive")]
    assert len(set(looks)) == len(looks)
    assert plots.look("some new method") == plots.look("some new method")


def settings(method, names):
    return pd.DataFrame({
        "method": method, "setting": names, "verification_rate": np.linspace(0.2, 0.6, len(names)),
        "discard_rate": np.linspace(1, 0.1, len(names)), "undominated": True,
        "chosen": [True, *[False] * (len(names) - 1)],
    })  # fmt: skip


def test_curves_follow_the_parameter_of_most_values():
    table = pd.concat([
        settings("speculative", ["K=2", "K=4"]),
        settings("specdec_pp", [f"h={h} head={head}" for head in "ab" for h in (0.1, 0.5, 0.9)]),
        settings("oracle", [""]),
    ])  # fmt: skip
    curves = {(method, curve.name): list(curve.setting) for method, curve in curves_of(table)}
    assert set(curves) == {("speculative", ""), ("specdec_pp", "head=a"), ("specdec_pp", "head=b"), ("oracle", "")}
    assert len(curves["specdec_pp", "head=b"]) == 3


def test_few_methods_are_in_colour():
    names = ["speculative", "svip", "tail", "rate", "adaedl", "confidence", "oracle", "autoregressive"]
    table = pd.concat([settings(method, ["h=0.1", "h=0.2"]).assign(throughput=i) for i, method in enumerate(names)])
    assert highlighted(table, most=3) == ["speculative", "confidence", "adaedl"], "the baseline, then the fastest"


def test_a_figure_has_three_formats_its_width_and_the_same_bytes_every_time(tmp_path):
    from PIL import Image

    from toolkit.runs.figure_style import DPI, WIDTHS

    table = pd.concat([settings("speculative", ["K=2", "K=4"]), settings("svip", ["h=0.1", "h=0.2", "h=0.3"])])
    one, two = (plots.pareto(table, tmp_path / name / "pareto.png", "title", width="page") for name in ("a", "b"))
    assert one.read_bytes() == two.read_bytes()
    assert {path.name for path in one.parent.iterdir()} == {"pareto.png", "pareto.pdf", "pareto.svg"}
    with Image.open(one) as image:
        assert image.width == round(WIDTHS["page"] * DPI)
    assert "undominated" in one.with_suffix(".svg").read_text(), "text stays text"


def test_texts_cover_neither_each_other_nor_points(tmp_path):
    from analysis.figures.plots import place
    from toolkit.runs.figure_style import figure

    x = np.linspace(0.2, 0.3, 6)
    with figure(tmp_path / "texts.png", "column") as ((axes,),):
        axes.scatter(x, 1 - x)
        place(axes, [(a, 1 - a, f"setting {n}", "black") for n, a in enumerate(x)])
        axes.figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in axes.texts]
        spots = axes.transData.transform(np.stack([x, 1 - x], axis=1))
    assert len(boxes) == 6
    assert not any(one.overlaps(two) for one, two in combinations(boxes, 2))
    assert not any(box.contains(*spot) for box in boxes for spot in spots)


def test_figures_of_rounds_and_costs_take_tables(tmp_path):
    rounds = pd.DataFrame(
        {"method": "svip", "setting": "h=0.1", "length": [0, 1, 2], "drafted": [0, 2, 8], "accepted": [3, 3, 4]}
    )
    positions = pd.DataFrame({
        "method": "svip", "setting": "h=0.1", "position": [1, 2], "reached": [50, 30], "accepted": [30, 10],
        "rate": [0.6, 1 / 3], "rate_low": [0.5, 0.2], "rate_high": [0.7, 0.5],
    })  # fmt: skip
    curves = pd.DataFrame({"method": ["svip"] * 3, "cost_ratio": [0.1, 0.2, 0.5], "throughput": [3.0, 2.0, 1.0]})
    made = [
        plots.lengths(rounds, tmp_path / "lengths.png", "title"),
        plots.acceptance_by_position(positions, tmp_path / "positions.png", "title"),
        plots.costs(curves, tmp_path / "costs.png", "title", 0.2),
        plots.costs(curves.assign(throughput_low=0.9, throughput_high=3.2), tmp_path / "bands.png", "title"),
    ]
    assert len({path.read_bytes() for path in made}) == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # too few rounds for any position: no curve, and no legend
        plots.acceptance_by_position(positions.assign(reached=9), tmp_path / "few.png", "title")


def test_a_sweep_in_which_only_plain_decoding_succeeded_has_its_figure(tmp_path):
    """Every other setting failed, on a full disk for one: the failures are what is said, not an axis without ends."""
    assert plots.pareto(settings(PLAIN, [""]), tmp_path / "alone.png", "plain").exists()


def test_signs_come_from_a_font_that_has_them_or_a_line_says_that_none_does(tmp_path):
    """As names in Chinese: a font that is installed is found; without one, a box and one line."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    from toolkit.runs.figure_style import figure

    usual, other = (
        get_font(findfont(FontProperties(family=[name]))).get_charmap() for name in ("sans-serif", "STIXGeneral")
    )
    sign, none = chr(min(set(other) - set(usual) - set(range(0x250)))), "\U0010fffd"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for title in (f"draft {sign}", "draft"):
            with figure(tmp_path / f"{len(title)}.png") as axes:
                axes[0, 0].set_title(title)
                axes[0, 0].set_xticks([0, 1], labels=[title, "b"])
                plots.place(axes[0, 0], [(0.5, 0.5, title, "black")])  # measured with the font that has the sign
    assert b"STIX" in (tmp_path / "7.svg").read_bytes() and b"STIX" not in (tmp_path / "5.svg").read_bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("a", "b"):
            with figure(tmp_path / f"{name}.png") as axes:
                axes[0, 0].set_title(f"{none} \u202etfard")
    (line,) = (str(warning.message) for warning in caught)
    assert line.startswith(f"figures: no installed font has {none}, boxes are drawn")
    assert "\u202e" not in (tmp_path / "a.svg").read_text() and "\ufffdtfard" in (tmp_path / "a.svg").read_text()
