"""Questions that call tools, and talks that come back to what was said."""

from __future__ import annotations

import json
import random

from base import (
    ADJECTIVES,
    CITIES,
    COLORS,
    DAYS,
    JOBS,
    Json,
    NAMES,
    NOUNS,
    PETS,
    Turn,
    pick,
    pseudo,
    some_word,
)

# ---------------------------------------------------------------- tools


def tool(name: str, about: str, required: int, **params: tuple[str, str]) -> Json:
    properties = {n: {"type": t, "description": d} for n, (t, d) in params.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {"type": "object", "properties": properties, "required": list(params)[:required]},
        },
    }


TOOLS = {
    t["function"]["name"]: t
    for t in [
        tool(
            "get_weather",
            "Get the current weather of a city",
            1,
            city=("string", "The city"),
            unit=("string", "celsius or fahrenheit"),
        ),
        tool("calculator", "Evaluate an arithmetic expression", 1, expression=("string", "The expression")),
        tool(
            "search",
            "Search the web",
            1,
            query=("string", "The query"),
            max_results=("integer", "How many results"),
        ),
        tool(
            "set_timer",
            "Start a timer",
            1,
            minutes=("integer", "Length in minutes"),
            label=("string", "A name for the timer"),
        ),
        tool(
            "send_message",
            "Send a message to a person",
            2,
            recipient=("string", "Who gets it"),
            text=("string", "The message"),
        ),
        tool(
            "convert_currency",
            "Convert money",
            3,
            amount=("integer", "The amount"),
            source=("string", "From currency"),
            target=("string", "To currency"),
        ),
        tool("get_time", "Get the local time of a city", 1, city=("string", "The city")),
        tool(
            "add_event",
            "Add an event to the calendar",
            2,
            title=("string", "The title"),
            day=("string", "The day"),
            hour=("integer", "The hour"),
        ),
        tool(
            "translate",
            "Translate a word",
            2,
            word=("string", "The word"),
            language=("string", "The language"),
        ),
        tool(
            "lights",
            "Switch the lights of a room",
            2,
            room=("string", "The room"),
            on=("boolean", "On or off"),
        ),
    ]
}
CURRENCIES = ["USD", "EUR", "GBP", "JPY", "CHF"]


# What is asked, and what comes back: arguments, question, result, answer, and what the answer must contain.
Talk = tuple[Json, str, Json, str, str]


def weather_talk(rng: random.Random) -> Talk:
    city, t, sky = rng.choice(CITIES), rng.randint(-10, 38), pick(rng, "sunny", "cloudy", "rainy", "snowy")
    args: Json = {"city": city}
    user = pick(
        rng,
        f"What is the weather in {city}?",
        f"How is the weather in {city} today?",
        f"Is it warm in {city}?",
    )
    if rng.random() < 0.4:
        args["unit"] = pick(rng, "celsius", "fahrenheit")
        user = f"What is the weather in {city} in {args['unit']}?"
    result = {"temperature": t, "sky": sky}
    return args, user, result, f"It is {t} degrees and {sky} in {city}.", f"{t} degrees and {sky}"


def calculator_talk(rng: random.Random) -> Talk:
    a, b, op = rng.randrange(10, 10000), rng.randrange(2, 1000), rng.choice("+-*")
    asked = f"{a} {op} {b}"
    total = {"+": a + b, "-": a - b, "*": a * b}[op]
    user = pick(rng, f"Use the calculator: {asked}", f"What is {asked}? Please use the calculator.")
    return {"expression": asked}, user, {"result": total}, f"{asked} = {total}", f"= {total}"


def search_talk(rng: random.Random) -> Talk:
    topic = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    args: Json = {"query": topic}
    user = pick(rng, f"Search the web for {topic}.", f"Look up '{topic}' on the web.")
    if rng.random() < 0.4:
        args["max_results"] = rng.randint(2, 9)
        user = f"Search the web for {topic} and give me {args['max_results']} results."
    title = f"{rng.choice(NAMES)}'s guide to the {topic}"
    return args, user, {"results": [{"title": title}]}, f"I found: {title}.", title


def timer_talk(rng: random.Random) -> Talk:
    m = rng.randint(1, 90)
    args: Json = {"minutes": m}
    user = pick(rng, f"Set a timer for {m} minutes.", f"Start a {m} minute timer.")
    if rng.random() < 0.4:
        args["label"] = rng.choice(NOUNS)
        user = f"Set a timer called {args['label']} for {m} minutes."
    return args, user, {"ok": True}, f"The timer is set for {m} minutes.", f"{m} minutes"


def message_talk(rng: random.Random) -> Talk:
    who = rng.choice(NAMES)
    text = pick(rng, "I am late", "Dinner is ready", "See you at the station", "Happy birthday")
    text += pick(rng, "", " today", " tonight", " on " + rng.choice(DAYS))
    user = pick(rng, f"Send {who} the message: {text}", f"Tell {who} this: {text}")
    args = {"recipient": who, "text": text}
    return args, user, {"sent": True}, f"I sent the message to {who}.", f"to {who}"


