"""Answers of an engine with the rounds that it counted, one JSON object per line.

vLLM            answers with `return_token_ids` and the counts of a server that was started with `detailed`
toolkit.decode  generations.jsonl of chains
any engine      {"prompt_token_ids": [...], "token_ids": [...], "per_step_drafted": [...], "per_step_accepted": [...]}
llama.cpp       {"stream": [...]}, all chunks of an answer with `timings_per_token`; sums alone of one that was not streamed

"prompt" or "messages" may stand for a prompt's ids, "text" for an answer's; "category" groups them. A round counts if at least
K + 1 tokens follow its start (K: the most that a round of the file drafted), so that no end cuts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from analysis.loads.engine_counts import DETAILED, answer_of, rounds_of
from analysis.loads.streamed import streamed_text, streamed_tokens
from toolkit.errors import InputError
from toolkit.models.pair import ModelPair
from toolkit.models.prompts import check_token_ids, numbered_lines

MOST_CHANGED = 0.01  # share of the texts that do not come back from the tokenizer
CHANGED = "its text does not come back from the tokenizer"
ASK = "vLLM: ask with return_token_ids=true"


@dataclass(frozen=True)
class Answer:
    """A text with its rounds (tokens before it, drafted and accepted ones), or the sums of drafted and accepted tokens.

    beyond  accepted tokens that it does not hold: its rounds counted them after its end
    """

    prompt_ids: list[int]
    token_ids: list[int]
    rounds: list[tuple[int, int, int]]
    sums: tuple[int, int] | None = None
    category: str = ""
    beyond: int = 0

    @property
    def length(self) -> int:
        """Tokens of prompt and text."""
        return len(self.prompt_ids) + len(self.token_ids)


class Unusable(Exception):
    """Why a line is left out."""


def read_answers(path: Path, pair: ModelPair) -> tuple[list[Answer], list[str]]:
    """The answers that can be replayed, and why lines are left out. Raises InputError if none can, or for a faulty line."""
    answers, left_out, num_texts, distinct = [], list[str](), 0, set[Any]()
    for number, line in numbered_lines(path, "a file of answers"):
        try:
            entry = answer_of(line)
            choices = entry.get("choices") or [{}]
            if len(choices) > 1:
                raise InputError(f"expected one choice, got {len(choices)}, whose counts are sums: ask with n=1")
            entry |= choices[0]
            num_texts += "token_ids" not in entry
            answer = _answer(entry, pair)
            key = tuple(answer.prompt_ids), tuple(answer.token_ids), tuple(answer.rounds), answer.sums
            if key in distinct:
                raise Unusable("the same as an answer before it")
            distinct.add(key)
            answers.append(answer)
        except Unusable as reason:
            left_out.append(f"line {number}: {reason}")
        except InputError as error:
            raise InputError(f"{path}, line {number}: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path}, line {number}: expected an answer with counts, got {error!r}") from None
    changed = [line for line in left_out if line.endswith(CHANGED)]
    if len(changed) > MOST_CHANGED * num_texts:
        raise InputError(f"{path}: {len(changed)} of {num_texts} texts do not come back ({changed[0]}): {ASK}")
    if not answers or len({answer.sums is None for answer in answers}) > 1:
        got = "lines of both" if answers else f"neither ({left_out[0] if left_out else 'an empty file'})"
        raise InputError(f"{path}: expected counts by round or sums in every line, got {got}")
    most = most_drafted(answers)
    return [replace(answer, rounds=whole_rounds(answer, most)) for answer in answers], left_out


def most_drafted(answers: Sequence[Answer]) -> int:
    """K, the most that a round drafted; 0 without rounds."""
    return max((drafted for answer in answers for _, drafted, _ in answer.rounds), default=0)


def whole_rounds(answer: Answer, most: int) -> list[tuple[int, int, int]]:
    """The rounds that drafted and that no end cuts."""
    return [each for each in answer.rounds if each[1] and each[0] + most + 1 <= len(answer.token_ids)]


def beyond_end(answers: Sequence[Answer]) -> dict[str, int]:
    """Accepted tokens that were counted after the end of their text, and how many texts have such."""
    return {"tokens": sum(answer.beyond for answer in answers), "texts": sum(answer.beyond > 0 for answer in answers)}


def _answer(entry: dict[str, Any], pair: ModelPair) -> Answer:
    if entry.get("error"):
        raise Unusable("it ended with an error")
    timings = {} if "stream" in entry else entry.get("timings") or {}
    sums = (int(timings["draft_n"]), int(timings["draft_n_accepted"])) if "draft_n" in timings else None
    if sums and not 0 <= sums[1] <= sums[0]:
        raise InputError(f"expected 0 <= draft_n_accepted <= draft_n, got {sums[1]} and {sums[0]}")
    if sums == (0, 0):
        raise Unusable("it drafted nothing")
    rounds = [] if sums else list(_decoded(entry) if "rounds" in entry else _counted(entry))
    prompt, tokens = entry.get("prompt_token_ids") or entry.get("prompt_ids"), _tokens(entry, pair)
    prompt = pair.encode(entry.get("messages") or entry["prompt"]) if prompt is None else prompt
    check_token_ids(prompt, pair.vocab_size, "prompt_token_ids: ")
    if not prompt or not tokens:
        raise Unusable("its prompt or its text is empty")
    if rounds and "rounds" not in entry and (end := rounds[-1][0] + rounds[-1][2] + 1) < len(tokens):
        raise Unusable(f"its rounds make {end} of {len(tokens)} tokens: some that drafted nothing are not listed")
    beyond = max(rounds[-1][0] + rounds[-1][2] - len(tokens), 0) if rounds else 0
    return Answer(prompt, tokens, rounds, sums, str(entry.get("category") or ""), beyond)


def _counted(entry: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Rounds in engines: the first token of a text comes from the reading of its prompt."""
    if "per_step_accepted" in entry:
        drafted, accepted = entry["per_step_drafted"], entry["per_step_accepted"]
        for values in (drafted, accepted):
            check_token_ids(values, where="per_step_drafted and per_step_accepted: ")
        if len(drafted) != len(accepted) or any(map(int.__gt__, accepted, drafted)):
            raise InputError("expected as many drafted as accepted counts, and accepted <= drafted")
    elif isinstance(counts := rounds_of(entry), str):
        raise Unusable(counts)
    elif "stream" not in entry and entry["metrics"]["speculative_decoding"].get("per_step_accepted") is None:
        raise InputError(f"expected the counts of every round, got a summary; start vLLM with {DETAILED}")
    else:
        _, drafted, accepted = counts
    starts = accumulate(accepted, lambda start, count: start + count + 1, initial=1)
    yield from zip(starts, drafted, accepted, strict=False)


