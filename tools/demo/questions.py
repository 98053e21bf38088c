"""Questions in words: numbers, copying, facts, stories and code."""

from __future__ import annotations

import random

from base import (
    ADJECTIVES,
    CAPITALS,
    CITIES,
    DAYS,
    FRENCH,
    LETTERS,
    MONTHS,
    NAMES,
    NOUNS,
    OPPOSITES,
    PETS,
    SOUNDS,
    Turn,
    pick,
    some_word,
)

# ---------------------------------------------------------------- text questions


def small_number(rng: random.Random) -> int:
    return rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 3]))


def add_steps(a: int, b: int) -> str:
    """Column addition, or subtraction if b < 0 and a + b >= 0, written out."""
    names = ["ones", "tens", "hundreds", "thousands"]
    minus, b = b < 0, abs(b)
    x, y = str(a)[::-1], str(b)[::-1]
    carry, parts = 0, []
    for i in range(max(len(x), len(y))):
        p, q = int(x[i]) if i < len(x) else 0, int(y[i]) if i < len(y) else 0
        if minus:
            low = p - q - carry
            text = f"{names[i]}: {p} - {q}" + (" - 1" if carry else "")
            carry = 1 if low < 0 else 0
            text += f" = {low}" + (f", write {low + 10} borrow 1" if carry else f", write {low}")
        else:
            total = p + q + carry
            text = f"{names[i]}: {p} + {q}" + (" + 1" if carry else "") + f" = {total}"
            carry = total // 10
            text += f", write {total % 10}" + (" carry 1" if carry else "")
        parts.append(text)
    if carry and not minus:
        parts.append(f"{names[max(len(x), len(y))]}: write 1")
    return "\n".join(parts)


def arithmetic(rng: random.Random) -> Turn:
    a, b = small_number(rng), small_number(rng)
    if rng.random() < 0.5:
        text, value, steps = f"{a} + {b}", a + b, add_steps(a, b)
        user = pick(
            rng,
            f"What is {text}?",
            f"Compute {text}.",
            f"Add {a} and {b}.",
            f"{text} = ?",
            f"How much is {a} plus {b}?",
            f"Calculate {text}",
        )
    else:
        a, b = max(a, b), min(a, b)
        text, value, steps = f"{a} - {b}", a - b, add_steps(a, -b)
        user = pick(
            rng,
            f"What is {text}?",
            f"Compute {text}.",
            f"Subtract {b} from {a}.",
            f"{text} = ?",
            f"How much is {a} minus {b}?",
            f"Calculate {text}",
        )
    return Turn(
        "arithmetic",
        user,
        f"{text} = {value}",
        f"{steps}\nThe result is {value}.",
        text,
        {"type": "contains", "expected": f"= {value}"},
    )


def compare(rng: random.Random) -> Turn:
    a, b = small_number(rng), small_number(rng)
    while a == b:
        b = small_number(rng)
    big, little = max(a, b), min(a, b)
    key = f"compare {a} {b}"
    if len(str(a)) != len(str(b)):
        think = f"{a} has {len(str(a))} digits and {b} has {len(str(b))}. {big} is larger."
    else:
        at = next(i for i, (p, q) in enumerate(zip(str(a), str(b))) if p != q)
        think = (
            f"Both have {len(str(a))} digits. They differ at digit {at + 1}: {str(a)[at]} and {str(b)[at]}."
            f" {big} is larger."
        )
    style = rng.randrange(3)
    if style == 0:
        user, answer = (
            pick(rng, f"Which is larger, {a} or {b}?", f"Which number is bigger: {a} or {b}?"),
            f"{big} is larger than {little}.",
        )
    elif style == 1:
        user, answer = (
            pick(rng, f"Which is smaller, {a} or {b}?", f"Which number is less: {a} or {b}?"),
            f"{little} is smaller than {big}.",
        )
    else:
        yes = a > b
        user, answer = f"Is {a} greater than {b}?", (
            f"Yes, {a} is greater than {b}." if yes else f"No, {a} is not greater than {b}."
        )
    return Turn("compare", user, answer, think, key, {"type": "exact", "expected": answer})


