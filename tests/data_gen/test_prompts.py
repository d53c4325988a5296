"""Prompt sources: every config of a data set renders its template from local files; selection, ids and error texts."""

import json
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from data_gen.prompts import HubPrompts, JsonlPrompts, ToyPrompts
from data_gen.templates import NullValueError, render, write_chat
from toolkit.errors import InputError

CONF = Path(__file__).parents[2] / "conf"
NAMES = sorted(path.stem for path in (CONF / "prompts").glob("*.yaml"))
HUB = [name for name in NAMES if name not in ("hub", "jsonl") and not name.startswith("toy_")]

BELOW = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
# name -> ending of the local file, its rows, and what they become: text ("...": how it ends) or messages; answer
SAMPLES = {
    "alpaca": (".csv", [
        {"instruction": "Name the season.", "input": "July", "output": "Summer."},
        {"instruction": "Tell a joke.", "input": "", "output": "No."},
    ], [
        ("Name the season.\nInput: July", "Summer."),
        ("Tell a joke.", "No."),
    ]),
    "humaneval": (".parquet", [
        {"task_id": "HumanEval/0", "prompt": "def one():\n    '''Return {1}.'''\n", "entry_point": "one",
         "canonical_solution": "    return 1\n", "test": "assert one() == 1"},
    ], [
        (BELOW + "\n\n\n### Instruction:\nCreate a Python script for this problem:\n"
         "def one():\n    '''Return {1}.'''\n\n\n### Response:", "return 1"),
    ]),
    "gsm8k": (".json", [{"question": "What is 600 + 634?", "answer": "600 + 634 = <<600+634=1234>>\n#### 1,234"}], [
        (BELOW + "\n\n### Instruction:\nWhat is 600 + 634?\n\n### Response: Let's think step by step.", "1234"),
    ]),
    "squad": (".parquet", [
        {"id": "5a", "title": "T", "context": "The sky is blue.", "question": "What is blue?",
         "answers": {"text": ["The sky", "sky"], "answer_start": [0, 4]}},
    ], [
        ("... reputedly appeared to Saint Bernadette Soubirous in 1858. \nQuestion: To whom did the Virgin Mary "
         "allegedly appear in 1858 in Lourdes France?\nAnswer: Saint Bernadette Soubirous\n\n"
         "Now, answer the following question[/INST]\n"
         "Context: The sky is blue.\nQuestion: What is blue? \nAnswer:", "The sky"),
    ]),
    "spider": (".json", [
        {"db_id": "zoo", "question": "How many?", "query": "SELECT 1", "sql": {"limit": [1, "x", None]}},
    ], [
        ("...WHERE age  >  56; \n\nSchema:\nTable Keeper, columns = [*,Name]\nTable animal, columns = [*,id,kind]\n\n"
         "Question: How many?\nSQL:", "SELECT 1"),
    ]),
    "mt_bench": (".jsonl", [
        {"prompt": ["Write.", "Rewrite."], "prompt_id": 7, "category": "writing", "reference": []},
    ], [
        ([{"role": "user", "content": "Write."}], None),
    ]),
    "mt_bench_plain": (".jsonl", [
        {"prompt": ["Write.", "Rewrite."], "prompt_id": 7, "category": "writing", "reference": []},
    ], [
        ("Write.", None),
    ]),
    "cnn_dailymail": (".json", [{"article": "Much.", "highlights": "Little.", "id": "a"}], [
        ("Summarize: Much.", "Little."),
    ]),
    "xsum": (".json", [{"document": "Much.", "summary": "Little.", "id": "1"}], [
        ("Article: Much.\n\nSummarize the article in one sentence.\nSummary:", "Little."),
    ]),
    "wmt": (".jsonl", [{"translation": {"de": "Guten Tag", "en": "Hello"}}], [
        ("Translate the input English sentence into German.\nInput: Hello\nOutput: ", "Guten Tag"),
    ]),
    "wmt_de_en": (".jsonl", [{"translation": {"de": "Guten Tag", "en": "Hello"}}], [
        ("Translate the input German sentence into English.\nInput: Guten Tag\nOutput: ", "Hello"),
    ]),
    "dolly": (".jsonl", [
        {"instruction": "Who?", "context": "", "response": "Me.", "category": "open_qa"},
        {"instruction": "Who?", "context": "He did.", "response": "He.", "category": "closed_qa"},
    ], [
        ("### Instruction:\nWho?\n\n### Response:", "Me."),
        ("### Instruction:\nWho?\n\n### Context:\nHe did.\n\n### Response:", "He."),
    ]),
    "chatgpt_prompts": (".json", [{"human_prompt": "Who are you?", "chatgpt_response": "A model."}], [
        ("Who are you?", "A model."),
    ]),
    "chatalpaca": (".json", [
        {"id": "1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"},
                                      {"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."},
                                      {"from": "human", "value": "Bye"}]},
    ], [
        ("Hi\nHello\nWho?", "Me."),
    ]),
    "sharegpt": (".json", [
        {"id": "a_1", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"},
                                        {"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]},
    ], [
        ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
          {"role": "user", "content": "Who?"}], "Me."),
    ]),
    "spec_bench": (".jsonl", [{"question_id": 81, "category": "writing", "turns": ["Compose.", "Again."]}], [
        ([{"role": "user", "content": "Compose."}], None),
    ]),
}  # fmt: skip
SAMPLES["wmt18"] = SAMPLES["wmt"]
TABLES = [{"db_id": "zoo", "table_names_original": ["animal", "Keeper"],
           "column_names_original": [[-1, "*"], [0, "id"], [0, "kind"], [1, "Name"]]}]  # fmt: skip


