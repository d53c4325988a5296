"""Distillation end to end on a tiny pair: what it leaves, that it learns, resuming, caches, refusals."""

from __future__ import annotations

import copy
import csv
import json
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from analysis import heads
from analysis.replay import drafts as replayed_drafts
from analysis.tables.files import read_table
from tests.toolkit.test_eagle3 import unrolled_logits
from toolkit import ModelPair, distill, generate
from toolkit.config import compose
from toolkit.distillation import recipe
from toolkit.distillation.data import MEASURED, DraftBatch, TextPart, split
from toolkit.distillation.losses import AcceptanceLikelihood, ForwardKL
from toolkit.distillation.module import DraftTraining, OnPolicy, is_on_policy, own_sequences
from toolkit.distillation.states import TargetStates
from toolkit.distillation.teachers import CachedTeacher, OnlineTeacher
from toolkit.drafts.eagle3 import format as eagle3
from toolkit.drafts.eagle3.training import Unrolled, UnrolledTraining
from toolkit.drafts.separate.weights import begin
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.fingerprint import Weights, fingerprint
from toolkit.models.pair import load_draft, load_tokenizer
from toolkit.models.reduced import kept_tokens, reduce_vocabulary
from toolkit.models.teacher import distributions_along, logits_of, produced_logits, produced_states
from toolkit.sampling import Sampling
from toolkit.testing import FAMILIES, llama_pair, tiny_eagle3, tiny_llama, tiny_model

SMALL = ["trainer.max_epochs=2", "data.batch_size=8", "optimizer.lr=1e-2", "trainer.log_every_n_steps=2"]


@pytest.fixture
def run(tiny_overrides, tiny_responses, tmp_path):
    """Distil the tiny pair's draft with these overrides, into a folder of this name."""

    def distilled(name, *words):
        given = [*tiny_overrides, *SMALL, f"paths.output_dir={tmp_path / name}"]
        responses = [] if any(word.startswith("responses=") for word in words) else [f"responses={tiny_responses}"]
        return distill.run(compose("distill", [*given, *responses, *words]))

    return distilled


def weights(folder):
    return load_file(folder / "draft" / "model.safetensors")


def same_weights(left, right):
    left, right = weights(left), weights(right)
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def scores(folder):
    return json.loads((folder / "metrics.json").read_text())


