"""A watch: streams that stay do not alarm, a fall is named with its page, bad input is one line."""

import json
import subprocess
import sys

import numpy as np
import pytest

from analysis import diagnose
from analysis.diagnosis.watch import watch
from analysis.loads.engine_counts import PositionCounts
from tests.analysis.loads.test_observed import scrape
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.files.atomic import read_json

SHARES = np.array([0.68, 0.75, 0.8])
SPREAD = 6  # of a text's own shares: beta of SPREAD * share, SPREAD * (1 - share)


def accepted_lengths(rng, num_texts, lower=0.0):
    """Per text the accepted tokens of its rounds: texts differ, and those accepted less have more rounds of their 64 tokens."""
    texts = []
    for _ in range(num_texts):
        shares = rng.beta(SPREAD * SHARES, SPREAD * (1 - SHARES)) * [1 - lower / SHARES[0], 1, 1]
        kept = np.cumprod(rng.random((64, len(SHARES))) < shares, axis=1).sum(1)
        texts.append(kept[: np.searchsorted(np.cumsum(kept + 1), 64) + 1])
    return texts


def counts(texts):
    """What a recording holds of texts."""
    positions = np.arange(1, len(SHARES) + 1)
    accepted = np.array([(kept[:, None] >= positions).sum(0) for kept in texts], dtype=float)
    reached = np.array([(kept[:, None] >= positions - 1).sum(0) for kept in texts], dtype=float)
    rounds = sum(map(len, texts))
    return PositionCounts(reached, accepted, rounds, rounds * len(SHARES))


def pages(batches):
    """The counters of a server, one page before each batch of texts and one at the end: texts run on over a page."""
    rounds = np.concatenate([kept for texts in batches for kept in texts])
    sizes = np.cumsum([sum(map(len, texts)) for texts in batches])
    totals = [counts([rounds[: 50 + size]]) for size in (0, *sizes - 50)]
    return [PositionCounts(c.reached, c.accepted, c.rounds, c.drafted, whole_server=True) for c in totals]


def watched(seed, lowers, num_texts=100, per_page=20):
    rng = np.random.default_rng(seed)
    baseline = counts(accepted_lengths(rng, num_texts))
    stream = pages([accepted_lengths(rng, per_page, lower) for lower in lowers])
    return watch(baseline, stream, [f"page{number}" for number in range(len(stream))])


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_that_stays_does_not_alarm(seed):
    result = watched(seed, [0] * 20)
    assert not result["fell"] and result["position"] is None
    assert len(result["log_evidence"]) == 20 and max(result["log_evidence"]) < np.log(50)


@pytest.mark.parametrize("seed", range(3))
def test_a_fall_of_position_1_is_named_with_its_page(seed):
    result = watched(seed, [0] * 10 + [0.15] * 15)
    assert result["fell"] and result["position"] == 1
    assert abs(int(result["since"].removeprefix("page")) - 10) <= 3
    assert 11 <= int(result["alarm"].removeprefix("page")) <= 20
    line = result["positions"][0]
    assert line["recorded"] - line["counted"] == pytest.approx(0.15, abs=0.05)
    assert line["interval"][0] < line["recorded"] < line["interval"][1]


def test_a_small_recording_is_not_believed():
    """The same stream: 20 texts leave their share open, 2,000 do not."""
    lowers = [0.06] * 10
    small, large = (watched(0, lowers, num_texts, per_page=60)["log_evidence"][-1] for num_texts in (20, 2000))
    assert large > np.log(50) > small


def test_rounds_that_drafted_less_are_no_fall():
    """Half of the rounds draft one token: positions 2 and 3 were reached less often than their counters say."""
    rng = np.random.default_rng(0)
    baseline, stream = counts(accepted_lengths(rng, 100)), pages([accepted_lengths(rng, 20) for _ in range(10)])
    shorter = [
        PositionCounts(
            np.array([[page.rounds, page.accepted[0, 0], page.accepted[0, 1] / 2]]),
            page.accepted * [1, 0.5, 0.5],
            page.rounds,
            2 * page.rounds,
            whole_server=True,
        )
        for page in stream
    ]
    assert not watch(baseline, shorter, [""] * len(shorter))["fell"]


