"""Word problems over small integers, solved in two to four written steps that end in `#### answer`."""

import random
from collections.abc import Callable
from itertools import pairwise

from data_gen.domains import Example, collect

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ivy", "Jack", "Kate", "Leo",
         "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor")  # fmt: skip
ITEMS = ("apples", "books", "cards", "coins", "eggs", "flowers", "marbles", "oranges", "pencils", "shells", "stamps",
         "stickers")  # fmt: skip
BOXES = ("boxes", "bags", "baskets", "packs")
PLACES = ("at the market", "in the garden", "at school", "from a friend", "in the shop", "on the way home")
GOODS = ("pens", "cups", "balls", "hats", "lamps", "cakes", "books", "tickets")
JOBS = (("reads", "pages", "a book"), ("paints", "tiles", "a wall"), ("walks", "miles", "a trail"),
        ("types", "lines", "a report"))  # fmt: skip

Problem = tuple[str, str, int]  # question, worked steps, answer


def examples(split: str, count: int, seed: int = 0) -> list[Example]:
    return collect("math", split, count, seed, _draw)


def is_correct(response_text: str, answer: str) -> bool:
    """Whether the number after the last `####` is the answer."""
    _, marker, final = response_text.rpartition("####")
    return bool(marker) and final.strip() == answer


def _draw(rng: random.Random) -> tuple[str, str, str]:
    question, steps, answer = rng.choice(FAMILIES)(rng)
    return f"Q: {question}\nA:", f" {steps} #### {answer}", str(answer)


def collecting(rng: random.Random) -> Problem:
    name, item, total = rng.choice(NAMES), rng.choice(ITEMS), rng.randint(5, 40)
    question = [f"{name} has {total} {item}."]
    steps = [rng.choice([f"{name} starts with {total} {item}.", f"At first there are {total} {item}."])]
    for _ in range(rng.randint(2, 4)):
        event, step, total = rng.choice(EVENTS)(rng, name, item, total)
        question.append(event)
        steps.append(step)
    question.append(rng.choice([f"How many {item} does {name} have now?", f"How many {item} are there in the end?"]))
    return " ".join(question), " ".join(steps), total


def _gain(rng: random.Random, name: str, item: str, total: int) -> Problem:
    more, location = rng.randint(2, 30), rng.choice(PLACES)
    event = rng.choice([f"{name} gets {more} more {location}.", f"Then {name} finds {more} {item} {location}."])
    sum_text = f"{total} + {more} = {total + more}"
    step = rng.choice(
        [f"After getting {more} more {location} there are {sum_text} {item}.", f"Now {name} has {sum_text}."]
    )
    return event, step, total + more


def _lose(rng: random.Random, name: str, item: str, total: int) -> Problem:
    if total < 3:
        return _gain(rng, name, item, total)
    less, friend = rng.randint(1, min(30, total - 1)), rng.choice([other for other in NAMES if other != name])
    event = rng.choice([f"{name} gives {less} {item} to {friend}.", f"Then {friend} takes {less} of them."])
    difference = f"{total} - {less} = {total - less}"
    step = rng.choice(
        [f"Without the {less} that {friend} gets, {difference} {item} are left.", f"That leaves {difference}."]
    )
    return event, step, total - less


def _gain_boxes(rng: random.Random, name: str, item: str, total: int) -> Problem:
    box, count, size = rng.choice(BOXES), rng.randint(2, 6), rng.randint(2, 9)
    event = rng.choice(
        [f"{name} buys {count} {box} with {size} {item} each.", f"Next come {count} {box} of {size} {item}."]
    )
    more = count * size
    step = rng.choice(
        [
            f"The {count} {box} hold {count} * {size} = {more} {item}, so there are {total} + {more} = {total + more}.",
            f"{count} {box} of {size} are {count} * {size} = {more}, and {total} + {more} = {total + more}.",
        ]
    )
    return event, step, total + more


def _double(rng: random.Random, name: str, item: str, total: int) -> Problem:
    if total > 60:
        return _lose(rng, name, item, total)
    event = rng.choice([f"Then the number of {item} doubles.", f"{name} gets as many {item} again."])
    step = rng.choice(
        [f"Twice as many {item} are {total} * 2 = {total * 2}.", f"Doubling gives {total} * 2 = {total * 2}."]
    )
    return event, step, total * 2


