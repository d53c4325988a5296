"""Drafts that read the target's states: cached logits against a plain unrolling, whole outputs, files, refusals."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from benchmarks.gpu_exactness import logit_gap, parting
from data_gen.held_out import load_frozen
from toolkit import ModelPair, config, generate
from toolkit.distillation.states import TargetStates
from toolkit.drafts.eagle3 import format as eagle3
from toolkit.drafts.eagle3.training import Unrolled, states_by_depth, unrolled_states
from toolkit.drafts.folders import kind_in
from toolkit.engine import open_session
from toolkit.engine.capture import Captures, StaticForward
from toolkit.errors import InputError
from toolkit.testing import chi_square, ragged_prompts, tiny_eagle3, tiny_llama

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eagle3"
LAYERS = [0, 1, 2]
FLAG_SETS = [(), ("norm_before_residual",), ("norm_before_fc", "norm_output"), ("fc_norm", "norm_before_residual")]


@torch.no_grad()
def unrolled_logits(target, draft, text, drafted):
    """Logits after the text and after every drafted token: one uncached forward pass per depth over all tokens but the first.

    The target has read all of the text but its newest token. A text's only token is read alone, beside zeros.
    """
    zeros = torch.zeros(1, 1, draft.config.hidden_size, dtype=draft.dtype)
    logits, known = [], zeros[:, :0]
    if len(text) > 1:
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        known = draft.projected(torch.cat([states[layer] for layer in draft.target_layers], -1))
    handed_on = known[:, :0]
    for depth in range(len(drafted) + 1):
        tokens, before, first = text[1:] + drafted[:depth], torch.cat([known, handed_on], 1), 1
        if not tokens:
            tokens, before, first = text, zeros, 0
        size = len(tokens)
        back = torch.arange(size).unsqueeze(1) - torch.arange(size)
        hidden = (back < 0) | (back >= (getattr(draft.config, "sliding_window", None) or size))
        mask = torch.zeros(size, size, dtype=draft.dtype).masked_fill(hidden, torch.finfo(draft.dtype).min)
        positions = torch.arange(first, first + size).unsqueeze(0)
        output = draft(torch.tensor([tokens]), positions, mask[None, None], None, own_states=before)
        logits.append(output.logits[0, -1])
        handed_on = torch.cat([handed_on, output.hidden_states[0][:, -1:]], 1)
    return logits


def sessions(target, draft, rows, captured=False):
    captures = [Captures(StaticForward) if captured else None for _ in range(2)]
    first = open_session(target, rows, 64, captures[0], kept_layers=LAYERS)
    return first, open_session(draft, rows, 64, captures[1], target=first)


def close(got, expected):
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(got), finite)
    assert torch.allclose(got[finite], expected[finite], rtol=0, atol=1e-10)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("flags", "window"), [*((flags, None) for flags in FLAG_SETS), ((), 2)])
def test_chains_give_the_logits_of_a_plain_unrolling(family, flags, window, captured):
    target = tiny_llama(32, 3, 1, torch.float64)
    draft = tiny_eagle3(target, flags=flags, family=family)
    draft.config.sliding_window, draft.config.use_sliding_window = window, True
    theirs, session = sessions(target, draft, 3, captured)
    sequences = [[5, 9, 33, 21, 8, 4], [7, 60, 12], [61]]
    for accepted in ([2, 0, 1], [1, 3, 2], [3, 1, 0]):
        unread = [text[length:-1] for text, length in zip(sequences, theirs.lengths, strict=True)]
        width = max(map(len, unread))
        block = torch.tensor([[0] * (width - len(part)) + part for part in unread])
        theirs.extend(block, counts=list(map(len, unread)))
        unread = [text[length:] for text, length in zip(sequences, session.lengths, strict=True)]
        width = max(map(len, unread))
        block = torch.tensor([[0] * (width - len(part)) + part for part in unread])
        got = [session.extend(block, counts=list(map(len, unread))).logits[:, -1]]
        drafted = torch.randint(3, 97, (3, 3), generator=torch.Generator().manual_seed(sum(accepted)))
        got += [session.extend(token.unsqueeze(1)).logits[:, -1] for token in drafted.T]
        for row, text in enumerate(sequences):
            expected = unrolled_logits(target, draft, text, drafted[row].tolist())
            for depth, logits in enumerate(expected):
                close(got[depth][row], logits)
        sequences = [[*text, *drafted[row, : accepted[row]].tolist(), 50 + row] for row, text in enumerate(sequences)]
        session.truncate(
            [len(text) - 1 for text in sequences]
        )  # as if its guesses were as good as what the target read
        assert all(
            length < len(text) - count for length, text, count in zip(session.lengths, sequences, accepted, strict=True)
        )


def test_trees_give_the_logits_of_a_plain_unrolling():
    target = tiny_llama(32, 3, 1, torch.float64)
    draft = tiny_eagle3(target)
    theirs, session = sessions(target, draft, 2)
    sequences = [[5, 9, 33, 21], [7, 60, 12, 11]]
    parents = torch.tensor([[-1, -1, 0, 1, 2], [-1, 0, 0, 2, 1]])
    for _ in range(2):
        theirs.extend(torch.tensor([text[length:-1] for text, length in zip(sequences, theirs.lengths, strict=True)]))
        session.extend(torch.tensor([text[length:] for text, length in zip(sequences, session.lengths, strict=True)]))
        tokens = torch.randint(3, 97, (2, 5), generator=torch.Generator().manual_seed(len(sequences[0])))
        got = torch.cat(
            [session.extend(tokens[:, i : i + 1], parents=parents[:, i : i + 1]).logits for i in range(5)], 1
        )
        for row, node in product(range(2), range(5)):
            path, at = [], node
            while at >= 0:
                path, at = [int(tokens[row, at]), *path], int(parents[row, at])
            close(got[row, node], unrolled_logits(target, draft, sequences[row], path)[-1])
        session.keep(torch.tensor([[2], [1]]))
        assert session.lengths == [4 if len(sequences[0]) == 4 else 6] * 2
        sequences = [[*text, int(tokens[row, 0]), 40 + row] for row, text in enumerate(sequences)]


def test_greedy_texts_are_the_targets():
    target = tiny_llama(32, 3, 1, torch.float64)
    pair, prompts = ModelPair(target, tiny_eagle3(target)), [*ragged_prompts(6), [5]]
    plain = [text.token_ids for text in generate(pair, prompts, "autoregressive", max_new_tokens=16, temperature=0.0)]
    for batch_size, methods in (
        (1, ("speculative", "mcsd")),
        (4, ("speculative", "block", "mcsd", "specinfer", "confidence", "best_source")),
    ):
        for method in methods:
            sequences = generate(pair, prompts, method, max_new_tokens=16, temperature=0.0, batch_size=batch_size)
            assert [text.token_ids for text in sequences] == plain, (method, batch_size)


@torch.no_grad()
def test_a_draft_begins_with_the_targets_last_layer():
    target = tiny_llama(32, 3, 1, torch.float64)
    kept, tokens = [1, 4, 7], torch.tensor([[3, 1, 4, 1, 5]])
    draft = Unrolled(target_layers=LAYERS, flags=("fc_norm",)).begin(target, kept, 0)
    assert draft.flags == {"fc_norm"} and draft.target_layers == tuple(LAYERS)
    output = target(tokens, output_hidden_states=True)
    normed = output.hidden_states[-1]  # transformers' last one is after the norm
    assert torch.allclose(draft.lm_head(normed), output.logits[..., kept])
    own, last = draft.layers[0], target.model.layers[-1]
    hidden = torch.randn(1, 5, 32, dtype=torch.float64)
    assert torch.equal(draft.norm(hidden), target.model.norm(hidden))
    assert torch.equal(own.mlp(own.post_attention_layernorm(hidden)), last.mlp(last.post_attention_layernorm(hidden)))
    apart = torch.cat([torch.zeros_like(hidden), own.hidden_norm(hidden)], -1)  # nothing of the token's embedding
    for name in ("q_proj", "k_proj", "v_proj"):
        read = getattr(own.self_attn, name)(apart)
        assert torch.allclose(read, getattr(last.self_attn, name)(last.input_layernorm(hidden)))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["speculative", "mcsd"])
def test_two_hundred_greedy_texts_in_float32_are_the_targets(method):
    """Texts may part only where the target's two largest logits tie up to rounding."""
    target = ModelPair.toy().target
    pair = ModelPair(target, Unrolled(target_layers=[0, 1, 2]).begin(target, None, 0).requires_grad_(False))
    tokenizer = ModelPair.toy().tokenizer
    prompts = [tokenizer(example.prompt).input_ids for example in load_frozen("math", "test")[:200]]
    settings = {"max_new_tokens": 24, "temperature": 0.0, "batch_size": 16}
    plain = generate(pair, prompts, "autoregressive", **settings)
    sequences = generate(pair, prompts, method, **settings)
    assert len(sequences) == 200 and sum(round_.num_accepted for text in sequences for round_ in text.rounds) > 0
    for ours, theirs in zip(sequences, plain, strict=True):
        at = parting(ours.token_ids, theirs.token_ids)
        assert at is None or logit_gap(pair, theirs, at) < 1e-4


