"""Generated text for the default corpus: what plain prose lacks, above all facts that have to be recalled.

Everything comes from one `random.Random(seed)`, so the same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from random import Random

_NAMES = (
    "Ada", "Ben", "Cora", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon", "Kira", "Leo", "Mina", "Noor", "Otto",
    "Pia", "Quin", "Rosa", "Sami", "Tess", "Umar", "Vera", "Wim", "Yara",
)  # fmt: skip
_THINGS = (
    "apples", "books", "coins", "cups", "keys", "lamps", "maps", "nails", "pens", "ropes", "shells", "stamps",
    "stones", "tickets",
)  # fmt: skip
_PLACES = (
    "Bergen", "Cairo", "Dakar", "Hanoi", "Lima", "Lyon", "Osaka", "Porto", "Quito", "Riga", "Seoul", "Tunis", "Turin",
    "Utrecht",
)  # fmt: skip
_COLOURS = (
    "amber", "black", "blue", "brown", "green", "grey", "orange", "pink", "red", "silver", "violet", "white", "yellow",
)  # fmt: skip
_JOBS = (
    "baker", "carpenter", "dentist", "driver", "farmer", "gardener", "nurse", "painter", "pilot", "tailor", "teacher",
    "welder",
)  # fmt: skip
_KINDS = (
    "birds", "boats", "fruits", "insects", "metals", "novels", "planets", "rivers", "songs", "tools", "trees",
    "villages",
)  # fmt: skip


def generate(seed: int, size: int) -> bytes:
    """About `size` bytes of short documents, kinds mixed at random; never fewer than `size`."""
    rng = Random(seed)
    parts: list[str] = []
    written = 0
    while written < size:
        text = rng.choice(_WRITERS)(rng) + "\n\n"
        parts.append(text)
        written += len(text)
    return "".join(parts).encode("ascii")


def _record(rng: Random) -> dict[str, object]:
    return {
        "id": rng.randrange(1000),
        "name": rng.choice(_NAMES),
        "job": rng.choice(_JOBS),
        "city": rng.choice(_PLACES),
        "tags": rng.sample(_COLOURS, rng.randrange(1, 4)),
        "active": rng.random() < 0.5,
    }


def _json_document(rng: Random) -> str:
    records = [_record(rng) for _ in range(rng.randrange(1, 4))]
    return json.dumps({"items": records, "count": len(records)}, indent=rng.choice([None, 2]))


def _table(rng: Random) -> str:
    rows = [(rng.choice(_NAMES), rng.choice(_PLACES), rng.randrange(10, 100)) for _ in range(rng.randrange(3, 7))]
    lines = [f"| {name:<5} | {place:<8} | {score:>5} |" for name, place, score in rows]
    total = sum(score for _, _, score in rows)
    head = ["| name  | city     | score |", "|-------|----------|-------|"]
    return "\n".join([*head, *lines, f"| all   | {len(rows):<8} | {total:>5} |"])


def _arithmetic(rng: Random) -> str:
    lines = []
    for _ in range(rng.randrange(4, 9)):
        a, b = rng.randrange(100), rng.randrange(100)
        sign, value = rng.choice([("+", a + b), ("-", a - b), ("*", a * b)])
        lines.append(f"{a} {sign} {b} = {value}")
    return "\n".join(lines)


def _counting_questions(rng: Random) -> str:
    """Facts first, then questions in another order: the answers have to be looked up."""
    owners = rng.sample(_NAMES, rng.randrange(3, 6))
    facts = {name: (rng.randrange(2, 60), rng.choice(_THINGS), rng.choice(_COLOURS)) for name in owners}
    told = [f"{name} has {count} {colour} {thing}." for name, (count, thing, colour) in facts.items()]
    rng.shuffle(owners)
    asked = []
    for name in owners:
        count, thing, colour = facts[name]
        asked += [f"Q: How many {thing} does {name} have?\nA: {count}"]
        asked += [f"Q: What colour are the {thing} of {name}?\nA: {colour}"]
    return "\n".join([" ".join(told), *asked])


def _dialogue(rng: Random) -> str:
    guest, host = rng.sample(_NAMES, 2)
    job, city = rng.choice(_JOBS), rng.choice(_PLACES)
    return "\n".join(
        [
            f"{host}: Hello, what is your name?",
            f"{guest}: My name is {guest}, I am a {job} from {city}.",
            f"{host}: Nice to meet you, {guest}. How long have you been a {job}?",
            f"{guest}: For {rng.randrange(2, 30)} years. Do you know {city}?",
            f"{host}: I was in {city} once, {rng.choice(['in spring', 'in winter', 'last year', 'as a child'])}.",
            f"{guest}: Then come and see us again.",
        ]
    )


def _syllogism(rng: Random) -> str:
    low, middle, high = rng.sample(_KINDS, 3)
    colour = rng.choice(_COLOURS)
    yes = rng.random() < 0.5
    claim = f"some {low} are not {colour}" if not yes else f"all {low} are {colour}"
    return (
        f"All {low} are {middle}. All {middle} are {high}. All {high} are {colour}.\n"
        f"Does it follow that {claim}? {'Yes' if yes else 'No'}, because all {low} are {high}."
    )


def _ordering(rng: Random) -> str:
    names = rng.sample(_NAMES, 4)
    pairs = list(pairwise(names))
    rng.shuffle(pairs)
    told = " ".join(f"{older} is older than {younger}." for older, younger in pairs)
    return f"{told}\nThe oldest is {names[0]}, the youngest is {names[-1]}. In order: {', '.join(names)}."


_WRITERS: tuple[Callable[[Random], str], ...] = (
    _json_document,
    _table,
    _arithmetic,
    _counting_questions,
    _dialogue,
    _syllogism,
    _ordering,
)
