"""What this machine's processor does in a forward pass: measured in about two seconds, for costs that are modelled.

A processor reaches neither its bandwidth nor its arithmetic in the products of a forward pass, which have few rows. So these
products are timed themselves, at several numbers of rows, with more weights than caches hold. Weights are 4 bytes (float32).

    seconds = weights * product(rows) + bytes of keys and values / copying + attention / arithmetic + layers * operations

A model of one row reads the weights and is bound by memory; with a batch, or many tokens per row, it is bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch

from toolkit.files.atomic import content_hash, parse_json_file, write_json
from toolkit.runs.stage import provenance

ROWS = (1, 2, 4, 8, 16, 64, 512)
WEIGHTS, INPUTS = 2**25, 1024  # numbers in the matrix that is multiplied (128 MiB), and in each of its rows
SQUARE = 1024  # side of the product whose operations per second are told
REPEATS = 3
OPERATIONS = 50  # small tensor operations of one layer, beside its products
BYTES = 4  # of a number


@dataclass(frozen=True)
class Cpu:
    """Measured seconds and rates.

    copied     bytes per second that a copy of a large array reads and writes
    arithmetic  operations per second of a square product
    operation  seconds of an operation on a small tensor
    products   seconds per weight of a product with ROWS rows; where kernels are faster with more rows, theirs
    """

    copied: float
    arithmetic: float
    operation: float
    products: tuple[float, ...]

    @classmethod
    def measured(cls) -> Cpu:
        """Ask the machine, with the threads that torch has here."""
        source = torch.ones(WEIGHTS)
        into, square, small = torch.empty_like(source), torch.ones(SQUARE, SQUARE), torch.ones(8, 64)
        weights = source.view(-1, INPUTS)
        rows = [torch.ones(count, INPUTS) for count in ROWS]
        times = [_seconds(partial(torch.nn.functional.linear, x, weights)) for x in rows]
        return cls(
            copied=2 * BYTES * WEIGHTS / _seconds(lambda: into.copy_(source)),
            arithmetic=2 * SQUARE**3 / _seconds(lambda: square @ square),
            operation=_seconds(lambda: [small + 1 for _ in range(1000)]) / 1000,
            products=tuple((np.minimum.accumulate(times[::-1])[::-1] / WEIGHTS).tolist()),
        )

    @classmethod
    def kept(cls, folder: Path) -> Cpu:
        """The figures that a folder holds of this machine and number of threads, so that costs do not change from call to call.

        Measured, and written there, if it holds none. Prints them.
        """
        threads = torch.get_num_threads()
        path = folder / f"cpu-{content_hash([provenance()['machine'], threads], length=16)}.json"
        if path.exists():
            content = parse_json_file(path)
            cpu = cls(**{**content, "products": tuple(content["products"])})
        else:
            cpu = cls.measured()
            write_json(path, asdict(cpu))
        print(f"hardware=cpu: {cpu}, {threads} thread{'s' * (threads > 1)} ({path.name})")
        return cpu

    def __str__(self) -> str:
        few = 2 * 8 / self.products[ROWS.index(8)]
        return (
            f"{self.copied / 1e9:.1f} GB/s copied, {self.arithmetic / 1e9:.0f} GFLOP/s in square products, "
            f"{few / 1e9:.0f} at 8 rows"
        )

    def product(self, rows: float) -> float:
        """Seconds per weight of a product with this many rows: linear between those timed, proportional beyond."""
        return float(np.interp(rows, ROWS, self.products)) * max(1.0, rows / ROWS[-1])


def _seconds(work: Callable[[], object]) -> float:
    """The median over repeats, the first of which is not counted."""
    times = []
    for _ in range(1 + REPEATS):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return median(times[1:])
