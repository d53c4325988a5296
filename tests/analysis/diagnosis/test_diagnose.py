"""Why an engine accepts less than it should: planted mistakes are named, clean runs are not accused, bad input is one line."""

import copy
import json
import re
import shutil
from functools import cache, partial

import numpy as np
import pandas as pd
import pytest
import torch

from analysis import diagnose
from analysis.diagnosis.answers import Answer, read_answers
from analysis.diagnosis.compare import best_of, explanations
from analysis.diagnosis.replay import expected
from analysis.diagnosis.sentence import of_rounds
from analysis.tables.bootstrap import Bootstrap
from tests.analysis.diagnosis.engine import DRAFTED, Engine, texts
from tests.analysis.loads.test_streamed import chunks_of
from toolkit import ModelPair, decode
from toolkit.config import compose
from toolkit.drafts import DraftKind
from toolkit.drafts.causes import AS_IT_SHOULD_BE, Case, Cause, ReplayedRound, ReplayedText
from toolkit.drafts.causes.shared import in_bfloat16
from toolkit.drafts.separate.causes import causes, with_rejected
from toolkit.errors import InputError
from toolkit.files.atomic import read_json
from toolkit.models.pair import TOY
from toolkit.sampling import Sampling
from toolkit.testing import llama_pair, ragged_prompts

TEMPLATE = "{{ bos_token }}{% for turn in messages %}Q: {{ turn.content }}\nA:{% endfor %}"


@pytest.fixture(scope="module")
def toy():
    return ModelPair.toy()


@pytest.fixture(scope="module")
def written(toy):
    """A few greedy texts of the toy target."""
    return texts(toy, 7, 32)


@pytest.fixture(scope="module")
def answers(toy, written, tmp_path_factory):
    """A file of a clean engine's answers."""
    return Engine(toy).answer(written, tmp_path_factory.mktemp("answers") / "answers.jsonl")


def diagnosed(path, *words):
    """What `diagnosis.json` holds of a file of answers."""
    words = [f"responses={path}", f"paths.root_dir={path.parent}", *words]
    return read_json(diagnose.run(compose("diagnose", words)) / "diagnosis.json")


def changed(answers, tmp_path, change):
    """A file with changed lines."""
    lines = [json.loads(line) for line in answers.read_text().split("\n") if line]
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))
    return path


# -- planted mistakes -----------------------------------------------------------------------------------------------------


def test_a_clean_run_is_as_it_should_be(answers, capsys):
    result = diagnosed(answers)
    assert result["sentence"] == f"as it should be: {result['rounds']} of {result['rounds']} rounds"
    assert result["sentence"] in capsys.readouterr().out
    assert result["causes"] == [] and result["equal"] == result["rounds"] > 40
    assert sum(line["rounds"] for line in result["category"]) == result["rounds"]


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ({"stale": 9}, "the draft's cache keeps all rejected tokens"),
        ({"window": 24}, "the draft reads the last 24 tokens"),
    ],
)
def test_a_mistake_is_named(mistake, name, toy, written, tmp_path):
    path = Engine(toy, **mistake).answer(written, tmp_path / "answers.jsonl")
    result = diagnosed(path, "windows=[24]")
    (cause,) = result["explained_by"]
    assert cause.startswith(name) and f"explained by: {cause}" in result["sentence"]
    assert max(result["causes"], key=lambda each: each["equal"])["names"] == [cause]