@pytest.mark.parametrize(
    ("method", "dtype"),
    [("speculative", torch.float32), ("block", torch.float64), ("mcsd", torch.float32), ("specinfer", torch.float64)],
)
def test_whole_outputs_follow_the_targets_distribution(method, dtype):
    """Three tokens of a vocabulary of five, the target's own top-k of 4 included: chi-square over all 125 outputs."""
    size, runs = 5, 3000
    target = tiny_llama(8, 3, 1, dtype, vocab_size=size)
    for parameter in target.parameters():
        parameter.data *= 2
    pair = ModelPair(target, tiny_eagle3(target, kept=torch.tensor([4, 0, 2, 3])), end_ids=())
    prompt = [1, 2, 0, 3]
    every = torch.tensor(list(product(range(size), repeat=3)))
    with torch.no_grad():
        logits = target(torch.cat([torch.tensor([prompt] * len(every)), every], 1)).logits[:, 3:-1].double()
    logits = logits.masked_fill(logits < logits.topk(4).values[..., -1:], -torch.inf)
    expected = logits.softmax(-1).gather(2, every.unsqueeze(2)).squeeze(2).prod(1)
    built = config.method(method, ["policy.num_drafted=2"] if method in ("speculative", "block") else [])
    sequences = generate(pair, [prompt] * runs, built, max_new_tokens=3, top_k=4, batch_size=3000, seed=3)
    outputs = torch.tensor([text.token_ids for text in sequences])
    counts = torch.bincount(outputs @ torch.tensor([25, 5, 1]), minlength=size**3).double()
    assert sum(round_.num_accepted for text in sequences for round_ in text.rounds) > runs / 10
    assert chi_square(counts, runs * expected) > 1e-4


