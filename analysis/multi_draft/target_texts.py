"""Target texts and what every rule accepts along them, part by part: finished parts are kept.

A part is PART prompts. It has one file of texts and one per method, with the sums over each text's positions. Their
names hold a hash of everything they depend on. Prompt r draws its positions and candidates from the random stream
(seed, r), the same for all methods.

Shapes: N positions of a text, R draws, K candidates, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor

from analysis.tables.files import read_parquet, write_parquet
from toolkit import config
from toolkit.config.identity import contents_of
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.generation_config import resolved
from toolkit.models.pair import ModelPair, fingerprint
from toolkit.models.teacher import TextReading as Reading
from toolkit.models.teacher import readings_along
from toolkit.sampling import Sampling, row_generator
from toolkit.verification import SelectionRule
from toolkit.verification.base import acceptance
from toolkit.verification.optimal import independent_bounds, optimal_acceptances
from toolkit.verification.schemes import candidates, most_probable

MODELS = ("target", "draft")
PART = 16  # prompts; an interruption loses at most one part's work
SUMS = ("accepted", "drafted", "optimum")  # over the positions of a text
TOLERANCE = 1e-4  # by which the optimum without replacement may be off: see `optima`


class ExpectedAcceptance(NamedTuple):
    """accepted [N]: P(a candidate is emitted by acceptance); drafted [N]: P(the emitted token is one)."""

    accepted: Tensor
    drafted: Tensor


def expected_acceptance(
    rule: SelectionRule, scheme: str, target_probs: Tensor, draft_probs: Tensor, uniforms: Tensor
) -> ExpectedAcceptance:
    """Means over R draws of the candidates, in float64, as near their expectations as control variates make them.

    target_probs [N, V]; uniforms [R, N, K]
    draft_probs  what the scheme draws K candidates from: q [N, V], one q for each [N, K, V] (independent), logits (top_k)
    """
    by_acceptance, by_extra = torch.zeros(2, len(target_probs), dtype=torch.float64, device=target_probs.device)
    num_drafts, alike = uniforms.shape[-1], scheme != "independent"
    uniforms = uniforms[:1] if scheme == "top_k" else uniforms
    for row in uniforms:
        # Candidates [N, K] of each position, how many are real [N], and what each was drawn from [N, K, V].
        if scheme == "top_k":
            drawn, counts = most_probable(draft_probs, num_drafts)
            distributions = torch.nn.functional.one_hot(drawn, draft_probs.shape[-1])
        else:
            drawn, counts = candidates(scheme, draft_probs, row)
            distributions = draft_probs.unsqueeze(-2).expand(-1, num_drafts, -1) if alike else draft_probs
        distributions = distributions.to(target_probs.dtype)
        accept, residual = rule.distribution(target_probs, distributions, drawn, counts)
        accepted = accept.sum(-1).double()
        real = torch.arange(num_drafts, device=drawn.device) < counts.unsqueeze(-1)
        redrawn = residual - residual.scatter(-1, torch.where(real, drawn, drawn[..., :1]), 0.0)
        by_extra += (1 - accepted) * redrawn.sum(-1)
        if scheme == "without_replacement" or (scheme == "greedy" and num_drafts == 1):
            # A control variate of mean 0: how much more than on average the first candidate is accepted.
            refused = 1 - torch.minimum(target_probs, draft_probs).sum(-1, dtype=torch.float64)
            refusal = 1 - acceptance(target_probs, draft_probs, drawn[..., 0]).double()
            accepted = accepted - (refused - refusal) * refused ** (num_drafts - 1)
        by_acceptance += accepted
    summed = rule.accepted(target_probs, distributions) if scheme in ("iid", "independent") else None
    mean = by_acceptance / len(uniforms) if summed is None else summed.double()
    return ExpectedAcceptance(mean, mean + by_extra / len(uniforms))


def spread_uniforms(shape: tuple[int, int, int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Uniforms [R, N, K] for R draws: per position and candidate one in each of R equal parts (a Latin hypercube)."""
    parts = torch.rand(shape, generator=generator, dtype=dtype).argsort(dim=0)
    within = torch.rand(shape, generator=generator, dtype=dtype)
    return ((parts + within) / shape[0]).clamp(max=1 - torch.finfo(dtype).eps)