@pytest.mark.parametrize(("mistake", "is_wrong"), [({"shift": 1}, False), ({"stale": 1}, True)])
def test_texts_without_rounds_that_differ_decide_nothing(mistake, is_wrong, toy, written, tmp_path, capsys):
    """The answer is that of replaying every cause along all texts, in fewer forward passes where nothing is wrong."""
    path, sampling = Engine(toy, **mistake).answer(written, tmp_path / "answers.jsonl"), Sampling(temperature=0)
    result = diagnosed(path, "windows=[24]")
    answers, _ = read_answers(path, toy)
    rounds = pd.DataFrame(
        [(number, *counts) for number, answer in enumerate(answers) for counts in answer.rounds],
        columns=["text", "start", "drafted", "accepted"],
    )
    case = Case(toy.draft, toy.tokenizer, [answer.prompt_ids for answer in answers], 99, sampling, [24])
    replays = {
        cause: np.concatenate(expected(toy.draft, cause, answers, sampling, [], int))
        for cause in (AS_IT_SHOULD_BE, *causes(case))
    }
    several = explanations(rounds, replays)
    best, right = best_of(rounds, several), several[0]
    assert (best is not right, result["explained"]) == (is_wrong, best is not None)
    assert result["explained_by"] == ([] if best in (None, right) else [cause.meaning for cause in best.causes])
    assert len({line["text"] for line in result["different"]}) > 0
    equal = {cause.meaning: each.equal for each in several[1:] for cause in each.causes}
    counted = {name: each["equal"] for each in result["causes"] for name in each["names"]}
    assert counted.items() <= equal.items() and (len(counted) == len(equal)) == is_wrong
    passes, of_causes = map(int, re.findall(r"(\d+) draft forward passes", capsys.readouterr().err))
    assert is_wrong or of_causes < passes * (len(replays) - 1)


def own_causes(case):
    return [Cause("a mistake of our own", context=partial(with_rejected, most=None))]


@pytest.mark.parametrize(
    ("part", "answer"),
    [(None, "none of the 0 causes explains it"), (f"{__name__}:own_causes", "explained by: a mistake of our own")],
)
def test_a_kind_brings_its_own_causes(part, answer, toy, written, tmp_path, monkeypatch):
    monkeypatch.setattr(type(toy.draft), "draft_kind", DraftKind("own", "own", causes=part), raising=False)
    path = Engine(toy, stale=DRAFTED).answer(written, tmp_path / "answers.jsonl")
    assert answer in diagnosed(path)["sentence"]


PLANTED = {
    "the draft's cache keeps one rejected token": {"stale": 1},
    "the draft's cache keeps all rejected tokens": {"stale": DRAFTED},
    "the draft reads the prompt without its chat template": {"prompt": "no template"},
    "the draft reads the last 64 tokens": {"window": 64},
    "the repetition penalty is the target's alone": {"unpenalized": True, "penalty": 1.2},
}
SUBTLE = {  # of 100 rounds they change 2 to 4: texts over which Student's t tells them have to be more
    "the draft's positions after the prompt are one too high": {"shift": 1},
    "the draft's positions after the prompt are one too low": {"shift": -1},
    "the draft reads the prompt without its begin token": {"prompt": "no begin"},
    "the draft reads the prompt with two begin tokens": {"prompt": "two begins"},
}
CLEAN = [  # of four sets of questions; of bfloat16 most, whose rounding changes most rounds
    {},
    {"penalty": 1.2},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16, "first": 14},
    {"dtype": torch.bfloat16, "first": 28},
    {"dtype": torch.float16, "first": 42},
]


@pytest.fixture(scope="module")
def folders(toy, tmp_path_factory):
    """The toy target with a chat template, and a draft of other weights."""
    root = tmp_path_factory.mktemp("folders")
    shutil.copytree(TOY / "target", root / "target")
    settings = root / "target" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    other = ModelPair.toy()
    torch.manual_seed(0)
    for weights in other.draft.parameters():
        weights += 0.15 * weights.std() * torch.randn_like(weights)
    other.draft.save_pretrained(root / "other")
    return root, other


@pytest.mark.slow
def test_planted_mistakes_are_named_and_clean_runs_are_not_accused(toy, folders, tmp_path):
    """Ten mistakes, whose rounds are all explained by one of a dozen causes; clean runs, and one of a batch decoded here."""
    root, other = folders
    asked = cache(partial(texts, toy))

    def named(pair, count=16, most=40, first=0, penalty=1.0, **mistake):
        written = asked(count, most, first, penalty)
        path = Engine(pair, penalty=penalty, **mistake).answer(written, tmp_path / "answers.jsonl")
        words = [f"pair.target={root}/target", f"others=[{root}/other]", f"sampling.repetition_penalty={penalty}"]
        return diagnosed(path, *words)

    for name, mistake in {**PLANTED, **SUBTLE}.items():
        result = named(toy, **({"count": 32, "most": 48} if name in SUBTLE else {}), **mistake)
        (cause,) = result["explained_by"]
        assert cause.startswith(name) and result["causes"][0]["equal"] == result["rounds"]
    (cause,) = named(other)["explained_by"]
    assert cause.startswith("the draft's weights are those of")
    runs = [named(toy, **clean) for clean in CLEAN]
    words = ["prompts=toy_instruct", "prompts.limit=16", "sampling.max_new_tokens=40", "sampling.temperature=0"]
    words += ["method=speculative", "pair.dtype=bfloat16", "track=false", f"paths.root_dir={tmp_path}"]
    runs.append(diagnosed(decode.run(compose("decode", words)) / "generations.jsonl"))
    assert [run["sentence"] for run in runs if not run["sentence"].startswith("as it should be")] == []