def source(name, *overrides):
    """The source of one config in conf/prompts."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return instantiate(compose(overrides=[f"+prompts={name}", *overrides]).prompts)


def write_rows(path, rows):
    import datasets

    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        getattr(datasets.Dataset.from_list(rows), f"to_{path.suffix[1:]}")(path)
    return path


def numbered(path, count, **options):
    """A source of `count` rows whose prompt is their number."""
    write_rows(path, [{"text": str(number)} for number in range(count)])
    options = {"name": "n", "template": "{{ text }}", "data_files": str(path), **options}
    return HubPrompts(**options, cache_dir=path.parent / "cache")


@pytest.fixture
def local(tmp_path):
    """Local files for a data set's config: the overrides that use them."""

    def overrides(name):
        ending, rows, _ = SAMPLES[name]
        file = write_rows(tmp_path / f"rows{ending}", rows)
        (tmp_path / "tables.json").write_text(json.dumps(TABLES))
        join = [f"prompts.join.file={tmp_path}/tables.json"] if name == "spider" else []
        return [f"prompts.data_files={file}", f"prompts.cache_dir={tmp_path}/cache", "prompts.shuffle_seed=null", *join]

    return overrides


# -- every config ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HUB)
def test_a_data_set_renders_its_template(name, local):
    prompts = source(name, *local(name)).load()
    assert [prompt.id for prompt in prompts] == [f"{name}-test-{index:05d}" for index in range(len(SAMPLES[name][1]))]
    for prompt, (expected, answer) in zip(prompts, SAMPLES[name][2], strict=True):
        if isinstance(expected, str) and expected.startswith("..."):
            assert prompt.prompt.endswith(expected[3:])
            assert prompt.prompt.startswith("[INST] <<SYS>> You ")
        else:
            assert prompt.content == expected
        assert prompt.answer == answer


@pytest.mark.parametrize("name", NAMES)
def test_a_prompts_file_replaces_any_source(name, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"id": 1, "prompt": "Hello"}\n')
    needed = ["prompts.name=any", "prompts.template=any"] if name == "hub" else []
    assert [prompt.prompt for prompt in source(name, f"prompts.path={path}", *needed).load()] == ["Hello"]


def test_chats_and_templates_of_the_command_line(local):
    chats = ("prompts.chat=none", "prompts.chat=llama2", "prompts.chat=tokenizer", 'prompts.template="{{ prompt }}"')
    (plain,), (wrapped,), (messages,), (bare,) = (
        source("humaneval", *local("humaneval"), chat).load() for chat in chats
    )
    assert bare.prompt == "def one():\n    '''Return {1}.'''\n"
    assert wrapped.prompt == f"[INST] {plain.prompt.strip()} [/INST]"
    assert messages.content == [{"role": "user", "content": plain.prompt}]
    assert messages.prompt is None


def test_fields_are_kept(local):
    (prompt,) = source("spec_bench", *local("spec_bench")).load()
    assert prompt.extra == {"question_id": 81, "category": "writing", "later_turns": ["Again."]}


def test_llama2_conversation():
    messages = [{"role": role, "content": text} for role, text in (
        ("system", "Be brief."), ("user", " Hi "), ("assistant", "Hello"), ("user", "Bye"))]  # fmt: skip
    expected = "[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello </s><s>[INST] Bye [/INST]"
    assert write_chat(messages, "llama2") == expected


# -- toy domains ----------------------------------------------------------------------------------------------------


def test_toy_splits():
    frozen = source("toy_math").load()
    assert frozen == source("toy_math", "prompts.seed=1").load()
    assert len(frozen) == 400
    assert frozen[:3] == source("toy_math", "prompts.limit=3").load()
    assert frozen[0].extra["response"].endswith(f"#### {frozen[0].answer}")
    assert len(source("toy_math", "prompts.split=dev").load()) == 200
    train, other = (ToyPrompts("instruct", "train", limit=5, seed=seed).load() for seed in (0, 1))
    assert len(train) == len(other) == 5
    assert train != other
    assert len(ToyPrompts("instruct", "train").load()) == 1000


