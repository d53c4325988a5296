"""Sweeps of table pairs: everything a real sweep does, in seconds. Configs name `IdPrompts` of this module."""

from types import SimpleNamespace

import torch

from toolkit import config

VOCAB, ORDER, END = 5, 2, 0


class IdPrompts:
    """Random prompts as token ids, for pairs without a tokenizer; every split has its own."""

    def __init__(self, limit, split="dev", domain="ids"):
        self.limit, self.split = limit, split

    def load(self):
        generator = torch.Generator().manual_seed(len(self.split))
        lengths = torch.randint(5, 10, (self.limit,), generator=generator).tolist()
        return [
            SimpleNamespace(
                id=f"{self.split}-{i}", content=torch.randint(1, VOCAB, (n,), generator=generator).tolist(), answer=None
            )
            for i, n in enumerate(lengths)
        ]


def table(seed):
    """Config of a random table over VOCAB tokens."""
    return {
        "_target_": "toolkit.engine.TabularModel.random",
        "vocab_size": VOCAB,
        "order": ORDER,
        "sharpness": 1.3,
        "generator": {"_target_": "toolkit.sampling.row_generator", "seed": seed, "row": 0},
    }


PAIR = {"_target_": "toolkit.models.pair.ModelPair", "target": table(1), "draft": table(2), "end_ids": [END]}


def sweep_config(folder, *, grid, split="dev", limit=7, pair=None, track=False, **changes):
    """conf/sweep.yaml on a table pair; `folder` is the root of output folders."""
    cfg = config.compose("sweep", [f"paths.root_dir={folder}", "sampling.max_new_tokens=12"])
    cfg.pair, cfg.grid, cfg.track, cfg.source = pair or PAIR, grid, track, "live"
    cfg.prompts = {"_target_": f"{__name__}.IdPrompts", "limit": limit, "split": split, "domain": "ids"}
    cfg.merge_with(changes)
    return cfg
