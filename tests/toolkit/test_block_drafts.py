"""Block drafts (DFlash, DSpark): logits against a slow forward and against `speculators`, files, greedy texts, refusals."""

from __future__ import annotations

import json
import math
from itertools import product

import pytest
import torch
from safetensors.torch import load_file, save_file

from analysis.loads.exports import engine_notes, write_exports
from toolkit import ModelPair, config, generate
from toolkit.drafts.block import format as block_format
from toolkit.drafts.eagle3 import format as eagle3
from toolkit.drafts.folders import kind_in
from toolkit.engine import open_session
from toolkit.errors import InputError
from toolkit.integrations.transformers import custom_generate
from toolkit.models.pair import load_draft
from toolkit.testing import chi_square, ragged_prompts, tiny_eagle3, tiny_llama
from toolkit.testing.blocks import tiny_block

LAYERS = [0, 1, 2]
KINDS = [
    ("dflash", {}),
    ("dflash", {"sample_from_anchor": True, "window": 3}),
    ("dspark", {}),
    ("dspark", {"sample_from_anchor": False, "window": 2, "sliding_window_non_causal": True}),
    ("dspark", {"markov_rank": 0, "confidence_head_with_markov": False}),
]


def normed(states, norm):
    return norm.weight * states / (states.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def turned(state, position, theta=10000.0):
    """One head's state [d] after the rotary embedding of a position."""
    half = len(state) // 2
    angles = position * theta ** (-torch.arange(half, dtype=state.dtype) / half)
    first, second = state[:half], state[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def of_head(projection, state, head, size=4):
    return (projection.weight @ state).view(-1, size)[head]


@torch.no_grad()
def slow_logits(target, draft, text, drafted):
    """Logits [K, V] after a text, one position, layer and head at a time; q_k after the first k - 1 `drafted` tokens."""
    settings, layers = draft.settings, draft.config
    read = draft.fc.weight.new_zeros(0, draft.target_width)
    if len(text) > 1:
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        read = torch.cat([states[layer][0] for layer in settings.target_layers], -1)
    context = normed(read @ draft.fc.weight.T, draft.hidden_norm)
    ids, start = [text[-1], *[settings.mask_token_id] * (settings.block_size - 1)], len(text) - 1
    hidden = draft.embed_tokens.weight[ids]
    for number, layer in enumerate(draft.layers):
        window = layers.sliding_window if layers.layer_types[number] == "sliding_attention" else None
        attention, read = layer.self_attn, normed(hidden, layer.input_layernorm)
        sources = [*((position, row, None) for position, row in enumerate(context)),
                   *((start + slot, row, slot) for slot, row in enumerate(read))]  # fmt: skip
        outputs = []
        for slot, row in enumerate(read):
            heads = []
            for head in range(layers.num_attention_heads):
                shared = head // (layers.num_attention_heads // layers.num_key_value_heads)
                query = turned(normed(of_head(attention.q_proj, row, head), attention.q_norm), start + slot)
                scores, values = [], []
                for position, state, other in sources:
                    if window is not None:
                        causal = not settings.sliding_window_non_causal
                        if position < start - window if other is None else causal and other > slot:
                            continue
                    key = normed(of_head(attention.k_proj, state, shared), attention.k_norm)
                    scores.append(query @ turned(key, position) / math.sqrt(attention.head_dim))
                    values.append(of_head(attention.v_proj, state, shared))
                heads.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            outputs.append(attention.o_proj.weight @ torch.cat(heads))
        hidden = hidden + torch.stack(outputs)
        read, mlp = normed(hidden, layer.post_attention_layernorm), layer.mlp
        gate = read @ mlp.gate_proj.weight.T
        hidden = hidden + (gate * gate.sigmoid() * (read @ mlp.up_proj.weight.T)) @ mlp.down_proj.weight.T
    final = normed(hidden, draft.norm)[0 if settings.sample_from_anchor else 1 :]
    logits = torch.full((len(final), draft.output_size), -torch.inf, dtype=final.dtype)
    for k, (state, before) in enumerate(zip(final, [text[-1], *drafted], strict=False)):
        rows = draft.lm_head.weight @ state
        if draft.markov_head is not None:
            rows = rows + draft.markov_head.markov_w2.weight @ draft.markov_head.markov_w1.weight[before]
        logits[k, draft.lm_head.kept] = rows
    return logits


def close(got, expected, atol=1e-5):  # norms and ropes are computed in float32
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(got), finite)
    assert torch.allclose(got[finite], expected[finite], rtol=0, atol=atol)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_blocks_give_the_logits_of_a_slow_forward(kind, settings):
    """Rows of different lengths, one of them a single token, round after round; the target reads first."""
    target = tiny_llama(32, 3, 1, torch.float64)
    draft = tiny_block(target, kind, **settings)
    theirs = open_session(target, 3, 64, kept_layers=LAYERS)
    session = open_session(draft, 3, 64, target=theirs)
    sequences = [[5, 9, 33, 21, 8, 4], [7, 60, 12], [61]]
    for accepted in ([2, 0, 1], [1, 3, 2], [3, 1, 0]):
        for reader, end in ((theirs, -1), (session, None)):
            unread = [text[length:end] for text, length in zip(sequences, reader.lengths, strict=True)]
            counts, width = list(map(len, unread)), max(map(len, unread))
            block = torch.tensor([[0] * (width - len(part)) + part for part in unread])
            if reader is theirs:
                theirs.extend(block, counts=counts)
            else:
                session.draft(block, counts)
        generator = torch.Generator().manual_seed(sum(accepted))
        drafted = torch.randint(3, 97, (3, draft.block_length), generator=generator)
        before = [None, *drafted.T[:-1]]
        got = [session.position(depth, token).logits[:, 0] for depth, token in enumerate(before, start=1)]
        for row, text in enumerate(sequences):
            close(torch.stack(got)[:, row], slow_logits(target, draft, text, drafted[row].tolist()))
        sequences = [[*text, *drafted[row, : accepted[row]].tolist(), 50 + row] for row, text in enumerate(sequences)]


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_blocks_of_many_anchors_are_those_of_single_ones(kind, settings):
    """Training and recording read all blocks of a text in one forward pass."""
    target = tiny_llama(32, 3, 1, torch.float64)
    draft = tiny_block(target, kind, **settings)
    text = torch.tensor([[5, 9, 33, 21, 8, 4, 70, 2]])
    with torch.no_grad():
        states = target(text, output_hidden_states=True).hidden_states
        states = torch.cat([states[layer] for layer in LAYERS], -1)[:, :-1]
        context = draft.context(states, torch.arange(7).unsqueeze(0))
        anchors = torch.tensor([[7, 0, 3]])
        finals = draft(text[:, anchors[0]], anchors, context)[0]
        for final, anchor in zip(finals, anchors[0].tolist(), strict=True):
            before = text[0, [min(anchor + k, 7) for k in range(draft.block_length)]]
            logits, _ = draft.outputs(final, draft.lm_head(final), before)
            expected = slow_logits(target, draft, text[0, : anchor + 1].tolist(), before[1:].tolist())
            close(draft.lm_head.whole(logits), expected)


@pytest.mark.parametrize(("kind", "settings"), KINDS)
@pytest.mark.parametrize("whole", [False, True])
def test_logits_and_files_are_those_of_speculators(kind, settings, whole, tmp_path):
    """Their own training forward on a folder saved here; slots that do not predict are left out."""
    speculators = pytest.importorskip("speculators", exc_type=ImportError)
    target = tiny_llama(16, 4, 1, torch.float32)
    draft = tiny_block(target, kind, torch.arange(97) if whole else None, **settings)
    if whole:  # theirs take the whole vocabulary's rows from the target
        draft.lm_head.rows.weight.data.copy_(target.lm_head.weight)
    draft.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    target.save_pretrained(tmp_path / "target")
    block_format.save(tmp_path / "draft", draft, str(tmp_path / "target"), ["LlamaForCausalLM"])
    path = tmp_path / "draft" / "config.json"
    written = json.loads(path.read_text())
    written["transformer_layer_config"]["_attn_implementation"] = "eager"
    path.write_text(json.dumps(written))
    theirs = speculators.SpeculatorModel.from_pretrained(tmp_path / "draft").eval()
    seen, size = {}, draft.settings.block_size
    text = torch.tensor([[5, 9, 33, 21, 8, 4, 70, 2, 11, 6, 90, 44]])
    mask = torch.zeros(1, 12)
    mask[0, 5] = 1  # of one anchor
    name = (
        "speculators.models.dspark.core.compute_metrics"
        if kind == "dspark"
        else "speculators.models.dflash.core.compute_metrics"
    )
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(name, lambda logits, *rest, **more: (seen.update(logits=logits, rest=rest), (None, {}))[1])
        states = target(text, output_hidden_states=True).hidden_states
        read = torch.cat([states[layer] for layer in LAYERS], -1)
        theirs(read, text, mask, states[-1], torch.zeros(1, 12, dtype=torch.long), max_anchors=1)
    anchors, before = torch.tensor([[5]]), text[0, 5 : 5 + draft.block_length]
    with torch.no_grad():
        final = draft(text[:, 5:6], anchors, draft.context(read, torch.arange(12).unsqueeze(0)))[0, 0]
        logits, hidden = draft.outputs(final, draft.lm_head(final), before)
        close(logits, seen["logits"][0, draft.settings.first :])
        if draft.confidence_head is not None:
            close(draft.confidence_head(hidden), seen["rest"][1][0, draft.settings.first :])
    assert size == theirs.block_size and list(theirs.target_layer_ids) == LAYERS


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_a_saved_draft_is_loaded_again(kind, settings, tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    draft = tiny_block(target, kind, **settings)
    block_format.save(tmp_path, draft, "a/target")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["sliding_window_non_causal"] == (
        "window" not in settings or draft.settings.sliding_window_non_causal
    )  # vLLM reads it for any layer
    of_dspark = {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"}
    assert of_dspark & written.keys() == (of_dspark if kind == "dspark" else set())
    for again in (block_format.load(tmp_path, "auto", target), load_draft(tmp_path)):
        assert again.settings == draft.settings and again.config.layer_types == draft.config.layer_types
        for name, tensor in draft.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize("kept", [range(97), [0, 4, 96]])
def test_embeddings_and_rows_that_a_folder_lacks_are_the_targets(kept, tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    block_format.save(tmp_path, tiny_block(target, kept=torch.tensor(kept)), "a/target")
    state = load_file(tmp_path / "model.safetensors")
    save_file({n: t for n, t in state.items() if n not in ("embed_tokens.weight", "lm_head.weight")},
              tmp_path / "model.safetensors")  # fmt: skip
    draft = block_format.load(tmp_path, "auto", target)
    assert torch.equal(draft.embed_tokens.weight, target.get_input_embeddings().weight)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight[list(kept)])
    with pytest.raises(InputError, match="or the draft's target beside it"):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    "missing",
    [
        {"sample_from_anchor"},
        {"sample_from_anchor", "markov_head_type"},
        {"enable_confidence_head", "confidence_head_with_markov", "sliding_window_non_causal"},
    ],
)
def test_what_a_config_leaves_out(missing, tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    for kind in ("dflash", "dspark"):
        draft = tiny_block(target, kind)
        block_format.save(tmp_path / kind, draft, "a/target")
        path = tmp_path / kind / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in missing}))
        assert block_format.load(tmp_path / kind, "auto", target).settings == draft.settings


