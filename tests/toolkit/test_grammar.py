"""Grammars in decoding: laws, whole outputs, forced tokens, and what is refused."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data_gen.prompts import JsonlPrompts
from toolkit import ModelPair, config, generate
from toolkit import decode as decode_command
from toolkit.decoding import Sampling, decode
from toolkit.drafts.block.testing import tiny_block
from toolkit.engine import TabularModel
from toolkit.errors import DecodingError, InputError
from toolkit.grammar import grammar_of, text
from toolkit.integrations.custom_generate import custom_generate
from toolkit.models.prompts import without_grammars
from toolkit.models.teacher import distributions_along
from toolkit.testing import tiny_eagle3, tiny_llama, tiny_tokenizer

END, NEW = 0, 4
WORDS = ["<|end|>", "a", "b", "c", "ab"]
GRAMMARS = ("a(b|c)*", "(ab|ba)+c?", None)
SCHEMA = {
    "type": "object",
    "properties": {"cat": {"type": "boolean"}, "dog": {"enum": ["sat", "ran"]}, "n": {"type": "integer"}},
    "required": ["cat", "dog", "n"],
    "additionalProperties": False,
}
CHAINS = ("speculative", "block", "confidence", "rate", "best_source", "prompt_lookup", "lookup_rate", "autoregressive")
TREES = ("specinfer", "mcsd", "tree_rate", "tree_rate_sampled")


def letters():
    """A tokenizer of five words, one of which two others spell, too."""
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(WORDS)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@pytest.fixture(scope="module")
def tables():
    generator = torch.Generator().manual_seed(5)
    target, draft = (TabularModel.random(len(WORDS), 2, generator, sharpness=1.0) for _ in range(2))
    return ModelPair(target=target, draft=draft, tokenizer=letters(), end_ids=(END,), costs="assumed")


def law(pair, grammar, temperature=1.0, prompt=()):
    """The distribution of outputs of at most NEW tokens, by a fresh matcher for every text: slow and obvious."""
    sampling, outputs = Sampling(temperature, grammar=grammar), {}

    def spread(tokens, prob):
        if len(tokens) == NEW or tokens[-1:] == (END,):
            outputs[tokens] = prob
            return
        p = pair.target.probs[pair.target.state([*prompt, *tokens])] ** (1 / temperature)
        if grammar is not None:
            state = grammar_of(pair, sampling)
            for token in tokens:
                state = state.after(token)
            p = p * torch.from_numpy(state.allowed)
        for token, share in enumerate((p / p.sum()).tolist()):
            if share:
                spread((*tokens, token), prob * share)

    spread((), 1.0)
    return outputs


def pvalue(generations, expected):
    """Chi-square of outputs against their law; 0 if there was one that cannot be."""
    seen = Counter(tuple(each.token_ids) for each in generations)
    if set(seen) - set(expected):
        return 0.0
    outputs = sorted(expected, key=expected.get)
    counts, law = [], []
    for output in outputs:  # rare ones together
        if law and law[-1] < 5:
            counts[-1] += seen[output]
            law[-1] += expected[output] * len(generations)
        else:
            counts.append(seen[output])
            law.append(expected[output] * len(generations))
    return chisquare(counts, law).pvalue if len(counts) > 1 else 1.0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", CHAINS + TREES)
def test_whole_outputs_follow_the_masked_law(tables, name, temperature):
    """Rows with two grammars and rows without one beside each other, each with its own law."""
    runs, method = 1500, config.method(name)
    request = {"temperature": temperature, "max_new_tokens": NEW}
    prompts = [{"prompt": "ab", "grammar": grammar} if grammar else "ab" for grammar in GRAMMARS] * runs
    prompt = tables.encode("ab")
    generations = decode(tables, prompts, method, Sampling(**request, seed=4), batch_size=600)
    for number, grammar in enumerate(GRAMMARS):
        expected = law(tables, grammar, temperature, prompt)
        assert pvalue(generations[number :: len(GRAMMARS)], expected) > 1e-4, grammar


def test_a_mask_of_the_node_before_is_noticed(tables, monkeypatch):
    """The control: every node is masked as its parent is."""
    along = text.TextGrammar.after

    def late(self, token):
        state = along(self, token)
        return state if state is None else _Late(state, self)

    class _Late(text.TextGrammar):
        def __init__(self, state, parent):
            super().__init__(state._matcher, state._vocab_size, state._end_ids)
            self.allowed = parent.allowed if parent.allowed.sum() > 1 else state.allowed

    monkeypatch.setattr(text.TextGrammar, "after", late)
    prompts = [{"prompt": "ab", "grammar": GRAMMARS[1]}] * 1500
    generations = decode(tables, prompts, config.method("speculative"), Sampling(max_new_tokens=NEW), batch_size=500)
    monkeypatch.undo()
    assert pvalue(generations, law(tables, GRAMMARS[1], prompt=tables.encode("ab"))) < 1e-6


def test_a_fork_is_a_fresh_one_that_was_fed_the_same_tokens(tables):
    generator = torch.Generator().manual_seed(0)
    for grammar in GRAMMARS[:2]:
        for _ in range(20):
            state, tokens = grammar_of(tables, Sampling(grammar=grammar)), []
            while state is not None and len(tokens) < 6:
                for other in range(len(WORDS)):
                    state.after(other)  # forks that are thrown away
                fresh = grammar_of(tables, Sampling(grammar=grammar))
                for token in tokens:
                    fresh = fresh.after(token)
                assert (fresh.allowed == state.allowed).all() and fresh.forced == state.forced
                tokens.append(int(torch.multinomial(torch.from_numpy(state.allowed).double(), 1, generator=generator)))
                state = state.after(tokens[-1])


@pytest.fixture(scope="module")
def llamas():
    """Random Llamas in float32 with a byte-level tokenizer of 290 tokens; token 2 ends a text."""
    tokenizer = tiny_tokenizer()
    target, draft = (tiny_llama(size, 2, seed, torch.float32, len(tokenizer)) for size, seed in ((32, 0), (16, 1)))
    return ModelPair(target=target, draft=draft, tokenizer=tokenizer, end_ids=(2,), costs="assumed")


PROMPTS = ["the cat sat on a mat", "the dog", "it ran to the cat and"]


def greedy(pair, prompt, grammar, new):
    """Masked greedy decoding by whole forward passes."""
    state, tokens = grammar_of(pair, Sampling(grammar=grammar)), pair.encode(prompt)
    produced = []
    while len(produced) < new and produced[-1:] != [2]:
        logits = pair.target(torch.tensor([tokens + produced])).logits[0, -1]
        if produced:
            state = state.after(produced[-1])
        produced.append(int(logits.masked_fill(~torch.from_numpy(state.allowed), -torch.inf).argmax()))
    return produced


@pytest.mark.parametrize("kind", ["separate", "eagle3", "dflash", "dspark"])
def test_greedy_texts_are_those_of_masked_decoding_with_every_method(llamas, kind):
    schema = json.dumps(SCHEMA)
    expected = [greedy(llamas, prompt, schema, 60) for prompt in PROMPTS]
    target = llamas.target
    draft = {"separate": lambda: llamas.draft, "eagle3": lambda: tiny_eagle3(target)}.get(
        kind, lambda: tiny_block(target, kind)
    )()
    pair = ModelPair(target=target, draft=draft, tokenizer=llamas.tokenizer, end_ids=(2,), costs="assumed")
    for name in CHAINS + TREES if kind == "separate" else ("speculative", "rate"):
        for batch_size in (1, 3):
            texts = generate(
                pair, PROMPTS, name, grammar=schema, temperature=0.0, max_new_tokens=60, batch_size=batch_size
            )
            assert [list(each.token_ids) for each in texts] == expected, (name, batch_size)


@pytest.mark.parametrize("name", CHAINS)
def test_sampled_texts_fit_their_schema_and_do_not_depend_on_their_neighbours(llamas, name):
    shared = {"temperature": 1.0, "max_new_tokens": 80, "seed": 3}
    requests = [
        {"prompt": PROMPTS[0], "grammar": SCHEMA},
        PROMPTS[1],
        {"prompt": PROMPTS[2], "grammar": "(cat|dog) [a-f]{3}"},
    ]
    alone = generate(llamas, requests, name, batch_size=1, **shared)
    assert [each.token_ids for each in generate(llamas, requests, name, batch_size=3, **shared)] == [
        each.token_ids for each in alone
    ]
    answer = json.loads(alone[0].text) if alone[0].finish_reason == "end" else {"cat": True, "dog": "ran", "n": 0}
    assert set(answer) == {"cat", "dog", "n"} and isinstance(answer["cat"], bool) and answer["dog"] in ("sat", "ran")
    assert re.fullmatch("(cat|dog) [a-f]{3}", alone[2].text)
    assert alone[0].counts.num_target_calls < len(alone[0].token_ids) - 15, "forced tokens ride along"


def test_forced_tokens_cost_no_draft_forward_pass(llamas):
    """The text is certain: one target forward pass, and none of the draft."""
    (alone,) = generate(llamas, PROMPTS[:1], "speculative", grammar="the cat", temperature=1.0, max_new_tokens=40)
    assert alone.text == "the cat" and alone.finish_reason == "end"
    assert (alone.counts.num_target_calls, alone.counts.num_draft_calls) == (1, 0)


def test_grammars_are_told_apart_and_read_from_files(llamas, tmp_path):
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(SCHEMA))
    shared = {"temperature": 0.0, "max_new_tokens": 60}
    (own,) = generate(llamas, PROMPTS[:1], "autoregressive", grammar=json.dumps(SCHEMA), **shared)
    (read,) = generate(llamas, PROMPTS[:1], "autoregressive", grammar=str(path), **shared)
    assert read.token_ids == own.token_ids
    assert grammar_of(llamas, Sampling(grammar=json.dumps({**SCHEMA, "description": "x" * 400}))), "too long for a path"
    (lark,) = generate(llamas, PROMPTS[:1], "autoregressive", grammar='start: "on " ("a" | "mat")', **shared)
    assert lark.text in ("on a", "on mat")
    (anything,) = generate(llamas, PROMPTS[:1], "autoregressive", grammar="json", **shared)
    if anything.finish_reason == "end":
        json.loads(anything.text)
    spaced = grammar_of(llamas, Sampling(grammar=json.dumps(SCHEMA), grammar_whitespace=True)).after(
        llamas.encode("{")[0]
    )
    compact = grammar_of(llamas, Sampling(grammar=json.dumps(SCHEMA))).after(llamas.encode("{")[0])
    assert spaced.allowed.sum() > compact.allowed.sum() == 1


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('{"type": "foo"}', "expected a JSON schema"),
        ('{"type": ', "expected a JSON schema"),
        ("(ab", "expected a JSON schema"),
        ("start: missing", "expected a JSON schema"),
        ("nothing.json", "found no file nothing.json"),
        ("My Missing.json", "found no file My Missing.json"),
        (str(Path(__file__).parent), "found no file"),
        (5, "expected text or a JSON schema, got int"),
        ('{"not": {}}', "grammar"),
    ],
)
def test_what_is_no_grammar_is_one_line(llamas, grammar, message):
    with pytest.raises(DecodingError, match=message) as error:
        generate(llamas, [{"prompt": PROMPTS[0], "grammar": grammar}], "autoregressive")
    assert "\n" not in str(error.value)


def test_what_knows_no_grammar_refuses_it(llamas, tables):
    with pytest.raises(InputError, match="a method of chains, copies or trees"):
        generate(llamas, PROMPTS[:1], "mtad", grammar="a+")
    two = ModelPair(target=llamas.target, drafts=[llamas.draft] * 2, tokenizer=llamas.tokenizer, costs="assumed")
    with pytest.raises(InputError, match="expected one draft"):
        generate(two, PROMPTS[:1], "specinfer", grammar="a+", overrides=["proposer.scheme=independent"])
    with pytest.raises(InputError, match="no stop strings"):
        generate(llamas, PROMPTS[:1], "speculative", grammar="a+", stop="b")
    with pytest.raises(DecodingError, match="needs the pair's tokenizer"):
        generate(
            ModelPair(target=tables.target, draft=tables.draft, costs="assumed"), [[1]], "speculative", grammar="a+"
        )
    with pytest.raises(InputError, match="grammar is for decoding alone"):
        llamas.encode({"prompt": "a", "grammar": "a+"})
    with pytest.raises(InputError, match="reads texts without grammars"):
        list(distributions_along(llamas, [(llamas.encode(PROMPTS[0]), [5, 6])], Sampling(grammar="a+")))


def test_transformers_generate_takes_a_grammar(llamas):
    """Through `custom_generate`: the greedy text is the one of masked decoding."""
    schema, tokens = json.dumps(SCHEMA), llamas.encode(PROMPTS[0])
    output = llamas.target.generate(
        torch.tensor([tokens]), custom_generate=custom_generate, draft=llamas.draft, method="speculative", do_sample=False,
        max_new_tokens=60, eos_token_id=2, grammar=schema, text_tokenizer=llamas.tokenizer,
    )  # fmt: skip
    assert output[0, len(tokens) :].tolist() == greedy(llamas, PROMPTS[0], schema, 60)


def test_a_row_is_decoded_again_when_the_file_of_its_grammar_changes(tmp_path):
    path, grammar = tmp_path / "prompts.jsonl", tmp_path / "answer.regex"
    path.write_text(json.dumps({"id": 1, "prompt": "Q: 3 + 4 =\nA:", "grammar": str(grammar)}))
    words = [f"prompts.path={path}", f"paths.root_dir={tmp_path}", "method=autoregressive", "sampling.max_new_tokens=8"]
    for answer in ("seven", "eight"):
        grammar.write_text(answer)
        folder = decode_command.run(config.compose("decode", [*words, "track=false"]))
        assert json.loads((folder / "generations.jsonl").read_text())["text"] == answer
        assert JsonlPrompts(path).load()[0].grammar == answer
    grammar.write_bytes(b"\xff")
    with pytest.raises(InputError, match="line 1: grammar: expected UTF-8 text"):
        JsonlPrompts(path).load()


def test_the_command_decodes_rows_with_grammars_of_their_own(tmp_path):
    rows = [
        {"id": 1, "prompt": "Q: 3 + 4 =\nA:", "grammar": {"type": "boolean"}},
        {"id": 2, "prompt": "Q: 3 + 4 =\nA:"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        f"prompts.path={path}",
        f"paths.root_dir={tmp_path}",
        "method=speculative",
        "sampling.max_new_tokens=8",
        "track=false",
    ]
    folder = decode_command.run(config.compose("decode", words))
    lines = [json.loads(line) for line in (folder / "generations.jsonl").read_text().strip().split("\n")]
    assert lines[0]["text"] in ("true", "false") and lines[1]["text"] not in ("true", "false")
    assert [line["metrics"]["speculative_decoding"] is None for line in lines] == [True, False], "certain tokens"
    with pytest.raises(InputError, match="prompt 1: expected no grammar"):
        without_grammars(JsonlPrompts(path).load())
    other = decode_command.run(config.compose("decode", [*words, 'sampling.grammar="[0-9]{2}"']))
    assert other != folder, "a grammar is part of what names an output"
    with pytest.raises(InputError, match="grammar: expected null"):
        config.compose("advise", ["sampling.grammar=json"])
    config.compose("sweep", ["sampling.grammar=json"])
