"""Prompt lookup on the toy domains: what copying saves without a draft model, decoded and replayed from the texts alone."""

from __future__ import annotations

from analysis.replay.prompt_lookup import replay_prompt_lookup
from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.metrics import block_efficiency, total
from toolkit.types import Counts

PROMPTS, TOKENS, LENGTHS = 150, 64, (2, 4, 8)


def prompt_lookup() -> str:
    """Tokens per target forward of prompt lookup, beside fixed drafts of the draft model; no draft forwards are paid."""
    pair = ModelPair.from_pretrained("toy/target")
    lines = [
        "| domain | temperature | K | decoded | replayed from the texts alone | drafted tokens per produced token |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for domain in ("instruct", "math", "code"):
        prompts = [example.prompt for example in load_frozen(domain, "test")][:PROMPTS]
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, max_new_tokens=TOKENS, seed=3)
            plain = decode(pair, prompts, config.method("autoregressive"), sampling, batch_size=32)
            texts = [(g.prompt_ids, g.token_ids) for g in plain]
            for length in LENGTHS:
                method = config.method("prompt_lookup", [f"policy.num_drafted={length}"])
                live: Counts = total(decode(pair, prompts, method, sampling, batch_size=32))
                replayed = replay_prompt_lookup(method.bind(pair), texts, TOKENS, pair.end_ids or ()).total
                lines.append(
                    f"| `{domain}` | {temperature:g} | {length} | {block_efficiency(live):.3f} | "
                    f"{block_efficiency(replayed):.3f} | {live.num_drafted / live.num_generated:.2f} |"
                )
    head = (
        f"{PROMPTS} test prompts per domain, at most {TOKENS} tokens. At temperature 0 both columns are of the same texts and "
        "agree exactly; at temperature 1 the decoded texts are others, of the same distribution."
    )
    return "\n".join([head, "", *lines])