@pytest.mark.parametrize("name", ["plain", "norm_before_residual", "norm_before_fc_norm_output", "fc_norm"])
def test_logits_are_those_of_speculators(name):
    """Checkpoints, inputs and logits that `speculators` 0.9.0 wrote: every pair of a text, then three depths more."""
    recorded = load_file(FIXTURES / name / "recorded.safetensors")
    draft = eagle3.load(FIXTURES / name, "auto", tiny_llama(16, 4, 1, torch.float32, vocab_size=64))
    assert draft.target_layers == (1, 2, 3)
    text, states = recorded["token_ids"].tolist(), draft.projected(recorded["target_states"][:-1]).unsqueeze(0)
    for depth in range(1, 5):
        tokens = torch.tensor([text[1:] + recorded["drafted"][: depth - 1].tolist()])
        size = tokens.shape[1]
        mask = torch.full((size, size), torch.finfo(draft.dtype).min).triu(1)[None, None]
        output = draft(tokens, torch.arange(1, size + 1).unsqueeze(0), mask, None, own_states=states)
        states = torch.cat([states, output.hidden_states[0][:, -1:]], 1)
        logits = output.logits[0][:, draft.lm_head.kept]
        expected = recorded[f"depth_{depth}"]
        assert torch.allclose(logits if depth == 1 else logits[-1], expected, rtol=0, atol=1e-5)
        assert draft.lm_head.kept[logits[-1].argmax()] == recorded["drafted"][depth - 1]


