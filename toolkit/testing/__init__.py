"""For people who write a rule, a policy or a method: tiny models, and checks by enumeration or by counting.

    pair = table_pair()                             next-token tables: the distribution of whole outputs is known exactly
    pair = llama_pair()                             random Llamas in float64: equal computations give equal numbers
    check_policy(MyPolicy())                        one state per row, whatever the neighbours do; reads what replays hold
    check_anticipation(MyPolicy(), ChainProposer())  is a token sent or left out for its own sake?
    rule_error(MyRule())                            total variation between what a rule emits and p; 0 if lossless
    output_pvalue(pair, my_method, runs=10_000)     do whole sampled outputs follow the target's distribution?

and what a session should hold, computed slowly and obviously. Needs torch, transformers and safetensors only.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers as hf
from torch import Tensor

from toolkit.acceptance import AcceptanceHead, PrereadHead
from toolkit.decoding import Method, Sampling, decode
from toolkit.drafts.eagle3.testing import tiny_eagle3 as tiny_eagle3
from toolkit.engine import TabularModel
from toolkit.models.pair import ModelPair
from toolkit.stopping import StoppingPolicy
from toolkit.stopping.base import Thresholded
from toolkit.testing.blocks import check_anticipation as check_anticipation
from toolkit.types import STEP_NAMES, DraftStep, Match, Proposal, Step, Verdict
from toolkit.verification import LayerRule, PathRule, SelectionRule, TreeRule
from toolkit.verification.chain_enumeration import PrefixTables, chain_error
from toolkit.verification.enumeration import beam_distribution, emission
from toolkit.verification.schemes import candidates

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {**COMMON, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3}  # fmt: skip
WINDOW = 7  # smaller than the texts of the tests, so that it shows
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
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


# -- models and pairs -------------------------------------------------------------------------------------------------


def tiny_model(family: str) -> Any:
    """A tiny random model of one of FAMILIES, its weights large enough that mistakes show."""
    torch.manual_seed(0)
    model_class, config_class, settings = FAMILIES[family]
    model = model_class(config_class(**settings)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    return model


def tiny_llama(hidden_size: int, num_layers: int, seed: int, dtype: torch.dtype, vocab_size: int = 97) -> Any:
    """A random Llama whose distributions are neither flat nor one-hot."""
    torch.manual_seed(seed)
    config = hf.LlamaConfig(
        vocab_size=vocab_size, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=num_layers,
        num_attention_heads=4, max_position_embeddings=256, initializer_range=0.3, bos_token_id=1, eos_token_id=5,
        pad_token_id=0,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)


def llama_pair(device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> ModelPair:
    """Random Llamas, the same numbers on every device: states of 32 and 16, 97 tokens; token 5 ends a text."""
    target, draft = tiny_llama(32, 3, 0, dtype), tiny_llama(16, 2, 1, dtype)
    return ModelPair(target=target.to(device), draft=draft.to(device), costs="assumed")


def table_pair(device: torch.device | str = "cpu") -> ModelPair:
    """Tables over three tokens in float64; token 2 ends a text."""
    generator, on = torch.Generator().manual_seed(3), torch.device(device)
    tables = [TabularModel.random(3, 2, generator, sharpness=1.2) for _ in range(2)]
    target, draft = (TabularModel(model.probs.to(on), on) for model in tables)
    return ModelPair(target=target, draft=draft, end_ids=(2,), costs="assumed")


def ragged_prompts(count: int, vocab_size: int = 97) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [(3, 9, 1, 12, 22, 4, 6)[i % 7] for i in range(count)]
    return [torch.randint(6, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def random_heads(folder: Path | str, hidden_size: int, embedding_size: int, depth: int = 1) -> Path:
    """A random acceptance head and a random pre-read head, saved in one folder."""
    torch.manual_seed(0)
    AcceptanceHead(hidden_size, depth=depth).save(folder)
    PrereadHead(hidden_size, embedding_size, width=8).save(folder)
    return Path(folder)


def tiny_tokenizer(words: str = "the cat sat on a mat and the dog ran to it") -> Any:
    """A byte-level tokenizer with a few merges, and the special tokens of the toy pair."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<|pad|>", "<|begin|>", "<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([words] * 20, trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>")


