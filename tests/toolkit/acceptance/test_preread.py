"""The pre-read head: its features, its training on traces, and what decoding and replay make of it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from data_gen import traces
from toolkit import ModelPair, generate, train
from toolkit.acceptance import AcceptanceHead, PrereadHead, StatisticsEstimator
from toolkit.acceptance.folder import head_hash, scorers
from toolkit.acceptance.inputs import NUM_STATISTICS, Inputs, newest_features
from toolkit.acceptance.preread import embedding_table
from toolkit.config import compose, instantiate
from toolkit.errors import InputError
from toolkit.integrations.transformers import assistant
from toolkit.runs.stage import read_manifest
from toolkit.trace.replay import replay
from toolkit.trace.steps import RecordedStep
from toolkit.trace.store import read_traces
from toolkit.training import TracedData
from toolkit.training.console import EpochLines
from toolkit.training.losses import WeightedBCE
from toolkit.training.module import HeadTraining
from toolkit.types import DraftStep

pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = ["model=preread_head", "data=traced", "head.width=8", "trainer.max_epochs=3", "data.batch_size=8", "logger=csv"]


@pytest.fixture(scope="module")
def recorded(tiny_overrides, tiny_responses, tmp_path_factory):
    """A traces folder with states, two replicates."""
    options = [
        f"responses={tiny_responses}", "hidden=true", "upper_bound=false", "max_drafted=3", "replicates=2", "heads={}",
        f"paths.output_dir={tmp_path_factory.mktemp('traces')}/t",
    ]  # fmt: skip
    return traces.run(compose("traces", [*tiny_overrides, *options]))


@pytest.fixture(scope="module")
def trained(tiny_overrides, recorded, tmp_path_factory):
    folder = tmp_path_factory.mktemp("preread") / "run"
    return train.run(compose("train", [*tiny_overrides, *SMALL, f"data.path={recorded}", f"paths.output_dir={folder}"]))


@pytest.fixture(scope="module")
def pair(tiny_pair):
    pair = ModelPair.from_pretrained(target=str(tiny_pair / "target"), draft=str(tiny_pair / "draft"))
    pair.costs = "assumed"  # as in replays
    return pair


def test_features_are_scaled_and_say_what_was_drawn(pair):
    table = embedding_table(pair.draft)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, pair.vocab_size, generator=generator) / 2  # no logarithm is cut off
    hidden = torch.randn(3, 16, generator=generator) * 5
    step = DraftStep(1, logits, (2 * logits).softmax(-1), hidden, torch.tensor([1, 2, 3]))
    features = newest_features(step, table)
    assert features.shape == (3, 16 + table.shape[1] + NUM_STATISTICS)
    assert torch.allclose(features[:, :16].square().mean(1), torch.ones(3), atol=1e-4)
    parallel = torch.cosine_similarity(features[:, 16 : 16 + table.shape[1]], table[step.tokens])
    assert torch.allclose(parallel, torch.ones(3), atol=1e-4)
    p = logits.softmax(-1)
    assert torch.allclose(features[:, -5], (2 * logits).log_softmax(-1)[torch.arange(3), step.tokens], atol=1e-4)
    assert torch.allclose(features[:, -4], p.log()[torch.arange(3), step.tokens], atol=1e-4)
    assert torch.allclose(features[:, -3], -(p * p.log()).sum(-1), atol=1e-4)
    assert torch.allclose(features[:, -2:], p.topk(2).values.log(), atol=1e-4)


def test_samples_are_clean_positions_and_what_follows_accepted_ones(recorded, pair):
    data = TracedData(recorded, pair.draft, batch_size=4)
    data.setup()
    whole = read_traces(recorded, None)
    assert data.states["train"].num_examples + data.states["validation"].num_examples == whole.num_texts
    held_out = set(whole.rows.tolist()) - {
        int(whole.rows[int(text)]) for text in torch.searchsorted(whole.text_first, data.states["train"].first)
    }
    assert len(held_out) == data.states["validation"].num_examples / 2  # both replicates of a text are on one side
    states = data.states["train"]
    rows = [2, 0, *range(3, states.num_examples), 1]
    assert any(bool(whole.accepted[int(states.last[row]) - 1]) for row in rows[:-1])  # nothing follows in its own text
    batch = states.batch(rows)
    expected = []
    for row in rows:
        first, last = int(states.first[row]), int(states.last[row])
        for position in range(first, last):
            follows = bool(whole.accepted[position]) and position + 1 < last
            expected.append([whole.accept_prob[position], whole.alpha[position + 1] if follows else torch.nan])
    assert torch.equal(batch.labels.nan_to_num(-1), torch.tensor(expected).nan_to_num(-1))
    step = RecordedStep(whole, 1, torch.arange(int(states.first[1]), int(states.last[1])))
    assert torch.equal(batch.hidden[-len(step.index) :], newest_features(step, embedding_table(pair.draft)))


def test_a_run_leaves_a_head_that_learned(trained, recorded, tiny_overrides, tmp_path):
    scores = json.loads((trained / "metrics.json").read_text())
    assert scores["val/log_loss"] == pytest.approx(
        (scores["val/log_loss_accepted"] + scores["val/log_loss_following"]) / 2
    )
    head, about = PrereadHead.load(trained / "head")
    assert head.config["width"] == 8 and {"draft_fingerprint", "sampling", "metrics"} < set(about)
    assert "Pre-read head" in (trained / "MODEL_CARD.md").read_text()
    options = ["optimizer.lr=1e-2", "head.width=64", "trainer.max_epochs=20", f"paths.output_dir={tmp_path}/long"]
    long = train.run(compose("train", [*tiny_overrides, *SMALL, f"data.path={recorded}", *options]))
    curve = [line.split(",") for line in (long / "metrics.csv").read_text().splitlines()]
    losses = [float(row[curve[0].index("train/loss")]) for row in curve[1:] if row[curve[0].index("train/loss")]]
    assert losses[-1] < 0.9 * losses[0]


def test_dropout_takes_any_seed_of_torch():
    """Trainings of one's own code are not seeded by a command: torch begins with a seed of 64 bits."""
    module = HeadTraining(PrereadHead(4, 3, dropout=0.5), WeightedBCE(), torch.optim.SGD)
    module.trainer = SimpleNamespace(fit_loop=SimpleNamespace(total_batch_idx=0), world_size=1, global_rank=0)
    torch.manual_seed(2**64 - 2)
    module.on_fit_start()
    module.on_train_batch_start(None, 0)
    assert torch.initial_seed() != 2**64 - 2