def optima(target_probs: Tensor, draft_probs: Tensor, num_drafts: int, scheme: str) -> Tensor:
    """`optimal_acceptances` [N]; of independent candidates with different distributions an upper bound.

    Without replacement, K > 2: q's least probable tokens are left out, each a candidate with probability below TOLERANCE.
    """
    if scheme == "top_k":
        tokens, counts = most_probable(draft_probs, num_drafts)
        real = torch.arange(num_drafts, device=tokens.device) < counts.unsqueeze(-1)
        return (target_probs.gather(-1, tokens) * real).sum(-1, dtype=torch.float64)
    if scheme == "independent":
        return independent_bounds(target_probs, draft_probs)
    if scheme == "without_replacement" and num_drafts > 2:
        # Both distributions on the tokens of q that count, and one more token that q cannot draw, with the rest of p.
        q, order = draft_probs.double().sort(dim=-1, descending=True)
        behind = q.flip(-1).cumsum(-1).flip(-1)  # the mass of each token and all less likely ones
        left = behind[..., min(num_drafts, q.shape[-1] - 1)].unsqueeze(-1)
        size = max(int((behind > TOLERANCE / num_drafts * left).sum(-1).max()), min(num_drafts, q.shape[-1]))
        whole = target_probs.double()
        q, p = q[..., :size], whole.gather(-1, order[..., :size])
        rest = (whole.sum(-1, keepdim=True) - p.sum(-1, keepdim=True)).clamp(min=0)
        p, q = torch.cat([p, rest], -1), torch.cat([q, torch.zeros_like(rest)], -1)
        target_probs, draft_probs = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return optimal_acceptances(target_probs, draft_probs, num_drafts, scheme)


@dataclass(frozen=True)
class TargetText:
    prompt: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]


@dataclass(frozen=True)
class MethodRule:
    """A method's rule and scheme.

    sources  draft model and temperature (None: the walk's) of each independent candidate, or of all
    """

    method: str
    rule: SelectionRule
    scheme: str
    key: str
    sources: tuple[tuple[int, float | None], ...]

    @classmethod
    def of(
        cls, method: str, overrides: Sequence[str] = (), sampling: Sampling | None = None, num_drafts: int = 1
    ) -> MethodRule:
        """Rule and scheme of a method of conf/method/ at these settings, as it decodes with `num_drafts` draft models.

        At temperature 0 that is `mcsd_naive` with the draft's most probable tokens, whatever the method (`Method.at`).
        Raises InputError if the method does not choose among candidates.
        """
        settings = config.plain(config.method_config(method, overrides))
        built = config.instantiate(settings)
        if not isinstance(built.rule, SelectionRule):
            raise InputError(f"methods: expected methods that choose among candidates, got {method}")
        if sampling is not None:
            built = built.at(sampling)
        rule, scheme = built.rule, built.proposer.scheme
        parts = [contents_of(settings).identity["rule"], scheme]
        temperature = built.draft_temperature
        drawn_from = built.proposer.sources(num_drafts) if scheme == "independent" else [(0, None)]
        sources = tuple((draft, temperature if own is None else own) for draft, own in drawn_from)
        if scheme == "independent" or temperature is not None:
            parts.append(sources)
        return cls(method, rule, scheme, content_hash(parts), sources)

    @property
    def num_models(self) -> int:
        return 1 + max(draft for draft, _ in self.sources)

    def draft_side(self, reading: Reading, temperature: float | None, num_drafts: int) -> Tensor:
        """What K candidates are drawn from, for `expected_acceptance`. temperature: of drafts without one of their own."""
        if self.scheme == "top_k":
            return reading.draft_logits[0]
        probs = [
            reading.draft_probs(temperature if own is None else own, draft) for draft, own in self.sources[:num_drafts]
        ]
        if self.scheme != "independent":
            return probs[0]
        return torch.stack([probs[k % len(probs)] for k in range(num_drafts)], -2)


