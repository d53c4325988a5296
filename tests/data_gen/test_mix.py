"""Token mixing: the labels, the acceptance draws, what the rows do not depend on, and the stage around it."""

import json
import shutil

import datasets
import pytest
import torch

from data_gen import mix, texts
from data_gen.mixed_preview import as_text
from data_gen.mixing import STREAM, mix_batch
from data_gen.texts import read_responses
from toolkit import ModelPair
from toolkit.config import compose, method
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.sampling import Sampling, draw, row_generator, warp
from toolkit.session.tabular import TabularModel

SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.7, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=1.5, min_p=0.05, repetition_penalty=1.3),
    Sampling(temperature=0.0),
]


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return ModelPair.from_pretrained(tiny_pair / "target", tiny_pair / "draft", dtype="float64")


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(3)
    lengths = [(2, 11), (7, 3), (3, 1), (5, 13), (1, 7)]
    return [
        {
            "row": 10 + i,
            "prompt_ids": torch.randint(3, 250, (a,), generator=generator).tolist(),
            "token_ids": torch.randint(3, 250, (b,), generator=generator).tolist(),
        }
        for i, (a, b) in enumerate(lengths)
    ]


def distribution_after(model, text, sampling):
    """The distribution after a text, from a forward over nothing else."""
    logits = model(input_ids=torch.tensor([text])).logits[0, -1]
    return warp(logits, sampling, torch.isin(torch.arange(len(logits)), torch.tensor(text)))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_rows_match_a_token_by_token_reference(pair, rows, sampling):
    ratio, seed = 0.3, 5
    for row, found in zip(rows, mix_batch(pair, rows, sampling, ratio, seed), strict=True):
        drawn, acceptance_draws = torch.rand(
            2, len(row["token_ids"]), generator=row_generator(seed + STREAM, row["row"])
        )
        assert (found.row, found.prompt_ids) == (row["row"], row["prompt_ids"])
        for i, token in enumerate(row["token_ids"]):
            prefix = row["prompt_ids"] + row["token_ids"][:i]  # of X, not of Z
            q, p = distribution_after(pair.draft, prefix, sampling), distribution_after(pair.target, prefix, sampling)
            drafted = int(draw(q, drawn[i]))
            assert float(found.labels[i]) == pytest.approx(min(1.0, float(p[drafted] / q[drafted])), abs=1e-9)
            assert bool(found.drafted[i]) == (float(acceptance_draws[i]) >= ratio)
            assert int(found.mixed[i]) == (drafted if found.drafted[i] else token)


def test_a_row_does_not_depend_on_the_batch(pair, rows):
    together = mix_batch(pair, rows, SAMPLINGS[1], 0.15, 0)
    for row, found in zip(rows, together, strict=True):
        (alone,) = mix_batch(pair, [row], SAMPLINGS[1], 0.15, 0)
        assert torch.equal(alone.mixed, found.mixed)
        assert torch.equal(alone.drafted, found.drafted)
        assert torch.allclose(alone.labels, found.labels, atol=1e-12)


def tabular_pair(same=False):
    generator = torch.Generator().manual_seed(0)
    target = TabularModel.random(7, 1, generator, sharpness=1.5)
    return ModelPair(target=target, draft=target if same else TabularModel.random(7, 1, generator), end_ids=())


def tabular_rows(pair, count=300, length=20, seed=0):
    sampling = Sampling(max_new_tokens=length, seed=seed)
    generations = decode(pair, [[1]] * count, method("autoregressive"), sampling, batch_size=count)
    return [{"row": g.index, "prompt_ids": g.prompt_ids, "token_ids": g.token_ids} for g in generations]


def test_drafted_tokens_are_fresh_draws_even_with_the_seed_of_the_responses():
    pair = tabular_pair(same=True)
    rows = tabular_rows(pair, seed=0)
    mixed = mix_batch(pair, rows, Sampling(), 0.15, seed=0)
    same, expected, count = 0, 0.0, 0
    for row, found in zip(rows, mixed, strict=True):
        before = [row["prompt_ids"][-1], *row["token_ids"][:-1]]
        distributions = pair.target.probs[before]
        x = torch.tensor(row["token_ids"])
        same += int((found.mixed == x)[found.drafted].sum())
        expected += float(distributions.gather(1, x[:, None])[found.drafted].sum())
        count += int(found.drafted.sum())
    assert abs(same - expected) < 4 * (count / 4) ** 0.5


