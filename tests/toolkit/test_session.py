"""Sessions against plain uncached runs: every family, trees, ragged rows, random extend and keep."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Tensor

from toolkit.errors import InputError
from toolkit.session import TabularModel, open_session

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3}  # fmt: skip
WINDOW = 7  # smaller than the texts below, so that it shows
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, LLAMA),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, LLAMA),
    "qwen2_window": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {**LLAMA, "use_sliding_window": True,
                     "sliding_window": WINDOW, "layer_types": MIXED}),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {**LLAMA, "head_dim": 8}),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {**LLAMA, "sliding_window": WINDOW}),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig, {**LLAMA, "head_dim": 8}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**LLAMA, "head_dim": 8, "sliding_window": WINDOW,
               "layer_types": MIXED}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**LLAMA, "head_dim": 8, "sliding_window": WINDOW,
               "layer_types": MIXED}),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {**LLAMA, "sliding_window": WINDOW}),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig, {k: v for k, v in LLAMA.items() if "key_value" not in k}),
    "opt": (hf.OPTForCausalLM, hf.OPTConfig, {**COMMON, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4,
            "num_hidden_layers": 3, "word_embed_proj_dim": 32}),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 3,
             "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}),
    "olmo2": (hf.Olmo2ForCausalLM, hf.Olmo2Config, LLAMA),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2,
                "sliding_window": WINDOW}),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, {**LLAMA, "head_dim": 8, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}  # fmt: skip


def build(family: str) -> torch.nn.Module:
    """A tiny random model of a family, its weights large enough that mistakes show."""
    torch.manual_seed(0)
    model_class, config_class, settings = FAMILIES[family]
    model = model_class(config_class(**settings)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return model


def plain_logits(model, tokens: list[int]) -> Tensor:
    """Logits after the last token, by one uncached run of the model's own."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


class Tree:
    """What a session should hold, the slow and obvious way: per row a trunk and nodes (token, parent)."""

    def __init__(self, trunks: list[list[int]]):
        self.trunks = [list(trunk) for trunk in trunks]
        self.nodes: list[list[tuple[int, int]]] = [[] for _ in trunks]

    def add(self, tokens: Tensor, parents: Tensor) -> None:
        for nodes, row_tokens, row_parents in zip(self.nodes, tokens.tolist(), parents.tolist(), strict=True):
            nodes += zip(row_tokens, row_parents, strict=True)

    def path(self, row: int, node: int) -> list[int]:
        ids = []
        while node >= 0:
            ids.append(node)
            node = self.nodes[row][node][1]
        return ids[::-1]

    def text(self, row: int, node: int) -> list[int]:
        return self.trunks[row] + [self.nodes[row][i][0] for i in self.path(row, node)]

    def keep(self, row: int, nodes: list[int]) -> list[int]:
        """Forget all but these nodes and their ancestors; what they share becomes trunk. Returns their new ids."""
        paths = [set(self.path(row, node)) for node in nodes]
        kept, shared = sorted(set.union(*paths)), sorted(set.intersection(*paths))
        new = {-1: -1} | {old: max(i - len(shared), -1) for i, old in enumerate(kept)}
        self.trunks[row] += [self.nodes[row][i][0] for i in shared]
        self.nodes[row] = [(self.nodes[row][i][0], new[self.nodes[row][i][1]]) for i in kept if i not in shared]
        return [new[node] for node in nodes]


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_prompts_branches_and_compaction_equal_plain_runs(family):
    model = build(family)
    generator = torch.Generator().manual_seed(1)
    session = open_session(model, 2, 64)
    prompts = torch.randint(3, VOCAB, (2, 11), generator=generator)
    reading = session.extend(prompts, counts=[11, 6])
    tree = Tree([prompts[0].tolist(), prompts[1, 5:].tolist()])
    worst = check(model, reading.logits[:, 0], tree.trunks)

    parents = torch.tensor([[-1, -1, 0, 0, 3, 2], [-1, 0, 1, 0, -1, 4]])
    tokens = torch.randint(3, VOCAB, (2, 6), generator=generator)
    tree.add(tokens, parents)
    reading = session.extend(tokens, parents=parents, last=6)
    for node in range(6):
        worst = max(worst, check(model, reading.logits[:, node], [tree.text(row, node) for row in range(2)]))

    texts = [tree.text(0, 4), tree.text(1, 2)]
    assert session.keep(torch.tensor([[4], [2]])).tolist() == [[-1], [-1]]
    assert session.lengths == [len(text) for text in texts]
    tail = torch.randint(3, VOCAB, (2, 3), generator=generator)
    reading = session.extend(tail, last=3)
    for i in range(3):
        longer = [text + tail[row, : i + 1].tolist() for row, text in enumerate(texts)]
        worst = max(worst, check(model, reading.logits[:, i], longer))
    assert worst < 1e-5