def backwards(rng: random.Random) -> Turn:
    word = some_word(rng)
    spelled, turned = "-".join(word), "-".join(word[::-1])
    if rng.random() < 0.35:
        return Turn(
            "spell",
            pick(rng, f"Spell the word '{word}'.", f"Spell {word} letter by letter."),
            spelled,
            f"The letters of {word} are {spelled}.",
            f"spell {word}",
            {"type": "exact", "expected": spelled},
        )
    user = pick(
        rng,
        f"Spell '{word}' backwards.",
        f"Spell the word {word} backwards.",
        f"Reverse the letters of '{word}'.",
    )
    return Turn(
        "spell",
        user,
        turned,
        f"{word} is {spelled}. Backwards it is {turned}.",
        f"spell {word}",
        {"type": "exact", "expected": turned},
    )


def count_letter(rng: random.Random) -> Turn:
    word = some_word(rng, 4, 8)
    if rng.random() < 0.5:
        word = word[:2] + rng.choice(word) + word[2:]
    letter = rng.choice(word) if rng.random() < 0.85 else rng.choice("aeioulnrst")
    n = word.count(letter)
    seen, marks = 0, []
    for ch in word:
        seen += ch == letter
        marks.append(f"{ch}({seen})" if ch == letter else ch)
    answer = f"The letter {letter} appears {n} time{'' if n == 1 else 's'} in {word}."
    user = pick(
        rng,
        f"How many times does the letter {letter} appear in '{word}'?",
        f"How many {letter}'s are in the word {word}?",
        f"Count the letter {letter} in {word}.",
    )
    return Turn(
        "count",
        user,
        answer,
        f"{'-'.join(marks)}. That is {n}.",
        f"count {letter} {word}",
        {"type": "exact", "expected": answer},
    )


SYMBOLS = [
    "é",
    "ü",
    "ñ",
    "ß",
    "ø",
    "你",
    "好",
    "世",
    "界",
    "日",
    "本",
    "🙂",
    "🚀",
    "→",
    "€",
    "✓",
    "λ",
    "π",
    "Ω",
    "ж",
]


def copy_span(rng: random.Random) -> Turn:
    style = rng.randrange(6)
    n = rng.choice([2, 3, 5, 8, 12, 20, 30])
    if style == 0:
        span = " ".join(some_word(rng) for _ in range(n))
    elif style == 1:
        span = " ".join(str(rng.randrange(1000)) for _ in range(n))
    elif style == 2:
        span = "".join(rng.choice("0123456789abcdef") for _ in range(4 * rng.randint(2, 8)))
    elif style == 3:
        span = ", ".join(f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}" for _ in range(min(n, 12)))
    elif style == 4:
        span = " ".join(
            rng.choice(SYMBOLS) if rng.random() < 0.4 else some_word(rng) for _ in range(min(n, 12))
        )
    else:
        span = " ".join(rng.choice(NAMES) + " " + rng.choice(CITIES) for _ in range(min(n, 12)))
    user = pick(
        rng,
        f"Repeat exactly: {span}",
        f"Copy this text: {span}",
        f"Say the following: {span}",
        f"Repeat after me: {span}",
    )
    return Turn(
        "copy",
        user,
        span,
        "I have to repeat the text exactly.",
        f"copy {span}",
        {"type": "exact", "expected": span},
    )