def test_a_saved_draft_is_loaded_again(tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    draft = tiny_eagle3(target, flags=("norm_before_residual", "fc_norm"))
    eagle3.save(tmp_path, draft, "a/target")
    again = eagle3.load(tmp_path, "auto", target)
    assert kind_in(tmp_path).name == "eagle3" and again.flags == draft.flags and again.target_layers == tuple(LAYERS)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    assert (
        json.loads((tmp_path / "config.json").read_text())["speculators_config"]["verifier"]["name_or_path"]
        == "a/target"
    )
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # as transformers writes it


def change_config(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (change_config(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), "below the target's 3, got [0, 1, 9]"),
        (change_config(eagle_aux_hidden_state_layer_ids=[1, 0, 2]), "expected ascending layers"),
        (change_config(eagle_aux_hidden_state_layer_ids=[0, 1]), "states of 48 numbers"),
        (change_config(other_norm=True), "other_norm=True"),
        (change_config(transformer_layer_config={"model_type": "llama", "num_hidden_layers": 2}), "of 1 layer, got 2"),
        (change_config(transformer_layer_config={"model_type": "gemma2", "num_hidden_layers": 1}), "got 'gemma2'"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(change, line, tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    eagle3.save(tmp_path, tiny_eagle3(target), "a/target")
    change(tmp_path)
    with pytest.raises(InputError) as error:
        eagle3.load(tmp_path, "auto", target)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_beams_are_refused():
    target = tiny_llama(32, 3, 1, torch.float64)
    with pytest.raises(InputError, match="beams need a separate draft"):
        generate(ModelPair(target, tiny_eagle3(target)), ragged_prompts(1), "dsbd", max_new_tokens=4)


@pytest.mark.parametrize("name", ["plain", "norm_before_residual", "norm_before_fc_norm_output", "fc_norm"])
def test_the_unrolling_in_training_is_that_of_speculators(name):
    recorded = load_file(FIXTURES / name / "recorded.safetensors")
    draft = eagle3.load(FIXTURES / name, "auto", tiny_llama(16, 4, 1, torch.float32, vocab_size=64))
    states, tokens = recorded["target_states"][:-1].unsqueeze(0), recorded["token_ids"].unsqueeze(0)
    for step, final in enumerate(unrolled_states(draft, states, tokens, 4)):
        logits, expected = draft.lm_head.rows(final[0]), recorded["training_logits"][step]
        assert torch.allclose(logits[: len(logits) - step], expected[: len(expected) - step], rtol=0, atol=1e-5)


@pytest.mark.parametrize("window", [None, 2])
def test_training_sees_what_decoding_computes(window):
    """Depth k of the row that begins at a token: the logits of a round that began there, after k - 1 drafted tokens."""
    target = tiny_llama(32, 3, 1, torch.float64)
    draft = tiny_eagle3(target, flags=("norm_before_residual",))
    draft.config.sliding_window = window
    sequences = [([5, 9, 33], [21, 8, 4, 70]), ([7], [60, 12, 11])]
    states = TargetStates(target, LAYERS).of(sequences)
    positions = [range(4), [0, 2]]
    places = [(row, len(sequences[row][0]) + i) for row, where in enumerate(positions) for i in where]
    for depth, (finals, index) in enumerate(states_by_depth(draft, states, sequences, positions, 3), start=1):
        assert index.tolist() == [number for number, (_, place) in enumerate(places) if place > depth]
        for number, got in zip(index.tolist(), draft.lm_head.rows(finals), strict=True):
            row, place = places[number]
            text = [*sequences[row][0], *sequences[row][1]]
            begun, drafted = text[: place - depth + 1], text[place - depth + 1 : place]
            close(got, unrolled_logits(target, draft, begun, drafted)[-1][draft.lm_head.kept])
