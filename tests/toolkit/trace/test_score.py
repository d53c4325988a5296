"""A head on a finished recording says what it would have said while recording; and no model runs."""

from __future__ import annotations

import pytest
import torch

from analysis import sweep
from analysis.tables.files import read_table
from data_gen import traces
from tests.analysis.table_sweeps import ORDER, VOCAB, sweep_config
from tests.data_gen.test_traces import SAMPLED, config, texts_file  # noqa: F401
from toolkit import ModelPair, generate
from toolkit.acceptance.folder import SurvivalScorer, head_hash
from toolkit.acceptance.head import AcceptanceHead
from toolkit.acceptance.preread import PrereadHead, PrereadScorer, embedding_table
from toolkit.errors import InputError
from toolkit.sampling import Sampling
from toolkit.trace import Trace
from toolkit.trace.record import Recorder
from toolkit.trace.score import recorded_logits
from toolkit.trace.store import read_traces


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_logits_from_states_are_those_recorded_with_the_head(dtype, tolerance):
    torch.manual_seed(0)
    pair = ModelPair.toy(dtype=dtype)
    sequences = [
        (one.prompt_ids, one.token_ids)
        for one in generate(pair, ["Q: Spell river.\nA:", "Once"], method="autoregressive", max_new_tokens=16)
    ]
    table = embedding_table(pair.draft)
    size = pair.draft.config.hidden_size
    acceptance, preread = AcceptanceHead(size, depth=2), PrereadHead(size, table.shape[1])
    for parameter in [*acceptance.parameters(), *preread.parameters()]:
        parameter.data += 0.1 * torch.randn_like(parameter)
    precise = acceptance.double() if dtype == "float64" else acceptance
    heads = {"late": SurvivalScorer(precise), "early": PrereadScorer(preread, table)}
    sampling = Sampling(max_new_tokens=16)
    whole = Recorder(pair, sampling, 6, heads, hidden=True).record(sequences, [0, 1])
    assert whole.num_steps > whole.num_positions, "some roll-outs"
    states = Recorder(pair, sampling, 6, hidden=True).record(sequences, [0, 1])
    assert states.hidden.dtype == getattr(torch, dtype) and not states.estimates
    for name, head in heads.items():
        close = tolerance if name == "late" else 1e-5  # a pre-read head computes in float32
        torch.testing.assert_close(recorded_logits(states, head), whole.estimates[name], rtol=0, atol=close)
    assert whole.estimates["late"].std() > 0.01


def test_a_recording_with_another_head_reads_the_states_of_the_first(texts_file, tmp_path, monkeypatch, capsys):  # noqa: F811
    head = ModelPair.toy().head
    options = (SAMPLED, "shard_size=2", "replicates=2")
    direct = read_traces(traces.run(config(tmp_path / "a" / "direct", texts_file, *options, f"heads={{mine: {head}}}")))
    traces.run(config(tmp_path / "b" / "bare", texts_file, *options, "heads={}"))
    assert "only the heads are scored" not in capsys.readouterr().out
    traces.run(config(tmp_path / "b" / "states", texts_file, *options, "heads={}", "hidden=true"))
    assert "with hidden=true, further heads need no recording" in capsys.readouterr().out
    monkeypatch.setattr(Recorder, "recorded", lambda *_: pytest.fail("recorded again"))
    for name, hidden in (("kept", True), ("dropped", False)):
        words = (*options, f"heads={{mine: {head}}}", f"hidden={hidden}")
        trace = read_traces(traces.run(config(tmp_path / "b" / name, texts_file, *words)))
        assert (trace.hidden is not None) == hidden
        assert trace.estimates.keys() == direct.estimates.keys() == {"mine", "mine.preread"}
        for key, logits in direct.estimates.items():
            torch.testing.assert_close(trace.estimates[key], logits, rtol=0, atol=1e-5)
        for key in ("accepted", "tokens", "draft_prob", "roll_first"):
            assert torch.equal(getattr(trace, key), getattr(direct, key))


def test_other_draws_are_recorded_anew(texts_file, tmp_path, capsys):  # noqa: F811
    traces.run(config(tmp_path / "one", texts_file, SAMPLED, "heads={}", "hidden=true"))
    traces.run(config(tmp_path / "two", texts_file, SAMPLED, "heads={}", "hidden=true", "draft_temperature=0.5"))
    assert "only the heads are scored" not in capsys.readouterr().out


@pytest.fixture
def folders(tmp_path):
    """Two untrained heads."""
    torch.manual_seed(3)
    heads = []
    for name in ("one", "two"):
        head = AcceptanceHead(VOCAB**ORDER)
        head.readout.weight.data.normal_()
        heads.append(str(head.save(tmp_path / name)))
    return heads


def with_heads(heads):
    return {"speculative": {"policy.num_drafted": [2]}, "specdec_pp": {"policy.threshold": [0.4], "head": heads}}


def rows_of(folder):
    table = read_table(folder, "rows")
    return table.drop(columns=["setting_seconds"]).set_index(["method", "setting", "prompt"]).sort_index()


@pytest.mark.parametrize("hidden", [True, False])
def test_a_sweep_with_a_further_head_records_nothing(hidden, folders, tmp_path, monkeypatch, capsys):
    options = {"source": "traces", "hidden": hidden}
    sweep.run(sweep_config(tmp_path / "later", grid=with_heads(folders[:1]), **options))
    recorded, record = [], Recorder.recorded
    monkeypatch.setattr(Recorder, "recorded", lambda self, *a: (recorded.append(a), record(self, *a))[1])
    capsys.readouterr()
    folder = sweep.run(sweep_config(tmp_path / "later", grid=with_heads(folders), **options))
    assert bool(recorded) == (not hidden)
    assert ("states were not kept; hidden=true" in capsys.readouterr().out) == (not hidden)
    if not hidden:
        return
    later = rows_of(folder)
    whole = rows_of(sweep.run(sweep_config(tmp_path / "whole", grid=with_heads(folders), **options)))
    assert later.equals(whole.loc[later.index]) and len(later) == len(whole)


def test_a_damaged_file_costs_a_recording_and_nothing_else(folders, tmp_path):
    options = {"source": "traces"}
    folder = sweep.run(sweep_config(tmp_path, grid=with_heads(folders[:1]), **options))
    (path,) = (folder / "settings").glob("traces-*.safetensors")
    path.write_bytes(path.read_bytes()[:-50])
    sweep.run(sweep_config(tmp_path, grid=with_heads(folders), **options))
    trace = Trace.load(path)
    assert len(trace.hidden) == trace.num_steps and set(trace.estimates) == set(map(head_hash, folders))


def test_states_are_needed():
    pair = ModelPair.toy()
    (text,) = generate(pair, ["Once"], method="autoregressive", max_new_tokens=8)
    trace = Recorder(pair, Sampling(max_new_tokens=8), 4).record([(text.prompt_ids, text.token_ids)], [0])
    with pytest.raises(InputError, match="record it with hidden=true"):
        recorded_logits(trace, SurvivalScorer(AcceptanceHead(pair.draft.config.hidden_size)))
