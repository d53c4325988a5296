"""Token mixing: the labels, the acceptance draws, what the rows do not depend on, and the stage around it."""

import json
import shutil

import datasets
import pyarrow as pa
import pytest
import torch

from data_gen import mix, texts
from data_gen.mix import STREAM, as_text, mix_batch
from data_gen.texts import read_responses
from toolkit import ModelPair
from toolkit.config import compose, method
from toolkit.decoding import decode
from toolkit.engine.tabular import TabularModel
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.runs.stage import checksum, read_manifest
from toolkit.sampling import Sampling, draw, row_generator, warp

SAMPLINGS = [
    Sampling(temperature=0.7, top_k=5, top_p=0.8),
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
    for row, example in zip(rows, mix_batch(pair, rows, sampling, ratio, seed), strict=True):
        drawn, acceptance_draws = torch.rand(
            2, len(row["token_ids"]), generator=row_generator(seed + STREAM, row["row"])
        )
        assert (example.row, example.prompt_ids) == (row["row"], row["prompt_ids"])
        for i, token in enumerate(row["token_ids"]):
            prefix = row["prompt_ids"] + row["token_ids"][:i]  # of X, not of Z
            q, p = distribution_after(pair.draft, prefix, sampling), distribution_after(pair.target, prefix, sampling)
            drafted = int(draw(q, drawn[i]))
            assert float(example.labels[i]) == pytest.approx(min(1.0, float(p[drafted] / q[drafted])), abs=1e-9)
            assert bool(example.drafted[i]) == (float(acceptance_draws[i]) >= ratio)
            assert int(example.mixed[i]) == (drafted if example.drafted[i] else token)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_rows_of_what_is_not_a_number_are_left_out(part):
    generator = torch.Generator().manual_seed(0)
    tables = {name: TabularModel.random(4, 1, generator) for name in ("target", "draft")}
    rows = [{"row": 3, "prompt_ids": [1], "token_ids": [1, 3, 1]}, {"row": 5, "prompt_ids": [1], "token_ids": [1, 1]}]
    tables[part].probs[3, 0] = torch.nan
    for sampling in (Sampling(), Sampling(temperature=0.0), Sampling(top_k=2)):
        assert [example.row for example in mix_batch(ModelPair(**tables), rows, sampling, 0.5, 0)] == [5]


def test_a_row_does_not_depend_on_the_batch(pair, rows):
    together = mix_batch(pair, rows, SAMPLINGS[0], 0.15, 0)
    for row, example in zip(rows, together, strict=True):
        (alone,) = mix_batch(pair, [row], SAMPLINGS[0], 0.15, 0)
        assert torch.equal(alone.mixed, example.mixed)
        assert torch.equal(alone.drafted, example.drafted)
        assert torch.allclose(alone.labels, example.labels, atol=1e-12)


def test_drafted_tokens_are_fresh_draws_even_with_the_seed_of_the_responses():
    target = TabularModel.random(7, 1, torch.Generator().manual_seed(0), sharpness=1.5)
    pair = ModelPair(target=target, draft=target, end_ids=())
    plain = decode(pair, [[1]] * 300, method("autoregressive"), Sampling(max_new_tokens=20, seed=0), batch_size=300)
    rows = [{"row": g.index, "prompt_ids": g.prompt_ids, "token_ids": g.token_ids} for g in plain]
    mixed = mix_batch(pair, rows, Sampling(), 0.15, seed=0)
    same, expected, count = 0, 0.0, 0
    for row, example in zip(rows, mixed, strict=True):
        before = [row["prompt_ids"][-1], *row["token_ids"][:-1]]
        distributions = pair.target.probs[before]
        x = torch.tensor(row["token_ids"])
        same += int((example.mixed == x)[example.drafted].sum())
        expected += float(distributions.gather(1, x[:, None])[example.drafted].sum())
        count += int(example.drafted.sum())
    assert abs(same - expected) < 4 * (count / 4) ** 0.5


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
    examples = [row for part in data.values() for row in part]
    assert sorted(row["row"] for row in examples) == sorted(responses)
    for row in examples:
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


def test_the_manifest_and_the_summary_say_what_was_mixed_with_what(tiny_overrides, tiny_pair, tiny_responses, tmp_path):
    folder = mix.run(config(tiny_overrides, tiny_responses, tmp_path / "out", "mixing_ratio=0.25"))
    manifest, summary = read_manifest(folder), read_json(folder / mix.SUMMARY)
    drawn = read_manifest(tiny_responses)["config"]["sampling"]
    assert manifest["stage"] == "mix"
    assert set(manifest["inputs"]) == set(map(str, tiny_responses.glob("shard-*.jsonl")))
    for said in (manifest["config"], manifest, summary):
        assert said["mixing_ratio"] == 0.25
        assert (said["sampling"]["temperature"], said["sampling"]["top_k"]) == (drawn["temperature"], drawn["top_k"])
    assert {key: manifest[key] for key in summary} == summary
    pair = ModelPair.from_pretrained(tiny_pair / "target", tiny_pair / "draft")
    for key, value in texts.fingerprints(pair, read_responses(tiny_responses)).items():
        assert summary[key] == json.loads(json.dumps(value))


def test_counts_and_balance_of_labels_are_those_of_the_rows(tiny_mix):
    summary, data = read_json(tiny_mix / mix.SUMMARY), contents(tiny_mix)
    rows = [
        (*row, n)
        for part in data.values()
        for *row, n in zip(part["labels"], part["mask"], part["prompt_length"], strict=True)
    ]
    assert summary["num_examples"] == {"train": 48, "validation": 12}
    assert summary["num_positions"] == sum(len(labels) - n for labels, _, n in rows)
    assert summary["num_drafted"] == sum(sum(mask) for _, mask, _ in rows)
    drafted = [label for labels, mask, _ in rows for label, is_drafted in zip(labels, mask, strict=True) if is_drafted]
    everywhere = [label for labels, _, n in rows for label in labels[n:]]
    assert summary["mean_label"] == pytest.approx(sum(drafted) / len(drafted), abs=1e-5)
    assert summary["mean_label_all"] == pytest.approx(sum(everywhere) / len(everywhere), abs=1e-5)
    assert not any(any(labels[:n]) for labels, _, n in rows)


def table_of(ids, labels=None):
    size = [[0.0] * len(row) for row in ids]
    columns = {"row": list(range(len(ids))), "prompt_length": [1] * len(ids), "input_ids": ids,
               "labels": labels or size, "mask": [[False] * len(row) for row in ids]}  # fmt: skip
    return datasets.Dataset(pa.table(columns, schema=mix.FEATURES.arrow_schema))


def test_all_or_no_tokens_drafted_are_refused():
    summary = mix.summarize({"train": table_of([[1, 2, 3], [4, 5]], [[0.0, 0.5, 0.25], [0.0, 0.0]])})
    assert (summary["num_positions"], summary["num_drafted"]) == (3, 0)
    assert summary["mean_label"] != summary["mean_label"] and summary["mean_label_all"] == 0.25
    for drafted in (0, 9):
        with pytest.raises(InputError, match="mixing_ratio"):
            mix.check_masks({"num_drafted": drafted, "num_positions": 9})


def test_the_hash_of_a_split_is_that_of_its_content():
    """Of every number, and of where one row ends and the next begins."""
    ids = [[1, 2, 3], [4, 5]]
    tables = [ids, [[1, 2], [3, 4, 5]], [[1, 2, 3], [4, 6]], [[1, 2, 3, 4], [5]]]
    given = [*((each, None) for each in tables), (ids, [[0.0, 0.0, 0.5], [0.0, 0.0]])]
    hashes = [mix.summarize({"train": table_of(*each)})["content"]["train"] for each in given]
    assert len(set(hashes)) == len(hashes) and {len(each) for each in hashes} == {16}
    assert hashes[0] == "3229342fcca2644e"  # the same everywhere, and in every version


def test_a_damaged_part_is_named(tiny_overrides, tiny_responses, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(mix, "split", None)
        with pytest.raises(TypeError):
            mix.run(config(tiny_overrides, tiny_responses, tmp_path))
    (path,) = (tmp_path / "parts").iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    with pytest.raises(InputError, match="part-00000.parquet is damaged"):
        mix.run(config(tiny_overrides, tiny_responses, tmp_path))


@pytest.mark.parametrize(
    ("prompts", "share", "held_out"),
    [(2, 0.01, 1), (2, 0.99, 1), (10, 0.34, 3), (10, 0.36, 4), (10, 0.99, 9)],
)
def test_a_share_of_the_prompts_is_held_out_and_some_are_left_on_either_side(prompts, share, held_out):
    table = datasets.Dataset.from_dict({"row": list(range(prompts))}).data.table
    data = mix.split(table, list(range(prompts)), share, seed=0)
    assert {name: len(part) for name, part in data.items()} == {"train": prompts - held_out, "validation": held_out}
    seeds = (0, *range(20))
    again = [sorted(mix.split(table, list(range(prompts)), share, s)["validation"]["row"]) for s in seeds]
    assert again[0] == sorted(data["validation"]["row"]) and len(set(map(tuple, again))) > 1


def test_responses_to_validate_on_can_be_named(tmp_path, tiny_overrides, tiny_responses):
    """Every response of the one folder is trained on, every one of the other is validated on; all are numbered on."""
    words = [f"validation={tiny_responses}", "validation_fraction=0.5"]
    data = contents(mix.run(config(tiny_overrides, tiny_responses, tmp_path, *words)))
    assert (sorted(data["train"]["row"]), sorted(data["validation"]["row"])) == ([*range(60)], [*range(60, 120)])
    shutil.copytree(tiny_responses, tmp_path / "again")
    assert [row["row"] for row in read_responses([tiny_responses, tmp_path / "again"]).rows] == list(range(120))


def test_prompts_are_not_split_between_training_and_validation():
    table = datasets.Dataset.from_dict({"row": list(range(30))}).data.table
    data = mix.split(table, [row // 3 for row in range(30)], 0.2, seed=0)
    parts = {name: {row // 3 for row in part["row"]} for name, part in data.items()}
    assert len(parts["validation"]) == 2 and not parts["train"] & parts["validation"]
    with pytest.raises(InputError, match="at least 2 prompts"):
        mix.split(table, [0] * 30, 0.2, seed=0)


def test_finished_work_is_kept_and_interrupted_work_goes_on(tiny_overrides, tiny_responses, tmp_path, monkeypatch):
    calls = []

    def fails_in_the_third_part(pair, rows, *rest):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return mix_batch(pair, rows, *rest)

    monkeypatch.setattr(mix, "PART_ROWS", 16)
    whole = mix.run(config(tiny_overrides, tiny_responses, tmp_path / "whole", "batch_size=5"))
    stamp = (whole / "dataset" / "dataset_dict.json").stat().st_mtime_ns
    assert mix.run(config(tiny_overrides, tiny_responses, tmp_path / "whole", "batch_size=3")) == whole
    assert (whole / "dataset" / "dataset_dict.json").stat().st_mtime_ns == stamp
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
    remote = tmp_path / "remote"  # as endpoints make them: the target's weights are not known
    shutil.copytree(tiny_responses, remote)
    manifest = read_json(remote / "manifest.json")
    del manifest["target_fingerprint"], manifest["target_weights"]
    manifest["checksum"] = checksum(manifest)
    (remote / "manifest.json").write_text(json.dumps(manifest))
    both = f"[{tiny_responses},{remote}]", f"[{remote},{tiny_responses}]"
    for name, folders in zip("bcd", (tiny_responses, *both), strict=True):
        swapped = config(tiny_overrides, folders, tmp_path / name, f"pair.target={tiny_pair}/draft")
        with pytest.raises(InputError, match="another target"):
            mix.run(swapped)


def test_the_preview_marks_where_tokens_come_from():
    row = {"input_ids": [5, 6, 7, 8], "prompt_length": 2, "mask": [0, 0, 1, 0], "labels": [0.0, 0.0, 0.25, 0.5]}
    assert as_text(None, row) == " 5 6 | [ 7|0.25] 8"
