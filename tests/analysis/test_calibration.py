"""analysis.heads fit=...: samples against slow ones, the whole command on tiny traces, refusals."""

import pytest
import torch

from analysis import heads as heads_command
from analysis.replay.calibrating import Scored
from analysis.tables.files import read_table
from data_gen.recording import Recorder
from data_gen.traces import run as record
from toolkit import testing
from toolkit.acceptance import AcceptanceHead, PrereadHead
from toolkit.acceptance.calibration import stored
from toolkit.config import compose
from toolkit.errors import InputError
from toolkit.sampling import Sampling

DEPTH = 4


@pytest.fixture(scope="module")
def scored():
    """A trace of random texts over a table pair, with made-up logits: of an acceptance head, and of a pre-read one."""
    pair = testing.table_pair()
    texts = [([0], [*[0, 1, 0, 0, 1, 1, 0][: 2 + i % 6], 2]) for i in range(30)]
    trace = Recorder(pair, Sampling(max_new_tokens=20), DEPTH + 2).record_all(texts, range(30))
    generator = torch.Generator().manual_seed(0)
    return trace, torch.randn(trace.num_steps, 2, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("preread", [True, False])
def test_products_are_those_of_rounds_from_every_place(scored, preread):
    """Walked slowly: along the text up to the first rejected position, then along its roll-out."""
    trace, logits = scored
    one = Scored(trace, logits if preread else logits[:, 0], preread)
    found = {depth: (product, label) for depth, product, label in one.products(torch.sigmoid, DEPTH)}
    slow = {depth: [] for depth in range(1, DEPTH + 1)}
    for text in range(trace.num_texts):
        first, end = trace.text_first[text : text + 2].tolist()
        for start in range(first, end):
            steps, alive = rounds_steps(trace, start, end)
            product = 1.0
            for depth in range(1, DEPTH + 1):
                said = depth - 1 if preread else depth
                if max(said, depth - 1) >= len(steps):
                    break
                product *= float(torch.sigmoid(logits[steps[said], 0]))
                slow[depth].append((product, trace.accept_prob[steps[depth - 1]] if alive[depth - 1] else 0.0))
    assert sum(map(len, slow.values())) > 100
    for depth, pairs in slow.items():
        product, label = found[depth]
        assert product.tolist() == pytest.approx([float(p) for p, _ in pairs])
        assert label.tolist() == pytest.approx([float(q) for _, q in pairs])


def rounds_steps(trace, start, end):
    """The steps of the longest round from a position, and whether all tokens before each were accepted."""
    steps, alive = [], []
    for position in range(start, end):
        steps.append(position)
        alive.append(True)
        if not trace.accepted[position]:
            rolled = range(int(trace.roll_length[position]))
            return steps + [int(trace.roll_first[position]) + i for i in rolled], alive + [False] * len(rolled)
    return steps, alive


@pytest.fixture(scope="module")
def tiny_traces(tiny_overrides, tiny_responses, tmp_path_factory):
    """Two recordings of the same texts with other acceptance draws, as stand-ins for two prompt sets."""
    root = tmp_path_factory.mktemp("calibration")
    words = [*tiny_overrides, f"responses={tiny_responses}", "hidden=true", "heads={}"]
    return [
        record(compose("traces", [*words, f"max_drafted={most}", f"paths.output_dir={root}/{most}"])) for most in (6, 7)
    ]


def test_the_command_calibrates_both_heads_of_a_folder(tiny_overrides, tiny_traces, tmp_path):
    heads = testing.random_heads(tmp_path / "heads", 16, 16)
    fitted, other = tiny_traces
    words = [
        *tiny_overrides, f"heads=[{heads}]", f"fit={{a: {fitted}}}", f"traces={{a: {other}, b: {other}}}", "max_depth=3",
        f"paths.output_dir={tmp_path}/out",
    ]  # fmt: skip
    folder = heads_command.run(compose("heads", words))
    scores = read_table(folder, "scores").set_index(["head", "dataset", "scope", "version"])
    assert not scores.loc[("survival", "b", "position", "raw")].in_distribution
    for kind in ("survival", "preread"):
        for scope in ("position", "product"):
            raw, mended = (scores.loc[(kind, "a", scope, version)] for version in ("corrected", "calibrated"))
            assert mended.ece < raw.ece and mended.log_loss < raw.log_loss
            assert mended.auroc >= raw.auroc - 0.05
        assert (folder / f"reliability-{kind}.png").stat().st_size > 10_000
    for kind in (AcceptanceHead, PrereadHead):
        assert stored.load(folder / "head", kind) is not None and kind.is_in(folder / "head")
        assert stored.load(heads, kind) is None  # the head that was given stays as it is
    stamp = (folder / "scores.csv").stat().st_mtime_ns
    heads_command.run(compose("heads", words))
    assert (folder / "scores.csv").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match="the same for b"):
        heads_command.run(compose("heads", [*words, f"traces={{a: {other}, b: {fitted}}}"]))