# -- selection ------------------------------------------------------------------------------------------------------


def test_selection_is_deterministic_and_ids_are_stable(tmp_path):
    everything = {p.id: p.prompt for p in numbered(tmp_path / "a.jsonl", 30).load()}
    drawn = numbered(tmp_path / "a.jsonl", 30, shuffle_seed=1, limit=10).load()
    assert drawn == numbered(tmp_path / "a.jsonl", 30, shuffle_seed=1, limit=20).load()[:10]
    assert all(everything[prompt.id] == prompt.prompt for prompt in drawn)
    assert drawn != numbered(tmp_path / "a.jsonl", 30, shuffle_seed=2, limit=10).load()
    assert list(everything)[:2] == ["n-test-00000", "n-test-00001"]


def test_parts_of_one_split_are_disjoint_and_a_papers_number_of_test_prompts_cuts_no_training_part(tmp_path):
    file = write_rows(tmp_path / "a.jsonl", [{"text": str(number)} for number in range(30)])
    options = {"data_files": {"whole": str(file)}, "splits": {"train": "whole[:20]", "test": "whole[20:]"}}
    whole = [numbered(file, 30, **options, split=split, shuffle_seed=0).load() for split in ("train", "test")]
    assert [len(part) for part in whole] == [20, 10] and len({p.prompt for part in whole for p in part}) == 30
    sizes = {
        (split, limit): len(numbered(file, 30, **options, split=split, limit=limit, limits={"test": 4}).load())
        for split in ("train", "test")
        for limit in (None, 7)
    }
    assert sizes == {("train", None): 20, ("train", 7): 7, ("test", None): 4, ("test", 7): 7}


def test_rows_that_ask_nothing_are_passed_over(tmp_path):
    write_rows(tmp_path / "a.jsonl", [{"text": " "}, {"text": "a"}, {"text": ""}, {"text": "b"}, {"text": "c"}])
    prompts = HubPrompts(
        "n", template="{{ text }}", data_files=str(tmp_path / "a.jsonl"), limit=2, cache_dir=tmp_path / "cache"
    ).load()
    assert [(p.id, p.prompt) for p in prompts] == [("n-test-00001", "a"), ("n-test-00003", "b")]


# -- errors ---------------------------------------------------------------------------------------------------------


def test_a_hub_out_of_reach_is_explained(monkeypatch):
    import datasets

    def fail(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError) as caught:
        source("gsm8k").load()
    said = str(caught.value)
    assert said.startswith("could not load split test of openai/gsm8k/main from the Hugging Face hub: Couldn't reach")
    assert "\n" not in said and "prompts.data_files=FILE" in said and "prompts.path=FILE.jsonl" in said


@pytest.mark.parametrize(("options", "message"), [
    ({"name": "gsm8k", "split": "tset"}, "unknown split of gsm8k 'tset': did you mean test"),
    ({"template": "{{ txt }}"}, "row 0: the template failed: 'txt' is undefined; the row's fields are text"),
    ({"splits": {"test": "train[:10%]"}}, "expected a split like train or train[100:200], got 'train[:10%]'"),
])  # fmt: skip
def test_errors_name_the_mistake(tmp_path, options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        numbered(tmp_path / "a.jsonl", 1, **options).load()


def test_errors_of_configs(local):
    with pytest.raises(InputError, match=r"spec_bench is not on the hub: expected its file as prompts\.data"):
        source("spec_bench").load()
    with pytest.raises(InputError, match="spider needs a second file, joined by db_id"):
        source("spider", *local("spider"), "prompts.join.file=null").load()


def test_parts_of_a_file_are_disjoint_and_stay_when_it_grows(tmp_path):
    def parts(count):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(f'{{"id": {i}, "prompt": "p{i}"}}\n' for i in range(count)))
        return {name: {p.id for p in JsonlPrompts(file, split=name).load()} for name in ("train", "dev", "test")}

    few, many = parts(60), parts(2000)
    for ids, count in ((few, 60), (many, 2000)):
        assert set().union(*ids.values()) == {str(i) for i in range(count)}
        assert sum(map(len, ids.values())) == count
    assert all(few[split] <= many[split] for split in few)
    assert len(many["dev"]) == pytest.approx(300, abs=60) and len(many["test"]) == pytest.approx(300, abs=60)
    file = tmp_path / "prompts.jsonl"
    assert len(JsonlPrompts(file, limit=3, split="dev").load()) == 3
    with pytest.raises(InputError, match="sum below 1"):
        JsonlPrompts(file, split="dev", shares={"dev": 0.5, "test": 0.5})
    file.write_text('{"id": 1, "prompt": "p"}\n')
    empty = [split for split in few if "1" not in many[split]]
    with pytest.raises(InputError, match="found none among the 1"):
        JsonlPrompts(file, split=empty[0]).load()