def save_checkpoint(folder: Path, hidden_size: int, seed: int, words: str | None = None) -> Path:
    """A tiny model with its tokenizer, as a local folder; token 2 ends a text."""
    tokenizer = tiny_tokenizer() if words is None else tiny_tokenizer(words)
    model = tiny_llama(hidden_size, 2, seed, torch.float32, vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = model.config.eos_token_id = 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


# -- what a session should hold ---------------------------------------------------------------------------------------


Known = dict[tuple[int, ...], Tensor]  # plain logits by text


def difference(model: Any, logits: Tensor, texts: list[list[int]], cached: Known | None = None) -> float:
    """Largest difference of logits [B, V] to plain runs of the texts, relative to the size of the logits.

    cached  plain logits of earlier calls, and of this one when it returns
    """
    cached = {} if cached is None else cached
    for text in map(tuple, texts):
        if text not in cached:
            tokens = torch.tensor([text], device=model.device)
            cached[text] = model(tokens, use_cache=False).logits[0, -1]
    reference = torch.stack([cached[tuple(text)] for text in texts])
    return float((logits - reference).abs().max() / reference.abs().max().clamp(min=1))


class ExpectedTree:
    """What a session should hold, the slow and obvious way: per row a context and nodes (token, parent)."""

    def __init__(self, contexts: list[list[int]]):
        self.contexts = [list(context) for context in contexts]
        self.nodes: list[list[tuple[int, int]]] = [[] for _ in contexts]

    def add(self, tokens: Tensor, parents: Tensor) -> None:
        """Add nodes: tokens and parents [B, N]."""
        for nodes, row_tokens, row_parents in zip(self.nodes, tokens.tolist(), parents.tolist(), strict=True):
            nodes += zip(row_tokens, row_parents, strict=True)

    def path(self, row: int, node: int) -> list[int]:
        ids = []
        while node >= 0:
            ids.append(node)
            node = self.nodes[row][node][1]
        return ids[::-1]

    def text(self, row: int, node: int) -> list[int]:
        """The tokens up to a node."""
        return self.contexts[row] + [self.nodes[row][i][0] for i in self.path(row, node)]

    def keep(self, row: int, nodes: list[int]) -> list[int]:
        """Forget all but these nodes and their ancestors; what they share becomes context. Returns their new ids."""
        paths = [set(self.path(row, node)) for node in nodes]
        nodes_left, shared = sorted(set.union(*paths)), sorted(set.intersection(*paths))
        new = {-1: -1} | {old: max(i - len(shared), -1) for i, old in enumerate(nodes_left)}
        self.contexts[row] += [self.nodes[row][i][0] for i in shared]
        self.nodes[row] = [(self.nodes[row][i][0], new[self.nodes[row][i][1]]) for i in nodes_left if i not in shared]
        return [new[node] for node in nodes]


# -- policies ---------------------------------------------------------------------------------------------------------


def check_policy(policy: StoppingPolicy, hidden_size: int = 2, rounds: int = 4, most: int = 5) -> None:
    """Rows of a batch of three behave like three batches of one, and only what a `Step` names is read.

    A `Thresholded` that does not use the history begins every round with a fresh state (`observe`).

    Raises AssertionError otherwise. A policy that reads more of a live step, such as `probs`, cannot be replayed. It is bound
    (`StoppingPolicy.bind`), its heads are for states of `hidden_size`.
    """
    generator = torch.Generator().manual_seed(0)
    together = policy.init(3, torch.device("cpu"))
    alone = [policy.init(1, torch.device("cpu")) for _ in range(3)]
    for _ in range(rounds):
        for depth in range(1, most + 1):
            step = _random_step(depth, hidden_size, generator)
            together, go_on = policy.step(cast(Step, _Recordable(step)), together)
            for row, state in enumerate(alone):
                alone[row], go_one = policy.step(cast(Step, _Recordable(_row_of(step, row))), state)
                assert bool(go_one) == bool(go_on[row]), f"row {row} decides otherwise at depth {depth}"
        drafted, length = torch.tensor([most, most - 1, most]), torch.tensor([most, 2, 0])
        together = policy.observe(*_verified(drafted, length, most), together)
        for row, state in enumerate(alone):
            part = slice(row, row + 1)
            alone[row] = policy.observe(*_verified(drafted[part], length[part], most), state)
        if isinstance(policy, Thresholded) and not policy.uses_history:
            for key, value in policy.init(3, torch.device("cpu")).items():
                assert torch.equal(together[key], value), (
                    f"{key} lives on after a round; replays score every round anew"
                )
    for key, value in together.items():
        own = torch.cat([state[key] for state in alone])  # processors round rows side by side otherwise
        assert torch.allclose(value, own, rtol=1e-5, atol=1e-6, equal_nan=True), f"{key} mixes rows"


class NotRecorded(AssertionError, AttributeError):
    """A policy reads what recordings do not hold; `hasattr` says that it is not there."""


class _Recordable:
    """A live step of which only the names of `Step` can be read, as of a recorded one."""

    def __init__(self, step: DraftStep):
        self._step = step

    def __getattr__(self, name: str) -> Any:
        if name not in STEP_NAMES:
            raise NotRecorded(f"reads step.{name}, which recordings do not hold; they hold {', '.join(STEP_NAMES)}")
        return getattr(self._step, name)


def _random_step(depth: int, hidden_size: int, generator: torch.Generator) -> DraftStep:
    logits = torch.randn(3, 7, generator=generator) * 2
    tokens = torch.randint(7, (3,), generator=generator)
    match = Match(*(torch.rand(3, generator=generator) for _ in range(3)))
    hidden = torch.rand(3, hidden_size, generator=generator)
    return DraftStep(depth, logits, logits.softmax(-1), hidden, tokens, match=match)


def _row_of(step: DraftStep, row: int) -> DraftStep:
    part = slice(row, row + 1)
    assert step.tokens is not None
    assert step.match is not None
    match = Match(step.match.length[part], step.match.occurrences[part], step.match.agreement[part])
    columns = (step.logits[part], step.probs[part], step.hidden[part], step.tokens[part])
    return DraftStep(step.depth, *columns, match=match)


def _verified(drafted: Tensor, length: Tensor, most: int) -> tuple[Proposal, Verdict]:
    """Chains of `drafted` tokens [B] of which `length` [B] were accepted."""
    tokens = torch.zeros(len(drafted), most, dtype=torch.long)
    proposal = Proposal(tokens, torch.zeros(len(drafted), most, 7), drafted, drafted)
    return proposal, Verdict(tokens, length, length, length == drafted, length >= 0)


# -- rules ------------------------------------------------------------------------------------------------------------


def rule_error(
    rule: PathRule | SelectionRule | TreeRule | LayerRule, vocab_size: int = 3, depth: int = 2, seeds: int = 4
) -> float:
    """Largest total variation between what a rule emits and the target's distribution, by enumeration in float64.

    0 up to rounding if the rule is lossless. depth: tokens of a chain (trees, too), candidates of a node or layer.
    """
    tables = [PrefixTables(vocab_size, depth, seed) for seed in range(seeds)]
    if isinstance(rule, PathRule | TreeRule):
        return max(chain_error(rule, table) for table in tables)
    p, q = (torch.stack([table[()] for table in side]) for side in ([t.p for t in tables], [t.q for t in tables]))
    if isinstance(rule, LayerRule):
        errors = []  # of two output beams, against the product of p's
        for target, draft in zip(p, q, strict=True):
            joint = beam_distribution(rule, target, draft, depth, 2, rule.schemes[0])
            errors.append(float((joint - torch.outer(target, target)).abs().sum() / 2))
        return max(errors)
    scheme = rule.schemes[0]
    emitted = emission(rule, scheme, p, draft_distributions(q, depth, scheme)).distribution
    return float((emitted - p).abs().sum(-1).max() / 2)


def dirichlet_pairs(num_pairs: int, vocab_size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """p, q [P, V] from the uniform Dirichlet distribution, in float64."""
    p, q = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.ones(vocab_size), (2, num_pairs)))
    return p, q


