"""python -m analysis.advise pair.target=T pair.draft=[D1,D2] prompts.path=P.jsonl batch_sizes=[1,4,16]: which draft, how far?

With pair=... recordings are replayed at the costs of this machine, of another one or of a file (`analysis.loads.advice`). With
responses=FILE.jsonl an engine's own counts are read, and no model is loaded (`analysis.loads.observed`).
"""

from __future__ import annotations

if __name__ == "__main__":  # the rest is imported once the command line is right
    from toolkit.runs.command import main

    main("advise")

from pathlib import Path

from analysis import keys


def run(cfg: keys.Advise) -> Path:
    if cfg.responses is not None:
        from analysis.loads.observed import advise_from_counts

        return advise_from_counts(cfg)
    from analysis.loads.advice import advise_by_replay

    return advise_by_replay(cfg)