def test_a_resumed_training_ends_like_an_uninterrupted_one(recorded, tiny_overrides, tmp_path, monkeypatch):
    words = [*tiny_overrides, *SMALL, f"data.path={recorded}", "head.dropout=0.3"]
    whole = train.run(compose("train", [*words, f"paths.output_dir={tmp_path}/whole"]))
    config = [*words, f"paths.output_dir={tmp_path}/cut"]

    def stops(self, trainer, module):
        if trainer.current_epoch == 1:
            raise RuntimeError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(EpochLines, "on_train_epoch_end", stops)
        with pytest.raises(RuntimeError, match="cut"):
            train.run(compose("train", config))
    assert (tmp_path / "cut" / "checkpoints" / "last.ckpt").exists()
    assert not (tmp_path / "cut" / "head").exists()
    train.run(compose("train", config))
    one, two = (load_file(path / "head" / "preread.safetensors") for path in (whole, tmp_path / "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_live_decoding_and_replay_see_the_same_scores(trained, pair, tiny_overrides, tiny_responses, tmp_path):
    """At temperature 0 live decoding and replay of the rate rule agree count for count."""
    prompts = ["the cat", "a dog and the cat", "the dog ran"]
    options = {"temperature": 0.0, "max_new_tokens": 12}
    plain = generate(pair, prompts, method="autoregressive", **options)
    with open(tmp_path / "texts.jsonl", "w") as file:
        for g in plain:
            file.write(json.dumps({"prompt_ids": g.prompt_ids, "token_ids": g.token_ids}) + "\n")
    head = str(trained / "head")
    folder = traces.run(
        compose(
            "traces",
            [
                *tiny_overrides, f"responses={tmp_path}/texts.jsonl", "+sampling.temperature=0",
                "+sampling.max_new_tokens=12", f"heads={{mine: {head}}}", f"paths.output_dir={tmp_path}/t",
            ],
        )
    )  # fmt: skip
    trace = read_traces(folder)
    assert set(trace.estimates) == {"mine.preread"} and trace.estimates["mine.preread"].shape == (trace.num_steps, 2)
    for overrides in ([], ["policy.rate=1.5"]):
        live = generate(pair, prompts, method="rate", head=head, overrides=overrides, **options)
        method = instantiate(
            compose("decode", ["method=rate", f"head={head}", *(f"method.{o}" for o in overrides)]).method
        )
        replayed = replay(trace, method.bind(pair).policy)
        for number, generation in enumerate(live):
            for name, values in replayed.counts.items():
                assert int(values[number]) == getattr(generation.counts, name), (name, overrides)


def test_hard_labels_are_the_acceptance_draws_of_training_alone(recorded, pair):
    data = TracedData(recorded, pair.draft, batch_size=4, hard_labels=True)
    data.setup()
    states, trace = data.states["train"], read_traces(recorded, None)
    first, last = int(states.first[0]), int(states.last[0])
    labels = states.batch([0]).labels
    assert torch.equal(labels[:, 0], trace.accepted[first:last].float())
    follows = [bool(trace.accepted[i]) and i + 1 < last for i in range(first, last)]
    assert torch.equal(~labels[:, 1].isnan(), torch.tensor(follows))
    assert labels[:, 1].nan_to_num(0).unique().tolist() in ([0.0, 1.0], [0.0], [1.0])
    soft = data.states["validation"].batch([0]).labels[:, 0]
    assert bool(((soft > 0) & (soft < 1)).any())  # scores are about probabilities
    assert data.about()["label"].startswith("1 where")


def test_a_head_that_reads_earlier_positions_is_trained_and_decodes(recorded, pair, tiny_overrides, tmp_path):
    options = ["head.earlier=2", "head.likelihood=true", "head.dropout=0.1", "trainer.max_epochs=1"]
    names = [f"data.path={recorded}", f"paths.output_dir={tmp_path}/run", *options]
    folder = train.run(compose("train", [*tiny_overrides, *SMALL, *names]))
    head, about = PrereadHead.load(folder / "head")
    assert head.inputs == Inputs(2, likelihood=True) and about["head"]["earlier"] == 2
    sequences = generate(pair, ["the cat"], method="rate", head=str(folder / "head"), max_new_tokens=8)
    assert len(sequences[0].token_ids) > 0
    warm = ["head.earlier=0", "head.likelihood=false", f"from_pretrained={folder}/head"]
    config = compose("train", [*tiny_overrides, *SMALL, *names, *warm, f"paths.output_dir={tmp_path}/warm"])
    with pytest.raises(InputError, match="earlier=None"):
        train.run(config)
    with pytest.raises(InputError, match="transformers keeps no earlier states"):
        assistant(pair.draft, "rate", head=folder / "head")


def test_bad_input_is_named(trained, recorded, pair, tiny_pair, tiny_overrides, tiny_mix, tmp_path):
    with pytest.raises(InputError, match="another draft"):
        TracedData(
            recorded, ModelPair.from_pretrained(target=str(tiny_pair / "target"), draft=str(tiny_pair / "target")).draft
        )
    words = [*tiny_overrides, f"paths.root_dir={tmp_path}"]
    with pytest.raises(InputError, match="expected a folder of data_gen.traces"):
        train.run(compose("train", [*words, *SMALL, f"data.path={tiny_mix}"]))
    with pytest.raises(InputError, match="expected a folder of data_gen.mix"):
        train.run(compose("train", [*words, f"data.path={recorded}"]))
    with pytest.raises(InputError, match="do not go together"):
        train.run(compose("train", [*words, "model=preread_head", f"data.path={tiny_mix}"]))
    with pytest.raises(InputError, match="needs an acceptance head"):
        generate(pair, ["the cat"], method="specdec_pp")
    with pytest.raises(InputError, match="expected an acceptance head"):
        generate(pair, ["the cat"], method="rate", head=str(tmp_path))
    both = tmp_path / "both"
    shutil.copytree(trained / "head", both)
    AcceptanceHead(16).save(both)
    assert set(scorers(pair, both)) == {"survival", "preread"} and head_hash(both) != head_hash(trained / "head")


def test_a_training_can_end_with_a_replayed_frontier(recorded, tiny_overrides, tiny_mix, tiny_responses, tmp_path):
    from analysis.replay.closing_frontier import LEVELS
    from analysis.tables.files import read_table

    with_rolls = traces.run(
        compose(
            "traces",
            [
                *tiny_overrides, f"responses={tiny_responses}", "hidden=true", "max_drafted=6", "limit=12", "heads={}",
                f"paths.output_dir={tmp_path}/t",
            ],
        )
    )  # fmt: skip
    closing = ["callbacks=replayed", f"callbacks.frontier.traces={with_rolls}", "logger=csv", "trainer.max_epochs=1"]
    for name, options in (
        ("preread", [*SMALL, f"data.path={recorded}"]),
        ("survival", [f"data.path={tiny_mix}", "head.depth=1"]),
    ):
        folder = train.run(
            compose("train", [*tiny_overrides, *options, *closing, f"paths.output_dir={tmp_path}/{name}"])
        )
        table = read_table(folder, "replayed")
        scores = json.loads((folder / "metrics.json").read_text())
        assert len(table) == len(LEVELS) and (folder / "replayed.png").stat().st_size > 1000
        assert scores["replay/throughput"] == pytest.approx(table.throughput.max())
        assert (table.num_drafted + table.num_target_calls == table.num_generated + table.num_discarded).all()
        assert table.num_drafted.is_monotonic_increasing  # a larger h drafts more
        again = train.run(
            compose("train", [*tiny_overrides, *options, *closing, f"paths.output_dir={tmp_path}/{name}"])
        )
        assert again == folder
    blind = traces.run(
        compose(
            "traces",
            [
                *tiny_overrides,
                f"responses={tiny_responses}",
                "limit=4",
                "heads={}",
                f"paths.output_dir={tmp_path}/blind",
            ],
        )
    )
    with pytest.raises(InputError, match="hidden=true"):
        train.run(
            compose(
                "train",
                [
                    *tiny_overrides, f"data.path={tiny_mix}", *closing[:1], f"callbacks.frontier.traces={blind}",
                    f"paths.output_dir={tmp_path}/c",
                ],
            )
        )  # fmt: skip


def test_a_head_with_products_begins_as_the_regression_and_is_kept(pair, tmp_path):
    head = PrereadHead(16, 16, width=4, products=True)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, pair.vocab_size, generator=generator) * torch.tensor([[0.1], [1], [3], [9], [200]])
    step = DraftStep(1, logits, logits.softmax(-1), torch.randn(5, 16, generator=generator), torch.arange(5))
    features = head.inputs.features(step, embedding_table(pair.draft))
    probs = torch.sigmoid(head(features)).unbind(-1)
    for prob, regression in zip(probs, StatisticsEstimator().bind(None).drawn_probs(step), strict=True):
        torch.testing.assert_close(prob, regression, atol=1e-4, rtol=0)
    torch.nn.init.normal_(head.layers[-1].weight)
    again, _ = PrereadHead.load(head.save(tmp_path / "head"))
    torch.testing.assert_close(again(features), head(features))
    assert again.config["products"] and "products" not in PrereadHead(16, 16).config


def test_all_texts_of_a_prompt_are_trained_on_or_validated_on(tiny_overrides, tiny_responses, pair, tmp_path):
    words = [
        f"responses=[{tiny_responses},{tiny_responses}]",
        "hidden=true",
        "max_drafted=1",
        "replicates=2",
        "heads={}",
    ]
    folder = traces.run(compose("traces", [*tiny_overrides, *words, f"paths.output_dir={tmp_path}/t"]))
    data, trace = TracedData(folder, pair.draft, validation_fraction=0.3), read_traces(folder, replicate=None)
    data.setup()
    count = read_manifest(tiny_responses)["rows"]["input"]
    prompts = []
    for name in ("train", "validation"):
        texts = torch.searchsorted(trace.text_first, data.states[name].first)
        prompts.append(set((trace.rows[texts] % count).tolist()))
    assert not prompts[0] & prompts[1]
    assert len(prompts[1]) == round(0.3 * len(prompts[0] | prompts[1]))


def test_data_of_few_positions_are_some_of_the_texts(recorded, pair):
    whole, few = (TracedData(recorded, pair.draft, positions=most) for most in (None, 400))
    for data in (whole, few):
        data.setup()
    trace = read_traces(recorded, replicate=None)
    used = {name: few.states[name].num_positions for name in ("train", "validation")}
    longest = int(trace.lengths().max()) * 2  # both replicates of a text are used together
    assert 400 <= sum(used.values()) < 400 + longest < whole.states["train"].num_positions
    with pytest.raises(InputError, match="leave none for the"):
        TracedData(recorded, pair.draft, positions=1).setup()
