"""What a judge is asked, and the rating in what it says.

Paper: MT-Bench (arXiv:2306.05685), single-answer grading: the prompts `single-v1` and `single-math-v1` of its code
(FastChat, Apache-2.0) word for word, and its first "[[rating]]" of the reply.
Deviation: its looser second pattern, "[rating]", is not tried; a rating outside of 1 to 10 is none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import InputError
from toolkit.files.atomic import content_hash
from toolkit.models.prompts import Message, Prompt

SYSTEM = "You are a helpful assistant."
LOWEST, HIGHEST = 1.0, 10.0
RATING = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]")
PLACE = re.compile(r"\{(question|answer|reference)\}")
SINGLE = """[Instruction]
Please act as an impartial judge and evaluate the quality of the response provided by an AI assistant to the user question \
displayed below. Your evaluation should consider factors such as the helpfulness, relevance, accuracy, depth, creativity, and \
level of detail of the response. Begin your evaluation by providing a short explanation. Be as objective as possible. After \
providing your explanation, you must rate the response on a scale of 1 to 10 by strictly following this format: \
"[[rating]]", for example: "Rating: [[5]]".

[Question]
{question}

[The Start of Assistant's Answer]
{answer}
[The End of Assistant's Answer]"""
REFERENCE = """[Instruction]
Please act as an impartial judge and evaluate the quality of the response provided by an AI assistant to the user question \
displayed below. Your evaluation should consider correctness and helpfulness. You will be given a reference answer and the \
assistant's answer. Begin your evaluation by comparing the assistant's answer with the reference answer. Identify and \
correct any mistakes. Be as objective as possible. After providing your explanation, you must rate the response on a scale \
of 1 to 10 by strictly following this format: "[[rating]]", for example: "Rating: [[5]]".

[Question]
{question}

[The Start of Reference Answer]
{reference}
[The End of Reference Answer]

[The Start of Assistant's Answer]
{answer}
[The End of Assistant's Answer]"""
KNOWN = {"single": SINGLE, "reference": REFERENCE}


@dataclass(frozen=True)
class Template:
    """A judge's instruction with the placeholders {question}, {answer} and perhaps {reference}."""

    name: str
    text: str

    @classmethod
    def named(cls, name: str) -> Template:
        """One of KNOWN, or a text file. Raises InputError if it is neither, or lacks a placeholder."""
        text = KNOWN.get(name)
        if text is None:
            try:
                text = Path(name).read_text(encoding="utf-8")
            except (OSError, ValueError):
                names = " or ".join(KNOWN)
                raise InputError(
                    f"template: expected {names}, or a text file with {{question}} and {{answer}}, got {name!r}"
                ) from None
        if missing := {"question", "answer"} - set(PLACE.findall(text)):
            raise InputError(f"template: {name} lacks the placeholder {{{min(missing)}}}")
        return cls(name, text)

    @property
    def needs_reference(self) -> bool:
        """Whether a prompt's answer is shown to the judge."""
        return "{reference}" in self.text

    @property
    def about(self) -> str:
        """Name and a hash of the words."""
        return f"template {self.name} ({content_hash(self.text, 8)})"

    def filled(self, prompt: Prompt, answer: str) -> str:
        """The instruction about one answer. Placeholders inside the question or the answer stay as they are."""
        turns: tuple[Message, ...] = prompt.messages or ()  # all of a conversation with several
        headed = "\n\n".join(f"### {turn['role'].capitalize()}:\n{turn['content']}" for turn in turns)
        question = prompt.prompt if prompt.prompt is not None else turns[0]["content"] if len(turns) == 1 else headed
        values = {"question": question, "answer": answer, "reference": prompt.answer or ""}
        return PLACE.sub(lambda match: values[match[1]], self.text)


def rating_of(reply: str) -> tuple[float | None, str]:
    """The first "[[rating]]" of a reply; or None, and why."""
    match = RATING.search(reply)
    if match is None:
        return None, "the judge gave no rating"
    rating = float(match[1])
    if not LOWEST <= rating <= HIGHEST:
        return None, f"the judge's rating is not from {LOWEST:g} to {HIGHEST:g}"
    return rating, ""