def currency_talk(rng: random.Random) -> Talk:
    n, (src, dst) = rng.randint(2, 999), rng.sample(CURRENCIES, 2)
    got = rng.randint(2, 2000)
    user = pick(rng, f"Convert {n} {src} to {dst}.", f"How much is {n} {src} in {dst}?")
    result = {"amount": got, "currency": dst}
    args = {"amount": n, "source": src, "target": dst}
    return args, user, result, f"{n} {src} is {got} {dst}.", f"{got} {dst}"


def time_talk(rng: random.Random) -> Talk:
    city, time = rng.choice(CITIES), f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    user = pick(rng, f"What time is it in {city}?", f"Tell me the local time in {city}.")
    return {"city": city}, user, {"time": time}, f"It is {time} in {city}.", time


def event_talk(rng: random.Random) -> Talk:
    what, day = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", rng.choice(DAYS)
    args: Json = {"title": what, "day": day}
    user = pick(rng, f"Put '{what}' into my calendar on {day}.", f"Add the event '{what}' on {day}.")
    if rng.random() < 0.5:
        args["hour"] = rng.randint(8, 20)
        user = user[:-1] + f" at {args['hour']} o'clock."
    return args, user, {"id": rng.randrange(1000)}, f"I added '{what}' on {day}.", f"'{what}' on {day}"


def translate_talk(rng: random.Random) -> Talk:
    word, language = some_word(rng), pick(rng, "French", "Spanish", "German", "Italian")
    other = pseudo(rng, 4, 7)
    user = pick(
        rng,
        f"Use the tool to translate '{word}' into {language}.",
        f"Look up how '{word}' is said in {language}.",
    )
    answer = f"'{word}' in {language} is '{other}'."
    return {"word": word, "language": language}, user, {"translation": other}, answer, other


def lights_talk(rng: random.Random) -> Talk:
    room, on = pick(rng, "kitchen", "bedroom", "office", "bathroom", "garage"), rng.random() < 0.5
    state = "on" if on else "off"
    user = pick(rng, f"Turn the lights in the {room} {state}.", f"Switch {state} the {room} lights.")
    answer = f"The {room} lights are {state}."
    return {"room": room, "on": on}, user, {"ok": True}, answer, f"lights are {state}"


TALKS = {
    "get_weather": weather_talk,
    "calculator": calculator_talk,
    "search": search_talk,
    "set_timer": timer_talk,
    "send_message": message_talk,
    "convert_currency": currency_talk,
    "get_time": time_talk,
    "add_event": event_talk,
    "translate": translate_talk,
    "lights": lights_talk,
}


def tool_turn(rng: random.Random) -> Turn:
    name = rng.choice(list(TOOLS))
    args, user, result, answer, value = TALKS[name](rng)
    return Turn(
        "tool",
        user,
        answer,
        f"I should call {name} for this.",
        f"tool {user}",
        {"type": "contains", "expected": value},
        call=(name, args),
        result=json.dumps(result),
    )


# ---------------------------------------------------------------- memory over turns


def memory(rng: random.Random) -> tuple[list[Turn], Turn, str]:
    """Facts the user tells, then a question about one of them."""
    name, pet, pet_name = rng.choice(NAMES), rng.choice(PETS), pseudo(rng, 4, 6).capitalize()
    color, city, number, job = (
        rng.choice(COLORS),
        rng.choice(CITIES),
        rng.randrange(10, 1000),
        rng.choice(JOBS),
    )
    options = [
        (
            pick(rng, f"My name is {name}.", f"Hi, I am {name}.", f"Please call me {name}."),
            f"Nice to meet you, {name}!",
            pick(rng, "What is my name?", "Do you remember my name?"),
            f"Your name is {name}.",
        ),
        (
            f"I have a {pet} called {pet_name}.",
            f"{pet_name} is a nice name for a {pet}.",
            f"What is my {pet} called?",
            f"Your {pet} is called {pet_name}.",
        ),
        (
            pick(rng, f"My favorite color is {color}.", f"I like the color {color} best."),
            f"I will remember that you like {color}.",
            "What is my favorite color?",
            f"Your favorite color is {color}.",
        ),
        (
            pick(rng, f"I live in {city}.", f"My home is in {city}."),
            f"{city} is a lovely place.",
            "Where do I live?",
            f"You live in {city}.",
        ),
        (
            f"Please remember the number {number}.",
            f"I will remember {number}.",
            "Which number did I ask you to remember?",
            f"You asked me to remember {number}.",
        ),
        (
            f"I work as a {job}.",
            f"Being a {job} sounds interesting.",
            "What is my job?",
            f"You work as a {job}.",
        ),
    ]
    rng.shuffle(options)
    told = options[: rng.randint(1, 3)]
    _, _, question, answer = rng.choice(told)
    turns = [Turn("memory", u, a) for u, a, _, _ in told]
    key = "memory " + " ".join(u for u, _, _, _ in told)
    final = Turn(
        "memory",
        question,
        answer,
        f"The user told me: {next(u for u, _, q, _ in told if q == question)}",
        key,
        {"type": "exact", "expected": answer},
    )
    return turns, final, key