def test_the_masked_labels_average_to_the_acceptance_rate():
    pair = tabular_pair()
    rows = tabular_rows(pair)
    mixed = mix_batch(pair, rows, Sampling(), 0.5, seed=1)
    alphas, labels = [], []
    for row, found in zip(rows, mixed, strict=True):
        before = [row["prompt_ids"][-1], *row["token_ids"][:-1]]
        alpha = torch.minimum(pair.target.probs[before], pair.draft.probs[before]).sum(-1)
        alphas.append(alpha[found.drafted])
        labels.append(found.labels[found.drafted])
        kept = ~found.drafted
        assert torch.equal(found.mixed[kept], torch.tensor(row["token_ids"])[kept])
    alpha, label = torch.cat(alphas), torch.cat(labels)
    assert abs(len(label) - 3000) < 4 * (6000 * 0.25) ** 0.5  # the acceptance draws
    assert abs(float(label.mean() - alpha.mean())) < 4 * float(label.std()) / len(label) ** 0.5


# -- the stage --------------------------------------------------------------------------------------------------------


def config(tiny_overrides, tiny_responses, folder, *overrides):
    return compose("mix", [*tiny_overrides, f"responses={tiny_responses}", f"paths.output_dir={folder}", *overrides])


def contents(folder):
    return {name: part[:] for name, part in datasets.load_from_disk(str(folder / "dataset")).items()}


def test_the_data_set_holds_every_response_once(tiny_mix, tiny_responses):
    from data_gen.responses import read_rows

    data = datasets.load_from_disk(str(tiny_mix / "dataset"))
    assert data["train"].features == mix.FEATURES
    assert {name: len(part) for name, part in data.items()} == {"train": 48, "validation": 12}
    responses = {row["row"]: row for row in read_rows(tiny_responses)}
    found = [row for part in data.values() for row in part]
    assert sorted(row["row"] for row in found) == sorted(responses)
    for row in found:
        source = responses[row["row"]]
        assert row["prompt_length"] == len(source["prompt_ids"])
        assert row["input_ids"][: row["prompt_length"]] == source["prompt_ids"]
        assert len(row["input_ids"]) == len(row["labels"]) == len(row["mask"])
        assert len(row["input_ids"]) == row["prompt_length"] + len(source["token_ids"])
        assert not any(row["mask"][: row["prompt_length"]])
        kept = [i for i in range(row["prompt_length"], len(row["mask"])) if not row["mask"][i]]
        assert all(row["input_ids"][i] == source["token_ids"][i - row["prompt_length"]] for i in kept)


def test_labels_use_the_sampling_of_the_responses(tiny_mix, tiny_pair, tiny_responses):
    from data_gen.responses import read_rows

    summary = json.loads((tiny_mix / "summary.json").read_text())
    sampling = Sampling(**{**summary["sampling"], "stop": ()})
    assert (sampling.temperature, sampling.top_k) == (0.9, 20)
    pair = ModelPair.from_pretrained(tiny_pair / "target", tiny_pair / "draft")
    responses = list(read_rows(tiny_responses))
    labels = {row.row: row.labels for row in mix_batch(pair, responses, sampling, 0.15, 0)}
    for row in datasets.load_from_disk(str(tiny_mix / "dataset"))["train"]:
        assert torch.allclose(torch.tensor(row["labels"][row["prompt_length"] :]), labels[row["row"]], atol=1e-5)


