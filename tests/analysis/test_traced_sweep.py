"""Sweeps on traces: the same settings and columns as live ones; the same counts at temperature 0, the same rates above it."""

import json

import pytest

from analysis import sweep
from analysis.tables import sweep_context
from analysis.tables.agreement import agreement, agreement_of
from analysis.tables.bootstrap import Bootstrap
from analysis.tables.files import read_table
from analysis.tables.rows import COUNTS, SOURCES
from analysis.tables.selection import load_rows
from tests.analysis.table_sweeps import PAIR, sweep_config
from toolkit.errors import InputError
from toolkit.files.atomic import read_json

GRID = {
    "speculative": {"policy.num_drafted": [1, 3]},
    "confidence": {"policy.threshold": [0.3]},
    "heuristic": {},
    "block": {},
    "oracle": {"max_drafted": [None]},
}


def rows_of(folder):
    return read_table(folder, "rows").set_index(["method", "setting", "prompt"]).sort_index()


def test_stop_strings_and_a_repetition_penalty_are_recorded(tmp_path, capsys):
    """At temperature 0 count for count, the lengths of every round included, on texts that stop strings have ended."""
    sampling = {"temperature": 0.0, "repetition_penalty": 1.3, "stop": ["re", "="], "max_new_tokens": 24}
    copying = {"prompt_lookup": {"policy.num_drafted": [3]}, "lookup_rate": {}}
    copying["best_source"] = {"policy.cost_ratio": [0.4]}
    grid = {**GRID, **copying, "upper_bound": {"price": [0.2]}, "rate": {}}
    pair = {"_target_": "toolkit.models.pair.ModelPair.toy"}
    prompts = {"_target_": "data_gen.prompts.ToyPrompts", "domain": "math", "split": "dev", "limit": 5}
    words = {"grid": grid, "sampling": sampling, "pair": pair, "prompts": prompts}
    live, traced = (rows_of(sweep.run(sweep_config(tmp_path, source=s, **words))) for s in ("live", "traces"))
    assert "left out" not in capsys.readouterr().out
    chosen = traced.xs("best_source")[list(SOURCES)].sum()
    assert (chosen > 0).all() and chosen.sum() <= traced.xs("best_source").num_target_calls.sum()
    assert (live.finish_reason == "stop").any() and (traced.xs("upper_bound").num_drafted > 0).any()
    shared = live.index.intersection(traced.index)
    methods = set(shared.get_level_values("method"))
    assert methods >= {*GRID, *copying, "rate"}
    for name in (*COUNTS, *SOURCES):  # the oracle has no sources
        assert (live.loc[shared, name].fillna(-1) == traced.loc[shared, name].fillna(-1)).all(), name
    for name in ("accepted_lengths", "drafted_lengths", "reached_lengths"):
        assert [list(x) for x in live.loc[shared, name]] == [list(x) for x in traced.loc[shared, name]], name


def test_only_what_cannot_be_replayed_is_decoded_and_the_trace_is_kept(tmp_path, monkeypatch):
    decoded = []
    decode = sweep_context.decode
    monkeypatch.setattr(sweep_context, "decode", lambda pair, prompts, method, *a, **k: (
        decoded.append(method.name), decode(pair, prompts, method, *a, **k))[1])  # fmt: skip
    folder = sweep.run(sweep_config(tmp_path, grid=GRID, source="traces"))
    assert decoded == ["autoregressive", "block"]
    (trace,) = (folder / "settings").glob("traces-*.safetensors")
    made = trace.stat().st_mtime_ns
    more = {**GRID, "speculative": {"policy.num_drafted": [1, 2, 3]}}
    sweep.run(sweep_config(tmp_path, grid=more, source="traces"))
    assert decoded == ["autoregressive", "block"]
    assert trace.stat().st_mtime_ns == made


