"""How fast a device decodes: seconds of forwards, the memory bandwidth they reach, tokens per second against `transformers`.

A forward is one call of a session's `extend`, bookkeeping included, launched back to back with others. On CUDA it is
timed by events on the device. Weights of zeros are read like any other: a padded model has the cost of its shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.decoders import (
    Decoder,
    ForwardMeter,
    capturing,
    constant,
    eager,
    engine,
    held_sessions,
    theirs,
)
from benchmarks.gpu_exactness import fixed
from data_gen.held_out import load_frozen
from toolkit import config
from toolkit.costs.clock import Stopwatch, now
from toolkit.costs.measure import measure
from toolkit.models.pair import ModelPair

PEAKS = {  # bytes per second by a part of the device's name, more special names first
    "H100 NVL": 3.9e12, "H100 PCIe": 2.0e12, "H100": 3.35e12, "H200": 4.8e12, "A100-SXM4-80GB": 2.04e12,
    "A100 80GB PCIe": 1.94e12, "A100": 1.56e12, "L40S": 0.864e12, "RTX 4090": 1.01e12, "L4": 0.3e12,
}  # fmt: skip
CONTEXT = 40  # tokens before a forward that is timed, and at most in a prompt
REFERENCE = "transformers autoregressive"
DOMAINS = ("math", "code")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    widths: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8, 16)
    contexts: tuple[int, ...] = (CONTEXT, 512, 2048)
    repeats: int = 20
    groups: int = 6  # of prompts, at most
    new_tokens: int = 64
    copied: int = 2**31  # bytes of the copy that bandwidth is measured by
    minutes: float = 4.0  # for tokens per second at a batch size: fewer groups are decoded if they do not fit


QUICK = Sizes((1, 2, 16), (CONTEXT, 64), 3, 1, 8, 2**24, 0.5)


# -- forwards ---------------------------------------------------------------------------------------------------------


def forwards(pair: ModelPair, sizes: Sizes) -> str:
    """Milliseconds by width and context, captured and eager, of target and draft; c; bandwidth of one-token forwards."""
    columns = [(role, captured) for role in ("target", "draft") for captured in (True, False)]
    tables = []
    for role, captured in columns:
        alone = ModelPair(target=getattr(pair, role), end_ids=())
        alone = capturing(alone) if captured else eager(alone)
        tables += measure(alone, 1, sizes.widths, sizes.contexts, sizes.repeats)
    lines = [
        f"Milliseconds of one forward, median of {sizes.repeats}, batch 1. c: one draft token over one target token.",
        "",
        "| tokens before | width | target, captured | target, eager | draft, captured | draft, eager |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for context in tables[0].contexts:
        for width in sizes.widths:
            entries = [f"{1e3 * table.target(width, context):.3f}" for table in tables]
            lines.append(f"| {context} | {width} | {' | '.join(entries)} |")
    captured, plain, draft_captured, draft_plain = (table.target(1, CONTEXT) for table in tables)
    lines += ["", f"c = {draft_captured / captured:.3f} captured, {draft_plain / plain:.3f} eager.", ""]
    return "\n".join([*lines, *bandwidth(pair, captured, plain, sizes)])


def bandwidth(pair: ModelPair, captured: float, plain: float, sizes: Sizes) -> list[str]:
    """What reading the target's weights once per token reaches, beside a plain copy and the data sheet."""
    device, weights = pair.device, bytes_read(pair.target)
    copied = copy_bandwidth(device, sizes.copied)
    name = device_name(device)
    peak = next((value for part, value in PEAKS.items() if part in name), None)
    against = f"the data sheet's {peak / 1e12:.2f} TB/s" if peak else "the measured copy (no data sheet known)"
    lines = [
        f"One-token target forwards read {weights / 1e9:.2f} GB of weights. A large copy on this device moves "
        f"{copied / 1e12:.3f} TB/s (read + written).",
        "",
        f"| forward | TB/s | of {against} | of the copy |",
        "|---|---:|---:|---:|",
    ]
    for how, seconds in (("captured", captured), ("eager", plain)):
        rate = weights / seconds
        lines.append(f"| {how} | {rate / 1e12:.3f} | {rate / (peak or copied):.0%} | {rate / copied:.0%} |")
    return lines


def bytes_read(model: Any) -> int:
    """Bytes of weights that a one-token forward reads: all but the rows of the input embeddings that are looked up."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return total - (0 if embeddings is head else embeddings.numel() * embeddings.element_size())


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second, read and written, of a copy from the device to itself."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    watch = Stopwatch(device)
    for _ in range(3 + 10):
        with watch:
            target.copy_(source)
    return 2 * size / median(watch.seconds[3:])


def device_name(device: torch.device) -> str:
    """As its driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# -- tokens per second ------------------------------------------------------------------------------------------------