def test_prompts_are_not_split_between_training_and_validation():
    table = datasets.Dataset.from_dict({"row": list(range(30))}).data.table
    data = mix.split(table, [row // 3 for row in range(30)], 0.2, seed=0)
    parts = {name: {row // 3 for row in part["row"]} for name, part in data.items()}
    assert len(parts["validation"]) == 2 and not parts["train"] & parts["validation"]
    with pytest.raises(InputError, match="at least 2 prompts"):
        mix.split(table, [0] * 30, 0.2, seed=0)


def test_finished_work_is_kept_and_interrupted_work_goes_on(tiny_overrides, tiny_responses, tmp_path, monkeypatch):
    monkeypatch.setattr(mix, "PART_ROWS", 16)
    whole = mix.run(config(tiny_overrides, tiny_responses, tmp_path / "whole", "batch_size=5"))
    stamp = (whole / "dataset" / "dataset_dict.json").stat().st_mtime_ns
    assert mix.run(config(tiny_overrides, tiny_responses, tmp_path / "whole", "batch_size=3")) == whole
    assert (whole / "dataset" / "dataset_dict.json").stat().st_mtime_ns == stamp

    calls = []

    def fails_in_the_third_part(pair, rows, *rest):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return mix_batch(pair, rows, *rest)

    cut = config(tiny_overrides, tiny_responses, tmp_path / "cut", "batch_size=16")
    with monkeypatch.context() as patch:
        patch.setattr(mix, "mix_batch", fails_in_the_third_part)
        with pytest.raises(KeyboardInterrupt):
            mix.run(cut)
        assert len(list((tmp_path / "cut" / "parts").glob("*.parquet"))) == 2
        mix.run(cut)
    assert len(calls) == 5  # four parts, one of them twice
    assert not (tmp_path / "cut" / "parts").exists()
    for name, part in contents(tmp_path / "cut").items():
        other = contents(whole)[name]
        for column in ("row", "prompt_length", "input_ids", "mask"):
            assert part[column] == other[column]
        flat = [torch.tensor([label for row in rows["labels"] for label in row]) for rows in (part, other)]
        assert torch.allclose(*flat, atol=1e-5)  # another batch size: float ties


@pytest.mark.parametrize(
    "override, message",
    [
        ("mixing_ratio=1", "mixing_ratio"),
        ("mixing_ratio=0", "mixing_ratio"),
        ("validation_fraction=0", "validation_fraction"),
        ("batch_size=0", "batch_size"),
        ("responses=nowhere", "nowhere"),
    ],
)
def test_bad_settings_are_refused(tiny_overrides, tiny_responses, tmp_path, override, message):
    with pytest.raises(InputError, match=message):
        mix.run(config(tiny_overrides, tiny_responses, tmp_path, override))


def test_degenerate_masks_are_refused():
    with pytest.raises(InputError, match="nothing to learn"):
        mix.check_masks({"num_drafted": 0, "num_positions": 9})
    with pytest.raises(InputError, match="nothing was mixed"):
        mix.check_masks({"num_drafted": 9, "num_positions": 9})


def test_empty_responses_and_other_targets_are_refused(
    tiny_overrides, tiny_responses, tiny_pair, tmp_path, monkeypatch
):
    cfg = config(tiny_overrides, tiny_responses, tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(texts, "read_rows", lambda folder: iter([{"id": "x", "prompt_ids": [1], "token_ids": []}]))
        with pytest.raises(InputError, match="response x is empty"):
            mix.run(cfg)
        patch.setattr(texts, "read_rows", lambda folder: iter([]))
        with pytest.raises(InputError, match="expected responses"):
            mix.run(cfg)
    swapped = config(tiny_overrides, tiny_responses, tmp_path / "b", f"pair.target={tiny_pair}/draft")
    with pytest.raises(InputError, match="another target"):
        mix.run(swapped)


def test_several_folders_are_numbered_on(tiny_responses, tmp_path):
    shutil.copytree(tiny_responses, tmp_path / "again")
    responses = read_responses([tiny_responses, tmp_path / "again"])
    assert [row["row"] for row in responses.rows] == list(range(120))


def test_the_preview_marks_where_tokens_come_from():
    row = {"input_ids": [5, 6, 7, 8], "prompt_length": 2, "mask": [0, 0, 1, 0], "labels": [0.0, 0.0, 0.25, 0.5]}
    assert as_text(None, row) == " 5 6 | [ 7|0.25] 8"
