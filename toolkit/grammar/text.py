"""The grammar of one text: what may come after the tokens that it has produced so far.

Masks, tokenisation and parsing are llguidance's (MIT). A text ends exactly where the grammar accepts. Forced text has its
canonical tokens alone: after `{"order":{"` one token is left for `customer`, where the target alone could spell it otherwise.
So what is decoded follows the target's distribution, renormalised token by token over what these masks leave. That is neither
the distribution under another library's masks nor the target's given that the whole text is valid.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import InputError
from toolkit.files.text import first_line, or_of_file
from toolkit.models.pair import ModelPair
from toolkit.sampling import Sampling

JSON = "json"  # any JSON
MOST_KEPT = 256  # compiled grammars of a tokenizer
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
FLEXIBLE = {"whitespace_flexible": True}
TokenLists = tuple[Sequence[int], Sequence[int]]
FILE = re.compile(r"[^\\\n]*[^\\\n]\.(json|lark|regex|txt)")  # a regular expression would escape the dot
RULE = re.compile(r"^\s*start\s*:", re.MULTILINE)  # of a Lark grammar
_tokenizers: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


class TextWithGrammar(TokenLists):
    """A text (prompt ids, produced ids) that may have a grammar of its own."""

    grammar: str | Mapping[str, Any] | None

    def __new__(
        cls, prompt: Sequence[int], produced: Sequence[int], grammar: str | Mapping[str, Any] | None
    ) -> TextWithGrammar:
        text = super().__new__(cls, (prompt, produced))
        text.grammar = grammar
        return text


class TextGrammar:
    """What may follow a text. It never changes; `after` gives those of longer texts."""

    def __init__(self, matcher: Any, vocab_size: int, end_ids: Collection[int]):
        self._matcher, self._vocab_size, self._end_ids = matcher, vocab_size, frozenset(end_ids)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next [V]; none where the grammar is stuck."""
        bits = np.full((1, (self._vocab_size + 31) // 32), -1, dtype=np.int32)
        if self._matcher.is_error():
            return np.zeros(self._vocab_size, dtype=bool)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)

    @property
    def forced(self) -> int | None:
        """The only token that may come next; None: there are others, or none at all."""
        few = np.flatnonzero(self.allowed)
        return int(few[0]) if len(few) == 1 else None

    def after(self, token: int) -> TextGrammar | None:
        """The grammar of the text with one more token; None: after an end of text, or a token that may not come."""
        if token in self._end_ids or not self.allowed[token]:
            return None
        matcher = self._matcher.deep_copy()
        return TextGrammar(matcher, self._vocab_size, self._end_ids) if matcher.consume_token(token) else None

    def run(self, most: int) -> list[int]:
        """The tokens that follow with certainty, one after another, an end of text included; at most `most`."""
        tokens: list[int] = []
        state: TextGrammar | None = self
        while state is not None and len(tokens) < most and (token := state.forced) is not None:
            tokens.append(token)
            state = state.after(token)
        return tokens

    def valid(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may come, one after another."""
        state: TextGrammar | None = self
        for count, token in enumerate(tokens):
            if state is None or not state.allowed[token]:
                return count
            state = state.after(token)
        return len(tokens)


def grammar_of(pair: ModelPair, sampling: Sampling, text: str | Mapping[str, Any] | None = None) -> TextGrammar | None:
    """The grammar of a new text: that of its row, else the sampling's; None: neither has one.

    text  a JSON schema, a regular expression, a Lark grammar (with a rule `start`), `json`, or a file of one of these
    Raises InputError for what is no grammar, one that allows nothing, and without llguidance or a tokenizer.
    """
    text = sampling.grammar if text is None else text
    if text is None:
        return None
    ends = pair.ends(sampling)
    tokenizer, grammars = _tokenizer(pair, ends)
    key = (source_of(text), sampling.grammar_whitespace)
    if key not in grammars:
        grammar = TextGrammar(_matcher(tokenizer, *key), pair.vocab_size, ends)
        if not grammar.allowed.any():
            raise InputError(
                "grammar: expected one that some text fits, got one that no token of this vocabulary begins"
            )
        while len(grammars) >= MOST_KEPT:  # the oldest are compiled again
            del grammars[next(iter(grammars))]
        grammars[key] = grammar
    return grammars[key]


def grammars_of(pair: ModelPair, sampling: Sampling, texts: Sequence[TokenLists]) -> list[TextGrammar | None] | None:
    """The grammars of texts, before their first produced tokens; None: no text has one. Raises InputError as `grammar_of`."""
    grammars = [grammar_of(pair, sampling, getattr(text, "grammar", None)) for text in texts]
    if all(grammar is None for grammar in grammars):
        return None
    if sampling.stop:
        raise InputError("beside a grammar expected no stop strings: a text ends where its grammar does")
    return grammars


def grammar_key(sampling: Sampling, text: TokenLists) -> list[Any]:
    """What names the grammar of a text: [content, whitespace], of its own or the sampling's; []: it has none."""
    own = getattr(text, "grammar", None)
    grammar = sampling.grammar if own is None else own
    return [] if grammar is None else [source_of(grammar), sampling.grammar_whitespace]


def _matcher(tokenizer: Any, text: str, whitespace: bool) -> Any:
    """The matcher at the beginning of a text. Raises InputError for what is no grammar."""
    from llguidance import LLMatcher

    try:
        compiled = _compiled(LLMatcher, text, whitespace)
        problem = LLMatcher.validate_grammar(compiled, tokenizer)
    except ValueError as error:
        problem = str(error)
    if problem and not problem.startswith("WARNING"):
        expected = "a JSON schema, a regular expression or a Lark grammar"
        raise InputError(f"grammar: expected {expected}; {first_line(problem)}")
    return LLMatcher(tokenizer, compiled)


def source_of(text: str | Mapping[str, Any]) -> str:
    """The text of a grammar, of a file its content. Raises InputError for a file that is not there, or is no text."""
    if isinstance(text, Mapping):
        return json.dumps(text)
    if not isinstance(text, str):
        raise InputError(f"grammar: expected text or a JSON schema, got {type(text).__name__}")
    is_path = FILE.fullmatch(text) or (os.sep in text.strip(os.sep) and os.path.isdir(text))
    if is_path and not os.path.isfile(text):
        raise InputError(f"grammar: expected a grammar or a file of one, found no file {text}")
    return or_of_file(text, "grammar")


def _compiled(matcher: Any, text: str, whitespace: bool) -> str:
    """The text as llguidance reads it. Raises ValueError for a schema that is no JSON."""
    if text.strip() == JSON or text.lstrip().startswith("{"):
        schema = "{}" if text.strip() == JSON else text
        return str(matcher.grammar_from_json_schema(schema, overrides=FLEXIBLE if whitespace else COMPACT))
    return str(matcher.grammar_from_lark(text) if RULE.search(text) else matcher.grammar_from_regex(text.strip("\n")))


def _tokenizer(pair: ModelPair, ends: Sequence[int]) -> tuple[Any, dict[Any, TextGrammar]]:
    """The pair's tokenizer as llguidance reads it, and the grammars that were compiled with it; made once."""
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise InputError("a grammar needs llguidance: pip install 'acceptance-toolkit[grammar]'") from None
    if pair.tokenizer is None:
        raise InputError("a grammar needs the pair's tokenizer, and it has none")
    tokenizer: Any = pair.tokenizer
    made = _tokenizers.setdefault(tokenizer, {})
    key = (pair.vocab_size, *ends)
    if key not in made:
        try:
            made[key] = from_tokenizer(tokenizer, n_vocab=pair.vocab_size, eos_token=list(ends)), {}
        except ValueError as error:
            raise InputError(f"a grammar cannot read this tokenizer: {first_line(error)}") from None
    reader: tuple[Any, dict[Any, TextGrammar]] = made[key]
    return reader