def changed(**values):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def without(part):
    def change(folder):
        state = load_file(folder / "model.safetensors")
        save_file({n: t for n, t in state.items() if part not in n}, folder / "model.safetensors")

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (changed(block_size=0), "block_size: expected at least 2"),
        (changed(block_size=1), "block_size: expected at least 2"),
        (changed(block_size="8"), "block_size: expected a whole number, got '8'"),
        (changed(mask_token_id=97), "mask_token_id: expected a token below 97, got 97"),
        (changed(mask_token_id=None), "mask_token_id: expected a whole number, got None"),
        (changed(aux_hidden_state_layer_ids=[0, 1, 9]), "below the target's 3, got [0, 1, 9]"),
        (changed(aux_hidden_state_layer_ids=[0, 1]), "fc.weight: expected shape [32, 64], got [32, 96]"),
        (changed(aux_hidden_state_layer_ids=None), "expected a list of layers, got None"),
        (changed(markov_rank=5), "expected shape [97, 5], got [97, 3]"),
        (changed(markov_rank=0), "confidence_head_with_markov needs a Markov term"),
        (changed(markov_rank=0, enable_confidence_head=False), "has an unknown weight confidence_head.proj.bias"),
        (without("markov"), "lacks weight markov_head.markov_w1.weight"),
        (changed(markov_head_type="gated"), "markov_head_type='gated' is not supported"),
        (changed(markov_head_type="rnn"), "markov_head_type='rnn' is not supported"),
        (changed(draft_vocab_size=50), "draft_vocab_size=50, but lm_head.weight has 40 rows"),
        (changed(speculators_model_type="dflash2"), "expected speculators_model_type=dflash or dspark, got 'dflash2'"),
        (changed(speculators_model_type=None, dflash_config={}), "dflash_config.target_layer_ids + 1"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_in_one_line(change, line, tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    block_format.save(tmp_path, tiny_block(target, "dspark"), "a/target")
    change(tmp_path)
    with pytest.raises(InputError) as error:
        block_format.load(tmp_path, "auto", target)
    assert line in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "line"),
    [
        (lambda: tiny_llama(16, 3, 1, torch.float32), "reads states of 32 numbers, the target's have 16"),
        (lambda: tiny_llama(32, 3, 1, torch.float32, vocab_size=61), "made for 97 tokens, the target has 61"),
        (lambda: tiny_llama(32, 2, 1, torch.float32), "below the target's 2, got [0, 1, 2]"),
    ],
)
def test_a_draft_of_another_target_is_refused(target, line, tmp_path):
    block_format.save(tmp_path, tiny_block(tiny_llama(32, 3, 1, torch.float32)), "a/target")
    with pytest.raises(InputError) as error:
        block_format.load(tmp_path, "auto", target())
    assert line in str(error.value)


