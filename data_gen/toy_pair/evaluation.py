"""How good is the pair? Exact match, held-out loss and acceptance on frozen prompts."""

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen.domains import Example, get
from data_gen.toy_pair.training import encode
from toolkit import ModelPair, generate
from toolkit.config import commands
from toolkit.models.teacher import produced_logits

BATCH = 50  # prompts at a time
Pair = tuple[list[int], list[int]]  # token ids of a prompt and of a response to it


def evaluate(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    domain: str,
    examples: list[Example],
    cfg: commands.Toy,
) -> dict[str, float]:
    """One domain's measures.

    exact_match_*    share of right answers at temperature 0 (where there are answers)
    loss_*           nats per token of the reference responses
    alpha            mean over positions of sum_x min(p(x), q(x)) along responses sampled from the target at temperature 1
    response_tokens  mean length of these responses, end of text included
    """
    models = {"target": target, "draft": draft}
    prompts = [example.prompt for example in examples]
    measures: dict[str, float] = {}
    for name, model in models.items():
        if examples[0].answer is not None:
            texts = [
                tokenizer.decode(response, skip_special_tokens=True)
                for _, response in respond(model, tokenizer, prompts, cfg.evaluation.max_new_tokens)
            ]
            hits = [get(domain).is_correct(text, e.answer) for text, e in zip(texts, examples, strict=True)]
            measures[f"exact_match_{name}"] = sum(hits) / len(hits)
        measures[f"loss_{name}"] = reference_loss(model, tokenizer, examples, cfg.max_length)
    sampled = respond(target, tokenizer, prompts, cfg.evaluation.max_new_tokens, temperature=1.0, seed=cfg.seed)
    measures["alpha"] = acceptance(target, draft, sampled)
    measures["response_tokens"] = sum(len(response) for _, response in sampled) / len(sampled)
    return measures


def respond(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Pair]:
    """A response of the model to each prompt, up to and including end of text."""
    generations = generate(
        ModelPair(target=model, draft=model, tokenizer=tokenizer),
        prompts,
        method="autoregressive",
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=BATCH,
    )
    return [(generation.prompt_ids, generation.token_ids) for generation in generations]


@torch.inference_mode()
def acceptance(target: LlamaForCausalLM, draft: LlamaForCausalLM, pairs: list[Pair]) -> float:
    """alpha = sum_x min(p(x), q(x)) at temperature 1, averaged over all response positions."""
    values = []
    for start in range(0, len(pairs), BATCH):
        p, q = (produced_logits(model, pairs[start : start + BATCH]).float().softmax(-1) for model in (target, draft))
        values.append(torch.minimum(p, q).sum(-1))
    return torch.cat(values).mean().item()


@torch.inference_mode()
def reference_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: list[Example], max_length: int
) -> float:
    """Nats per token of the reference responses, end of text included."""
    documents = encode(tokenizer, examples, max_length)
    pairs = [(d.tokens[: d.num_prompt].tolist(), d.tokens[d.num_prompt :].tolist()) for d in documents]
    losses = []
    for start in range(0, len(pairs), BATCH):
        batch = pairs[start : start + BATCH]
        labels = torch.tensor([token for _, response in batch for token in response])
        losses.append(
            torch.nn.functional.cross_entropy(produced_logits(model, batch).float(), labels, reduction="none")
        )
    return torch.cat(losses).mean().item()