def draft_distributions(q: Tensor, num_drafts: int, scheme: str) -> Tensor:
    """draft_probs [P, K, V]: one distribution for all candidates, or other pairs' distributions for independent ones."""
    if scheme == "independent":
        return torch.stack([q.roll(3 * k, 0) for k in range(num_drafts)], 1)
    if scheme == "top_k":  # a point mass on each of the most probable
        tokens, _ = candidates(scheme, q, torch.zeros(num_drafts))
        return torch.nn.functional.one_hot(tokens, q.shape[-1]).to(q.dtype)
    return q.unsqueeze(1).expand(-1, num_drafts, -1).contiguous()


# -- whole outputs ----------------------------------------------------------------------------------------------------


def output_counts(
    pair: ModelPair, method: Method, runs: int, batch_size: int = 5000, seed: int = 11
) -> tuple[Tensor, Tensor]:
    """How often a pair of tables gives each output of at most 4 tokens, and how often it should [n], in float64.

    The last entry counts outputs that cannot be: none are expected.
    """
    prompt, sampling = [0, 1], Sampling(max_new_tokens=4, seed=seed)
    distribution = pair.target.sequence_distribution(prompt, 4, next(iter(pair.end_ids or ()), None))
    generations = decode(pair, [prompt] * runs, method, sampling, batch_size=min(runs, batch_size))
    seen = Counter(tuple(generation.token_ids) for generation in generations)
    outputs = sorted(distribution)
    counts = [seen[output] for output in outputs]
    expected = [distribution[output] * runs for output in outputs]
    return torch.tensor([*counts, runs - sum(counts)]).double(), torch.tensor([*expected, 0.0]).double()


def output_pvalue(pair: ModelPair, method: Method, runs: int, batch_size: int = 5000, seed: int = 11) -> float:
    """p-value of `output_counts` by chi-square: 0 if there was an output that cannot be."""
    return chi_square(*output_counts(pair, method, runs, batch_size, seed))


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """p-value of counts [n] against their expectations [n] by chi-square; 0 if something came that cannot be."""
    possible = expected > 0
    if bool((counts[~possible] > 0).any()):
        return 0.0
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
