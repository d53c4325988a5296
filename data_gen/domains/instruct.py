"""Short word tasks with a computable answer: sort, reverse, spell, repeat, count, replace and so on.

A response is a lead-in, a colon, the answer and a full stop. Lead-ins are easy to draft, answers are where the work is.
"""

import random
from collections.abc import Callable

from data_gen.domains import Example, collect

Task = tuple[list[str], list[str], str]  # requests and lead-ins to choose from, answer
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


def examples(split: str, count: int, seed: int = 0) -> list[Example]:
    return collect("instruct", split, count, seed, _draw)


def is_correct(response_text: str, answer: str) -> bool:
    """Whether the text after the last colon is the answer."""
    return response_text.rsplit(":", 1)[-1].strip().removesuffix(".") == answer


def _draw(rng: random.Random) -> tuple[str, str, str]:
    requests, lead_ins, answer = rng.choice(TASKS)(rng)
    request, lead_in = rng.choice(requests), rng.choice(lead_ins)
    return f"Q: {request}\nA:", f" {lead_in}: {answer}.", answer


def _pick(rng: random.Random, low: int, high: int) -> tuple[list[str], str]:
    words = rng.sample(WORDS, rng.randint(low, high))
    return words, " ".join(words)


def sort_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 5)
    requests = [f"Sort these words alphabetically: {text}.", f"Put the words {text} in alphabetical order.",
                f"Arrange from A to Z: {text}."]  # fmt: skip
    lead_ins = ["Sorted alphabetically", "In alphabetical order", f"The words {text} in alphabetical order",
                f"Sorting {text} from A to Z gives"]  # fmt: skip
    return requests, lead_ins, " ".join(sorted(words))


def reverse_order(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 6)
    requests = [f"Write these words in reverse order: {text}.", f"Turn the list {text} around.",
                f"List these words from last to first: {text}."]  # fmt: skip
    lead_ins = ["In reverse order", "From last to first", f"The list {text} turned around"]
    return requests, lead_ins, " ".join(reversed(words))


def longest_word(rng: random.Random) -> Task:
    while True:
        words, text = _pick(rng, 3, 5)
        ordered = sorted(words, key=len)
        if len(ordered[-1]) > len(ordered[-2]):
            break
    requests = [f"Which of these words is the longest: {text}?", f"Find the longest word: {text}.",
                f"Name the word with the most letters: {text}."]  # fmt: skip
    lengths = " ".join(f"{word} {len(word)}" for word in words)
    lead_ins = [f"The numbers of letters are {lengths}, so the longest word is",
                f"Counting letters gives {lengths}. The word with the most letters is"]  # fmt: skip
    return requests, lead_ins, ordered[-1]


def spell_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 2, 4)
    requests = [f"Spell these words: {text}.", f"Write the letters of {text} with dashes.", f"How do you spell {text}?"]
    lead_ins = ["The spelling is", "Letter by letter", f"The words {text} are spelled like this"]
    return requests, lead_ins, " ".join("-".join(word) for word in words)


def spell_backwards(rng: random.Random) -> Task:
    words, text = _pick(rng, 1, 2)
    requests = [f"Spell backwards: {text}.", f"Reverse the letters of {text}.",
                f"Write the letters of {text} from end to start."]  # fmt: skip
    forwards = " ".join("-".join(word) for word in words)
    lead_ins = [f"The letters are {forwards}. Backwards that is", f"Reversing {forwards} gives"]
    return requests, lead_ins, " ".join("-".join(reversed(word)) for word in words)


def capitalise(rng: random.Random) -> Task:
    _, text = _pick(rng, 2, 5)
    requests = [f"Write in capital letters: {text}.", f"Put {text} in upper case.",
                f"Turn these words into capitals: {text}."]  # fmt: skip
    lead_ins = ["In capital letters", "In upper case", f"The words {text} in capitals"]
    return requests, lead_ins, text.upper()