# -- the replay -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_the_replay_accepts_what_plain_forward_passes_draft(penalty):
    """Ragged rounds side by side against one uncached forward pass per token, in float64."""
    draft, generator = llama_pair().draft, np.random.default_rng(0)
    answers = []
    for number, prompt in enumerate(ragged_prompts(5)):
        tokens = draft.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, repetition_penalty=penalty)
        ids = [t if generator.random() < 0.8 else 7 for t in tokens[0, len(prompt) :].tolist()]
        rounds = [(start, 1 + (start + number) % 4, 0) for start in range(1, len(ids) - 4, 1 + number)]
        answers.append(Answer(prompt, ids, rounds))
    wanted = []
    for answer in answers:
        for start, count, _ in answer.rounds:
            ids = [*answer.prompt_ids, *answer.token_ids[:start]]
            for depth in range(count):
                logits = draft(torch.tensor([ids])).logits[0, -1]
                rows = torch.tensor(sorted(set(ids)))
                logits[rows] = torch.where(logits[rows] > 0, logits[rows] / penalty, logits[rows] * penalty)
                ids.append(int(logits.argmax()))
                if ids[-1] != answer.token_ids[start + depth]:
                    break
            matching = [
                a == b for a, b in zip(ids[len(answer.prompt_ids) + start :], answer.token_ids[start:], strict=False)
            ]
            wanted.append(sum(matching))
    sampling, passed = Sampling(temperature=0, repetition_penalty=penalty), []
    ours = expected(draft, AS_IT_SHOULD_BE, answers, sampling, [], passed.append)
    assert [count for counts in ours for count in counts] == wanted and {0, 1, 2} <= set(wanted)
    assert sum(passed) == sum(count for answer in answers for _, count, _ in answer.rounds)


def test_a_token_that_is_never_drafted():
    pair, prompt = llama_pair(), ragged_prompts(1)[0]
    top = int(pair.draft(torch.tensor([[*prompt, 7]])).logits[0, -1].argmax())
    answers = [Answer(prompt, [7, top, 8], [(1, 1, 0)])]
    sampling = Sampling(temperature=0)
    assert expected(pair.draft, AS_IT_SHOULD_BE, answers, sampling, [], int) == [[1]]
    assert expected(pair.draft, AS_IT_SHOULD_BE, answers, sampling, [top], int) == [[0]]


def test_bfloat16_is_what_torch_computes_in_it(toy, written):
    """Rounded as often, and the draft that it was made from stays as it is."""
    ids = torch.tensor([[*prompt, *tokens][:40] for _, _, prompt, tokens in written if len(prompt) + len(tokens) >= 40])
    before = {name: values.clone() for name, values in toy.draft.state_dict().items()}
    with torch.inference_mode():
        ours, theirs, exact = (
            model(ids).logits for model in (in_bfloat16(toy.draft), copy.deepcopy(toy.draft).bfloat16(), toy.draft)
        )
    assert ours.dtype == torch.bfloat16 and (ours == theirs).float().mean() > 0.9
    assert (ours - theirs).abs().mean() < 0.1 * (theirs - exact).abs().mean()
    assert all(torch.equal(values, before[name]) for name, values in toy.draft.state_dict().items())


def test_rejected_tokens_that_stay():
    text = ReplayedText(
        [1], [10, 11, 12, 13, 14, 15], 5, [ReplayedRound(1, [11, 90, 91, 92], 1), ReplayedRound(3, [93, 94], 0)]
    )
    assert with_rejected(text, None) == [1, 10, 11, 90, 91, 12, 93, 13, 14]
    assert with_rejected(text, 1) == [1, 10, 11, 90, 12, 93, 13, 14]


