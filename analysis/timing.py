"""python -m analysis.timing prompts=toy_math: what a forward pass of each model costs here, and whether counts explain time.

With prompts=... prompts are decoded and timed, and seconds are regressed on counts (`analysis.loads.regression`). With
traces=FOLDER head=HEAD the price of the rate rule is solved on a recording, and nothing is timed (`analysis.replay.price`).
With engine=... a serving engine's rounds are priced by its answers, and no model is loaded (`analysis.loads.engine_costs`).
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("timing")

from pathlib import Path

from analysis import keys


def run(cfg: keys.Timing) -> Path:
    if cfg.traces is not None:
        from analysis.replay.price import solve_prices

        return solve_prices(cfg)
    if cfg.engine == "xllamacpp" or str(cfg.engine).startswith(("http://", "https://")):
        from analysis.loads.engine_answers import ask_server, probe_xllamacpp

        return probe_xllamacpp(cfg) if cfg.engine == "xllamacpp" else ask_server(cfg)
    if cfg.engine is not None:
        from analysis.loads.engine_costs import price_engine

        return price_engine(cfg)
    from analysis.loads.regression import regress

    return regress(cfg)