def check(model, logits: Tensor, texts: list[list[int]]) -> float:
    """Largest difference to plain runs, relative to the size of the logits."""
    reference = torch.stack([plain_logits(model, text) for text in texts])
    return float((logits - reference).abs().max() / reference.abs().max().clamp(min=1))


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt"])
@pytest.mark.parametrize("seed", range(3))
def test_random_extend_and_keep_equal_recomputation(family, seed):
    """Beams: several nodes survive each round, so that the cache keeps branching behind a growing trunk."""
    model = build(family)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, VOCAB, (2, 5), generator=generator)
    session, tree = open_session(model, 2, 96), Tree(prompts.tolist())
    session.extend(prompts)
    for _ in range(4):
        for width in (3, 2):
            held = [len(nodes) for nodes in tree.nodes]
            choices = [torch.randint(-1, max(count, 1), (width,), generator=generator) for count in held]
            parents = torch.stack([c.clamp(max=count - 1) for c, count in zip(choices, held, strict=True)])
            tokens = torch.randint(3, VOCAB, (2, width), generator=generator)
            tree.add(tokens, parents)
            reading = session.extend(tokens, parents=parents, last=width)
            for i in range(width):
                texts = [tree.text(row, held[row] + i) for row in range(2)]
                assert check(model, reading.logits[:, i], texts) < 1e-5
        kept = torch.stack([torch.randint(len(nodes), (2,), generator=generator) for nodes in tree.nodes])
        expected = [tree.keep(row, kept[row].tolist()) for row in range(2)]
        assert session.keep(kept).tolist() == expected
        assert session.lengths == [len(t) + len(n) for t, n in zip(tree.trunks, tree.nodes, strict=True)]


def test_hidden_is_the_state_that_the_output_layer_reads():
    model = build("gemma2")  # soft-caps its logits: the state must be taken before that
    tokens = torch.tensor([[5, 9, 7]])
    reading = open_session(model, 1, 16).extend(tokens, last=2)
    expected = model.model(tokens).last_hidden_state[:, -2:]
    assert torch.allclose(reading.hidden, expected, atol=1e-6)


def test_rows_join_leave_and_restart():
    model = build("llama")
    session = open_session(model, 3, 32)
    session.extend(torch.tensor([[4, 5, 6]] * 3))
    session.reset(1)
    session.extend(torch.tensor([[9, 8]]), rows=[1])
    session.select([1, 2])
    reading = session.extend(torch.tensor([[7], [7]]))
    assert check(model, reading.logits[:, 0], [[9, 8, 7], [4, 5, 6, 7]]) < 1e-5
    session.truncate([2, 1])
    reading = session.extend(torch.tensor([[3], [3]]))
    assert check(model, reading.logits[:, 0], [[9, 8, 3], [4, 3]]) < 1e-5


def test_cache_memory_is_the_documented_formula():
    """2 x layers x rows x (capacity + 1) x key-value heads x head size x bytes per number."""
    session = open_session(build("llama"), 3, 40)
    assert session.cache_bytes == 0
    session.extend(torch.tensor([[4, 5]] * 3))
    assert session.cache_bytes == 2 * 3 * 3 * 41 * 2 * 8 * 4


def test_overflow_and_misuse_are_refused():
    session = open_session(build("llama"), 2, 4)
    with pytest.raises(InputError, match="row 0: the cache holds 4 tokens, 5 were asked for"):
        session.extend(torch.ones(2, 5, dtype=torch.long))
    with pytest.raises(InputError, match="expected tokens for 2 rows, got 1"):
        session.extend(torch.ones(1, 1, dtype=torch.long))
    session.extend(torch.ones(2, 1, dtype=torch.long))
    session.extend(torch.ones(2, 1, dtype=torch.long), parents=torch.tensor([[-1], [-1]]))
    with pytest.raises(InputError, match="its trunk cannot grow while it holds 1 tree nodes"):
        session.extend(torch.ones(2, 1, dtype=torch.long))


def test_tabular_sessions_follow_each_nodes_own_path():
    generator = torch.Generator().manual_seed(0)
    model = TabularModel.random(3, 2, generator)
    session = open_session(model, 1, 16)
    session.extend(torch.tensor([[2, 1]]))
    reading = session.extend(torch.tensor([[0, 2, 1]]), parents=torch.tensor([[-1, -1, 1]]), last=3)
    for node, text in enumerate(([2, 1, 0], [2, 1, 2], [2, 1, 2, 1])):
        assert torch.equal(reading.logits[0, node].exp(), model.probs[model.state(text)].log().exp())
    session.keep(torch.tensor([[2]]))
    assert torch.equal(session.extend(torch.tensor([[0]])).logits[0, 0], model.probs[model.state([1, 0])].log())