def test_causes_that_apply(toy):
    def meanings(prompts, longest=100, **sampling):
        return [each.meaning for each in causes(Case(toy.draft, toy.tokenizer, prompts, longest, Sampling(**sampling)))]

    assert sum("begin token" in each for each in meanings([[1, 5]])) == 2
    assert sum("begin token" in each for each in meanings([[5, 6]])) == 1
    assert [each for each in meanings([[1, 5]], 300) if "last" in each][
        -1
    ] == "the draft reads the last 256 tokens alone"
    for windows, sizes in ((None, 2), ([], 0), ([40], 1)):
        case = Case(toy.draft, toy.tokenizer, [[1, 5]], 200, Sampling(), windows)
        assert sum("last" in each.meaning for each in causes(case)) == sizes
    assert ("the repetition penalty is the target's alone" in meanings([[1, 5]], repetition_penalty=1.1)) is True
    assert ("the repetition penalty is the target's alone" in meanings([[1, 5]])) is False


# -- the comparison -------------------------------------------------------------------------------------------------------


def table(accepted, num_texts=20):
    """Rounds of 4 drafted tokens, text after text."""
    size = len(accepted)
    return pd.DataFrame(
        {
            "text": np.arange(size) * num_texts // size,
            "start": 1,
            "drafted": 4,
            "accepted": accepted,
            "third": 1,
            "category": "",
        }
    )


RIGHT = np.tile([0, 1, 2, 3, 4], 60)
OTHER = Cause("another mistake", "nothing")


def test_causes_that_predict_the_same_are_one_answer_with_two_names():
    counted = np.where(RIGHT == 4, 1, RIGHT)
    replays = {AS_IT_SHOULD_BE: RIGHT, Cause("a mistake"): counted, OTHER: counted.copy()}
    result = of_rounds(table(counted), explanations(table(counted), replays), Bootstrap(200))
    assert result["explained_by"] == ["a mistake", "another mistake"] and result["set"] == ["nothing"]
    assert "explained by: a mistake, or another mistake (300 of 300 rounds; next best 240)" in result["sentence"]


def test_rounds_that_differ_both_ways_are_rounding_and_one_way_are_not():
    both, one_way = RIGHT.copy(), RIGHT.copy()
    both[[2, 9, 31, 44, 78, 101]] += [1, -1, 1, -1, -1, 1]
    one_way[[4, 29, 51, 73, 98, 142, 184, 199, 203, 217, 234, 266]] -= 1
    for counted, explained in ((both, True), (one_way, False)):
        several = explanations(table(counted), {AS_IT_SHOULD_BE: RIGHT, OTHER: RIGHT.copy()})
        assert (best_of(table(counted), several) is several[0]) == explained
        result = of_rounds(table(counted), several, Bootstrap(200))
        assert result["explained"] == explained and result["set"] == []  # of a cause that changes nothing


def test_one_text_alone_accuses_nobody():
    counted = RIGHT.copy()
    counted[:15] = 4 - counted[:15]
    several = explanations(table(counted), {AS_IT_SHOULD_BE: RIGHT, OTHER: counted})
    assert best_of(table(counted), several) is several[0]
    sentence = of_rounds(table(counted), several, Bootstrap(200))["sentence"]
    assert sentence == "as it should be: 288 of 300 rounds; another mistake: 300, which is not certain over 20 texts"


def test_few_texts_that_name_no_cause_are_called_too_few():
    counted = np.where(np.arange(len(RIGHT)) < 75, 4 - RIGHT, RIGHT)
    several = explanations(table(counted, 4), {AS_IT_SHOULD_BE: RIGHT, OTHER: counted})
    result = of_rounds(table(counted, 4), several, Bootstrap(200))
    assert not result["explained"] and result["explained_by"] == []
    assert "4 texts are too few to name a cause (240 of 300 rounds" in result["sentence"]
    assert "another mistake: 300)" in result["sentence"]