def pair_of(kind="dspark", **settings):
    target = tiny_llama(32, 3, 1, torch.float64)
    return ModelPair(target, tiny_block(target, kind, **settings), costs="assumed")


@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_greedy_texts_are_the_targets(kind, settings):
    pair, prompts = pair_of(kind, **settings), [*ragged_prompts(6), [5]]
    plain = [text.token_ids for text in generate(pair, prompts, "autoregressive", max_new_tokens=16, temperature=0.0)]
    for batch_size, method in (
        (1, "speculative"),
        (4, "speculative"),
        (4, "block"),
        (3, "confidence"),
        (7, "heuristic"),
    ):
        options = {"max_new_tokens": 16, "temperature": 0.0, "batch_size": batch_size}
        sequences = generate(pair, prompts, method, **options)
        assert [text.token_ids for text in sequences] == plain, (method, batch_size)
        rounds = [round_ for text in sequences for round_ in text.rounds]
        assert all(round_.num_drafted <= pair.draft.block_length for round_ in rounds)
        assert all(round_.num_draft_calls == (round_.num_drafted > 0) for round_ in rounds)


@pytest.mark.parametrize(("kind", "method"), [("dflash", "speculative"), ("dspark", "block")])
def test_whole_outputs_follow_the_targets_distribution(kind, method):
    """Three tokens of a vocabulary of five by networks in float32: chi-square over all 125 outputs."""
    size, runs = 5, 3000
    target = tiny_llama(8, 3, 1, torch.float32, vocab_size=size)
    for parameter in target.parameters():
        parameter.data *= 2
    pair = ModelPair(target, tiny_block(target, kind, torch.tensor([0, 2, 3, 4])), end_ids=())
    prompt, every = [1, 2, 0, 3], torch.tensor(list(product(range(size), repeat=3)))
    with torch.no_grad():
        logits = target(torch.cat([torch.tensor([prompt] * len(every)), every], 1)).logits[:, 3:-1].double()
    expected = logits.softmax(-1).gather(2, every.unsqueeze(2)).squeeze(2).prod(1)
    built = config.method(method, ["policy.num_drafted=2"])
    sequences = generate(pair, [prompt] * runs, built, max_new_tokens=3, batch_size=3000, seed=3)
    outputs = torch.tensor([text.token_ids for text in sequences])
    counts = torch.bincount(outputs @ torch.tensor([25, 5, 1]), minlength=size**3).double()
    assert sum(round_.num_accepted for text in sequences for round_ in text.rounds) > runs / 10
    assert chi_square(counts, runs * expected) > 1e-4