def repeat_word(rng: random.Random) -> Task:
    _, text = _pick(rng, 1, 2)
    times = rng.randint(2, 6)
    requests = [f"Repeat {text} {times} times.", f"Write {text} {times} times.", f"Say {times} times: {text}."]
    lead_ins = [f"Here it is {times} times", f"Repeated {times} times", f"That is {text} {times} times"]
    return requests, lead_ins, " ".join([text] * times)


def count_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 8)
    requests = [f"How many words are in this list: {text}?", f"Count the words: {text}.", f"Number of words in {text}?"]
    numbered = " ".join(f"{number} {word}" for number, word in enumerate(words, start=1))
    lead_ins = [f"Counting {numbered}, the number of words is", f"With {numbered} the count is"]
    return requests, lead_ins, str(len(words))


def remove_word(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 7)
    gone = rng.choice(words)
    requests = [f"Remove {gone} from this list: {text}.", f"Take {gone} out of {text}.",
                f"Which words are left without {gone}: {text}?"]  # fmt: skip
    lead_ins = [f"Without {gone}", f"After removing {gone} the list is", "The words that are left are"]
    return requests, lead_ins, " ".join(word for word in words if word != gone)


def every_second(rng: random.Random) -> Task:
    words, text = _pick(rng, 4, 8)
    requests = [f"Write every second word: {text}.", f"Skip every other word, starting with the first: {text}.",
                f"Keep the second, fourth, and so on: {text}."]  # fmt: skip
    lead_ins = ["Every second word", "The words at even places are", f"From {text} every second word is"]
    return requests, lead_ins, " ".join(words[1::2])


def join_words(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 6)
    sign, mark = rng.choice([("dashes", "-"), ("plus signs", "+"), ("slashes", "/")])
    requests = [f"Join with {sign}: {text}.", f"Connect the words {text} with {sign}.",
                f"Use {sign} between these words: {text}."]  # fmt: skip
    lead_ins = [f"Joined with {sign}", f"With {sign} in between", f"The words {text} with {sign}"]
    return requests, lead_ins, f" {mark} ".join(words)


def last_letters(rng: random.Random) -> Task:
    words, text = _pick(rng, 3, 6)
    side, index = rng.choice([("last", -1), ("first", 0)])
    requests = [f"Write the {side} letter of each word: {text}.", f"What are the {side} letters of {text}?",
                f"Give the {side} letters: {text}."]  # fmt: skip
    lead_ins = [f"The {side} letters are", f"The {side} letters of {text} are"]
    return requests, lead_ins, " ".join(word[index] for word in words)


def replace_word(rng: random.Random) -> Task:
    (new, *words), text = _pick(rng, 4, 7)
    old, text = rng.choice(words), " ".join(words)
    requests = [f"Replace {old} with {new}: {text}.", f"Write {text} with {new} instead of {old}.",
                f"In the list {text} change {old} to {new}."]  # fmt: skip
    lead_ins = [f"With {new} instead of {old}", "The new list is", f"Changing {old} to {new} gives"]
    return requests, lead_ins, " ".join(new if word == old else word for word in words)


def count_in_steps(rng: random.Random) -> Task:
    start, step, length = rng.randint(1, 50), rng.randint(2, 6), rng.randint(4, 8)
    numbers = [start + step * index for index in range(length)]
    requests = [f"Count from {start} to {numbers[-1]} in steps of {step}.",
                f"List the numbers from {start} to {numbers[-1]}, adding {step} each time.",
                f"Start at {start} and add {step} until you reach {numbers[-1]}."]  # fmt: skip
    lead_ins = ["The numbers are", f"In steps of {step}", f"Adding {step} each time from {start} gives"]
    return requests, lead_ins, " ".join(map(str, numbers))


TASKS: tuple[Callable[[random.Random], Task], ...] = (
    sort_words, reverse_order, longest_word, spell_words, spell_backwards, capitalise, repeat_word, count_words,
    remove_word, every_second, join_words, last_letters, replace_word, count_in_steps,
)  # fmt: skip
