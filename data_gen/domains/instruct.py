"""Short word tasks with a computable answer: sort, reverse, spell, repeat, count, replace and so on.

A response is a lead-in, a colon, the answer and a full stop. Lead-ins are easy to draft, answers are where the work is.
"""

import random
from collections.abc import Callable

from data_gen.domains.example import Example
from data_gen.domains.splits import collect
from data_gen.domains.words import WORDS

Task = tuple[str, str, str]  # request, lead-in, answer


def examples(split: str, count: int, seed: int = 0) -> list[Example]:
    """`count` different tasks of one split, deterministic in (split, seed)."""
    return collect("instruct", split, count, seed, _draw)


def is_correct(response_text: str, answer: str) -> bool:
    """Whether the text after the last colon is the answer."""
    return response_text.rsplit(":", 1)[-1].strip().removesuffix(".") == answer


def _draw(rng: random.Random) -> tuple[str, str, str]:
    request, lead_in, answer = rng.choice(TASKS)(rng)
    return f"Q: {request}\nA:", f" {lead_in}: {answer}.", answer


def _pick(rng: random.Random, low: int, high: int) -> tuple[list[str], str]:
    """Between `low` and `high` different words, as a list and as text."""
    words = rng.sample(WORDS, rng.randint(low, high))
    return words, " ".join(words)


def sort_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 5)
    request = rng.choice(
        [
            f"Sort these words alphabetically: {text}.",
            f"Put the words {text} in alphabetical order.",
            f"Arrange from A to Z: {text}.",
        ]
    )
    lead_in = rng.choice(
        [
            "Sorted alphabetically",
            "In alphabetical order",
            f"The words {text} in alphabetical order",
            f"Sorting {text} from A to Z gives",
        ]
    )
    return request, lead_in, " ".join(sorted(words))


def reverse_order(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 6)
    request = rng.choice(
        [
            f"Write these words in reverse order: {text}.",
            f"Turn the list {text} around.",
            f"List these words from last to first: {text}.",
        ]
    )
    lead_in = rng.choice(["In reverse order", "From last to first", f"The list {text} turned around"])
    return request, lead_in, " ".join(reversed(words))


def longest_word(rng: random.Random) -> Task:
    while True:
        words, text = _pick(rng, 3, 5)
        ordered = sorted(words, key=len)
        if len(ordered[-1]) > len(ordered[-2]):
            break
    request = rng.choice(
        [
            f"Which of these words is the longest: {text}?",
            f"Find the longest word: {text}.",
            f"Name the word with the most letters: {text}.",
        ]
    )
    lengths = " ".join(f"{word} {len(word)}" for word in words)
    lead_in = rng.choice(
        [
            f"The numbers of letters are {lengths}, so the longest word is",
            f"Counting letters gives {lengths}. The word with the most letters is",
        ]
    )
    return request, lead_in, ordered[-1]


def spell_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 2, 4)
    request = rng.choice(
        [f"Spell these words: {text}.", f"Write the letters of {text} with dashes.", f"How do you spell {text}?"]
    )
    lead_in = rng.choice(["The spelling is", "Letter by letter", f"The words {text} are spelled like this"])
    return request, lead_in, " ".join("-".join(word) for word in words)


def spell_backwards(rng: random.Random) -> Task:
    words, text = _pick(rng, 1, 2)
    request = rng.choice(
        [
            f"Spell backwards: {text}.",
            f"Reverse the letters of {text}.",
            f"Write the letters of {text} from end to start.",
        ]
    )
    forwards = " ".join("-".join(word) for word in words)
    lead_in = rng.choice([f"The letters are {forwards}. Backwards that is", f"Reversing {forwards} gives"])
    return request, lead_in, " ".join("-".join(reversed(word)) for word in words)


def capitalise(rng: random.Random) -> Task:
    _, text = _pick(rng, 2, 5)
    request = rng.choice(
        [f"Write in capital letters: {text}.", f"Put {text} in upper case.", f"Turn these words into capitals: {text}."]
    )
    lead_in = rng.choice(["In capital letters", "In upper case", f"The words {text} in capitals"])
    return request, lead_in, text.upper()