EVENTS = (_gain, _lose, _lose, _gain_boxes, _double)


def shopping(rng: random.Random) -> Problem:
    name, paid = rng.choice(NAMES), rng.choice([100, 150, 200])
    bought, steps, costs = [], [], []
    for many in rng.sample(GOODS, rng.choice([2, 2, 3])):
        count, price = rng.randint(2, 6), rng.randint(2, 9)
        bought.append(f"{count} {many} for {price} dollars each")
        costs.append(count * price)
        steps.append(f"The {many} cost {count} * {price} = {count * price} dollars.")
    cost, sum_text = sum(costs), " + ".join(map(str, costs))
    question = f"{name} buys {', '.join(bought[:-1])} and {bought[-1]}. " + rng.choice(
        [
            f"{name} pays with {paid} dollars. How much change does {name} get?",
            f"How many of {name}'s {paid} dollars are left?",
        ]
    )
    steps.append(rng.choice(["Together that is", f"In total {name} spends"]) + f" {sum_text} = {cost} dollars.")
    steps.append(rng.choice(["The change is", "What is left is"]) + f" {paid} - {cost} = {paid - cost} dollars.")
    return question, " ".join(steps), paid - cost


def comparing(rng: random.Random) -> Problem:
    names, item, count = rng.sample(NAMES, 3), rng.choice(ITEMS), rng.randint(4, 25)
    question, steps, counts = [f"{names[0]} has {count} {item}."], [], [count]
    for before, name in pairwise(names):
        relation, symbol, value = _relation(rng, counts[-1])
        result = {"+": counts[-1] + value, "-": counts[-1] - value, "*": counts[-1] * value}[symbol]
        question.append(f"{name} has {relation} {before}.")
        steps.append(f"{name} has {counts[-1]} {symbol} {value} = {result} {item}.")
        counts.append(result)
    two, total = counts[0] + counts[1], sum(counts)
    sum_text = f"{counts[0]} + {counts[1]} = {two}, and {two} + {counts[2]} = {total}"
    question.append(
        f"How many {item} do " + rng.choice(["they have together?", f"{', '.join(names[:2])} and {names[2]} have?"])
    )
    steps.append(rng.choice(["Together they have", f"All {item} together are"]) + f" {sum_text}.")
    return " ".join(question), " ".join(steps), total


def _relation(rng: random.Random, count: int) -> tuple[str, str, int]:
    kind = rng.choice("+" if count <= 3 else "+-*" if count < 26 else "+-")
    if kind == "*":
        times = rng.choice([2, 3])
        return ("twice as many as" if times == 2 else "three times as many as"), "*", times
    value = rng.randint(1, min(12, count - 1)) if kind == "-" else rng.randint(2, 12)
    return f"{value} {'more' if kind == '+' else 'fewer'} than", kind, value


def working(rng: random.Random) -> Problem:
    name, (verb, unit, whole) = rng.choice(NAMES), rng.choice(JOBS)
    (rate, days), (rate_2, days_2) = [(rng.randint(3, 9), rng.randint(2, 7)) for _ in range(2)]
    first, second = rate * days, rate_2 * days_2
    size = first + second + rng.randint(5, 60)
    question = (
        f"{name} {verb} {rate} {unit} a day for {days} days and then {rate_2} {unit} a day for {days_2} days. "
        + rng.choice(
            [f"How many of the {size} {unit} of {whole} are left?", f"There are {size} {unit}. How many remain?"]
        )
    )
    steps = (
        f"The first {days} days give {days} * {rate} = {first} {unit}. "
        f"The next {days_2} days give {days_2} * {rate_2} = {second} {unit}. "
        + rng.choice([f"Together {name} {verb}", "In all these days that makes"])
        + f" {first} + {second} = {first + second} {unit}. "
        + rng.choice(["So the number that remains is", "What is left is"])
        + f" {size} - {first + second} = {size - first - second}."
    )
    return question, steps, size - first - second


FAMILIES: tuple[Callable[[random.Random], Problem], ...] = (collecting, collecting, shopping, comparing, working)
