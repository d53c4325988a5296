"""The page of predictors: which rows stand in which table."""

import numpy as np
import pandas as pd

from analysis.replay.predictor_pages import page


def line(method, domain, home=True, **more):
    facts = {"upper_bound_share": 0.5, "upper_bound_share_low": 0.4, "upper_bound_share_high": 0.6, "prompts": 128}
    facts |= dict.fromkeys(
        ("AUC", "ECE", "ECE_calibrated", "positions", "microseconds", "free", "free_calibrated"), np.nan
    )
    return {"method": method, "domain": domain, "home": home, "states": False, **facts, **more}


def test_small_rows_are_in_the_curve_alone_and_other_drafts_in_transfer_alone():
    sizes = {"statistics": 900, "statistics, 100": 100, "pre-read head, 80": 80, "pre-read head, 800": 800}
    lines = [line(name, "math", positions=size, ECE=0.1, ECE_calibrated=0.05) for name, size in sizes.items()]
    lines += [line("speculative", "math"), line("statistics of math", "math", ECE=0.1, ECE_calibrated=0.1)]
    lines += [line("statistics of math", "far", home=False, free=0.25, upper_bound_share=0.75)]
    lines += [line("statistics", "code", positions=900)]
    depths = [{"method": "statistics", "domain": domain, "depth": k, "positions": n, "ECE": e, "ECE_calibrated": 0.0}
              for domain, k, n, e in (("math", "all", 4, 9.0), ("math", "1", 1, 0.4), ("math", "2", 3, 0.1),
                                      ("code", "1", 3, 0.2), ("far", "1", 9, 0.9))]  # fmt: skip
    drift = [
        {"before": "a", "after": "b", **line(name, "b")} for name in ("statistics", "statistics, 100", "upper_bound")
    ]
    tables = {"predictors": lines, "calibration": depths, "drift": drift}
    text = page({name: pd.DataFrame(rows) for name, rows in tables.items()}, 0.2, 900)
    main, _, depth, curve, transfer, changed = (part.split("\n## ")[0] for part in text.split("\n## "))
    assert "pre-read head, 800" in main and "pre-read head, 80 " not in main and "statistics, 100" not in main
    assert "best fixed K" in main and "far" not in main and "50% [40%, 60%]" in main
    assert "0.250" in depth  # (.4 + 3 * .2) / 4: of the domains at home
    assert [row.split("|")[2].strip() for row in curve.split("\n") if "| pre-read" in row] == ["80", "800"]
    assert "75% / 25%" in transfer and "statistics, 100" not in transfer + changed
