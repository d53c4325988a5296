"""Exactness on larger numbers than the tests use: by enumeration, by chi-square of whole outputs, by equal greedy texts.

python -m benchmarks.exactness [--small]      prints every table; `make evidence` writes the same into pages
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.gpu_exactness import logit_gap, parting
from benchmarks.tree_enumeration import tree_error
from data_gen.held_out import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.errors import answer_signals
from toolkit.metrics import total
from toolkit.testing import dirichlet_pairs, draft_distributions, output_pvalue, random_heads, table_pair
from toolkit.types import Generation
from toolkit.verification import LayerRule, PathRule, SelectionRule, TreeRule, get, names
from toolkit.verification.chain_enumeration import PrefixTables, chain_error, chain_outputs, expected_lengths
from toolkit.verification.enumeration import beam_distribution, candidate_tuples, emission, optimum

LEVEL = 0.01  # of all chi-square tests together (Bonferroni)
DOMAINS = ("instruct", "math", "code")
CHAINS = ((2, 3), (3, 2), (3, 3), (4, 2), (5, 2))  # vocabulary V, drafted tokens K
TREES = ((2, (2, 2)), (2, (1, 2, 2)), (2, (7,)), (3, (3, 1)), (3, (2, 1, 1)))  # vocabulary V, children per level
VOCABULARIES, CANDIDATES = (2, 3, 4), (1, 2, 3, 4)
LAYERS = ((2, 1, 1), (3, 2, 1), (4, 2, 2), (4, 3, 2), (3, 3, 3))  # beam-token pairs M, candidates W_S, output beams W


# -- rules, by enumeration ----------------------------------------------------------------------------------------------


def rules(small: bool = False) -> str:
    """Every rule under every scheme that it declares: total variation of what it emits from the target, enumerated."""
    pairs = 4 if small else 20
    lines = [
        f"All distributions are random, with zeros among their probabilities, in float64; {pairs} per size. Chains: all drafts "
        f"of K tokens, (V, K) = {', '.join(map(str, CHAINS))}. Nodes: all tuples of K = {CANDIDATES[0]}..{CANDIDATES[-1]} "
        f"candidates, V = {VOCABULARIES[0]}..{VOCABULARIES[-1]}. Trees: all draws of up to 7 nodes. "
        "Layers of beams: all candidates, (M, W_S, W) = "
        f"{', '.join(map(str, LAYERS))}. *Further*: of lossless chain rules, by how much the expected length is off its "
        "formula; of nodes, by how much P(the emitted token was drafted) exceeds the optimum over all rules (negative: below).",
        "",
        "| rule | checked on | scheme | declared | largest total variation | further |",
        "|---|---|---|---|---:|---:|",
    ]
    for name in names():
        declared = "lossless" if get(name).lossless else "lossy"
        for kind, scheme, error, further in errors(name, pairs):
            lines.append(f"| {name} | {kind} | {scheme} | {declared} | {error:.1e} | {further} |")
    return "\n".join(lines)


def errors(name: str, pairs: int) -> Iterator[tuple[str, str, float, str]]:
    """What a rule is checked on, the scheme, its largest total variation over all sizes, and what *further* says."""
    rule = get(name)
    if isinstance(rule, PathRule):
        tables = [PrefixTables(size, depth, seed) for size, depth in CHAINS for seed in range(pairs)]
        off = max(abs(chain_outputs(rule, t)[1] - expected_lengths(t)[name != "rejection"]) for t in tables)
        yield "chain", "any", max(chain_error(rule, table) for table in tables), f"{off:.1e}" if rule.lossless else ""
    elif isinstance(rule, SelectionRule):
        for scheme in rule.schemes:
            worst, above = 0.0, -1.0
            for size in VOCABULARIES:
                p, q = random_pairs(pairs, size)
                for count in CANDIDATES:
                    drawn = draft_distributions(q, count, scheme)
                    emitted = emission(rule, scheme, p, drawn)
                    best = optimum(candidate_tuples(scheme, drawn), p)
                    worst = max(worst, float((emitted.distribution - p).abs().sum(-1).max() / 2))
                    above = max(above, float((emitted.drafted - best).max()))
            yield "node", scheme, worst, f"{above:+.1e}"
    elif isinstance(rule, TreeRule):
        for scheme in rule.schemes:
            tables = [(shape, PrefixTables(size, len(shape), seed)) for size, shape in TREES for seed in range(pairs)]
            yield "tree", scheme, max(tree_error(rule, scheme, *one) for one in tables), ""
    elif isinstance(rule, LayerRule):
        for scheme in rule.schemes:
            worst = 0.0
            for size, count, width in LAYERS:
                for p, q in zip(*random_pairs(pairs, size), strict=True):
                    joint, independent = (
                        beam_distribution(rule, p, q, count, width, scheme),
                        torch.ones((), dtype=p.dtype),
                    )
                    for _ in range(width):  # `width` independent draws from p
                        independent = independent.unsqueeze(-1) * p
                    worst = max(worst, float((joint - independent).abs().sum() / 2))
            yield "layer", scheme, worst, ""


def random_pairs(count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """p, q [P, V] from the uniform Dirichlet distribution, with a zero in both of every other pair."""
    p, q = dirichlet_pairs(count, vocab_size)
    for n in range(0, count, 2):
        p[n, n % vocab_size] = q[n, (n // 2) % vocab_size] = 0.0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


# -- methods ------------------------------------------------------------------------------------------------------------


def outputs(small: bool = False) -> str:
    """Whole outputs of every lossless method against the exact distribution of all texts of at most 4 tokens."""
    built = {name: config.method(name) for name in config.choices("method")}
    chosen = [name for name, method in built.items() if method.lossless and method.beams is None]
    runs, single_runs, tests = (5_000, 100, 2 * len(chosen)) if small else (100_000, 5_000, 2 * len(chosen))
    lines = [
        f"{tests} chi-square tests, level {LEVEL} for all together: each fails below {LEVEL / tests:.1e}. Runs: {runs} in "
        f"batches of 5000, and {single_runs} one by one.",
        "",
        "| method | p-value, batched | p-value, one by one | verdict | seconds |",
        "|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as heads:
        pair = table_pair()
        pair.head = str(random_heads(Path(heads), 3**2, 3))
        for name in tqdm(chosen, desc="whole outputs", unit="method"):
            started = perf_counter()
            batched = output_pvalue(pair, config.method(name), runs, 5_000, seed=1)
            single = output_pvalue(pair, config.method(name), single_runs, 1, seed=2)
            verdict = "exact" if min(batched, single) > LEVEL / tests else "REJECTED"
            lines.append(f"| {name} | {batched:.3f} | {single:.3f} | {verdict} | {perf_counter() - started:.0f} |")
    return "\n".join(lines)


def greedy(small: bool = False) -> str:
    """Greedy texts of every lossless method against the target's own, token for token, in float32, on the toy pair."""
    pair, prompts = ModelPair.toy(), prompts_of(2 if small else 67)
    sampling = Sampling(temperature=0, max_new_tokens=96)
    reference = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=1)
    lines = [
        f"{len(prompts)} prompts of three domains, at most 96 tokens, batches of 16. The reference is the target alone, one "
        "prompt at a time. Where a tie in float32 falls the other way, the gap between the two largest logits is given.",
        "",
        "| method | equal | first difference, gap between the two largest logits |",
        "|---|---|---|",
    ]
    for name in config.choices("method"):
        method = config.method(name)
        if not method.lossless or (method.beams is not None and method.beams.selection == "top"):
            continue  # beam search looks for likelier texts than greedy decoding finds
        sequences = zip(reference, decode(pair, prompts, method, sampling, batch_size=16), strict=True)
        different = [(a, b) for a, b in sequences if a.token_ids != b.token_ids]
        gaps = ", ".join(f"{logit_gap(pair, a, parting(a.token_ids, b.token_ids)):.1e}" for a, b in different[:5])
        lines.append(f"| {name} | {len(prompts) - len(different)} of {len(prompts)} | {gaps or '-'} |")
    return "\n".join(lines)