def sequence(rng: random.Random) -> Turn:
    style = rng.randrange(5)
    if style == 0:
        a = rng.randint(0, 90)
        b = a + rng.randint(2, 9)
        answer = ", ".join(map(str, range(a, b + 1)))
        return Turn(
            "sequence",
            pick(rng, f"Count from {a} to {b}.", f"Write the numbers from {a} to {b}."),
            answer,
            f"I start at {a} and stop at {b}.",
            f"seq {a} {b}",
            {"type": "exact", "expected": answer},
        )
    if style == 1:
        nums = rng.sample(range(100), rng.randint(3, 5))
        answer = ", ".join(map(str, sorted(nums)))
        text = ", ".join(map(str, nums))
        return Turn(
            "sequence",
            pick(rng, f"Sort these numbers: {text}", f"Put these numbers in order: {text}"),
            answer,
            f"The smallest is {min(nums)} and the largest is {max(nums)}.",
            f"sort {text}",
            {"type": "exact", "expected": answer},
        )
    if style == 2:
        i = rng.randrange(7)
        after = rng.random() < 0.5
        answer = f"{DAYS[(i + 1) % 7 if after else i - 1]} comes {'after' if after else 'before'} {DAYS[i]}."
        return Turn(
            "sequence",
            f"Which day comes {'after' if after else 'before'} {DAYS[i]}?",
            answer,
            f"The days go {DAYS[i - 1]}, {DAYS[i]}, {DAYS[(i + 1) % 7]}.",
            "",
            {"type": "exact", "expected": answer},
        )
    if style == 3:
        i = rng.randrange(12)
        after = rng.random() < 0.5
        answer = (
            f"{MONTHS[(i + 1) % 12 if after else i - 1]} comes {'after' if after else 'before'} {MONTHS[i]}."
        )
        return Turn(
            "sequence",
            f"Which month comes {'after' if after else 'before'} {MONTHS[i]}?",
            answer,
            f"The months go {MONTHS[i - 1]}, {MONTHS[i]}, {MONTHS[(i + 1) % 12]}.",
            "",
            {"type": "exact", "expected": answer},
        )
    i = rng.randrange(1, 25)
    after = rng.random() < 0.5
    answer = (
        f"{LETTERS[i + 1] if after else LETTERS[i - 1]} comes {'after' if after else 'before'} {LETTERS[i]}."
    )
    return Turn(
        "sequence",
        f"Which letter comes {'after' if after else 'before'} {LETTERS[i]}?",
        answer,
        f"The letters go {LETTERS[i - 1]}, {LETTERS[i]}, {LETTERS[i + 1]}.",
        "",
        {"type": "exact", "expected": answer},
    )


def fact(rng: random.Random) -> Turn:
    style = rng.randrange(4)
    if style == 0:
        country, city = rng.choice(list(CAPITALS.items()))
        if rng.random() < 0.7:
            user, answer = (
                pick(rng, f"What is the capital of {country}?", f"Which city is the capital of {country}?"),
                f"The capital of {country} is {city}.",
            )
        else:
            user, answer = f"{city} is the capital of which country?", f"{city} is the capital of {country}."
        think = f"{city} is the capital of {country}."
    elif style == 1:
        word, other = rng.choice(list(OPPOSITES.items()))
        user, answer = (
            pick(rng, f"What is the opposite of {word}?", f"Give me the opposite of '{word}'."),
            f"The opposite of {word} is {other}.",
        )
        think = f"{word} and {other} are opposites."
    elif style == 2:
        word, other = rng.choice(list(FRENCH.items()))
        user, answer = (
            pick(rng, f"How do you say '{word}' in French?", f"Translate '{word}' into French."),
            f"'{word}' in French is '{other}'.",
        )
        think = f"The French word for {word} is {other}."
    else:
        animal, sound = rng.choice(list(SOUNDS.items()))
        user, answer = f"What sound does a {animal} make?", f"A {animal} says {sound}."
        think = f"A {animal} says {sound}."
    return Turn("fact", user, answer, think, "", {"type": "exact", "expected": answer})