def test_a_run_leaves_a_draft_that_a_pair_can_use(run, tiny_pair):
    """A plain checkpoint: transformers loads it, nothing left over; vLLM, not installed here, knows its architecture."""
    folder = run("run", "loss=forward_kl", "trainer.max_epochs=4")
    scored = scores(folder)
    assert scored["val/alpha"] > scored["start/alpha"] and scored["val/loss"] < scored["start/loss"]
    pair = ModelPair.from_pretrained(tiny_pair / "target", draft=folder / "draft")
    (generation,) = generate(pair, ["the cat"], "speculative", max_new_tokens=8)
    assert len(generation.token_ids) <= 8 and generation.counts.num_drafted > 0
    card = (folder / "draft" / "README.md").read_text()
    assert "probability of acceptance" in card and f"begun from | `{tiny_pair.name}/draft`" in card
    assert not pair.draft.lm_head.weight.requires_grad
    draft = folder / "draft"
    model, report = AutoModelForCausalLM.from_pretrained(draft, output_loading_info=True)
    assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokenizer = AutoTokenizer.from_pretrained(draft)
    ids = tokenizer("the cat", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).shape[1] <= ids.shape[1] + 4
    about = json.loads((draft / "config.json").read_text())
    assert about["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in about  # no code of its own
    names = {path.name for path in draft.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= names
    assert not any(name.endswith((".bin", ".pt", ".py")) for name in names)
    stamp = (folder / "metrics.json").stat().st_mtime_ns
    run("run", "loss=forward_kl", "trainer.max_epochs=4")  # finished before
    assert (folder / "metrics.json").stat().st_mtime_ns == stamp


def test_the_draft_of_the_largest_loss_is_not_the_best_one(run):
    with pytest.raises(InputError, match="callbacks.checkpoints.mode: expected min for val/loss, got max"):
        run("run", "optimized_metric=val/loss")


def cut_often(run, monkeypatch, *words):
    """The folder of a run that breaks off twice in training, and then in its exports."""
    step, export, made = DraftTraining.training_step, recipe.export, []

    def cut_step(self, batch, batch_idx):
        made.append(batch_idx)
        if len(made) > 5:
            raise RuntimeError("power cut")
        return step(self, batch, batch_idx)

    def cut_export(*args):
        export(*args)
        raise RuntimeError("power cut")

    in_training = (DraftTraining, "training_step", cut_step)
    for replaced in (in_training, in_training, (recipe, "export", cut_export)):
        made.clear()
        with monkeypatch.context() as patched:
            patched.setattr(*replaced)
            with pytest.raises(RuntimeError, match="power cut"):
                run("cut", *words)
    return run("cut", *words)


EAGLE = ["kind=eagle3", "kind.target_layers=[0,1]", "vocabulary=12", "trainer.max_epochs=3"]


@pytest.mark.parametrize(
    "words",
    [
        ["pair.draft=null", "layers=1", "vocabulary=20", "lmbda=.5", "exports=[plain]"],
        [*EAGLE, "trainer.max_epochs=2"],
        [
            "kind=dflash",
            "kind.target_layers=[0,1]",
            "kind.block_size=4",
            "kind.num_layers=1",
            "kind.anchors=2",
            "seed=5",
        ],
    ],
)
def test_a_run_that_is_interrupted_again_and_again_ends_with_equal_weights(run, monkeypatch, words):
    words = [*words, "callbacks.checkpoints.every_n_steps=2"]
    whole, again = run("whole", *words), cut_often(run, monkeypatch, *words)
    assert same_weights(whole, again) and scores(whole) == scores(again)
    files, others = (sorted(path.name for path in folder.glob("draft*/*")) for folder in (whole, again))
    assert files == others


def test_a_teachers_cache_trains_as_the_target_does(run, tmp_path, tiny_pair):
    online = run("online", "loss=lk")
    cache = ["loss=lk", "teacher=cached", f"teacher.folder={tmp_path / 'cache'}", "teacher.top_k=100000"]
    cached = run("cached", *cache)  # all of the vocabulary: the same numbers, up to the order of categories
    assert scores(cached)["val/alpha"] == pytest.approx(scores(online)["val/alpha"], abs=1e-4)
    again = run("again", *cache, "teacher.on_missing=raise")
    assert same_weights(cached, again)


def test_validation_reads_the_whole_of_p(run, tmp_path):
    """With three tokens kept per position the scores before training are those of the target's whole distributions."""
    online = scores(run("online", "loss=lk", "trainer.max_epochs=1"))
    words = ["loss=lk", "teacher=cached", "teacher.top_k=3", f"teacher.folder={tmp_path / 'cache'}"]
    cached = scores(run("cached", *words, "trainer.max_epochs=1"))
    for name in ("start/alpha", "start/loss", "start/cross_entropy"):
        assert cached[name] == pytest.approx(online[name], rel=1e-5)
    control = scores(run("control", "loss=cross_entropy", "trainer.max_epochs=1"))
    assert control["start/loss"] == pytest.approx(online["start/cross_entropy"], rel=1e-6)
    assert online["start/cross_entropy"] > 0 and online["positions"] == cached["positions"] <= MEASURED


def test_validation_looks_at_evenly_spread_tokens():
    sequences = [([1], list(range(length))) for length in (40, 0, 3, 1, 56)]
    assert TextPart(sequences).num_positions == TextPart(sequences, 100).num_positions == 100
    part = TextPart(sequences, 10)
    assert part.num_positions == 10 and part.total == 100 and part.num_examples == 3  # texts without any are left out
    assert part.whole.positions == [[0, 10, 20, 30], [0], [6, 16, 26, 36, 46]]
    assert part.batch([2]).labels.tolist() == [6, 16, 26, 36, 46]


def test_large_seeds_split_texts_otherwise():
    texts = [([number], [1]) for number in range(40)]
    assert len({str(split(texts, 0.5, seed)) for seed in (0, 2**32, 2**33, 2**64)}) == 4


def test_a_cache_keeps_what_each_target_says(tmp_path, tiny_pair):
    target, other = load_draft(tiny_pair / "target"), load_draft(tiny_pair / "target")
    sequences = [([4, 5, 6], [7, 8, 9, 4]), ([5], [6, 7])]
    settings = {"folder": str(tmp_path / "cache"), "top_k": 5}
    train, validation = DraftBatch(sequences), DraftBatch([([4], [5, 6, 7])], [[0, 2]])
    CachedTeacher(target, 1.0, **settings).prepare(train, validation)
    cached = CachedTeacher(None, 1.0, Weights.of(target), **settings, on_missing="raise")
    expected = cached.expected(sequences[::-1])
    online = OnlineTeacher(target, 1.0)
    whole = torch.arange(6)
    probs = online.expected(sequences[::-1]).at(whole).log_probs
    assert cached.vocab_size == online.vocab_size == target.config.vocab_size
    assert torch.allclose(expected.log_probs, probs.gather(-1, expected.tokens.long()), atol=1e-5)
    assert torch.allclose(expected.log_probs, probs.topk(5).values, atol=1e-5)
    assert torch.allclose(expected.log_rest, probs.sort(-1).values[:, :-5].double().logsumexp(-1).float(), rtol=1e-5)
    cached.prepare(train, validation)
    assert torch.allclose(
        *(teacher.whole(validation).at(whole[:2]).log_probs for teacher in (cached, online)), atol=1e-5
    )
    with pytest.raises(InputError, match="lacks 2 of 3 texts"):
        cached.prepare(DraftBatch([sequences[0], ([5], [6, 8])]), DraftBatch(validation.sequences, [[1, 2]]))
    with torch.no_grad():
        next(other.parameters()).mul_(1.5)
    others = [(other, 1.0, settings), (target, 0.5, settings), (target, 1.0, {**settings, "top_k": 4})]
    for model, temperature, changed in others:  # side by side in one folder
        beside = CachedTeacher(model, temperature, **changed)
        beside.prepare(train, validation)
        probs = OnlineTeacher(model, temperature).expected(sequences).at(whole).log_probs
        assert torch.allclose(beside.expected(sequences).log_probs, probs.topk(changed["top_k"]).values, atol=1e-5)
    faster = CachedTeacher(target, 1.0, **settings, dtype="bfloat16")
    faster.prepare(train, validation)
    rounded, exact = faster.expected(sequences).log_probs, cached.expected(sequences).log_probs
    assert torch.allclose(rounded, exact, atol=0.2) and not torch.equal(rounded, exact)
    assert torch.equal(
        faster.whole(validation).at(whole[:2]).log_probs, cached.whole(validation).at(whole[:2]).log_probs
    )
    again = CachedTeacher(None, 1.0, Weights.of(target), **settings, on_missing="raise").expected(sequences[::-1])
    assert torch.equal(again.log_probs, expected.log_probs)
    half = Weights.of(load_draft(tiny_pair / "target", dtype="bfloat16"))  # as another number format of these weights
    assert torch.equal(
        CachedTeacher(None, 1.0, half, **settings).expected(sequences[::-1]).log_probs, expected.log_probs
    )
    with pytest.raises(InputError, match="is of several targets: expected responses that name theirs"):
        CachedTeacher(None, 1.0, None, **settings)
    CachedTeacher(None, 0.5, None, **settings).prepare(train, validation)  # the only one of its settings


def test_a_cache_tells_number_formats_and_configurations_of_the_same_weights_apart(tmp_path, tiny_pair):
    """A checkpoint in bfloat16 says something else in float32 or with another RoPE, though its weights have one fingerprint."""
    low = load_draft(tiny_pair / "target", dtype="bfloat16")
    high = copy.deepcopy(low).float()
    shutil.copytree(tiny_pair / "target", tmp_path / "longer")
    shape = read_json(tmp_path / "longer" / "config.json")
    shape["rope_parameters"]["rope_theta"] = 100.0
    (tmp_path / "longer" / "config.json").write_text(json.dumps(shape))
    longer = load_draft(tmp_path / "longer", dtype="bfloat16")
    assert fingerprint(low) == fingerprint(high) == fingerprint(longer)
    train, validation, index = DraftBatch([([4, 5, 6], [7, 8, 9, 4])]), DraftBatch([([4], [5, 6, 7])]), torch.arange(3)
    settings = {"folder": str(tmp_path / "cache"), "top_k": 5}
    only = CachedTeacher(low, 1.0, **settings)
    only.prepare(train, validation)
    alone = CachedTeacher(None, 1.0, Weights.of(low), **settings)
    assert alone.folder == only.folder, "of a target that is not loaded the only one counts"
    for model in (low, high, longer):
        teacher = CachedTeacher(model, 1.0, **settings)
        teacher.prepare(train, validation)
        probs = OnlineTeacher(model, 1.0).whole(validation).at(index).log_probs
        assert torch.equal(teacher.whole(validation).at(index).log_probs, probs)


def test_what_is_not_a_number_is_neither_taught_nor_kept(run, tiny_pair, tmp_path):
    shutil.copytree(tiny_pair / "draft", tmp_path / "broken")
    path = tmp_path / "broken" / "model.safetensors"
    save_file({name: weight * torch.nan for name, weight in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(InputError, match="^val/[a-z_]+ is nan after step") as error:
        run("kept", f"pair.draft={tmp_path / 'broken'}")
    assert "\n" not in str(error.value) and not (tmp_path / "kept" / "draft").exists()
    with pytest.raises(InputError, match="the target's distributions hold values that are not numbers"):
        OnlineTeacher(load_draft(tmp_path / "broken"), 1.0).expected([([4, 5], [6])]).at(torch.arange(1))


@pytest.mark.parametrize("size", [80, 97, 110])
def test_alpha_of_output_layers_of_other_sizes(size):
    """Where the draft has fewer outputs than the target, q is 0; where it has more, they are cut, as in decoding."""
    pair = llama_pair(dtype=torch.float32)
    draft = tiny_llama(16, 1, 3, torch.float32, vocab_size=size)
    sequences = [([4, 5, 6], [7, 8, 9, 4]), ([5], [6, 7])]
    batch = DraftBatch(sequences)
    teacher = OnlineTeacher(pair.target, 1.0)
    module = DraftTraining(draft, teacher, ForwardKL(), 1.0, OnPolicy(0.0, Sampling(), (), 0), torch.optim.SGD)
    ((_, states, index),) = module.chunks(batch)
    seen = module.distill_batch(states, teacher.whole(batch), batch.labels, index)
    mixed = replace(pair, draft=None, drafts=[draft])
    slow = [p.minimum(q).sum(-1) for p, q in distributions_along(mixed, sequences, Sampling())]
    assert torch.allclose(seen.alpha, torch.cat(slow), atol=1e-5)
    assert ForwardKL()(seen).isfinite().all()


def training_of(kind, target, loss):
    """A draft in training: of all tokens, of some, or one that reads the target's states."""
    arguments = (OnlineTeacher(target, 1.0), loss, 0.8, OnPolicy(0.0, Sampling(), (), 0), torch.optim.SGD)
    if kind == "eagle3":
        states = TargetStates(target, [0, 1, 2])
        draft = tiny_eagle3(target).requires_grad_(True)
        return UnrolledTraining(draft, *arguments, states=states, kind=Unrolled([0, 1, 2], decay=0.5))
    draft = tiny_llama(16, 1, 3, torch.float64).requires_grad_(True)
    if kind == "reduced":
        reduce_vocabulary(draft, range(5, 60), ())
    return DraftTraining(draft, *arguments)


@pytest.mark.parametrize("kind", ["whole", "reduced", "eagle3"])
def test_texts_and_positions_in_parts_have_the_loss_and_gradients_of_all_at_once(kind, monkeypatch):
    """No more tokens are read at once than was said (a long text alone), and no more positions have logits."""
    generator, target = torch.Generator().manual_seed(0), tiny_llama(32, 3, 1, torch.float64)
    lengths = [(3, 5), (2, 30), (9, 1), (4, 12), (5, 13), (1, 2)]
    sequences = [[torch.randint(3, 97, (n,), generator=generator).tolist() for n in pair] for pair in lengths]
    training, reads, rows, results = training_of(kind, target, AcceptanceLikelihood()), [], [], []
    draft, layer = training.draft, training.draft.get_output_embeddings()
    (layer.rows if kind != "whole" else layer).register_forward_hook(
        lambda module, args, output: rows.append(output.shape[:-1].numel())
    )
    draft.get_input_embeddings().register_forward_hook(
        lambda module, args, output: reads.append(output.shape[:-1].numel())
    )
    for most, chunk in ((10**6, 10**6), (25, 4)):
        monkeypatch.setattr("toolkit.distillation.module.CHUNK", chunk)
        draft.zero_grad()
        reads.clear(), rows.clear()
        total, weight = training.sums(DraftBatch(sequences, None, most), 0.5)
        (total / weight).backward()
        gradients = {name: w.grad.clone() for name, w in draft.named_parameters() if w.grad is not None}
        results.append((total.detach(), weight, gradients))
    assert max(rows) == 4 and max(reads) == 31 and sorted(set(reads))[-2] <= 25
    (total, weight, gradients), (in_parts, same, others) = results
    assert torch.allclose(total, in_parts, rtol=1e-6) and weight == same and gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0 or "embed" in name
        assert torch.allclose(gradient, others[name], rtol=1e-5, atol=1e-8), name


@pytest.mark.parametrize("family", FAMILIES)
def test_only_produced_tokens_have_logits(family):
    """Logits and gradients are those of whole forward passes; the output layer reads the looked-at positions alone."""
    model, rows = tiny_model(family).requires_grad_(True), []
    sequences, where = [([4, 5, 6], [7, 8, 9, 4]), ([5], [6, 7])], [[0, 3], [1]]
    hook = model.get_output_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(output.shape[:-1].numel())
    )
    logits = produced_logits(model, sequences, where)
    hook.remove()
    assert rows == [3]
    states = produced_states(model, sequences, where)
    torch.testing.assert_close(torch.cat([logits_of(model, some) for some in states.split(2)]), logits)
    slow = torch.stack([
        model(input_ids=torch.tensor([[*prompt, *produced[:i]]])).logits[0, -1]
        for (prompt, produced), at in zip(sequences, where, strict=True) for i in at
    ])  # fmt: skip
    torch.testing.assert_close(logits, slow, rtol=1e-4, atol=1e-4)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    fast, whole = (torch.autograd.grad(x.log_softmax(-1)[:, 3].sum(), weights) for x in (logits, slow))
    for one, other in zip(fast, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_drafts_own_texts_are_theirs(tiny_pair):
    """The draft's texts follow its weights as they are now, depend on (seed, step, rank) alone, and come lmbda of the time."""
    draft = load_draft(tiny_pair / "draft").requires_grad_(True)
    sequences = [([4, 5, 6], [7]), ([5, 9], [6, 7])]
    sampling = Sampling(temperature=0.0, max_new_tokens=6)
    for factor in (1.0, -1.0):  # other weights in between
        with torch.no_grad():
            draft.get_output_embeddings().weight.mul_(factor)
        for prompt, produced in own_sequences(draft, sequences, sampling, (), 0, 3):
            for i, token in enumerate(produced):
                logits = draft(input_ids=torch.tensor([[*prompt, *produced[:i]]])).logits[0, -1]
                assert logits[token] >= logits.max() - 1e-4
    drawn = Sampling(max_new_tokens=6)
    assert own_sequences(draft, sequences, drawn, (), 0, 3) == own_sequences(draft, sequences, drawn, (), 0, 3)
    streams = [(seed, step, rank) for seed in (0, 1, 2**32) for step in (3, 4) for rank in (0, 1)]
    texts = {stream: own_sequences(draft, sequences, drawn, (), *stream) for stream in streams}
    assert len({str(text) for text in texts.values()}) == len(streams)
    share = sum(is_on_policy(0.3, 5, step) for step in range(2000)) / 2000
    assert abs(share - 0.3) < 0.05
    steps = {tuple(is_on_policy(0.3, seed, step) for step in range(200)) for seed in (0, 1, 4096, 2**32)}
    assert len(steps) == 4
    assert not any(is_on_policy(0.0, 5, step) for step in range(50)) and all(is_on_policy(1.0, 5, s) for s in range(50))


def test_training_from_scratch_makes_the_shape_that_was_asked_for(run):
    folder = run("small", "from_pretrained=null", "shape={hidden_size: 8, num_hidden_layers: 1}", "lmbda=1.0")
    draft = load_draft(folder / "draft")
    assert draft.config.hidden_size == 8 and draft.config.num_hidden_layers == 1
    assert draft.config.head_dim == 8 // draft.config.num_attention_heads
    assert draft.get_output_embeddings().weight.shape[1] == 8


def test_bad_input_is_one_line(run, tmp_path, tiny_pair, tiny_responses):
    stranger = shutil.copytree(tiny_pair / "draft", tmp_path / "stranger")
    words = json.loads((stranger / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = [token for token, index in vocab.items() if index in (8, 9)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (stranger / "tokenizer.json").write_text(json.dumps(words))
    cases = (
        (["shape={hidden_size: 8}"], "from_pretrained: expected a draft with hidden_size=8"),
        ([f"from_pretrained={stranger}"], "the same tokenizer: token 8"),
        (["teacher=cached", "teacher.on_missing=raise", f"teacher.folder={tmp_path / 'none'}"], "lacks 60 of 60 texts"),
        (["teacher=cached", "teacher.on_missing=raise", "lmbda=0.5"], "expected lmbda=0, got 0.5"),
        ([f"pair.target={tiny_pair}/draft"], "the responses come from another target"),
    )
    for number, (overrides, said) in enumerate(cases):
        with pytest.raises(InputError, match=said.replace("[", r"\[")) as error:
            run(f"bad-{number}", *overrides)
        assert "\n" not in str(error.value)


def test_tokens_that_no_model_has_are_refused_before_the_training():
    """An endpoint's responses name no target, so that their tokens alone tell."""
    rows = [{"id": "a", "prompt_ids": [1, 2], "token_ids": [3]}, {"id": "b", "prompt_ids": [1], "token_ids": [5, 97]}]
    with pytest.raises(InputError, match=r"response b: expected token ids in \[0, 97\), .* got 97"):
        distill.readable([llama_pair().target], SimpleNamespace(rows=rows))


def test_a_checkpoint_of_another_draft_is_refused(run):
    folder = run("first")
    with pytest.raises(InputError, match="holds another draft"):
        run("second", "from_pretrained=null", "shape={hidden_size: 8}", f"ckpt_path={folder}/checkpoints/last.ckpt")


def test_drafts_side_by_side(run, tiny_overrides, tiny_responses, tiny_pair, tmp_path):
    """alpha by enumeration is the mean of sum min(p, q); the target as its own draft accepts all; equal drafts gain nothing."""
    named = f"drafts={{a: {tiny_pair}/draft, b: {tiny_pair}/draft, self: {tiny_pair}/target}}"
    words = [named, f"responses={{one: {tiny_responses}}}", "limit=12", "depth=3", "max_drafted=4", "resamples=200"]
    folder = heads.run(compose("heads", [*tiny_overrides, *words, f"paths.output_dir={tmp_path / 'drafts'}"]))
    table = read_table(folder, "drafts").set_index("draft")
    assert table.alpha["a"] == table.alpha["b"] and table["throughput gain_high"]["b"] == 0
    assert 0 < table.alpha["a"] < 1 and table.alpha_low["a"] < table.alpha["a"] < table.alpha_high["a"]
    assert table.alpha["self"] == pytest.approx(1, abs=1e-5) and table["alpha gain_low"]["self"] > 0
    assert table["best K"]["self"] == 4 and table.accepted["self"] > table.accepted["a"]
    assert "self" in (folder / "drafts.md").read_text()


def test_other_responses_choose_how_many_tokens_are_drafted(
    tiny_overrides, tiny_responses, tiny_pair, tmp_path, monkeypatch
):
    chosen = []
    monkeypatch.setattr(replayed_drafts, "best_length", lambda generated, cost: chosen.append(len(generated)) or 3)
    words = [f"drafts={{a: {tiny_pair}/draft, self: {tiny_pair}/target}}", f"responses={{one: {tiny_responses}}}"]
    words += [f"dev={tiny_responses}", "limit=6", "depth=3", "max_drafted=4", "resamples=100"]
    folder = heads.run(compose("heads", [*tiny_overrides, *words, f"paths.output_dir={tmp_path / 'drafts'}"]))
    assert list(read_table(folder, "drafts")["best K"]) == [3, 3]
    assert chosen == [5, 5], "once per draft, and of the reported responses never"


def test_drafts_by_vocabulary_at_measured_costs(tiny_overrides, tiny_responses, tiny_pair, tmp_path, capsys):
    """A reduction that keeps most tokens covers more; the best candidate is written as a draft of its own."""
    words = [f"drafts={{a: {tiny_pair}/draft}}", f"responses={{one: {tiny_responses}}}", "limit=12", "depth=3"]
    words += ["max_drafted=4", "resamples=200", "vocabularies=[8,40,null,100000]", f"frequencies=[{tiny_responses}]"]
    words += ["measured=true", f"paths.output_dir={tmp_path / 'shapes'}"]
    folder = heads.run(compose("heads", [*tiny_overrides, *words]))
    table = read_table(folder, "drafts").set_index("draft")
    assert list(table.index) == ["a, V'=8", "a, V'=40", "a"]
    assert table.coverage.is_monotonic_increasing and table.coverage["a"] == 1
    assert (table.c > 0).all() and (table["best K"] >= 1).all()
    best = str(table.throughput.idxmax())
    kept = kept_tokens(load_draft(folder / "best"))
    assert (None if kept is None else len(kept)) == {"a, V'=8": 8, "a, V'=40": 40, "a": None}[best]
    assert f"best/ is {best}, predicted speed-up" in capsys.readouterr().out
    with pytest.raises(InputError, match=r"expected frequencies=\[FOLDER"):
        heads.run(compose("heads", [*tiny_overrides, *words[:2], "vocabularies=[8]"]))


def test_a_target_without_a_draft_gets_one_of_its_layers(run, tiny_pair):
    target = ModelPair.from_pretrained(tiny_pair / "target")
    folder = run("layers", "pair.draft=null", "layers=1", "loss=lk")
    draft = load_draft(folder / "draft")
    assert draft.config.num_hidden_layers == 1 < target.target.config.num_hidden_layers
    assert scores(folder)["val/alpha"] > scores(folder)["start/alpha"]
    pair = ModelPair.from_pretrained(tiny_pair / "target", folder / "draft")
    assert generate(pair, ["the cat"], "speculative", max_new_tokens=4)[0].counts.num_drafted > 0


def test_a_reduced_vocabulary_trains_its_rows_and_is_exported_whole(run, tiny_pair, capsys):
    """The same rows in all exports; the plain one's other rows are the target's; plain and GGUF files agree."""
    pytest.importorskip("gguf")
    target = ModelPair.from_pretrained(tiny_pair / "target")
    words = ["pair.draft=null", "layers=1", "loss=lk", "vocabulary=20", "exports=[plain,gguf]"]
    folder = run("reduced", *words)
    draft, plain = load_draft(folder / "draft"), load_draft(folder / "draft_plain")
    rows = kept_tokens(draft)
    assert len(rows) == 20 and set(target.end_ids) <= set(rows.tolist())
    assert scores(folder)["val/alpha"] > scores(folder)["start/alpha"]
    assert torch.equal(draft.get_input_embeddings().weight, target.target.get_input_embeddings().weight)
    assert not torch.equal(draft.get_output_embeddings().weight, target.target.get_output_embeddings().weight[rows])
    ids = torch.tensor([[5, 6, 7, 8]])
    torch.testing.assert_close(plain(ids).logits[..., rows], draft(ids).logits[..., rows])
    others = [token for token in range(target.vocab_size) if token not in rows.tolist()]
    assert torch.equal(
        plain.get_output_embeddings().weight[others], target.target.get_output_embeddings().weight[others]
    )
    read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="draft.gguf")
    torch.testing.assert_close(read(ids).logits, plain(ids).logits, atol=1e-5, rtol=1e-5)
    pair = ModelPair.from_pretrained(tiny_pair / "target", folder / "draft")
    assert generate(pair, ["the cat"], "speculative", max_new_tokens=4)[0].counts.num_drafted > 0
    words = ["pair.draft=null", f"from_pretrained={folder / 'draft'}", "trainer.max_epochs=1"]
    again = run("on", *words, f"vocabulary={target.vocab_size}")  # as many as there are: nothing is reduced
    assert torch.equal(kept_tokens(load_draft(again / "draft")), rows)


def test_a_compact_draft_has_its_targets_embeddings(run, tiny_pair, tmp_path):
    """It decodes as the draft rounded to bfloat16 does, inside its target alone; another target is refused."""
    words = ["pair.draft=null", "layers=1", "vocabulary=20", "trainer.max_epochs=1"]
    folder = run("compact", *words, "exports=[compact]")
    compact, whole = folder / "draft_compact", folder / "draft"
    assert not any(compact.glob("tokenizer*"))
    pair = ModelPair.from_pretrained(tiny_pair / "target", compact)
    rounded = load_draft(whole)
    for weights in rounded.parameters():
        weights.data.copy_(weights.bfloat16())
    rounded.get_input_embeddings().weight.data.copy_(pair.target.get_input_embeddings().weight)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert torch.equal(pair.draft(ids).logits, rounded(ids).logits)
    alone = load_draft(compact, target=str(tiny_pair / "target"))  # as training a head loads it
    assert torch.equal(alone(ids).logits, rounded(ids).logits)
    with pytest.raises(InputError, match="the target beside it"):
        load_draft(compact)
    other = load_draft(tiny_pair / "target")
    other.get_input_embeddings().weight.data[3, 2] += 1
    other.save_pretrained(tmp_path / "other")
    load_tokenizer(tiny_pair / "target").save_pretrained(tmp_path / "other")
    with pytest.raises(InputError, match="another target's draft"):
        ModelPair.from_pretrained(tmp_path / "other", compact)
    with pytest.raises(InputError, match="expected a draft of the target's layers"):
        run("own", "exports=[compact]")


def test_an_interrupted_run_exports_its_best_draft_and_goes_on(run, monkeypatch):
    """The export of an unfinished run changes nothing of what follows."""
    expected = run("whole", "vocabulary=20", "layers=1", "pair.draft=null", "trainer.max_epochs=4")

    def stop(self, batch, batch_idx):
        if self.trainer.current_epoch == 2:
            raise RuntimeError("cut")
        return step(self, batch, batch_idx)

    words = ["vocabulary=20", "layers=1", "pair.draft=null", "trainer.max_epochs=4"]
    step = DraftTraining.training_step
    with monkeypatch.context() as patched:
        patched.setattr(DraftTraining, "training_step", stop)
        with pytest.raises(RuntimeError, match="cut"):
            run("cut", *words)
    folder = run("cut", *words, "export=true")
    assert load_draft(folder / "draft").config.num_hidden_layers == 1
    card = (folder / "draft" / "README.md").read_text(encoding="utf-8")
    assert f"| tokens | {scores(expected)['tokens'] // 2:,} in all epochs |" in card  # two epochs of four
    assert not (folder / "metrics.json").exists()
    assert math.isnan(distill.score(compose("distill", ["responses=x"]), folder))  # what the command returns
    assert same_weights(run("cut", *words), expected)


def test_the_best_state_is_the_one_that_was_validated(run):
    """Also within epochs, of which the last steps are not validated: seven batches, validated after three and six."""
    folder = run("run", "+trainer.val_check_interval=.5", "optimizer.lr=.1")
    with open(folder / "metrics.csv", newline="") as file:
        alphas = [float(line["val/alpha"]) for line in csv.DictReader(file) if line["val/alpha"]]
    assert len(alphas) == 5 and scores(folder)["val/alpha"] == pytest.approx(max(alphas[1:]), abs=1e-6)


def test_the_positions_are_those_that_were_read(run, monkeypatch, capsys):
    read, step = [], DraftTraining.validation_step
    monkeypatch.setattr(
        DraftTraining,
        "validation_step",
        lambda self, batch, i: (read.append(len(batch.labels)), step(self, batch, i))[1],
    )
    words = ["+trainer.limit_val_batches=2", "data.batch_size=2", "trainer.max_epochs=1"]
    assert scores(run("run", *words))["positions"] == sum(read[:2])
    assert f"at {sum(read[:2])} of" in capsys.readouterr().out


@pytest.mark.parametrize("export", [False, True])
def test_curves_hold_the_state_of_their_step(run, monkeypatch, export):
    """The scores of the exported state, an earlier one, are not another point at their end, or the first one's."""
    words = ["optimizer.lr=.3", "trainer.max_epochs=3"]
    folder = run("run", *words)
    if export:
        (folder / "manifest.json").unlink()
        run("run", *words, "export=true")
    with open(folder / "metrics.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    alphas = [float(line["val/alpha"]) for line in lines if line["val/alpha"]]
    first, best = (scores(folder)[f"{name}/alpha"] for name in ("start", "val"))
    assert len(alphas) == 4 and alphas[0] == pytest.approx(first)
    assert lines[-1]["train/lr"] and max(alphas) == pytest.approx(best)


def test_texts_beyond_a_drafts_context_are_passed_over(run, tiny_pair, tmp_path, capsys):
    short = shutil.copytree(tiny_pair / "draft", tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 24}))
    run("short", f"from_pretrained={short}", "trainer.max_epochs=1")
    assert "texts exceed the context of 24 tokens and are passed over" in capsys.readouterr().out


@pytest.mark.parametrize("teacher", ["online", "cached"])
def test_a_draft_that_reads_the_targets_states_is_trained_and_decodes(run, tiny_pair, tmp_path, teacher, capsys):
    folder = run(
        teacher, *EAGLE, f"teacher={teacher}", *([f"teacher.folder={tmp_path / 'cache'}"] * (teacher == "cached"))
    )
    values = scores(folder)
    assert all(values[f"val/{name}"] > values[f"start/{name}"] for name in ("alpha", "alpha_2", "alpha_3"))
    assert ("states: the target reads" in capsys.readouterr().out) == (teacher == "cached")
    pair = ModelPair.from_pretrained(tiny_pair / "target", folder / "draft")
    plain = [
        text.token_ids
        for text in generate(pair, ["the cat", "a dog"], "autoregressive", max_new_tokens=8, temperature=0.0)
    ]
    sequences = generate(pair, ["the cat", "a dog"], "speculative", max_new_tokens=8, temperature=0.0)
    assert [text.token_ids for text in sequences] == plain and sum(text.counts.num_drafted for text in sequences) > 0
    embedding = pair.target.get_input_embeddings().weight
    assert torch.equal(pair.draft.embed_tokens.weight, embedding)


def test_a_draft_that_reads_states_is_trained_on(run):
    whole = run("whole", *EAGLE)
    further = run("further", *EAGLE, f"from_pretrained={whole / 'draft'}")
    assert scores(further)["start/alpha"] == pytest.approx(scores(whole)["val/alpha"], abs=1e-6)


def test_texts_that_are_too_short_for_a_depth_weigh_nothing():
    """Two depths more than the first text has tokens after its first, none for the third text."""
    target = tiny_llama(32, 3, 1, torch.float32)
    kind, states = Unrolled([0, 1, 2], depth=3), TargetStates(target, [0, 1, 2])
    training = UnrolledTraining(
        tiny_eagle3(target), OnlineTeacher(target, 1.0), ForwardKL(), 1.0, OnPolicy(0.0, Sampling(), (), 0),
        torch.optim.SGD, states=states, kind=kind,
    )  # fmt: skip
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    long, batches = ([5, 8, 9, 11], [6, 7, 9]), [([5], [6, 7]), ([4], [6])]
    alone, among = (
        trainer.validate(
            training, DataLoader([DraftBatch([text]) for text in sequences], batch_size=None), verbose=False
        )[0]
        for sequences in ([long], [long, *batches])
    )
    assert among["val/alpha"] != pytest.approx(alone["val/alpha"])  # token 7 of the first is predicted at depth 1
    for name in ("val/alpha_2", "val/alpha_3"):
        assert among[name] == pytest.approx(alone[name])


def test_validation_counts_the_rounds_that_decoding_has():
    """Not those that begin inside a prompt; the slow way drafts token by token, from every start within the response."""
    target = tiny_llama(32, 3, 1, torch.float32)
    draft, kind, states = tiny_eagle3(target), Unrolled([0, 1, 2], depth=3), TargetStates(target, [0, 1, 2])
    training = UnrolledTraining(
        draft, OnlineTeacher(target, 1.0), ForwardKL(), 1.0, OnPolicy(0.0, Sampling(), (), 0),
        torch.optim.SGD, states=states, kind=kind,
    )  # fmt: skip
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
    sequences = [([5, 8, 9, 11, 3, 14], [6, 7, 9]), ([4, 21], [6, 30])]
    (logged,) = trainer.validate(training, DataLoader([DraftBatch(sequences)], batch_size=None), verbose=False)
    alphas = {depth: [] for depth in (1, 2, 3)}
    for prompt, response in sequences:
        text = [*prompt, *response]
        for start in range(len(prompt), len(text)):  # tokens that are there when a round begins
            for depth in range(1, 1 + min(3, len(text) - start)):
                logits = unrolled_logits(target, draft, text[:start], text[start : start + depth - 1])[-1]
                q = logits.softmax(-1)
                p = target(torch.tensor([text[: start + depth - 1]])).logits[0, -1].softmax(-1)
                alphas[depth].append(float(torch.minimum(p, q).sum()))
    for depth, name in enumerate(("val/alpha", "val/alpha_2", "val/alpha_3"), start=1):
        assert logged[name] == pytest.approx(sum(alphas[depth]) / len(alphas[depth]), abs=1e-5), name


@pytest.mark.parametrize("vocabulary", [12, pytest.param("null", marks=pytest.mark.slow)])
def test_a_draft_whose_rows_are_in_another_order_is_trained_alike(run, tiny_pair, tmp_path, vocabulary):
    words = [*EAGLE, f"vocabulary={vocabulary}", "trainer.max_epochs=1", "loss=lk", "teacher=cached", "teacher.top_k=3"]
    begun = run("begun", *words, f"teacher.folder={tmp_path / 'cache'}") / "draft"
    target = ModelPair.from_pretrained(tiny_pair / "target").target
    shuffled = eagle3.load(begun, "float32", target)
    order = torch.randperm(len(shuffled.lm_head.kept), generator=torch.Generator().manual_seed(1))
    shuffled.lm_head.kept, shuffled.lm_head.rows.weight.data = (
        rows[order] for rows in (shuffled.lm_head.kept, shuffled.lm_head.weight.data)
    )
    eagle3.save(tmp_path / "shuffled", shuffled, "target")
    folders = [
        run(name, *words, f"teacher.folder={tmp_path / 'cache'}", f"from_pretrained={source}")
        for name, source in (("ascending", begun), ("mixed", tmp_path / "shuffled"))
    ]
    ascending, mixed = (eagle3.load(folder / "draft", "float32", target) for folder in folders)
    assert torch.equal(mixed.lm_head.kept, shuffled.lm_head.kept) and not torch.equal(order, order.sort().values)
    assert torch.allclose(mixed.lm_head.weight, ascending.lm_head.weight[order], atol=1e-4)
    before, after = map(scores, folders)
    assert {name: after[name] for name in before if "/" in name} == pytest.approx(
        {name: before[name] for name in before if "/" in name}, abs=1e-4
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["layers=1"], "layers: kind=eagle3 takes none"),
        (["lmbda=.5"], "lmbda: kind=eagle3 takes none"),
        (["exports=[gguf]"], "exports: kind=eagle3 takes none"),
        (["kind.target_layers=[1,0]"], "kind.target_layers: expected ascending layers"),
    ],
)
def test_what_such_a_draft_cannot_take_is_one_line(run, words, line):
    with pytest.raises(InputError) as error:
        run("bad", *EAGLE, *words)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_what_reads_a_draft_alone_refuses_it_in_one_line(tmp_path):
    target = tiny_llama(32, 3, 1, torch.float32)
    eagle3.save(tmp_path, tiny_eagle3(target), "target")
    draft = eagle3.load(tmp_path, "float32", target)
    with pytest.raises(InputError, match="cannot be read alone"):
        list(distributions_along(ModelPair(target, draft), [([4, 5], [6, 7])], Sampling()))
    with pytest.raises(InputError, match="kind=eagle3 trains"):
        begin(tmp_path, {}, None, None, 0, "cpu", "float32")
    alone = load_draft(tmp_path)  # what heads need of it
    assert torch.equal(alone.embed_tokens.weight, draft.embed_tokens.weight)
    state = load_file(tmp_path / "model.safetensors")
    del state["embed_tokens.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="embed_tokens.weight, or the draft's target beside it"):
        load_draft(tmp_path)
