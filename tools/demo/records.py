"""Questions that are answered in JSON."""

from __future__ import annotations

import json
import random
from typing import Any

from base import ADJECTIVES, CITIES, COLORS, DAYS, ITEMS, JOBS, Json, NAMES, NOUNS, Turn, pick

# ---------------------------------------------------------------- JSON


def person(rng: random.Random) -> tuple[str, Json]:
    f = {
        "name": rng.choice(NAMES),
        "age": rng.randint(18, 90),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
    }
    return (
        pick(
            rng,
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "{name}, a {age}-year-old {job}, lives in {city}.",
            "My friend {name} from {city} is a {job} and is {age} years old.",
        ).format(**f),
        f,
    )


def order(rng: random.Random) -> tuple[str, Json]:
    f = {
        "customer": rng.choice(NAMES),
        "item": rng.choice(ITEMS),
        "quantity": rng.randint(2, 99),
        "color": rng.choice(COLORS),
    }
    return (
        pick(
            rng,
            "{customer} ordered {quantity} {color} {item}.",
            "Please send {quantity} {color} {item} to {customer}.",
            "We sold {quantity} {item} in {color} to {customer}.",
        ).format(**f),
        f,
    )


def event(rng: random.Random) -> tuple[str, Json]:
    f = {
        "title": f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)} meeting",
        "day": rng.choice(DAYS),
        "hour": rng.randint(8, 20),
        "place": rng.choice(CITIES),
    }
    return (
        pick(
            rng,
            "The {title} is on {day} at {hour} o'clock in {place}.",
            "On {day} at {hour} o'clock we have the {title} in {place}.",
        ).format(**f),
        f,
    )


def book(rng: random.Random) -> tuple[str, Json]:
    f = {
        "title": f"The {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}",
        "author": rng.choice(NAMES),
        "year": rng.randint(1900, 2025),
        "available": rng.random() < 0.5,
    }
    tail = "It is available." if f["available"] else "It is not available."
    return (
        pick(
            rng, "The book '{title}' by {author} is from {year}. ", "{author} wrote '{title}' in {year}. "
        ).format(**f)
        + tail,
        f,
    )


def weather(rng: random.Random) -> tuple[str, Json]:
    f = {
        "city": rng.choice(CITIES),
        "temperature": rng.randint(-10, 38),
        "sky": pick(rng, "sunny", "cloudy", "rainy", "snowy", "foggy"),
        "windy": rng.random() < 0.5,
    }
    tail = "There is a strong wind." if f["windy"] else "There is no wind."
    return (
        pick(
            rng,
            "It is {temperature} degrees and {sky} in {city}. ",
            "In {city} it is {sky} with {temperature} degrees. ",
        ).format(**f)
        + tail,
        f,
    )


JSON_TYPES = {str: "string", int: "integer", bool: "boolean"}


def extract(rng: random.Random) -> Turn:
    text, fields = rng.choice([person, order, event, book, weather])(rng)
    names = rng.sample(list(fields), rng.randint(2, len(fields)))
    value = {n: fields[n] for n in names}
    answer = json.dumps(value, ensure_ascii=False)
    kinds = {n: JSON_TYPES[type(fields[n])] for n in names}
    if rng.random() < 0.5:
        want = ", ".join(f"{n} ({t})" for n, t in kinds.items())
        user = pick(
            rng,
            f"Extract JSON with the keys {want} from this text: {text}",
            f"Read the text and return a JSON object with {want}.\n\n{text}",
        )
    else:
        schema = json.dumps(
            {"type": "object", "properties": {n: {"type": t} for n, t in kinds.items()}, "required": names}
        )
        user = pick(
            rng,
            f"Return JSON that follows this schema: {schema}\nText: {text}",
            f"{text}\n\nFill in this JSON schema: {schema}",
        )
    think = (
        "The fields are "
        + ", ".join(f"{n}: {json.dumps(v, ensure_ascii=False)}" for n, v in value.items())
        + "."
    )
    return Turn("json", user, answer, think, f"json {text}", {"type": "json", "expected": value})


def json_list(rng: random.Random) -> Turn:
    items = (
        rng.sample(NOUNS, rng.randint(2, 5))
        if rng.random() < 0.6
        else rng.sample(range(1000), rng.randint(2, 6))
    )
    text = ", ".join(map(str, items[:-1])) + f" and {items[-1]}"
    if rng.random() < 0.5:
        value: Any = items
        user = pick(rng, f"Make a JSON array of {text}.", f"Write these as a JSON list: {text}")
    else:
        value = {"items": items, "count": len(items)}
        user = f"Return a JSON object with the keys items (array) and count (integer) for: {text}"
    return Turn(
        "json",
        user,
        json.dumps(value),
        f"There are {len(items)} entries.",
        f"jlist {text}",
        {"type": "json", "expected": value},
    )
