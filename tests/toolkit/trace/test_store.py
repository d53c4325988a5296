"""A store records what is missing and nothing else; its traces are those of a recorder, and replay what decoding counts."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.toolkit.trace.plain import Text
from toolkit import config, testing
from toolkit.acceptance import AcceptanceHead
from toolkit.acceptance.folder import head_hash
from toolkit.decoding import decode
from toolkit.errors import InputError
from toolkit.models.fingerprint import fingerprint
from toolkit.sampling import Sampling
from toolkit.trace import Trace
from toolkit.trace.record import Recorder
from toolkit.trace.replay import replay
from toolkit.trace.store import SHARD, Store
from toolkit.types import Counts

GREEDY, MOST, COUNT = Sampling(temperature=0.0, max_new_tokens=9), 4, SHARD + 3


@pytest.fixture(scope="module")
def pair():
    return testing.table_pair()


@pytest.fixture(scope="module")
def sequences(pair):
    prompts = [[1 + number % 2, 1 + number // 2 % 2, 1 + number // 4 % 2] for number in range(COUNT)]
    return [(g.prompt_ids, g.token_ids) for g in decode(pair, prompts, config.method("autoregressive"), GREEDY)]


@pytest.fixture(scope="module")
def heads(pair, tmp_path_factory):
    torch.manual_seed(1)
    folders = []
    for name in ("one", "two"):
        head = AcceptanceHead(pair.draft.probs.shape[0])
        head.readout.weight.data.normal_()
        folders.append(str(head.save(tmp_path_factory.mktemp(name))))
    return folders


@pytest.fixture
def recorded(monkeypatch):
    """The rows of every batch that is recorded."""
    rows, record = [], Recorder.recorded
    monkeypatch.setattr(
        Recorder,
        "recorded",
        lambda self, sequences, at, others: (rows.append(list(at)), record(self, sequences, at, others))[1],
    )
    return rows


def same(one, other):
    for name, value in vars(one).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.nan_to_num(-1), getattr(other, name).nan_to_num(-1)), name


def test_what_is_there_is_not_recorded_again(pair, sequences, heads, recorded, tmp_path):
    store = Store(tmp_path)
    first = store.trace(pair, GREEDY, sequences, MOST, heads[:1])
    assert sum(map(len, recorded)) == COUNT and len(list(tmp_path.glob("traces-*.safetensors"))) == 2
    same(first, Recorder(pair, GREEDY, MOST).record_all(sequences, range(COUNT)))
    recorded.clear()
    both = Store(tmp_path, hidden=False).trace(pair, GREEDY, sequences, MOST, heads)
    same(first, both)
    assert all(Trace.load(path).hidden is not None for path in tmp_path.glob("traces-*")), "states that are there stay"
    assert set(both.estimates) == set(map(head_hash, heads)) and both.hidden is None
    assert torch.equal(both.estimates[head_hash(heads[0])], first.estimates[head_hash(heads[0])])
    assert recorded == [], "a further head is scored on the states"
    store.trace(pair, GREEDY, sequences, MOST + 1)
    store.trace(pair, GREEDY, sequences, MOST, draft_temperature=1.0)
    store.trace(pair, GREEDY, sequences, MOST, rows=range(1, COUNT + 1))
    assert sum(map(len, recorded)) == 3 * COUNT, "what the trace depends on has changed"


def test_the_same_weights_in_another_format_or_configuration_are_recorded_apart(tmp_path):
    sampling = Sampling(max_new_tokens=6)
    pairs = [testing.llama_pair(dtype=torch.bfloat16) for _ in range(3)]
    pairs[1].target.float(), pairs[1].draft.float()  # the same numbers as weights
    settings = pairs[2].target.config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    pairs[2].target.model.rotary_emb = LlamaRotaryEmbedding(LlamaConfig(**settings))
    pairs[2].target.config.rope_parameters["rope_theta"] = 100.0
    assert len({fingerprint(pair.target) for pair in pairs}) == 1
    sequences = [
        (g.prompt_ids, g.token_ids) for g in decode(pairs[0], [[7, 8, 9]], config.method("autoregressive"), sampling)
    ]
    for number, pair in enumerate(pairs):
        shared = Store(tmp_path / "shared").trace(pair, sampling, sequences, MOST)
        same(shared, Store(tmp_path / str(number)).trace(pair, sampling, sequences, MOST))


def test_recordings_at_several_temperatures_are_made_in_one_pass_and_equal_those_made_alone(tmp_path):
    pair, sampling = testing.llama_pair(), Sampling(max_new_tokens=12)
    prompts = [[7, 8, 9], [5], [11, 4]]
    sequences = [(g.prompt_ids, g.token_ids) for g in decode(pair, prompts, config.method("autoregressive"), sampling)]
    passes, temperatures = [], (None, 0.0, 0.5)
    pair.target.register_forward_hook(lambda *_: passes.append(1))
    for temperature in temperatures:
        Store(tmp_path / "alone").trace(pair, sampling, sequences, MOST, draft_temperature=temperature)
    alone = len(passes)
    for temperature in temperatures:
        store = Store(tmp_path / "together")
        store.trace(
            pair, sampling, sequences, MOST, draft_temperature=temperature, policies=dict.fromkeys(temperatures)
        )
    assert len(passes) - alone == 1 == alone // 3
    files = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert len(files) == 3 and files == sorted(path.name for path in (tmp_path / "together").iterdir())
    for name in files:
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "together" / name).read_bytes()


def test_tokens_that_are_never_drafted_are_recorded_apart(pair, sequences, tmp_path):
    for unshared in ((), (0,), (1,)):
        less = replace(pair, drafts=(), unshared=unshared)
        shared = Store(tmp_path / "shared").trace(less, GREEDY, sequences, MOST)
        same(shared, Store(tmp_path / str(unshared)).trace(less, GREEDY, sequences, MOST))


def test_an_interruption_between_two_heads_and_a_damaged_file(pair, sequences, heads, recorded, tmp_path):
    store = Store(tmp_path)
    whole = store.trace(pair, GREEDY, sequences, MOST, heads)
    first, second = sorted(tmp_path.glob("traces-*.safetensors"))
    for path, names in ((first, heads), (second, heads[:1])):  # the second head had come to the first file alone
        trace = Trace.load(path)
        replace(trace, estimates={head_hash(name): trace.estimates[head_hash(name)] for name in names}).save(path)
    recorded.clear()
    same(store.trace(pair, GREEDY, sequences, MOST, heads[:1]), whole)
    same(store.trace(pair, GREEDY, sequences, MOST, heads), whole)
    assert recorded == []
    second.write_bytes(second.read_bytes()[:-40])
    same(store.trace(pair, GREEDY, sequences, MOST, heads), whole)
    assert [row for rows in recorded for row in rows] == list(range(SHARD, COUNT))


def test_states_that_were_not_kept_cost_a_recording_and_older_files_a_line(
    pair, sequences, heads, recorded, tmp_path, capsys
):
    (tmp_path / "trace-0123456789abcdef-000.safetensors").touch()
    store = Store(tmp_path, hidden=False)
    first = store.trace(pair, GREEDY, sequences, MOST, heads[:1])
    assert "recordings of an older revision" in capsys.readouterr().out
    again = store.trace(pair, GREEDY, sequences, MOST, heads)
    assert sum(map(len, recorded)) == 2 * COUNT and "states were not kept" in capsys.readouterr().out
    same(first, again)
    assert set(again.estimates) == set(map(head_hash, heads))
    with pytest.raises(InputError, match="nothing to replay"):
        store.trace(pair, GREEDY, [], MOST)


def test_a_policy_that_decodes_is_replayed_as_it_is(pair, sequences, heads, tmp_path):
    trace = Store(tmp_path).trace(pair, GREEDY, sequences, MOST, heads)
    assert len(Text(trace, COUNT - 1).rounds(lambda text, start: (0, 0))) > 0
    drafted = set()
    for threshold, head in ((0.2, heads[0]), (0.8, heads[1])):
        method = config.method(
            "specdec_pp", [f"max_drafted={MOST}", "min_drafted=1", f"policy.threshold={threshold}"], head
        )
        live = decode(pair, [prompt for prompt, _ in sequences], method, GREEDY)
        counts = replay(trace, method.bind(pair).policy).total
        assert counts == sum((generation.counts for generation in live), Counts())
        drafted.add(counts.num_drafted)
    assert len(drafted) == 2
    with pytest.raises(InputError, match="holds no estimates of the head"):
        replay(Store(tmp_path).trace(pair, GREEDY, sequences, MOST), method.bind(pair).policy)