def identity(small: bool = False) -> str:
    """The counting identity of the papers, drafted + target calls = generated + discarded, for every text of every method."""
    pair, prompts = ModelPair.toy(), prompts_of(2 if small else 20)
    lines = [
        f"{len(prompts)} prompts of three domains, T = 1 and T = 0, at most 7 and 64 tokens (so that the limit falls inside "
        "accepted runs).",
        "",
        "| method | texts | identity holds | ended by end of text | drafted + target calls = generated + discarded |",
        "|---|---|---|---|---|",
    ]
    for name in config.choices("method"):
        sequences: list[Generation] = []
        for temperature, limit in ((1.0, 64), (0.0, 64), (1.0, 7)):
            sampling = Sampling(temperature=temperature, max_new_tokens=limit)
            sequences += decode(pair, prompts, config.method(name), sampling, batch_size=20)
        all_counts = [text.counts for text in sequences]
        holds = sum(c.num_drafted + c.num_target_calls == c.num_generated + c.num_discarded for c in all_counts)
        c, ended = total(sequences), sum(text.finish_reason == "end" for text in sequences)
        sums = f"{c.num_drafted} + {c.num_target_calls} = {c.num_generated} + {c.num_discarded}"
        lines.append(f"| {name} | {len(sequences)} | {holds} | {ended} | {sums} |")
    return "\n".join(lines)


def prompts_of(count: int) -> list[str]:
    """`count` test prompts of each domain."""
    return [example.prompt for domain in DOMAINS for example in load_frozen(domain, "test")[:count]]


TABLES: dict[str, Callable[[bool], str]] = {
    "rules": rules,
    "outputs": outputs,
    "greedy": greedy,
    "identity": identity,
}


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a few prompts and runs only")
    options = parser.parse_args()
    for name, table in TABLES.items():
        print(f"## {name}\n\n{table(options.small)}\n", flush=True)


if __name__ == "__main__":
    answer_signals()
    main()