@dataclass
class Entrant:
    """A decoder with the pair it runs on, and what it has done so far."""

    decoder: Decoder
    pair: ModelPair
    warm_up: int
    tokens: int = 0
    seconds: float = 0.0
    target_forwards: int = 0
    draft_forwards: int = 0

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def work(self, prompts: list[list[int]], max_new_tokens: int, seed: int) -> None:
        """Decode one group of prompts, timed from an idle device to an idle device."""
        draft_model = self.pair.draft or torch.nn.Identity()  # a target alone: nothing is counted
        with ForwardMeter(self.pair.target) as target, ForwardMeter(draft_model) as draft:
            started = now([self.pair.device])
            self.tokens += sum(map(len, self.decoder.run(self.pair, prompts, max_new_tokens, seed, 1.0)))
            self.seconds += now([self.pair.device]) - started
        self.target_forwards += target.calls
        self.draft_forwards += draft.calls


def entrants(pair: ModelPair, batch_size: int) -> list[Entrant]:
    """Everybody who takes part at a batch size. Who captures has caches, and so captures, of his own."""
    field = [Entrant(theirs(REFERENCE), pair, 1)]
    methods = {"autoregressive": config.method("autoregressive"), "lookup_rate": config.method("lookup_rate")}
    if pair.drafts:
        field.append(Entrant(theirs("transformers assisted K=4", **constant(4)), pair, 1))
        methods |= {f"speculative K={k}": fixed(k) for k in (2, 4)}
        methods |= {"tree 2 x 2": config.method("mcsd", ["proposer.k_config=2x2"])}
        methods |= {"best_source": config.method("best_source")}
        methods |= {"rate": config.method("rate", head=pair.head)}  # without a head: statistics of q
    else:
        field.append(Entrant(theirs("transformers lookup", lookup=10), pair, 1))
    for name, method in methods.items():
        build = lambda _, method=method: method
        field.append(Entrant(engine(f"{name}, captured", build), capturing(pair), 4))
        field.append(Entrant(engine(f"{name}, eager", build), eager(pair), 1))
    return [entrant for entrant in field if entrant.decoder.batched or batch_size == 1]


def decoding(pair: ModelPair, sizes: Sizes, batch_size: int) -> str:
    """Tokens per second, every decoder in turn on every group of prompts, in an order that rotates."""
    field, done = _race(pair, batch_size, sizes)
    lines = [
        f"Temperature 1, at most {sizes.new_tokens} new tokens of prompts of at most {CONTEXT}. {done} groups of {batch_size}. "
        "Every decoder decodes every group, in an order that rotates, after a warm-up.",
        "",
        f"| decoder | tokens/s | x {REFERENCE} | tokens per row and target forward "
        "| draft forwards per target forward | captured shapes |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*lines, *(_line(entrant, field[0], batch_size) for entrant in field)])


def _race(pair: ModelPair, batch_size: int, sizes: Sizes) -> tuple[list[Entrant], int]:
    """The field after it has decoded up to `groups` groups, at least one; and how many."""
    deadline = perf_counter() + 60 * sizes.minutes
    field = entrants(pair, batch_size)
    prompts = prompts_of(pair, batch_size * (sizes.groups + 1))
    for entrant in field:
        for seed in range(entrant.warm_up):
            if not seed or perf_counter() < deadline:
                entrant.decoder.run(entrant.pair, prompts[:batch_size], sizes.new_tokens, seed % 2, 1.0)
    done = 0
    while done < sizes.groups and (not done or perf_counter() < deadline):
        group = prompts[batch_size * (done + 1) : batch_size * (done + 2)]
        for entrant in field[done % len(field) :] + field[: done % len(field)]:
            entrant.work(group, sizes.new_tokens, done)
        done += 1
    return field, done


def _line(entrant: Entrant, reference: Entrant, batch_size: int) -> str:
    drafts = entrant.draft_forwards / max(entrant.target_forwards, 1)
    shapes = [len(session.captures.known) for session in held_sessions(entrant.pair)]
    return (
        f"| {entrant.decoder.name} | {entrant.speed:.1f} "
        f"| {entrant.speed / reference.speed:.2f} "
        f"| {entrant.tokens / max(entrant.target_forwards, 1) / batch_size:.2f} | {drafts:.2f} "
        f"| {' and '.join(map(str, shapes)) or '-'} |"
    )


def prompts_of(pair: ModelPair, count: int) -> list[list[int]]:
    """Short test prompts, alternating between two domains; all caches then have one size, and captures last."""
    mixed = [example for both in zip(*(load_frozen(d, "test") for d in DOMAINS), strict=True) for example in both]
    short = [ids for ids in (pair.encode(example.prompt) for example in mixed) if len(ids) <= CONTEXT]
    return [short[i % len(short)] for i in range(count)]