def test_what_nothing_explains_is_said_with_the_first_rounds():
    counted = np.where(RIGHT == 4, 1, RIGHT)
    for replays, number in (({}, 0), ({OTHER: np.zeros_like(RIGHT)}, 1)):
        several = explanations(table(counted), {AS_IT_SHOULD_BE: RIGHT, **replays})
        result = of_rounds(table(counted), several, Bootstrap(200))
        assert f"none of the {number} causes explains it (240 of 300 rounds" in result["sentence"]
        assert "answer 1 after 1 tokens, 1 of 4 accepted, expected 4" in result["sentence"]
        assert result["explained_by"] == [] and len(result["different"]) == 60


# -- answers --------------------------------------------------------------------------------------------------------------


def of_vllm(line):
    """A line as vLLM answers it."""
    drafted, accepted = line["per_step_drafted"], line["per_step_accepted"]
    counts = {
        "num_spec_tokens": DRAFTED, "num_spec_steps": len(drafted), "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted), "per_step_drafted": drafted, "per_step_accepted": accepted,
        "acceptance_histogram": [accepted.count(n) for n in range(DRAFTED + 1)],
    }  # fmt: skip
    choice = {name: line[name] for name in ("prompt_token_ids", "token_ids")}
    return {"choices": [{**choice, "finish_reason": "length"}], "metrics": {"speculative_decoding": counts}}


def test_vllms_answers_are_read_as_json_lines_are(answers, toy, tmp_path):
    ours, theirs = (read_answers(path, toy)[0] for path in (answers, changed(answers, tmp_path, of_vllm)))
    assert [(each.token_ids, each.rounds) for each in ours] == [(each.token_ids, each.rounds) for each in theirs]
    assert all(start + DRAFTED + 1 <= len(each.token_ids) for each in ours for start, _, _ in each.rounds)


def test_streams_of_llamacpp_are_read_as_json_lines_are(answers, toy, tmp_path):
    def of_llamacpp(line):
        rounds = zip(line.pop("per_step_drafted"), line.pop("per_step_accepted"), strict=True)
        return {**line, "stream": chunks_of(list(rounds)), "num_drafted": DRAFTED, "timings": {"draft_n": 9}}

    ours, theirs = (read_answers(path, toy)[0] for path in (answers, changed(answers, tmp_path, of_llamacpp)))
    assert [(each.token_ids, each.rounds) for each in ours] == [(each.token_ids, each.rounds) for each in theirs]


def test_streams_whose_texts_have_other_tokens_are_refused(answers, toy, tmp_path):
    """A text that was not written in its tokenizer's own pieces comes back in fewer: its rounds would be of other tokens."""

    def streamed(line):
        chunks = chunks_of(list(zip(line.pop("per_step_drafted"), line.pop("per_step_accepted"), strict=True)))
        last = chunks[-1]["timings"]
        chunks.append({"timings": {**last, "predicted_n": last["predicted_n"] + 5}})
        text = toy.text(line.pop("token_ids"))
        return {**line, "text": text, "stream": chunks}

    with pytest.raises(InputError, match="7 of 7 texts do not come back"):
        read_answers(changed(answers, tmp_path, streamed), toy)


def test_generations_of_decode_are_as_they_should_be(tiny_overrides, tmp_path):
    words = [*tiny_overrides, "prompts=toy_math", "prompts.limit=8", "sampling.max_new_tokens=24", "method=speculative"]
    words += ["sampling.temperature=0", "track=false", f"paths.root_dir={tmp_path}"]
    path = decode.run(compose("decode", words)) / "generations.jsonl"
    result = diagnosed(path, *tiny_overrides)
    assert result["equal"] == result["rounds"] > 40
    with pytest.raises(InputError, match="repetition_penalty: the texts were decoded with 1.0, not 1.5"):
        diagnosed(path, *tiny_overrides, "sampling.repetition_penalty=1.5")


def test_texts_without_ids_are_tokenised_again(answers, toy, tmp_path):
    def as_text(line):
        ids = [token for token in line.pop("token_ids") if token not in toy.end_ids]
        return {**line, "text": toy.text(ids), "usage": {"completion_tokens": len(ids)}}

    read, left_out = read_answers(changed(answers, tmp_path, as_text), toy)
    whole, _ = read_answers(answers, toy)
    assert left_out == [] and [each.prompt_ids for each in read] == [each.prompt_ids for each in whole]
    assert all(
        ours.token_ids == theirs.token_ids[: len(ours.token_ids)] for ours, theirs in zip(read, whole, strict=True)
    )
    with pytest.raises(InputError, match="7 of 7 texts do not come back"):
        read_answers(changed(answers, tmp_path, lambda line: {**as_text(line), "usage": {"completion_tokens": 1}}), toy)