def test_prompt_lookup_is_replayed_from_the_texts_beside_the_others(tmp_path):
    """A pair without a draft model: plain decoding gives the texts, nothing is recorded."""
    grid = {"prompt_lookup": {"policy.num_drafted": [2, 5]}}
    alone = {name: value for name, value in PAIR.items() if name != "draft"}
    tables = {}
    for source in ("traces", "live"):
        folder = sweep.run(sweep_config(tmp_path / source, grid=grid, source=source, pair=alone, limit=100))
        assert not list((folder / "settings").glob("traces-*"))
        tables[source] = read_table(folder, "summary").set_index(["method", "setting"])
    for setting in ("K=2", "K=5"):
        replayed, live = (tables[source].loc["prompt_lookup", setting] for source in ("traces", "live"))
        assert replayed.num_draft_calls == live.num_draft_calls == 0
        assert abs(replayed.verification_rate - live.verification_rate) < 0.1  # other texts, the same distribution
        assert replayed.verification_rate < 0.95


def test_texts_token_by_token_add_up_to_the_rows(tmp_path, head):
    """What tokens.json shows of a prompt is what the setting's row counts."""
    grid = {**GRID, "specdec_pp": {"policy.threshold": [0.2, 0.8], "head": [head]}}
    folder = sweep.run(sweep_config(tmp_path, grid=grid, source="traces"))
    rows, views = rows_of(folder), read_json(folder / "tokens.json")
    assert {view["method"] for view in views} == {"speculative", "confidence", "heuristic", "specdec_pp"}
    for view in views:
        for text in view["texts"]:
            row, rounds = rows.loc[(view["method"], view["setting"], text["id"])], text["rounds"]
            kinds = [token["kind"] for one in rounds for token in one["drafted"]]
            extra = [one["extra"]["kind"] for one in rounds if one["extra"] is not None]
            assert len(kinds) == row.num_drafted and len(rounds) == row.num_target_calls
            assert kinds.count("accepted") + len(extra) == row.num_generated
            assert extra.count("corrected") == kinds.count("rejected")
            assert sum(one["extra"] is None for one in rounds) <= 1, (
                "only the text's last round can lack an extra token"
            )
        predicted = [token["predicted"] for text in view["texts"] for one in text["rounds"] for token in one["drafted"]]
        assert all(value is None or 0 <= value <= 1 for value in predicted)
        assert any(value is not None for value in predicted), "a head was recorded"