@pytest.mark.slow
def test_at_most_10_of_200_streams_that_stay_alarm():
    assert sum(watched(seed, [0] * 30)["fell"] for seed in range(200)) <= 10


# -- the command ----------------------------------------------------------------------------------------------------------


def answer(kept):
    """A line of a recording with the counts of its rounds."""
    histogram = np.bincount(kept, minlength=len(SHARES) + 1).tolist()
    totals = {
        "num_spec_tokens": len(SHARES),
        "num_spec_steps": len(kept),
        "num_draft_tokens": len(SHARES) * len(kept),
        "num_accepted_draft_tokens": int(kept.sum()),
    }
    return json.dumps({"metrics": {"speculative_decoding": {**totals, "acceptance_histogram": histogram}}})


@pytest.fixture
def recorded(tmp_path):
    """A folder as toolkit.decode leaves it, and three pages: of a stream that stays, then falls by .3."""
    rng = np.random.default_rng(0)
    (tmp_path / "recorded").mkdir()
    lines = map(answer, accepted_lengths(rng, 60))
    (tmp_path / "recorded" / "generations.jsonl").write_text("".join(f"{line}\n" for line in lines))
    stream = pages([accepted_lengths(rng, 40, lower) for lower in (0, 0, 0.3)])
    return tmp_path, [page(tmp_path / f"{number}.txt", counted) for number, counted in enumerate(stream)]


def page(path, counted):
    path.write_text("".join(f"{line}\n" for line in scrape(counted.rounds, counted.drafted, counted.accepted[0])))
    return path


def words_of(folder, files, baseline="recorded"):
    return [f"counts=[{','.join(map(str, files))}]", f"baseline={folder / baseline}", f"paths.root_dir={folder}"]


def test_a_watch_that_alarms_ends_with_3_and_a_line(recorded):
    folder, files = recorded
    clean = diagnose.run(compose("diagnose", words_of(folder, files[:3])))
    assert diagnose.exit_code(clean) == 0 and not read_json(clean / "diagnosis.json")["fell"]
    command = [sys.executable, "-m", "analysis.diagnose", *words_of(folder, files)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    line, output = finished.stdout.strip().split("\n")
    assert finished.returncode == 3 and line.startswith("position 1 has fallen by 0."), finished
    assert str(files[2]) in line
    assert diagnose.exit_code(diagnose.run(compose("diagnose", words_of(folder, files)))) == 3  # it is finished
    assert output.startswith("output: ")


def test_bad_input_is_one_line(recorded):
    folder, files = recorded
    narrow = folder / "narrow.txt"
    narrow.write_text("".join(f"{line}\n" for line in scrape(1000, 2000, [600, 400])))
    bare = folder / "bare.txt"
    bare.write_text("vllm:num_requests_running 3.0\n")
    few = folder / "few.jsonl"
    lines = (folder / "recorded" / "generations.jsonl").read_text().split("\n")
    few.write_text("\n".join(lines[:5]))
    grown = folder / "grown.txt"  # of two servers, of which one began again
    grown.write_text("".join(f"{line}\n" for line in scrape(1001, 3003, [950, 940, 930])))
    for pages_in, baseline, message in (
        ([files[0], grown], "recorded", "more accepted since than rounds can"),
        ([files[2], files[1]], "recorded", "began again"),
        ([files[0], files[0]], "recorded", "too few, 0 rounds"),
        ([files[0]], "recorded", "two /metrics pages"),
        ([files[0], bare], "recorded", "by position"),
        ([files[0], narrow], "recorded", "3 positions, got 2"),
        ([files[0], few], "recorded", "got answers"),
        (files, "0.txt", "sums over all texts"),
        (files, "few.jsonl", "40 of 20"),
    ):
        with pytest.raises(InputError, match=message):
            diagnose.run(compose("diagnose", words_of(folder, pages_in, baseline)))
    for words in ([], words_of(folder, files)[1:], [*words_of(folder, files), f"responses={few}"]):
        with pytest.raises(InputError, match="either responses"):
            diagnose.run(compose("diagnose", words))