def test_sums_are_compared_as_sums(answers, tmp_path):
    def summed(line, wrong=0):
        accepted = line.pop("per_step_accepted")
        line.pop("per_step_drafted")
        counts = {"draft_n": DRAFTED * len(accepted), "draft_n_accepted": max(sum(accepted) - wrong, 0)}
        return {**line, "timings": counts}

    path = changed(answers, tmp_path, summed)
    result = diagnosed(path, f"num_drafted={DRAFTED}")
    assert result["sentence"].startswith("as it should be, as far as sums tell")
    assert all(counted == ours for *counted, drafted, kept in result["totals"] for ours in [[drafted, kept]])
    path = changed(answers, tmp_path, lambda line: summed(line, 5))
    assert diagnosed(path, f"num_drafted={DRAFTED}")["sentence"].startswith("different: ")
    with pytest.raises(InputError, match="num_drafted: expected K"):
        diagnosed(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [5000]}, "line 1: token_ids: expected token ids in"),
        ({"text": "Another answer."}, "line 1: the text begins 'Another answer.'"),
        ({"per_step_accepted": [1]}, "line 1: expected as many drafted as accepted counts"),
        ({"per_step_accepted": [0], "per_step_drafted": [4]}, "its rounds make 2 of"),
        ({"choices": [{}, {}]}, "expected one choice, got 2"),
        ({"rounds": [{}], "metrics": {}}, "line 1: expected an answer with counts"),
        ({"prompt_token_ids": None}, "line 1: expected an answer with counts, got KeyError\\('prompt'\\)"),
        ({"timings": {"draft_n": 5, "draft_n_accepted": 50}}, "line 1: expected 0 <= draft_n_accepted <= draft_n"),
        ({"timings": {"draft_n": 0, "draft_n_accepted": 0}}, "line 1: it drafted nothing"),
    ],
)
def test_faulty_answers_are_one_line(change, message, answers, tmp_path):
    with pytest.raises(InputError, match=message):
        diagnosed(changed(answers, tmp_path, lambda line: {**line, **change}))


def test_an_answer_counts_once(answers, tmp_path):
    """As independent texts, copies would make every interval narrow and every mistake certain."""
    path = tmp_path / "thrice.jsonl"
    path.write_text(3 * answers.read_text())
    result, once = diagnosed(path), diagnosed(answers)
    assert result["rounds"] == once["rounds"] and result["positions"] == once["positions"]
    assert len(result["left_out"]) == 2 * len(answers.read_text().strip().split("\n"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sampling.temperature=.7"], "sampling.top_p: the texts were decoded with 0.6, not 1.0"),
        (
            ["sampling.temperature=1", "sampling.top_p=.6"],
            "sampling.temperature: the texts were decoded with 0.7, not 1",
        ),
        (["sampling.generation_config=true"], "sampling.generation_config: expected false or null"),
    ],
)
def test_another_sampling_than_that_of_the_texts_is_one_line(words, message, tiny_overrides, tmp_path):
    drawn = [*tiny_overrides, "prompts=toy_math", "prompts.limit=2", "sampling.temperature=.7", "sampling.top_p=.6"]
    path = decode.run(compose("decode", [*drawn, "track=false", f"paths.root_dir={tmp_path}"])) / "generations.jsonl"
    with pytest.raises(InputError, match=message):
        diagnosed(path, *words)


def test_too_few_rounds_are_one_line(answers):
    with pytest.raises(InputError, match="too few, 20 whole rounds of 3 answers: 40 rounds of 3 answers are needed"):
        diagnosed(answers, "rounds=20")


def test_sums_above_temperature_0_are_one_line(answers, tmp_path):
    path = changed(answers, tmp_path, lambda line: {**line, "timings": {"draft_n": 9, "draft_n_accepted": 3}})
    with pytest.raises(InputError, match="expected 0 for answers with sums alone"):
        diagnosed(path, "num_drafted=4", "sampling.temperature=1")
