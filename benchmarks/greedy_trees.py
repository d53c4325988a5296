"""Draft trees at temperature 0: their block efficiency, and what the ranks of the target's tokens predict for it.

At temperature 0 a node's children are the draft's likeliest tokens. The walk goes on iff the target's own token is among them
(MCSD, arXiv:2401.06706, section 3). The text is the target's greedy text, whatever is drafted. So the rank of each of its
tokens in the draft's distribution there says exactly how every round ends.

Shapes: N tokens of a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_gen.frozen import load_frozen
from toolkit import ModelPair, config
from toolkit.decoding import Sampling, decode
from toolkit.metrics import block_efficiency, total

DOMAINS = ("instruct", "math", "code")
SHAPES: dict[str, tuple[int, ...]] = {"1x1x1": (1, 1, 1), "2x1x1": (2, 1, 1), "4x2x1": (4, 2, 1), "4x4x4": (4, 4, 4)}
RULES = ("specinfer", "spectr", "importance", "mcsd", "mcsd_naive", "greedy_multi")


@torch.inference_mode()
def ranks(pair: ModelPair, prompt: Sequence[int], produced: Sequence[int]) -> Tensor:
    """Rank [N] of each produced token among the draft's logits there: 0 is the likeliest, of equal ones the lowest id."""
    tokens = torch.tensor([*prompt, *produced], device=pair.device)
    logits = pair.fit(pair.draft(tokens[None]).logits[0, len(prompt) - 1 : -1])
    own = logits.gather(-1, tokens[len(prompt) :, None])
    ids = torch.arange(logits.shape[-1], device=logits.device)
    ahead = (logits > own) | ((logits == own) & (ids < tokens[len(prompt) :, None]))
    return ahead.sum(-1)


def predicted_rounds(rank: Sequence[int], widths: Sequence[int], limit: int) -> int:
    """Target forwards for a text whose tokens have these ranks, drafted by trees of these widths; at most `limit` tokens."""
    done, rounds = 0, 0
    while done < len(rank):
        rounds += 1
        for width in widths[: limit - done - 1]:  # the last token of the limit is always the target's own
            if done == len(rank) or rank[done] >= width:
                break
            done += 1
        done += 1  # corrected, or bonus; behind an end of text there is none
    return rounds


def greedy_table(pair: ModelPair, num_prompts: int, limit: int = 64) -> str:
    """Per domain and shape: predicted from the ranks, decoded by every rule, and whether the texts are the greedy ones."""
    sampling = Sampling(max_new_tokens=limit, temperature=0.0)
    head = (
        "| domain | " + " | ".join(f"{shape}: predicted | decoded" for shape in SHAPES) + " | texts are the target's |"
    )
    lines = [
        f"T = 0, {num_prompts} test prompts per domain, at most {limit} tokens, decoded by {', '.join(RULES)}.",
        "",
    ]
    lines += [head, "|---" * (2 * len(SHAPES) + 2) + "|"]
    plain = config.method("autoregressive", [])
    for domain in DOMAINS:
        prompts = [example.prompt for example in load_frozen(domain, "test")[:num_prompts]]
        texts = decode(pair, prompts, plain, sampling, batch_size=20)
        known = [ranks(pair, pair.encode(p), text.token_ids).tolist() for p, text in zip(prompts, texts, strict=True)]
        produced = sum(len(text.token_ids) for text in texts)
        cells, same, all_texts = [], 0, 0
        for shape, widths in SHAPES.items():
            expected = produced / sum(predicted_rounds(rank, widths, limit) for rank in known)
            found = set()
            for name in RULES:
                method = config.method(name, [f'proposer.k_config="{shape}"'])
                drafted = decode(pair, prompts, method, sampling, batch_size=20)
                found.add(f"{block_efficiency(total(drafted)):.3f}")
                same += sum(one.token_ids == other.token_ids for one, other in zip(drafted, texts, strict=True))
                all_texts += len(texts)
            cells += [f"{expected:.3f}", ", ".join(sorted(found))]
        lines.append(f"| {domain} | {' | '.join(cells)} | {same} of {all_texts} |")
    return "\n".join(lines)