@dataclass(frozen=True)
class Walk:
    """Which texts, and how they are looked at.

    source      prompts (decoded plainly with the target), or ready texts
    num_drafts  the K
    positions   per text; None: all
    draws       of the candidates per position
    optimum     whether the best that any rule could do is computed; else it is not a number
    """

    pair: ModelPair
    source: Sequence[Any]
    sampling: Sampling
    num_drafts: Sequence[int]
    positions: int | None
    draws: int
    seed: int
    draft_temperature: float | None
    batch_size: int
    optimum: bool = True

    def __post_init__(self) -> None:
        if not self.pair.drafts:
            raise InputError("acceptance needs a draft model, the pair has none")
        object.__setattr__(self, "sampling", resolved(self.sampling, self.pair.target))
        if not self.source:
            raise InputError("expected texts or prompts to walk along, got none")
        if not self.num_drafts:
            raise InputError("num_drafts: expected positive integers, got []")
        for text in self.source:
            ids = [*text.prompt_ids, *text.token_ids] if isinstance(text, TargetText) else []
            if len(ids) > self.pair.max_length:
                raise InputError(f"text {text.prompt}: {len(ids)} tokens exceed {self.pair.context}")
            if ids and not 0 <= min(ids) <= max(ids) < (size := self.pair.vocab_size):
                raise InputError(f"text {text.prompt}: expected token ids in [0, {size}), got {min(ids)}..{max(ids)}")

    def run(self, method_rules: Sequence[MethodRule], folder: Path, on_part: Callable[[int], object]) -> pd.DataFrame:
        """One row per method, prompt and K: `method`, `scheme`, `prompt`, `K`, `positions` and SUMS."""
        models = max(method_rule.num_models for method_rule in method_rules)
        frames = []
        for first in range(0, len(self.source), PART):
            digest = self._digest(first, models)
            paths = {m: folder / f"{m.method}-{m.key}-{first:06d}-{digest}.parquet" for m in method_rules}
            done = {method_rule: _read(path) for method_rule, path in paths.items()}
            if missing := [method_rule for method_rule, frame in done.items() if frame is None]:
                texts = self._texts(first, folder / f"texts-{first:06d}-{digest}.parquet")
                for method_rule, frame in self._score(texts, first, missing).items():
                    write_parquet(frame, paths[method_rule])
                    done[method_rule] = frame
            for method_rule, frame in done.items():
                assert frame is not None
                frames.append(frame.assign(method=method_rule.method, scheme=method_rule.scheme))
            on_part(len(self.source[first : first + PART]))
        return pd.concat(frames, ignore_index=True)

    def readings(self, folder: Path) -> Iterator[Reading]:
        """What target and first draft say at the positions of one text after another; `folder` as in `run`, afterwards."""
        for first in range(0, len(self.source), PART):
            sequences = self._texts(first, folder / f"texts-{first:06d}-{self._digest(first, 1)}.parquet")
            for _, _, reading in self._read(sequences, first, 1):
                yield reading

    def _digest(self, first: int, models: int) -> str:
        part = self.source[first : first + PART]
        prints = [fingerprint(model) for model in (self.pair.target, *self.pair.drafts[:models])]
        contents = [vars(item) if isinstance(item, TargetText) else [item.id, item.content] for item in part]
        settings: list[Any] = [list(self.num_drafts), self.positions, self.draws, self.seed, self.draft_temperature]
        settings += [] if self.optimum else ["no optimum"]
        return content_hash([prints, vars(self.sampling), contents, first, settings])

    def _texts(self, first: int, path: Path) -> list[TargetText]:
        """The texts of a part. Left out are empty ones, those a draft cannot read, and prompts that cannot be decoded."""
        part = self.source[first : first + PART]
        if isinstance(part[0], TargetText):
            return [text for text in part if len(text.prompt_ids) and len(text.token_ids)]
        saved = _read(path)
        if saved is None:
            contents, method = [prompt.content for prompt in part], config.method("autoregressive")
            options: dict[str, Any] = {"batch_size": self.batch_size, "row_ids": range(first, first + len(part))}
            generations = decode(self.pair, contents, method, self.sampling, **options)
            rows = [
                {"prompt": str(prompt.id), "prompt_ids": g.prompt_ids, "token_ids": g.token_ids}
                for prompt, g in zip(part, generations, strict=True)
                if g.error is None and len(g.prompt_ids) + len(g.token_ids) <= self.pair.max_length
            ]
            saved = pd.DataFrame(rows, columns=["prompt", "prompt_ids", "token_ids"])
            write_parquet(saved, path)
        return [
            TargetText(row.prompt, list(map(int, row.prompt_ids)), list(map(int, row.token_ids)))
            for row in saved.itertuples()
        ]

    def _score(
        self, texts: Sequence[TargetText], first: int, method_rules: Sequence[MethodRule]
    ) -> dict[MethodRule, pd.DataFrame]:
        """Sums over each text's positions, a row per text and K, for every rule. The optimum is computed once per scheme."""
        rows: dict[MethodRule, list[dict[str, Any]]] = {method_rule: [] for method_rule in method_rules}
        models = max(method_rule.num_models for method_rule in method_rules)
        for text, generator, reading in self._read(texts, first, models):
            p = reading.target_probs
            uniforms = spread_uniforms((self.draws, len(p), max(self.num_drafts)), generator, p.dtype).to(p.device)
            for num_drafts in self.num_drafts:
                best: dict[Any, float] = {}
                for method_rule, lines in rows.items():
                    q = method_rule.draft_side(reading, self.draft_temperature, num_drafts)
                    drawn_so = (method_rule.scheme, method_rule.sources)
                    if drawn_so not in best:
                        total = optima(p, q, num_drafts, method_rule.scheme).sum() if self.optimum else float("nan")
                        best[drawn_so] = float(total)
                    rule, draws = method_rule.rule, uniforms[..., :num_drafts]
                    accepted, drafted = expected_acceptance(rule, method_rule.scheme, p, q, draws)
                    sums = (float(accepted.sum()), float(drafted.sum()), best[drawn_so])
                    line = {"prompt": text.prompt, "positions": len(p), "K": num_drafts}
                    lines.append(line | dict(zip(SUMS, sums, strict=True)))
        columns = ["prompt", "positions", "K", *SUMS]
        return {method_rule: pd.DataFrame(lines, columns=columns) for method_rule, lines in rows.items()}

    def _read(
        self, sequences: Sequence[TargetText], first: int, models: int
    ) -> Iterator[tuple[TargetText, torch.Generator, Reading]]:
        """Each text of a part with its random stream and what the models say at its positions."""
        for start in range(0, len(sequences), self.batch_size):
            batch = sequences[start : start + self.batch_size]
            generators = [row_generator(self.seed, first + start + row) for row in range(len(batch))]
            chosen = []  # positions, drawn without replacement, in order
            for text, generator in zip(batch, generators, strict=True):
                order = torch.arange(length := len(text.token_ids))
                if self.positions is not None and length > self.positions:
                    order = torch.randperm(length, generator=generator)[: self.positions]
                chosen.append(sorted(order.tolist()))
            ids = [(text.prompt_ids, text.token_ids) for text in batch]
            readings = readings_along(self.pair, ids, self.sampling, chosen, models)
            yield from zip(batch, generators, readings, strict=True)


def alphabet_table(walk: Walk, folder: Path) -> pd.DataFrame:
    """Share of positions by tokens of probability above 0, per model (Khisti et al., arXiv:2410.18234, appendix F)."""
    counted: dict[str, Counter[int]] = {model: Counter() for model in MODELS}
    for reading in walk.readings(folder):
        sides = reading.target_probs, reading.draft_probs(walk.draft_temperature)
        for model, probs in zip(MODELS, sides, strict=True):
            counted[model].update(torch.count_nonzero(probs, dim=-1).tolist())
    lines = [(model, size, sizes[size]) for model, sizes in counted.items() for size in sorted(sizes)]
    table = pd.DataFrame(lines, columns=["model", "size", "positions"])
    table["share"] = table.positions / table.groupby("model").positions.transform("sum")
    return table.assign(share_up_to=table.groupby("model").share.cumsum())


def _read(path: Path) -> pd.DataFrame | None:
    try:
        return read_parquet(path)
    except InputError:
        return None
