"""Interactive charts as Vega-Lite specifications (Altair): colours and markers as in the figures, counts under the pointer."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from analysis.figures.method_styles import look, setting_name, short
from analysis.figures.plots import highlighted
from analysis.tables.grid import PLAIN, REFERENCES
from analysis.tables.rows import COUNTS, undominated

SHAPES = {
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "P": "cross",
    "*": "M0,-1L0.24,-0.31L0.95,-0.31L0.36,0.12L0.59,0.81L0,0.38L-0.59,0.81L-0.36,0.12L-0.95,-0.31L-0.24,-0.31Z",
}  # fmt: skip
# Light colours and what they become on a dark page (contrast to its background above 4.5, tested).
DARK = {
    "#0072B2": "#4FB3E8", "#D55E00": "#FF9A4D", "#2BA37C": "#4FD1A5", "#B0266E": "#F07AB5", "#2E1A7A": "#A99BFF",
    "#5C4400": "#D9B44A", "#1A1A1A": "#F2F2F2", "#6E6E6E": "#A8A8A8",
}  # fmt: skip
HEIGHT = 340
Spec = dict[str, Any]


def frontier_chart(settings: pd.DataFrame, title: str) -> Spec:
    """Discard rate over verification rate, a point per setting; filled: undominated; a click in the legend picks methods."""
    data = settings[settings.method != PLAIN].copy()
    parts = data.setting.astype(str).str.partition(" head=")
    data["head"] = parts[2].where(parts[2] != "", "none")
    data["bare"] = parts[0].str.replace(r"^head=.*", "", regex=True)
    data["name"], data["undominated"] = data.method.map(short), data.undominated.astype(bool)
    data["joined"] = False
    for _, of_method in data.groupby(
        "method", sort=False
    ):  # a line joins settings that no other one of the method beats
        data.loc[of_method.index, "joined"] = undominated(
            of_method[["discard_rate", "verification_rate"]].to_numpy(dtype=float)
        )
    data["x"], data["y"] = data.verification_rate, data.discard_rate
    keep = [name for name in ("throughput", "prompts", *COUNTS) if name in data]
    data = data[["method", "name", "bare", "head", "x", "y", "undominated", "joined", *keep]]
    picked = [{"name": short(method)} for method in [*highlighted(data), *REFERENCES] if method in set(data.method)]
    chosen = alt.selection_point(fields=["name"], bind="legend", value=picked, name="methods")
    tips = [alt.Tooltip("name", title="method"), alt.Tooltip("bare", title="setting"), alt.Tooltip("head")]
    titles = {"x": "verification rate", "y": "discard rate"}
    tips += [alt.Tooltip(axis, title=text, format=".4f") for axis, text in titles.items()]
    tips += [alt.Tooltip(name, title=name.replace("_", " "), format=",.4~f") for name in keep]
    opacity = alt.when(chosen).then(alt.value(1.0)).otherwise(alt.value(0.18))
    title_x = ["verification rate", "(target forward passes per token)"]  # two lines: a phone is narrow
    x = alt.X("x:Q", title=title_x, scale=alt.Scale(zero=False, padding=14))
    y = alt.Y("y:Q", title="discard rate (discarded per token)")
    base = alt.Chart(data).encode(x=x, y=y, color=_colors(data), opacity=opacity)
    lines = base.mark_line(strokeWidth=1).encode(detail=alt.Detail("name:N"), order=alt.Order("x:Q"))
    lines = lines.transform_filter(alt.datum.joined)
    fill = alt.when(alt.datum.undominated).then(_colors(data)).otherwise(alt.value("transparent"))
    points = base.mark_point(size=70, strokeWidth=1.5).encode(fill=fill, shape=_shapes(data), tooltip=tips)
    return _spec(alt.layer(lines, points.add_params(chosen)), title)


def costs_chart(curves: pd.DataFrame, title: str) -> Spec:
    """Throughput over the cost ratio, a line per method, intervals as bands."""
    data = curves.assign(name=curves.method.map(short))
    chosen = alt.selection_point(fields=["name"], bind="legend", name="methods")
    opacity = alt.when(chosen).then(alt.value(1.0)).otherwise(alt.value(0.15))
    title_x = ["cost ratio c", "(draft forward pass / target forward pass)"]
    x = alt.X("cost_ratio:Q", title=title_x, scale=alt.Scale(type="log", nice=False))
    y = alt.Y("throughput:Q", title="tokens per target-forward time")
    tips = [
        alt.Tooltip("name", title="method"), alt.Tooltip("setting"), alt.Tooltip("cost_ratio", title="c", format=".3f"),
        alt.Tooltip("throughput", title="tokens per target time", format=".3f"),
    ]  # fmt: skip
    base = alt.Chart(data).encode(x=x, color=_colors(data))
    points = base.mark_point(size=26).encode(y=y, shape=_shapes(data), opacity=opacity, tooltip=tips)
    layers = [base.mark_line().encode(y=y, opacity=opacity), points.add_params(chosen)]
    if "throughput_low" in data:
        ends = {"y": alt.Y("throughput_low:Q", title="tokens per target-forward time"), "y2": "throughput_high:Q"}
        layers.insert(0, base.mark_area(opacity=0.15).encode(**ends))
    return _spec(alt.layer(*layers), title)


def positions_chart(positions: pd.DataFrame, title: str) -> Spec:
    """Acceptance rate by position in the round, a line per setting, numerator and denominator under the pointer."""
    data = positions[positions.reached >= 10].copy()
    data["name"] = [setting_name(*key) for key in zip(data.method, data.setting, strict=True)]
    tips = [
        alt.Tooltip(name, format=".4~f") if name == "rate" else name
        for name in ("name", "position", "accepted", "reached", "rate")
    ]
    x = alt.X("position:O", title="position in the round (k-th drafted token)", axis=alt.Axis(labelAngle=0))
    low = max(float(data.rate.min()) - 0.2, 0.0) if len(data) else 0.0
    axis_title, span = "acceptance rate (accepted / reached)", alt.Scale(domain=[round(low, 1), 1], clamp=True)
    y = alt.Y("rate:Q", title=axis_title, scale=span)
    base = alt.Chart(data).encode(x=x, color=_colors(data))
    dash = alt.StrokeDash("name:N", legend=None)
    layers = [
        base.mark_line().encode(y=y, strokeDash=dash),
        base.mark_point(size=40).encode(y=y, shape=_shapes(data), tooltip=tips),
    ]
    if "rate_low" in data:
        ends = {"y": alt.Y("rate_low:Q", scale=span, title=axis_title), "y2": "rate_high:Q"}
        layers.insert(0, base.mark_area(opacity=0.15, clip=True).encode(**ends, detail="name:N"))
    return _spec(alt.layer(*layers), title)


def reliability_chart(bins: pd.DataFrame, title: str) -> Spec:
    """Share accepted over mean prediction; the size of a point is the number of positions in its bin."""
    columns = {"mean_prob": "predicted", "mean_label": "accepted", "count": "positions"}
    data = bins[bins["count"] > 0].rename(columns=columns)
    names = list(dict.fromkeys(map(str, data.scores)))
    looks = [look(method) for method in ("speculative", "specdec_pp", "rate", "confidence")]
    span = alt.Scale(domain=[0, 1])
    scale = alt.Scale(domain=names, range=[looks[i % 4].color for i in range(len(names))])
    colors = alt.Color("scores:N", scale=scale, legend=_legend())
    base = alt.Chart(data[["scores", "predicted", "accepted", "positions"]]).encode(
        x=alt.X(
            "predicted:Q", title="predicted P(accepted)", scale=span, axis=alt.Axis(values=[n / 5 for n in range(6)])
        ),
        y=alt.Y("accepted:Q", title="share accepted", scale=span),
        color=colors,
    )
    tips = [alt.Tooltip(name, format=".4~f") for name in ("predicted", "accepted", "positions")]
    points = base.mark_circle(opacity=0.9).encode(size=alt.Size("positions:Q", legend=None), tooltip=["scores", *tips])
    corners = alt.Chart(pd.DataFrame({"x": [0, 1], "y": [0, 1]}))
    diagonal = corners.mark_line(strokeDash=[4, 4], color="#6E6E6E").encode(x="x:Q", y="y:Q")
    return _spec(alt.layer(diagonal, base.mark_line(strokeWidth=1), points), title)


def _colors(data: pd.DataFrame) -> Any:
    named = dict(zip(data.name, data.method, strict=True))
    scale = alt.Scale(domain=list(named), range=[look(method).color for method in named.values()])
    return alt.Color("name:N", scale=scale, legend=_legend())


def _shapes(data: pd.DataFrame) -> Any:
    named = dict(zip(data.name, data.method, strict=True))
    scale = alt.Scale(domain=list(named), range=[SHAPES[look(method).marker] for method in named.values()])
    return alt.Shape("name:N", scale=scale, legend=_legend())


def _legend() -> Any:
    return alt.Legend(title=None, orient="bottom", labelLimit=260, symbolOpacity=1)  # report.js: columns by width


def _spec(chart: Any, title: str) -> Spec:
    """The chart as plain JSON, as wide as its space on the page; a screen reader reads the title."""
    with alt.data_transformers.enable("default", consolidate_datasets=False, max_rows=None):
        spec: Spec = chart.properties(width="container", height=HEIGHT, description=title).to_dict()
    spec.pop("config", None)  # the page's colours, light or dark
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec
