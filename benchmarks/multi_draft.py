"""Multi-draft rules on larger numbers than the tests use: exactness and optimality by enumeration, means and costs, and
block efficiency on the toy pair. One forward over a tree is timed beside its chains as separate rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from analysis.tables.files import markdown
from benchmarks import dirichlet as uniform
from benchmarks import rules
from benchmarks.greedy_trees import greedy_table
from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.decoding.proposers.tree import num_nodes
from toolkit.metrics import block_efficiency, total
from toolkit.session import open_session
from toolkit.testing import dirichlet_pairs, draft_distributions
from toolkit.verification import SelectionRule, get, names
from toolkit.verification.enumeration import candidate_tuples, emission, optimum

RULES = ("specinfer", "spectr", "importance", "mcsd", "mcsd_naive", "greedy_multi")  # methods with draft trees
DOMAINS = ("instruct", "math", "code")
FIGURES = Path(__file__).resolve().parent.parent / "docs" / "evidence" / "figures"


def random_pairs(num_pairs: int, vocab_size: int, zeros: bool = False, seed: int = 0) -> tuple[Tensor, Tensor]:
    """p, q [P, V] from the uniform Dirichlet distribution; with zeros in every other pair if asked."""
    p, q = dirichlet_pairs(num_pairs, vocab_size, seed)
    for n in range(0, num_pairs if zeros else 0, 2):
        p[n, n % vocab_size] = q[n, (n // 2) % vocab_size] = 0.0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def optimality() -> str:
    """Every selection rule under every scheme it declares, by enumeration over all tuples of candidates. Gives the
    total variation of the emitted token from p, and acceptance against the optimum (minimum over all sets of tokens).
    """
    lines = [
        "60 random pairs for each V = 2, 3, 4 and K = 1..4, half of them with zeros in p and q. Acceptance: a candidate is "
        "emitted by acceptance; drafted: the emitted token is a candidate; both means over V = 4, K = 2.",
        "",
        "| rule | scheme | largest total variation | largest drafted - optimum | acceptance | drafted | optimum |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in [name for name in names() if isinstance(get(name), SelectionRule)]:
        for scheme in get(name).schemes:
            worst, above = 0.0, -1.0
            for vocab_size in (2, 3, 4):
                p, q = random_pairs(60, vocab_size, zeros=True)
                for num_drafts in (1, 3, 4, 2):
                    distributions = draft_distributions(q, num_drafts, scheme)
                    got, best = (
                        emission(get(name), scheme, p, distributions),
                        optimum(candidate_tuples(scheme, distributions), p),
                    )
                    worst = max(worst, float((got.distribution - p).abs().sum(-1).max() / 2))
                    above = max(above, float((got.drafted - best).max()))
            means = " | ".join(f"{float(values.mean()):.4f}" for values in (got.accepted, got.drafted, best))
            lines.append(f"| {name} | {scheme} | {worst:.1e} | {above:+.1e} | {means} |")
    return "\n".join(lines)


def dirichlet() -> str:
    """Mean acceptance over 1,000 pairs of uniform-Dirichlet distributions on 4 tokens, exactly, beside the published means."""
    table = uniform.measure()
    uniform.draw_figure(table, FIGURES / "dirichlet.png")
    return f"{markdown(table)}\n\n![dirichlet](figures/dirichlet.png)"


def rule_cost() -> str:
    """Milliseconds per node of every multi-draft rule on one core, over V and K, in float32."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            table = rules.measure(dtype=torch.float32)
    finally:
        torch.set_num_threads(threads)
    rules.draw_figure(table, FIGURES / "rule_cost.png")
    return f"{markdown(table)}\n\n![rule cost](figures/rule_cost.png)"


def trees() -> str:
    """Block efficiency of draft trees on the toy pair, at T = 1 and T = 0; one forward over a tree against its chains."""
    pair = ModelPair.toy()
    parts = [tree_table(pair, num_prompts=60), greedy_table(pair, num_prompts=200), forward_table(pair, repeats=30)]
    return "\n\n".join(parts)


def tree_table(pair: ModelPair, num_prompts: int, widths: tuple[int, ...] = (1, 2, 4, 8), below: str = "x1x1x1") -> str:
    """Block efficiency per domain, rule and K; the rules are decoded in turn for each K."""
    sampling = Sampling(max_new_tokens=64, seed=1)
    lines = [f"{num_prompts} test prompts per domain, at most 64 tokens, trees K{below}."]
    for domain in DOMAINS:
        prompts = [example.prompt for example in load_frozen(domain, "test")[:num_prompts]]
        found: dict[str, list[str]] = {name: [] for name in RULES}
        for width in widths:
            for name in RULES:
                method = config.method(name, [f'proposer.k_config="{width}{below}"'])
                counts = total(decode(pair, prompts, method, sampling, batch_size=20))
                found[name].append(f"{block_efficiency(counts):.3f}")
        lines += [
            "",
            f"| {domain} | {' | '.join(f'K = {width}' for width in widths)} |",
            "|---" * (len(widths) + 1) + "|",
        ]
        lines += [f"| {name} | {' | '.join(values)} |" for name, values in found.items()]
    return "\n".join(lines)


@torch.inference_mode()
def forward_table(pair: ModelPair, repeats: int, depth: int = 4) -> str:
    """K chains of `depth` tokens behind one context, judged in three ways, in turns; medians of `repeats`."""
    lines = [
        f"K chains of {depth} tokens, {torch.get_num_threads()} threads, medians of {repeats} interleaved repeats. Difference: "
        "the largest one between the logits of the tree and of the rows.",
        "",
        "| context | K | nodes | tree: 1 forward, ms | K rows: 1 forward, ms | 1 row: K forwards, ms | rows / tree | "
        "cache of rows / tree | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for context in (64, 512):
        for width in (2, 4, 8):
            ways = _Ways(pair, context, width, depth)
            timed: dict[Callable[[], Tensor], list[float]] = {ways.tree: [], ways.rows: [], ways.one_by_one: []}
            difference = float((ways.tree() - ways.rows()).abs().max())
            for _ in range(repeats):
                for way, seconds in timed.items():
                    started = perf_counter()
                    way()
                    seconds.append(perf_counter() - started)
            tree, rows, single = (1e3 * median(seconds) for seconds in timed.values())
            nodes = num_nodes((width, *[1] * (depth - 1)))
            lines.append(
                f"| {context} | {width} | {nodes} | {tree:.2f} | {rows:.2f} | {single:.2f} | {rows / tree:.2f} | "
                f"{ways.on_rows.cache_bytes / ways.on_tree.cache_bytes:.1f} | {difference:.1e} |"
            )
    return "\n".join(lines)


class _Ways:
    """The same K chains behind the same context, ready in three caches; every way returns logits [K, depth, V]."""

    def __init__(self, pair: ModelPair, context: int, width: int, depth: int):
        generator = torch.Generator().manual_seed(0)
        before = torch.randint(4, pair.vocab_size, (1, context), generator=generator)
        self.chains = torch.randint(4, pair.vocab_size, (width, depth), generator=generator)
        self.context, self.width, self.depth = context, width, depth
        capacity = context + width * depth + 1
        self.on_tree, self.on_row = (open_session(pair.target, 1, capacity) for _ in range(2))
        self.on_rows = open_session(pair.target, width, context + depth + 1)
        for session in (self.on_tree, self.on_row):
            session.extend(before)
        self.on_rows.extend(before.expand(width, -1))
        nodes = torch.arange(width * depth)  # level after level, the chains beside each other
        self.parents = torch.where(nodes < width, -1, nodes - width).unsqueeze(0)

    def tree(self) -> Tensor:
        """All chains in one row, as a tree."""
        nodes = self.chains.T.reshape(1, -1)
        logits = self.on_tree.extend(nodes, parents=self.parents, last=nodes.shape[1]).logits[0]
        self.on_tree.keep(torch.tensor([[-1]]))
        return logits.view(self.depth, self.width, -1).transpose(0, 1)

    def rows(self) -> Tensor:
        """A row for each chain."""
        logits = self.on_rows.extend(self.chains, last=self.depth).logits
        self.on_rows.truncate([self.context] * self.width)
        return logits

    def one_by_one(self) -> Tensor:
        """A forward for each chain."""
        found = []
        for chain in self.chains:
            found.append(self.on_row.extend(chain.unsqueeze(0), last=self.depth).logits)
            self.on_row.truncate([self.context])
        return torch.cat(found)
