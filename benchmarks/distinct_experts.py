"""python -m benchmarks.distinct_experts: what a forward pass of a mixture costs by how many distinct experts it reads.

A random Qwen3-MoE (.9 billion parameters, 64 experts, 4 per token), larger than the caches: its routing says nothing of any
model, but what reading an expert costs does not depend on weights. Forward passes over 1 to 17 random tokens after 64 others,
in turns; the distinct experts of each are counted by its router's logits. Seconds are CPU seconds where one thread is used.
Printed: seconds by width and by distinct experts, and the line seconds = a + b * distinct + c * width, with what it leaves
unexplained. `analysis.loads.modelled` assumes that bytes of the reached experts are what counts.
"""

from __future__ import annotations

import argparse
from time import perf_counter, process_time

import numpy as np
import pandas as pd
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from analysis.tables.files import markdown
from benchmarks.evidence import machine
from toolkit.errors import answer_signals

WIDTHS = (1, 2, 3, 5, 9, 17)
CONTEXT = 64


def build(small: bool) -> Qwen3MoeForCausalLM:
    """The random mixture: 12 layers of 64 experts of 1024 x 352; small: two layers, for a trial."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=1024, num_hidden_layers=2 if small else 12, num_attention_heads=16,
        num_key_value_heads=4, head_dim=64, moe_intermediate_size=352, num_experts=64, num_experts_per_tok=4,
        output_router_logits=True, max_position_embeddings=1024,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    model.model.embed_tokens.weight.data.mul_(
        50
    )  # else attention makes all tokens alike, and they reach the same experts
    return model


@torch.inference_mode()
def measured(model: Qwen3MoeForCausalLM, turns: int) -> pd.DataFrame:
    """One line per timed forward pass: width, distinct experts of a layer on average, seconds."""
    generator = torch.Generator().manual_seed(1)
    clock = process_time if torch.get_num_threads() == 1 else perf_counter
    lines = []
    for turn in range(turns + 1):  # the first one warms up
        for width in WIDTHS:
            tokens = torch.randint(4096, (1, CONTEXT + width), generator=generator)
            cache = model(tokens[:, :CONTEXT], use_cache=True).past_key_values
            started = clock()
            output = model(tokens[:, CONTEXT:], past_key_values=cache, use_cache=True)
            seconds = clock() - started
            chosen = [logits.topk(4).indices.unique().numel() for logits in output.router_logits]
            if turn:
                lines.append((width, np.mean(chosen), seconds))
    return pd.DataFrame(lines, columns=["tokens", "distinct experts", "seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="two layers: does it run at all?")
    options = parser.parse_args()
    model = build(options.small)
    size = sum(weights.numel() for weights in model.parameters())
    print(f"{size / 1e9:.2f} billion parameters, float32; {machine()}; {options.turns} turns")
    rows = measured(model, options.turns)
    medians = rows.groupby("tokens").median().reset_index()
    one = medians.seconds.iloc[0]
    print(
        markdown(
            medians.assign(seconds=(medians.seconds / one).round(2))
            .rename(columns={"seconds": "times one token's"})
            .round(1)
        )
    )
    inputs = np.stack([np.ones(len(rows)), rows["distinct experts"], rows.tokens], 1)
    solution, *_ = np.linalg.lstsq(inputs, rows.seconds.to_numpy(), rcond=None)
    left = rows.seconds - inputs @ solution
    explained = 1 - left.var() / rows.seconds.var()
    base, expert, token = solution / one
    print(
        f"times one token's = {base:.3f} + {expert:.4f} x distinct experts + {token:.4f} x tokens; R^2 {explained:.3f}, "
        f"residual {left.std() / one:.3f}"
    )


if __name__ == "__main__":
    answer_signals()
    main()
