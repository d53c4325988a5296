"""python -m benchmarks.dirichlet [--out docs/evidence]: mean acceptance of every multi-draft rule and every optimum.

Pairs of distributions from the uniform Dirichlet distribution on four tokens; exact, by enumeration over all tuples of
candidates. The published column: the same setting with other pairs (arXiv:2502.18779).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

from analysis.figures import plots
from toolkit.io import write_text
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.verification import SelectionRule, get, names
from toolkit.verification.enumeration import emission
from toolkit.verification.optimal import SCHEMES, optimal_acceptances

PUBLISHED = {  # (rule or optimum, scheme, K): mean acceptance
    ("specinfer", "iid", 1): 0.570,
    ("specinfer", "iid", 2): 0.666,
    ("spectr", "iid", 2): 0.683,
    ("optimum", "iid", 2): 0.719,
    ("mcsd", "without_replacement", 2): 0.740,
    ("optimum", "greedy", 2): 0.770,
    ("optimum", "without_replacement", 2): 0.810,
}


def measure(num_pairs: int = 1000, vocab_size: int = 4, max_drafts: int = 3, seed: int = 0) -> pd.DataFrame:
    """One line per rule (or optimum), scheme and K: mean acceptance, its standard error, distance from the optimum."""
    p, q = dirichlet_pairs(num_pairs, vocab_size, seed)
    rules = [(name, how) for name in names() if isinstance(get(name), SelectionRule) for how in get(name).schemes]
    lines = []
    for count in range(1, max_drafts + 1):
        best = {how: optimal_acceptances(p, q, count, how) for how in SCHEMES}
        found = {("optimum", how): values for how, values in best.items()}
        for name, how in rules:
            if how in best:  # one draft model
                found[name, how] = emission(get(name), how, p, draft_distributions(q, count, how)).accepted
        for (name, how), values in found.items():
            lines.append({
                "rule": name,
                "scheme": how,
                "num_candidates": count,
                "acceptance": float(values.mean()),
                "standard_error": float(values.std() / num_pairs**0.5),
                "below_optimum": float((best[how] - values).mean()),
                "published": PUBLISHED.get((name, how, count)),
            })  # fmt: skip
    return pd.DataFrame(lines)


def draw_figure(table: pd.DataFrame, path: Path) -> Path:
    """Acceptance over K: a panel per scheme, the optimum dashed."""
    curves = table[table.rule != "optimum"].rename(columns={"rule": "method", "num_candidates": "K"})
    curves = curves.assign(optimum=curves.acceptance + curves.below_optimum)
    return plots.acceptance(curves, path, "uniform Dirichlet, four tokens")


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