@pytest.mark.parametrize(
    ("method", "line"),
    [
        ("mcsd", "TreeProposer reads a draft token by token, and BlockDraft gives a block at once"),
        ("best_source", "BestSourceProposer reads a draft token by token"),
        ("dsbd", "ForestProposer reads a draft token by token"),
    ],
)
def test_methods_that_read_token_by_token_refuse_blocks_in_one_line(method, line):
    with pytest.raises(InputError) as error:
        generate(pair_of(), ragged_prompts(1), method, max_new_tokens=4)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_block_needs_a_draft_that_gives_one():
    target = tiny_llama(32, 3, 1, torch.float64)
    method = config.method("speculative", ["+proposer={_target_: toolkit.decoding.BlockProposer}"])
    with pytest.raises(InputError, match="expected a draft that gives blocks"):
        generate(ModelPair(target, tiny_eagle3(target)), ragged_prompts(1), method, max_new_tokens=4)


def test_folders_of_all_kinds_are_told_apart(tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    block_format.save(tmp_path / "block", tiny_block(target), "a/target")
    eagle3.save(tmp_path / "eagle3", tiny_eagle3(target), "a/target")
    assert (kind_in(tmp_path / "block").name, kind_in(tmp_path / "eagle3").name) == ("dflash", "eagle3")
    with pytest.raises(InputError, match="is a DFlash draft, no target"):
        ModelPair.from_pretrained(tmp_path / "block")


def test_advice_on_a_block_draft_names_it_as_engines_do(tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    block_format.save(tmp_path / "draft", tiny_block(target, "dspark"), "a/target")
    files = write_exports(tmp_path, str(tmp_path / "draft"), {1: 3, 8: 2}, None, ["method=speculative"], [0.8, 0.5])
    assert {path.name for path in files} == {"toolkit.txt", "vllm.json", "vllm_synthetic.json"}
    assert json.loads((tmp_path / "vllm.json").read_text())["method"] == "dspark"


def test_advice_says_what_engines_do_otherwise_with_a_block_draft(tmp_path):
    """vLLM refuses DSpark, makes DFlash blocks causal where their folder does not say otherwise (ours do), and short."""
    target = tiny_llama(32, 3, 1, torch.float32)
    for kind in ("dflash", "dspark"):
        block_format.save(tmp_path / kind, tiny_block(target, kind), "a/target")
    assert engine_notes(str(tmp_path / "dflash"), {1: 3}) == []
    (line,) = engine_notes(str(tmp_path / "dflash"), {1: 2, 4: 3, 8: 1})  # a block is of four tokens
    assert "at K = 1, 2 its tokens are others there; num_speculative_tokens=3 drafts as here" in line
    assert ["DSpark" in line for line in engine_notes(str(tmp_path / "dspark"), {1: 3})] == [True]
    assert engine_notes(None, {1: 3}) == engine_notes("a/name", {1: 3}) == []
    path = tmp_path / "dflash" / "config.json"
    for windows, words in ((None, "makes its blocks causal"), (8, "layers without a window")):
        config = json.loads(path.read_text())
        config["transformer_layer_config"]["sliding_window"] = windows
        path.write_text(json.dumps({**config, "sliding_window_non_causal": False}))
        assert [words in line for line in engine_notes(str(tmp_path / "dflash"), {1: 3})] == [True]


def test_generate_of_transformers_takes_a_block_draft():
    target = tiny_llama(32, 3, 1, torch.float64)
    draft, tokens = tiny_block(target, "dspark"), torch.tensor([[7, 9, 30]])
    settings = {"max_new_tokens": 9, "do_sample": False}
    expected = target.generate(tokens, **settings)
    for method in (None, "speculative"):
        assert torch.equal(
            target.generate(tokens, **settings, custom_generate=custom_generate, draft=draft, method=method), expected
        )
