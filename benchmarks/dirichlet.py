"""python -m benchmarks.dirichlet [--out docs/evidence]: mean acceptance of every multi-draft rule and every optimum.

Pairs of laws from the uniform Dirichlet law on four tokens; exact, by enumeration over all tuples of candidates. The
published column: the same setting with other pairs (arXiv:2502.18779's setting, as restated in the papers' pages).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.plots import label, look
from toolkit.io import write_atomic, write_text
from toolkit.verification import SelectionRule, get, names
from toolkit.verification.enumeration import emission
from toolkit.verification.optimal import SCHEMES, optimal_acceptances

PUBLISHED = {  # (rule or optimum, drawing, K): mean acceptance
    ("specinfer", "iid", 1): 0.570,
    ("specinfer", "iid", 2): 0.666,
    ("spectr", "iid", 2): 0.683,
    ("optimum", "iid", 2): 0.719,
    ("mcsd", "without_replacement", 2): 0.740,
    ("optimum", "greedy", 2): 0.770,
    ("optimum", "without_replacement", 2): 0.810,
}


def measure(num_pairs: int = 1000, vocab_size: int = 4, max_drafts: int = 3, seed: int = 0) -> pd.DataFrame:
    """One line per rule (or optimum), drawing and K: mean acceptance, its standard error, distance from the optimum."""
    weights = np.random.default_rng(seed).dirichlet(np.ones(vocab_size), (2, num_pairs))
    p, q = torch.from_numpy(weights)
    rules = [(name, how) for name in names() if isinstance(get(name), SelectionRule) for how in get(name).drawing]
    lines = []
    for count in range(1, max_drafts + 1):
        best = {how: optimal_acceptances(p, q, count, how) for how in SCHEMES}
        found = {("optimum", how): values for how, values in best.items()}
        for name, how in rules:
            if how in best:  # one draft model
                laws = q.unsqueeze(1).expand(-1, count, -1)
                found[name, how] = emission(get(name), how, p, laws).accepted
        for (name, how), values in found.items():
            lines.append({
                "rule": name,
                "drawing": how,
                "num_candidates": count,
                "acceptance": float(values.mean()),
                "standard_error": float(values.std() / num_pairs**0.5),
                "below_optimum": float((best[how] - values).mean()),
                "published": PUBLISHED.get((name, how, count)),
            })  # fmt: skip
    return pd.DataFrame(lines)


def draw_figure(table: pd.DataFrame, path: Path) -> Path:
    """Acceptance over K: every rule under its first drawing, and the optima dashed."""
    figure = Figure(figsize=(8.2, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, how), lines in table.groupby(["rule", "drawing"], sort=False):
        if name == "optimum":
            dashes = {"iid": ":", "without_replacement": "--", "greedy": "-."}[str(how)]
            text = f"optimum, {label(str(how))}"
            axes.plot(
                lines.num_candidates,
                lines.acceptance,
                color="#1A1A1A",
                linestyle=dashes,
                linewidth=1,
                zorder=5,
                label=text,
            )
        elif how == get(str(name)).drawing[0]:
            style = look(str(name))
            axes.plot(
                lines.num_candidates, lines.acceptance, color=style.color, marker=style.marker, label=label(str(name))
            )
    axes.set(xlabel="candidates", ylabel="mean acceptance", xticks=sorted(table.num_candidates.unique()))
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return write_atomic(path, lambda temporary: figure.savefig(temporary, format="png", metadata={"Software": None}))


def main() -> None:
    """Print the table; with --out write dirichlet.csv and dirichlet.png there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for dirichlet.csv and dirichlet.png")
    parser.add_argument("--pairs", type=int, default=1000)
    arguments = parser.parse_args()
    table = measure(arguments.pairs)
    print(table.to_string(index=False, float_format="{:.4f}".format, na_rep=""))
    if arguments.out:
        write_text(arguments.out / "dirichlet.csv", table.to_csv(index=False, float_format="%.6f"))
        print(draw_figure(table, arguments.out / "dirichlet.png"))


if __name__ == "__main__":
    main()
