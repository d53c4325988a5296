"""Short word tasks with a computable answer: sort, reverse, spell, repeat, count, replace and so on.

A response is a lead-in, a colon, the answer and a full stop. Lead-ins are easy to draft, answers are where the work is.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from data_gen.domains import Example, collect

TEXT = """
apple arrow autumn baker balloon banana barn basket beach bell bird blanket boat bone book bottle bread bridge brush
button cabin cake camel camera candle carpet castle chair cheese circle clock cloud coffee comet copper corn crown cup
dance desert diamond doctor door dragon drum eagle earth engine farm feather field finger fire fish flag flower forest
fox frog fruit garden gate ghost glass glove gold grape guitar hammer harbor heart honey horse house ice island jacket
juice jungle kettle key king kite kitten knife ladder lake lamp leaf lemon letter lion lizard magnet market mirror money
moon morning mountain mouse music needle night ocean onion orange owl palace paper parrot pencil piano pilot planet plate
pocket pond potato prince puzzle queen rabbit radio rain ribbon ring river robot rocket rose salt school seed shadow ship
silver sister snow spider spoon star stone storm sugar summer table temple thunder ticket tiger tower train tree turtle
umbrella valley village violin wagon water whale wheel window winter wolf yard zebra
"""
WORDS = tuple(TEXT.split())
SIGNS = {"dashes": "-", "plus signs": "+", "slashes": "/"}


class Task(NamedTuple):
    """One kind of request.

    low, high  how many words are drawn
    requests   ways to ask, with bars between them; {text} is the words, other names are `details`
    lead_ins   beginnings of a response, likewise
    answer     of the words and the details: a text, or its words
    details    what else is drawn or said, of the generator and the words
    suit       whether the words will do; else others are drawn
    """

    low: int
    high: int
    requests: str
    lead_ins: str
    answer: Callable[..., str | Iterable[str]]
    details: Callable[[random.Random, list[str]], dict[str, Any]] = lambda rng, words: {}
    suit: Callable[[list[str]], bool] = lambda words: True


def examples(split: str, count: int, seed: int = 0) -> list[Example]:
    return collect("instruct", split, count, seed, _draw)


def is_correct(response_text: str, answer: str) -> bool:
    """Whether the text after the last colon is the answer."""
    return response_text.rsplit(":", 1)[-1].strip().removesuffix(".") == answer


def _draw(rng: random.Random) -> tuple[str, str, str]:
    requests, lead_ins, answer = drawn(rng.choice(TASKS), rng)
    request, lead_in = rng.choice(requests), rng.choice(lead_ins)
    return f"Q: {request}\nA:", f" {lead_in}: {answer}.", answer


def drawn(task: Task, rng: random.Random) -> tuple[list[str], list[str], str]:
    """Requests and lead-ins to choose from, and the answer."""
    words: list[str] = []
    while task.high and not (words and task.suit(words)):
        words = rng.sample(WORDS, rng.randint(task.low, task.high))
    details = task.details(rng, words)
    answer = task.answer(words, **details)
    texts = {"text": " ".join(words), **details}
    requests, lead_ins = (part.format(**texts).split(" | ") for part in (task.requests, task.lead_ins))
    return requests, lead_ins, answer if isinstance(answer, str) else " ".join(answer)


def _numbers(rng: random.Random, _: list[str]) -> dict[str, Any]:
    start, step, length = rng.randint(1, 50), rng.randint(2, 6), rng.randint(4, 8)
    return {"start": start, "step": step, "end": start + step * (length - 1)}


def _replaced(rng: random.Random, words: list[str]) -> dict[str, Any]:
    new, *others = words
    return {"new": new, "old": rng.choice(others), "text": " ".join(others)}


TASKS = (
    Task(3, 5,
        "Sort these words alphabetically: {text}. | Put the words {text} in alphabetical order. | Arrange from A to Z: {text}.",
        "Sorted alphabetically | In alphabetical order | The words {text} in alphabetical order | "
        "Sorting {text} from A to Z gives",
        sorted),
    Task(3, 6,
        "Write these words in reverse order: {text}. | Turn the list {text} around. | "
        "List these words from last to first: {text}.",
        "In reverse order | From last to first | The list {text} turned around",
        reversed),
    Task(3, 5,
        "Which of these words is the longest: {text}? | Find the longest word: {text}. | "
        "Name the word with the most letters: {text}.",
        "The numbers of letters are {lengths}, so the longest word is | "
        "Counting letters gives {lengths}. The word with the most letters is",
        lambda words, lengths: max(words, key=len),
        lambda rng, words: {"lengths": " ".join(f"{word} {len(word)}" for word in words)},
        lambda words: len({len(word) for word in sorted(words, key=len)[-2:]}) == 2),  # one word alone is the longest
    Task(2, 4,
        "Spell these words: {text}. | Write the letters of {text} with dashes. | How do you spell {text}?",
        "The spelling is | Letter by letter | The words {text} are spelled like this",
        lambda words: map("-".join, words)),
    Task(1, 2,
        "Spell backwards: {text}. | Reverse the letters of {text}. | Write the letters of {text} from end to start.",
        "The letters are {forwards}. Backwards that is | Reversing {forwards} gives",
        lambda words, forwards: ("-".join(reversed(word)) for word in words),
        lambda rng, words: {"forwards": " ".join(map("-".join, words))}),
    Task(2, 5,
        "Write in capital letters: {text}. | Put {text} in upper case. | Turn these words into capitals: {text}.",
        "In capital letters | In upper case | The words {text} in capitals",
        lambda words: map(str.upper, words)),
    Task(1, 2,
        "Repeat {text} {times} times. | Write {text} {times} times. | Say {times} times: {text}.",
        "Here it is {times} times | Repeated {times} times | That is {text} {times} times",
        lambda words, times: words * times,
        lambda rng, words: {"times": rng.randint(2, 6)}),
    Task(3, 8,
        "How many words are in this list: {text}? | Count the words: {text}. | Number of words in {text}?",
        "Counting {numbered}, the number of words is | With {numbered} the count is",
        lambda words, numbered: str(len(words)),
        lambda rng, words: {"numbered": " ".join(f"{number} {word}" for number, word in enumerate(words, start=1))}),
    Task(3, 7,
        "Remove {gone} from this list: {text}. | Take {gone} out of {text}. | Which words are left without {gone}: {text}?",
        "Without {gone} | After removing {gone} the list is | The words that are left are",
        lambda words, gone: (word for word in words if word != gone),
        lambda rng, words: {"gone": rng.choice(words)}),
    Task(4, 8,
        "Write every second word: {text}. | Skip every other word, starting with the first: {text}. | "
        "Keep the second, fourth, and so on: {text}.",
        "Every second word | The words at even places are | From {text} every second word is",
        lambda words: words[1::2]),
    Task(3, 6,
        "Join with {sign}: {text}. | Connect the words {text} with {sign}. | Use {sign} between these words: {text}.",
        "Joined with {sign} | With {sign} in between | The words {text} with {sign}",
        lambda words, sign: f" {SIGNS[sign]} ".join(words),
        lambda rng, words: {"sign": rng.choice([*SIGNS])}),
    Task(3, 6,
        "Write the {side} letter of each word: {text}. | What are the {side} letters of {text}? | "
        "Give the {side} letters: {text}.",
        "The {side} letters are | The {side} letters of {text} are",
        lambda words, side: (word[-1 if side == "last" else 0] for word in words),
        lambda rng, words: {"side": rng.choice(["last", "first"])}),
    Task(4, 7,
        "Replace {old} with {new}: {text}. | Write {text} with {new} instead of {old}. | "
        "In the list {text} change {old} to {new}.",
        "With {new} instead of {old} | The new list is | Changing {old} to {new} gives",
        lambda words, new, old, text: (new if word == old else word for word in words[1:]),
        _replaced),
    Task(0, 0,
        "Count from {start} to {end} in steps of {step}. | List the numbers from {start} to {end}, adding {step} each time. | "
        "Start at {start} and add {step} until you reach {end}.",
        "The numbers are | In steps of {step} | Adding {step} each time from {start} gives",
        lambda words, start, step, end: map(str, range(start, end + 1, step)),
        _numbers),
)  # fmt: skip
