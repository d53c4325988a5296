"""What a training of a head leaves: weights and curves, as tests compare them."""

import csv

import torch
from safetensors.torch import load_file


def weights(folder):
    return load_file(folder / "head" / "head.safetensors")


def same_weights(folder, other):
    left, right = weights(folder), weights(other)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def curves(folder):
    """metrics.csv without the speed."""
    rows = csv.DictReader((folder / "metrics.csv").read_text().split("\n"))
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]