def repeat_word(rng: random.Random) -> Task:
    _, text = _pick(rng, 1, 2)
    times = rng.randint(2, 6)
    request = rng.choice(
        [f"Repeat {text} {times} times.", f"Write {text} {times} times.", f"Say {times} times: {text}."]
    )
    lead_in = rng.choice([f"Here it is {times} times", f"Repeated {times} times", f"That is {text} {times} times"])
    return request, lead_in, " ".join([text] * times)


def count_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 8)
    request = rng.choice(
        [f"How many words are in this list: {text}?", f"Count the words: {text}.", f"Number of words in {text}?"]
    )
    numbered = " ".join(f"{number} {word}" for number, word in enumerate(words, start=1))
    lead_in = rng.choice([f"Counting {numbered}, the number of words is", f"With {numbered} the count is"])
    return request, lead_in, str(len(words))


def remove_word(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 7)
    gone = rng.choice(words)
    request = rng.choice(
        [
            f"Remove {gone} from this list: {text}.",
            f"Take {gone} out of {text}.",
            f"Which words are left without {gone}: {text}?",
        ]
    )
    lead_in = rng.choice([f"Without {gone}", f"After removing {gone} the list is", "The words that are left are"])
    return request, lead_in, " ".join(word for word in words if word != gone)


def every_second(rng: random.Random) -> Task:
    words, text = _pick(rng, 4, 8)
    request = rng.choice(
        [
            f"Write every second word: {text}.",
            f"Skip every other word, starting with the first: {text}.",
            f"Keep the second, fourth, and so on: {text}.",
        ]
    )
    lead_in = rng.choice(["Every second word", "The words at even places are", f"From {text} every second word is"])
    return request, lead_in, " ".join(words[1::2])


def join_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 6)
    sign, mark = rng.choice([("dashes", "-"), ("plus signs", "+"), ("slashes", "/")])
    request = rng.choice(
        [
            f"Join with {sign}: {text}.",
            f"Connect the words {text} with {sign}.",
            f"Use {sign} between these words: {text}.",
        ]
    )
    lead_in = rng.choice([f"Joined with {sign}", f"With {sign} in between", f"The words {text} with {sign}"])
    return request, lead_in, f" {mark} ".join(words)


def last_letters(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 6)
    side, index = rng.choice([("last", -1), ("first", 0)])
    request = rng.choice(
        [
            f"Write the {side} letter of each word: {text}.",
            f"What are the {side} letters of {text}?",
            f"Give the {side} letters: {text}.",
        ]
    )
    lead_in = rng.choice([f"The {side} letters are", f"The {side} letters of {text} are"])
    return request, lead_in, " ".join(word[index] for word in words)


def replace_word(rng: random.Random) -> Task:
    (new, *words), text = _pick(rng, 4, 7)
    old, text = rng.choice(words), " ".join(words)
    request = rng.choice(
        [
            f"Replace {old} with {new}: {text}.",
            f"Write {text} with {new} instead of {old}.",
            f"In the list {text} change {old} to {new}.",
        ]
    )
    lead_in = rng.choice([f"With {new} instead of {old}", "The new list is", f"Changing {old} to {new} gives"])
    return request, lead_in, " ".join(new if word == old else word for word in words)


def count_in_steps(rng: random.Random) -> Task:
    start, step, length = rng.randint(1, 50), rng.randint(2, 6), rng.randint(4, 8)
    numbers = [start + step * index for index in range(length)]
    request = rng.choice(
        [
            f"Count from {start} to {numbers[-1]} in steps of {step}.",
            f"List the numbers from {start} to {numbers[-1]}, adding {step} each time.",
            f"Start at {start} and add {step} until you reach {numbers[-1]}.",
        ]
    )
    lead_in = rng.choice(["The numbers are", f"In steps of {step}", f"Adding {step} each time from {start} gives"])
    return request, lead_in, " ".join(map(str, numbers))


TASKS: tuple[Callable[[random.Random], Task], ...] = (
    sort_words, reverse_order, longest_word, spell_words, spell_backwards, capitalise, repeat_word, count_words,
    remove_word, every_second, join_words, last_letters, replace_word, count_in_steps,
)  # fmt: skip
