"""The toy pair's recipe in miniature: tokenizer, batches, training, resuming, export."""

import json
from itertools import islice

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_gen import toy
from data_gen.domains import DOMAINS, get
from data_gen.toy_pair.export import acceptance, respond, train_tokenizer
from data_gen.toy_pair.training import BatchStream, Muon, ToyModule, encode, learning_rate_factor, orthogonal
from toolkit.config import compose
from toolkit.errors import StaleError

TINY = [
    "target.steps=4", "target.warmup=1", "draft.steps=4", "draft.warmup=1", "checkpoint_every=2",
    "examples=60", "tokens_per_batch=512",
    "vocab_size=400", "tokenizer_examples={instruct: 60, math: 60, code: 60}",
    "target.num_layers=1", "target.hidden_size=32", "target.num_heads=2", "target.intermediate_size=32",
    "draft.num_layers=1", "draft.hidden_size=16", "draft.num_heads=2", "draft.intermediate_size=16",
    "evaluation.prompts=2", "evaluation.max_new_tokens=4",
]  # fmt: skip


def tiny_config(folder, *overrides):
    return compose("toy", [*TINY, f"paths.output_dir={folder}", *overrides])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return toy.run(tiny_config(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def corpus():
    return {domain: get(domain).examples("train", 100) for domain in DOMAINS}


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_tokenizer(texts_of(corpus), 400, 1024)


def texts_of(corpus):
    return [text for examples in corpus.values() for e in examples for text in (e.prompt, e.response)]


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").state_dict()


def test_tokenizer_splits_digits_and_round_trips(tokenizer, corpus):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert [token for token in tokenizer.tokenize("1234 + 56") if token.isdigit()] == list("123456")
    for text in [*texts_of(corpus), "naïve 東京 🙂\n\t  x "]:
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 1
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert train_tokenizer(texts_of(corpus), 400, 1024).get_vocab() == tokenizer.get_vocab()


def test_stream_restarts_anywhere_and_wastes_little(tokenizer, corpus):
    pools = {domain: encode(tokenizer, examples, 300) for domain, examples in corpus.items()}
    arguments = (pools, dict.fromkeys(pools, 1.0), 1024, 0.1, 0)
    batches = list(islice(BatchStream(*arguments), 40))
    later = next(iter(BatchStream(*arguments, start=7)))
    assert torch.equal(batches[7]["input_ids"], later["input_ids"])
    assert all(batch["input_ids"].numel() <= 1024 for batch in batches)
    real = sum(int((batch["input_ids"] != 0).sum()) for batch in batches)
    assert real > 0.9 * sum(batch["input_ids"].numel() for batch in batches)


def test_batches_weigh_the_response(tokenizer, corpus):
    example = corpus["math"][0]
    document = encode(tokenizer, [example], 512)[0]
    batch = next(iter(BatchStream({"math": [document]}, {"math": 1.0}, 1, 0.1, 0)))
    row = batch["input_ids"][0].tolist()
    assert tokenizer.decode(row, skip_special_tokens=True) == example.prompt + example.response
    response = tokenizer(example.response, add_special_tokens=False)["input_ids"]
    assert batch["weights"][0].tolist() == pytest.approx(
        [0.0] + [0.1] * (len(row) - len(response) - 2) + [1.0] * (len(response) + 1)
    )


def test_learning_rate_rises_and_falls():
    factors = [learning_rate_factor(step, 10, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == factors[10] == 1.0
    assert factors[100] == pytest.approx(0.01)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_export_loads_and_is_float16_on_disk(finished, name):
    with safe_open(finished / name / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(key).dtype for key in file.keys()} == {torch.float16}  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(finished / name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(finished / name)
    assert model.config.vocab_size == len(tokenizer) == 400
    assert model.config.max_position_embeddings == 1024
    assert model.generation_config.eos_token_id == 2
    assert tokenizer("Q:")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert len(respond(model, tokenizer, ["Q: 1 + 1?\nA:", "Q:"], 3)) == 2
    assert acceptance(model, model, [([1, 5, 6], [7, 8, 2]), ([1], [9])]) == pytest.approx(1.0), "it accepts itself"


def test_card_describes_the_run(finished):
    card = json.loads((finished / "card.json").read_text())
    assert card["domains"].keys() == set(DOMAINS)
    assert card["steps"] == {"target": 4, "draft": 4}
    assert all(0 < values["alpha"] <= 1 for values in card["domains"].values())
    assert "exact_match_target" in card["domains"]["math"]
    assert "exact_match_target" not in card["domains"]["code"]
    assert f"{card['parameters']['target']:,}" in (finished / "MODEL_CARD.md").read_text()


def test_a_killed_run_resumes_to_the_same_weights(finished, tmp_path, monkeypatch):
    step = ToyModule.training_step

    def dies_at_three(self, batch, batch_idx):
        if self.global_step == 3:
            raise RuntimeError("killed")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(ToyModule, "training_step", dies_at_three)
        with pytest.raises(RuntimeError, match="killed"):
            toy.run(tiny_config(tmp_path))
    assert not (tmp_path / "card.json").exists()
    toy.run(tiny_config(tmp_path))
    for name in ("target", "draft"):
        resumed, straight = weights(tmp_path / name), weights(finished / name)
        assert all(torch.equal(resumed[key], straight[key]) for key in straight)


def test_a_finished_run_is_kept_and_another_recipe_refused(finished):
    written = (finished / "card.json").stat().st_mtime_ns
    toy.run(tiny_config(finished))
    assert (finished / "card.json").stat().st_mtime_ns == written
    with pytest.raises(StaleError, match="seed was 0, is 1"):
        toy.run(tiny_config(finished, "seed=1"))


# -- the optimizer against plain descriptions of its two updates ------------------------------------------------------


def test_orthogonal_keeps_the_singular_vectors_and_evens_out_their_values():
    random = torch.randn(24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, _, vh = torch.linalg.svd(random, full_matrices=False)
    matrix = u @ torch.diag(torch.logspace(-2, 0, 24, dtype=torch.float64)) @ vh  # singular values from 0.01 to 1
    for given, result in ((matrix, orthogonal(matrix)), (matrix.mT, orthogonal(matrix.mT).mT)):
        assert given.shape in {(24, 40), (40, 24)}
        values = torch.diagonal(u.mT @ result @ vh.mT)
        assert torch.allclose(u.mT @ result @ vh.mT, torch.diag(values), atol=1e-9)
        assert values.min() > 0.1
        assert values.max() < 2


def test_size_of_a_matrix_step_does_not_depend_on_the_gradient():
    steps = []
    for scale in (1.0, 1e3):
        weight = torch.nn.Parameter(torch.zeros(8, 4))
        weight.grad = scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        Muon([{"params": [weight], "lr": 0.1}]).step()
        steps.append(weight.detach())
    assert torch.allclose(steps[0], steps[1], atol=1e-4)
    assert steps[0].abs().max() > 0.01


def test_adam_groups_are_adam():
    ours, theirs = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    optimizer = Muon([{"params": [ours], "lr": 0.1, "adam": True, "weight_decay": 0.3}])
    reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.98), weight_decay=0.3)
    for seed in range(5):
        gradient = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)