def test_a_shallow_recording_serves_copies_of_any_length_and_both_sources(tmp_path, capsys):
    """Nothing but autoregressive decoding and rules without a recording is decoded; what is, is named."""
    grid = {"prompt_lookup": {"policy.num_drafted": [8]}, "lookup_rate": {}, "best_source": {}, "block": {}}
    words = {"grid": grid, "sampling": {"temperature": 0.0}, "max_drafted": 3}
    traced = rows_of(sweep.run(sweep_config(tmp_path / "traced", source="traces", **words)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("decoded, ")]
    assert [line.rpartition(": ")[2] for line in lines] == ["block"]
    live = rows_of(sweep.run(sweep_config(tmp_path / "live", source="live", **words)))
    for name in COUNTS:
        assert (live[name] == traced.loc[live.index, name]).all(), name


# -- decoded against replayed sweeps: honest ones agree, a wrong one is found out -------------------------------------


AGREEING = {"speculative": {"policy.num_drafted": [1, 4]}, "confidence": {"policy.threshold": [0.3]}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A replayed sweep, and a live one that is compared with it."""
    root = tmp_path_factory.mktemp("agreement")
    replayed = sweep.run(sweep_config(root, grid=AGREEING, source="traces", limit=200, max_drafted=6))
    live = sweep.run(
        sweep_config(root, grid=AGREEING, source="live", limit=200, max_drafted=6, replayed=[str(replayed)])
    )
    return {"traces": replayed, "live": live}


def test_honest_sweeps_agree(folders):
    tables = load_rows([folders["traces"]], "replayed"), load_rows([folders["live"]], "live")
    table = agreement(*tables, 0.2, Bootstrap(1000, 0.9999)).set_index("setting")
    assert set(table.index) == {"K=1", "K=4", "h=0.3"} and (table.prompts == 200).all()  # the others are only in one
    assert ((table.low < 0) & (table.high > 0)).all()
    assert table.loc["K=4", "difference"] == pytest.approx(table.loc["K=4", "live"] / table.loc["K=4", "replayed"] - 1)


def test_a_live_sweep_says_how_far_it_agrees(folders, capsys):
    """Also one that was finished before."""
    table = read_table(folders["live"], "agreement").set_index("setting")
    assert set(table.index) == {"K=1", "K=4", "h=0.3"}
    root = folders["live"].parent
    config = sweep_config(
        root, grid=AGREEING, source="live", limit=200, max_drafted=6, replayed=[str(folders["traces"])]
    )
    assert sweep.run(config) == folders["live"]
    assert "of 3 intervals leave out 0" in capsys.readouterr().out


def test_a_wrong_recording_is_found_out(folders):
    """As if the text did not matter for its acceptance draws: rounds from other prompts' rows."""
    replayed, live = load_rows([folders["traces"]], "replayed"), load_rows([folders["live"]], "live")
    wrong = replayed.copy()
    setting = wrong.setting == "K=4"
    wrong.loc[setting, "num_target_calls"] = (wrong.loc[setting, "num_target_calls"] * 1.4).round().astype(int)
    table = agreement(wrong, live, 0.2, Bootstrap(1000, 0.9999)).set_index("setting")
    assert table.loc["K=4", "low"] > 0 and table.loc["K=1", "low"] < 0 < table.loc["K=1", "high"]


def test_a_sweep_on_the_wrong_side_or_without_a_common_setting_is_refused(folders, tmp_path):
    """Compared with itself, a live sweep would agree however wrong the replay is."""
    with pytest.raises(InputError, match=r"replayed: expected sweeps with source=traces, .* was made with source=live"):
        agreement_of(folders["live"], [folders["live"]], 0.2)
    with pytest.raises(InputError, match="replayed: expected source=live"):
        sweep.run(sweep_config(tmp_path, grid=AGREEING, source="traces", replayed=[str(folders["traces"])]))
    rows = load_rows([folders["traces"]], "replayed")
    with pytest.raises(InputError, match="no setting and prompt in common"):
        agreement(rows, rows.assign(setting="K=9"), 0.2, Bootstrap(100))


def test_texts_with_grammars_are_recorded_and_replayed(tmp_path, capsys):
    """Rows with a grammar of their own and one without, at temperature 0 count for count; bounds are left out."""
    path = tmp_path / "prompts.jsonl"
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}, "right": {"type": "boolean"}},
              "required": ["sum", "right"], "additionalProperties": False}  # fmt: skip
    rows = [{"prompt": "Q: 3 + 4 =\nA:", "grammar": schema}, {"prompt": "Q: 8 + 4 =\nA:", "grammar": "(1|2){3} or 5"}]
    path.write_text(
        "".join(json.dumps({"id": n, **row}) + "\n" for n, row in enumerate([*rows, {"prompt": "Q: 1 + 4 =\nA:"}]))
    )
    grid = {"speculative": {"policy.num_drafted": [4]}, "rate": {}, "lookup_rate": {}, "best_source": {}}
    words = {
        "grid": {**grid, "oracle": {}, "upper_bound": {"price": [0.2]}},
        "sampling": {"temperature": 0.0, "max_new_tokens": 16},
    }
    words |= {"pair": {"_target_": "toolkit.models.pair.ModelPair.toy"}}
    tables = []
    for source in ("live", "traces"):
        cfg = sweep_config(tmp_path, source=source, **words)
        cfg.prompts = {"_target_": "data_gen.prompts.JsonlPrompts", "path": str(path)}
        tables.append(rows_of(sweep.run(cfg)))
    live, traced = tables
    assert "left out, they know no grammar" in capsys.readouterr().out
    assert set(traced.index.get_level_values("method")) == {*grid, "autoregressive"}
    for name in (*COUNTS, *SOURCES):
        shared = live.index.intersection(traced.index)
        assert (
            len(shared) == 3 * 5 and (live.loc[shared, name].fillna(-1) == traced.loc[shared, name].fillna(-1)).all()
        ), name
    for name in ("accepted_lengths", "drafted_lengths", "reached_lengths"):
        assert [list(x) for x in live.loc[shared, name]] == [list(x) for x in traced.loc[shared, name]], name