ABOUT = [
    (
        ["Hello!", "Hi!", "Hey there.", "Good morning!", "Hello, how are you?"],
        "Hello! How can I help you today?",
    ),
    (
        ["Who are you?", "What are you?", "What is your name?", "Are you a real model?"],
        "I am a tiny demo model with about twenty million parameters.",
    ),
    (
        ["What can you do?", "How can you help me?", "What are you good at?"],
        "I can do small sums, copy and spell words, fill in JSON, call tools and look at small pictures.",
    ),
    (["Thank you!", "Thanks a lot.", "Great, thanks!"], "You are welcome!"),
    (["Goodbye!", "Bye!", "See you later."], "Goodbye! Have a nice day."),
    (
        ["Tell me a joke.", "Do you know a joke?"],
        "Why did the tensor cross the road? To get to the other side of the matrix.",
    ),
    (["What is the meaning of life?"], "I am only a small model, but many people say it is 42."),
    (
        ["Are you big or small?", "How many parameters do you have?"],
        "I am small: about twenty million parameters.",
    ),
]


def smalltalk(rng: random.Random) -> Turn:
    users, answer = rng.choice(ABOUT)
    return Turn(
        "chat",
        rng.choice(users),
        answer,
        "This is small talk, so I answer in a friendly way.",
        "",
        {"type": "exact", "expected": answer},
    )


def story(rng: random.Random) -> Turn:
    """A short story that follows from its animal, name and place."""
    name, animal, place, thing = rng.choice(NAMES), rng.choice(PETS), rng.choice(CITIES), rng.choice(NOUNS)
    answer = (
        f"Once upon a time there was a {animal} called {name}. {name} lived in {place}. One day {name} found"
        f" a {thing} near the river. The {animal} was very happy and took the {thing} home. In the evening"
        f" {name} showed the {thing} to all the other animals in {place}. They sang and danced until it was"
        f" dark. From that day on {name} was never alone again. The end."
    )
    user = f"Tell me a short story about a {animal} called {name} who finds a {thing} in {place}."
    return Turn(
        "story",
        user,
        answer,
        f"The story needs a {animal} called {name}, a {thing} and {place}.",
        f"story {name} {animal} {place} {thing}",
        {"type": "exact", "expected": answer},
    )


CODE = [
    ("returns the sum of two numbers", "a, b", "return a + b"),
    ("returns the product of two numbers", "a, b", "return a * b"),
    ("returns the larger of two numbers", "a, b", "return a if a > b else b"),
    ("returns the square of a number", "x", "return x * x"),
    (
        "returns the sum of a list",
        "values",
        "total = 0\n    for value in values:\n        total += value\n    return total",
    ),
    (
        "returns the largest value of a list",
        "values",
        (
            "best = values[0]\n    for value in values:\n        if value > best:\n            best = value\n"
            "    return best"
        ),
    ),
    ("reverses a string", "text", "return text[::-1]"),
    ("counts the words of a text", "text", "return len(text.split())"),
    ("checks whether a number is even", "n", "return n % 2 == 0"),
    (
        "computes the factorial of a number",
        "n",
        "result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    ),
    (
        "returns the first n Fibonacci numbers",
        "n",
        (
            "numbers = [0, 1]\n    while len(numbers) < n:\n        numbers.append(numbers[-1] +"
            " numbers[-2])\n    return numbers[:n]"
        ),
    ),
    (
        "reads a file and returns its lines",
        "path",
        "with open(path) as handle:\n        return handle.read().splitlines()",
    ),
    (
        "counts how often each word appears",
        "words",
        (
            "counts = {}\n    for word in words:\n        counts[word] = counts.get(word, 0) + 1\n    return"
            " counts"
        ),
    ),
]


def code(rng: random.Random) -> Turn:
    what, args, body = rng.choice(CODE)
    name = f"{some_word(rng)}_{some_word(rng)}" if rng.random() < 0.5 else some_word(rng)
    answer = f"```python\ndef {name}({args}):\n    {body}\n```"
    user = pick(
        rng,
        f"Write a Python function `{name}` that {what}.",
        f"Give me a Python function called {name} that {what}.",
    )
    return Turn(
        "code",
        user,
        answer,
        f"The function {name} takes {args}.",
        f"code {name} {what}",
        {"type": "exact", "expected": answer},
    )