def _decoded(entry: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    """Rounds of toolkit.decode: they begin with the text; those that copy are no draft's."""
    if not entry["metrics"]["speculative_decoding"] or "prompt_ids" not in entry:
        raise InputError("expected generations of chains without a grammar, with prompt_ids; decode them again")
    start = 0
    for each in entry["rounds"]:
        if each["num_draft_calls"]:
            yield start, each["num_drafted"], each["num_accepted"]
        start += each["num_produced"]


def _tokens(entry: dict[str, Any], pair: ModelPair) -> list[int]:
    """The answer's tokens; those of its text, where it has no ids."""
    ids, text = entry.get("token_ids"), entry.get("text") or (entry.get("message") or {}).get("content")
    text = streamed_text(entry["stream"]) if text is None and "stream" in entry else text
    if ids is not None:
        check_token_ids(ids, pair.vocab_size, "token_ids: ")
        decoded, stripped = pair.text(ids).strip(), str(text or "").strip()
        if not decoded.startswith(stripped) and not stripped.startswith(decoded):
            raise InputError(f"the text begins {stripped[:30]!r}, its tokens mean {decoded[:30]!r}: another tokenizer")
        return list(ids)
    if text is None:
        raise InputError(f"expected token_ids or a text, got neither; {ASK}")
    tokenizer: Any = pair.tokenizer
    ids = [int(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
    counted = (entry.get("usage") or {}).get("completion_tokens", len(ids))
    counted = streamed_tokens(entry["stream"]) if "stream" in entry else counted
    if pair.text(ids) != text or counted not in (len(ids), len(ids) + 1):  # an end of text is not shown
        raise Unusable(CHANGED)
    return ids