def test_a_prompt_that_a_file_holds_under_several_ids_is_in_one_part(tmp_path):
    file = tmp_path / "prompts.jsonl"
    contents = [
        f'"prompt": "p{i % 30}"' if i % 2 else f'"messages": [{{"role": "user", "content": "p{i % 30}"}}]'
        for i in range(300)
    ]
    file.write_text("".join(f'{{"id": {i}, {content}}}\n' for i, content in enumerate(contents)))
    parts = {name: JsonlPrompts(file, split=name).load() for name in ("train", "dev", "test")}
    assert sum(map(len, parts.values())) == 300
    texts = [{str(prompt.content) for prompt in prompts} for prompts in parts.values()]
    assert sum(map(len, texts)) == len(set().union(*texts)) == 30


def test_an_id_that_is_no_unicode_has_a_part_of_its_own_file(tmp_path):
    """Half a character as an id: JSON can hold it, UTF-8 cannot."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"id": "\\\\ud800{number}", "prompt": "p{number}"}}\n' for number in range(40)))
    parts = [JsonlPrompts(path=str(path), split=part) for part in ("train", "dev", "test")]
    assert sum(len(part.load()) for part in parts) == 40


# -- rows as they come: nulls, parts, and texts where lists are expected ----------------------------------------------


def load(tmp_path, rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return HubPrompts("n", data_files=str(path), cache_dir=tmp_path / "cache", **options).load()


def user(content):
    return {"role": "user", "content": content}


REPLY = {"role": "assistant", "content": "Hello"}


@pytest.mark.parametrize(("options", "nothing", "something", "expected"), [
    ({"turns": "turns"}, {"turns": None}, {"turns": ["a", None, "b"]}, "a"),
    ({"turns": "turns"}, {"turns": [None, "b"]}, {"turns": ["a"]}, "a"),
    ({"turns": "turns"}, {"turns": [user(None), REPLY]}, {"turns": [user("a"), REPLY]}, "a"),
    ({"turns": "turns"}, {"turns": [None, REPLY]}, {"turns": [user("a"), REPLY]}, "a"),
    ({"template": "Q: {{ question }}"}, {"question": None}, {"question": "a"}, "Q: a"),
    ({"template": "Q: {{ question|trim }}"}, {"question": None}, {"question": " a "}, "Q: a"),
    ({"template": "Q: {{ x.y[0] ~ '?' }}"}, {"x": {"y": [None]}}, {"x": {"y": ["a"]}}, "Q: a?"),
])  # fmt: skip
def test_rows_with_a_null_are_passed_over_and_counted(tmp_path, options, nothing, something, expected):
    with pytest.warns(RuntimeWarning, match=r"n \(test\): 2 of 3 rows ask nothing"):
        (prompt,) = load(tmp_path, [nothing, something, nothing], **options)
    assert (prompt.id, prompt.prompt) == ("n-test-00001", expected)


def test_a_null_answer_is_none(tmp_path):
    rows = [{"q": "a", "reply": None}, {"q": "b", "reply": "B"}]
    prompts = load(tmp_path, rows, template="{{ q }}", answer="{{ reply }}")
    assert [(prompt.prompt, prompt.answer) for prompt in prompts] == [("a", None), ("b", "B")]


def test_a_template_may_ask_whether_a_field_is_null():
    row = {"q": "a", "context": None, "more": {"x": None, "y": 1}}
    assert render("{{ q }}{% if context %} in {{ context }}{% endif %}", row) == "a"
    assert render("{{ q }}{{ '' if context is none else context }}{{ '!' if context == none }}", row) == "a!"
    assert render("{{ context|default('-', true) }}{{ more|tojson }}", row) == '-{"x": null, "y": 1}'
    with pytest.raises(NullValueError):
        render("{{ context.lower() }}", row)


def test_parts_of_text_are_one_text(tmp_path):
    parts = [{"type": "text", "text": "Good"}, {"type": "text", "text": " day"}]
    (prompt,) = load(tmp_path, [{"turns": [user(parts), REPLY]}], turns="turns")
    assert (prompt.prompt, prompt.answer) == ("Good day", "Hello")


@pytest.mark.parametrize("turns", ["What is it?", [user([{"type": "image", "text": None}]), REPLY], [user(7), REPLY]])
def test_what_is_no_list_of_turns_is_named_with_its_row(tmp_path, turns):
    with pytest.raises(InputError, match=r"^n \(test\), row 0: expected [^\n]*$"):
        load(tmp_path, [{"turns": turns}], turns="turns")
