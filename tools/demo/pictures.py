"""Pictures of shapes, digits and words, and questions about them."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from base import LETTERS, Turn, pick, some_word, split_of

# ---------------------------------------------------------------- images

RGB = {
    "red": (214, 40, 40), "green": (44, 160, 60), "blue": (40, 80, 210), "yellow": (240, 205, 40),
    "orange": (245, 130, 30), "purple": (130, 50, 170), "black": (20, 20, 20), "pink": (245, 130, 180),
}  # fmt: skip
SHAPES = ["circle", "square", "triangle", "star", "diamond", "cross"]


@lru_cache(maxsize=1)
def font_files() -> list[str]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = [
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSans-Oblique",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSansMono-Bold",
        "DejaVuSansMono",
    ]
    return [str(folder / f"{n}.ttf") for n in names]


@lru_cache(maxsize=256)
def font(path: str, size: int) -> Any:
    from PIL import ImageFont

    return ImageFont.truetype(path, size)


@lru_cache(maxsize=1)
def digit_scans() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    d = load_digits()
    return (255 - d.images * 255 / 16).astype(np.uint8), d.target


def paper(rng: random.Random) -> tuple[int, int, int]:
    base = rng.choice([255, 255, 240, 225])
    return tuple(max(0, min(255, base + rng.randint(-6, 6))) for _ in range(3))  # type: ignore[return-value]


def jitter(rng: random.Random, color: tuple[int, int, int]) -> tuple[int, int, int]:
    return tuple(max(0, min(255, v + rng.randint(-14, 14))) for v in color)  # type: ignore[return-value]


def canvas(grid: tuple[int, int], fill: tuple[int, int, int]) -> tuple[Any, Any]:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (grid[1] * 16, grid[0] * 16), fill)
    return image, ImageDraw.Draw(image)


def draw_shape(draw: Any, shape: str, x: float, y: float, r: float, color: tuple[int, int, int]) -> None:
    if shape == "circle":
        draw.ellipse([x - r, y - r, x + r, y + r], fill=color)
    elif shape == "square":
        draw.rectangle([x - r * 0.85, y - r * 0.85, x + r * 0.85, y + r * 0.85], fill=color)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r * 0.95, y + r * 0.8), (x + r * 0.95, y + r * 0.8)], fill=color)
    elif shape == "diamond":
        draw.polygon([(x, y - r), (x + r * 0.7, y), (x, y + r), (x - r * 0.7, y)], fill=color)
    elif shape == "cross":
        w = r * 0.33
        draw.rectangle([x - r, y - w, x + r, y + w], fill=color)
        draw.rectangle([x - w, y - r, x + w, y + r], fill=color)
    else:
        points = []
        for i in range(10):
            radius = r if i % 2 == 0 else r * 0.42
            angle = -math.pi / 2 + i * math.pi / 5
            points.append((x + radius * math.cos(angle), y + radius * math.sin(angle)))
        draw.polygon(points, fill=color)


def draw_text(rng: random.Random, text: str, grid: tuple[int, int], color: tuple[int, int, int]) -> Any:
    image, draw = canvas(grid, paper(rng))
    w, h = image.size
    path = rng.choice(font_files())
    size = rng.randint(int(h * 0.42), int(h * 0.75))
    while True:
        box = draw.textbbox((0, 0), text, font=font(path, size))
        if box[2] - box[0] <= w - 6 and box[3] - box[1] <= h - 6:
            break
        size -= 2
    x = rng.randint(3, w - 3 - (box[2] - box[0])) - box[0]
    y = rng.randint(3, h - 3 - (box[3] - box[1])) - box[1]
    draw.text((x, y), text, font=font(path, size), fill=color)
    return image


def scan(rng: random.Random, split: str) -> tuple[Any, int, str]:
    from PIL import Image

    images, labels = digit_scans()
    while True:
        i = rng.randrange(len(labels))
        key = f"scan {i}"
        if split_of(key) == split:
            break
    size = rng.choice([64, 64, 96])
    picture = Image.fromarray(images[i]).resize(
        (size, size), rng.choice([Image.Resampling.NEAREST, Image.Resampling.BICUBIC])
    )
    return picture.convert("RGB"), int(labels[i]), key


def shape_image(
    rng: random.Random,
    shape: str,
    color: str,
    grid: tuple[int, int] | None = None,
    scale: float | None = None,
) -> Any:
    grid = grid or rng.choice([(4, 4), (4, 4), (6, 6), (8, 8), (4, 6), (6, 4)])
    image, draw = canvas(grid, paper(rng))
    w, h = image.size
    r = min(w, h) * (scale or rng.uniform(0.24, 0.44))
    draw_shape(
        draw, shape, rng.uniform(r + 1, w - r - 1), rng.uniform(r + 1, h - r - 1), r, jitter(rng, RGB[color])
    )
    return image


def many_shapes(rng: random.Random, n: int, shape: str, color: str) -> Any:
    grid = rng.choice([(6, 6), (8, 8), (6, 8), (8, 6), (4, 8)])
    image, draw = canvas(grid, paper(rng))
    w, h = image.size
    spots: list[tuple[float, float]] = []
    r = rng.uniform(9, 12)
    tries = 0
    while len(spots) < n:
        tries += 1
        if tries % 200 == 0:  # jammed: the first few left no room for the rest
            spots, r = [], max(7.0, r * 0.95)
        x, y = rng.uniform(r + 1, w - r - 1), rng.uniform(r + 1, h - r - 1)
        if all((x - a) ** 2 + (y - b) ** 2 > (2.15 * r) ** 2 for a, b in spots):
            spots.append((x, y))
    fill = jitter(rng, RGB[color])
    for x, y in spots:
        draw_shape(draw, shape, x, y, r, fill)
    return image


def plural(n: int, color: str, shape: str) -> str:
    end = "" if n == 1 else "es" if shape == "cross" else "s"
    return f"{n} {color} {shape}{end}"


# Kind, question, answer, what is thought, the key of what must not repeat, and the pictures.
Asked = tuple[str, str, str, str, str, list[Any]]


def digit(rng: random.Random, split: str) -> Asked:
    image, label, key = scan(rng, split)
    user = pick(rng, "Which digit is this?", "What digit do you see?", "Which digit is in the picture?")
    think = f"The picture shows a handwritten {label}."
    return "image-digit", user, f"The digit is {label}.", think, key, [image]


def number(rng: random.Random, _: str) -> Asked:
    n = rng.randrange(10 ** rng.choice([1, 2, 3, 3]))
    grid = rng.choice([(4, 4), (4, 6), (4, 8), (6, 6)]) if n < 100 else (4, 8)
    image = draw_text(rng, str(n), grid, jitter(rng, RGB[rng.choice(list(RGB))]))
    user = pick(rng, "Which number is this?", "Read the number in the picture.", "What number do you see?")
    think = f"The picture shows the number {n}."
    return "image-number", user, f"The number is {n}.", think, f"number {n}", [image]


def one_shape(rng: random.Random, _: str) -> Asked:
    shape, color = rng.choice(SHAPES), rng.choice(list(RGB))
    images = [shape_image(rng, shape, color)]
    key = f"shape {rng.random()}"
    which = rng.randrange(3)
    if which == 0:
        user = pick(rng, "What do you see?", "Describe the picture.", "Which shape and color is this?")
        answer = f"I see a {color} {shape}."
    elif which == 1:
        user = pick(rng, "What color is the shape?", "Which color is it?")
        answer = f"The color is {color}."
    else:
        user = pick(rng, "Which shape is this?", "What shape do you see?")
        answer = f"The shape is a {shape}."
    return "image-shape", user, answer, f"The picture shows one shape: a {color} {shape}.", key, images


def how_many(rng: random.Random, _: str) -> Asked:
    n, shape, color = rng.randint(1, 6), rng.choice(SHAPES), rng.choice(list(RGB))
    images = [many_shapes(rng, n, shape, color)]
    key = f"many {rng.random()}"
    user = pick(
        rng,
        "How many shapes are there?",
        "Count the shapes in the picture.",
        "What is in the picture, and how many?",
    )
    answer = f"There {'is' if n == 1 else 'are'} {plural(n, color, shape)}."
    return "image-count", user, answer, f"I count {n}. They are {color}.", key, images


def word(rng: random.Random, _: str) -> Asked:
    said = (
        "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 3)))
        if rng.random() < 0.3
        else some_word(rng, 3, 5)[:5].upper()
    )
    color = rng.choice(["black", "black", "blue", "red", "green", "purple"])
    image = draw_text(rng, said, (4, 8), jitter(rng, RGB[color]))
    user = pick(
        rng, "What does the picture say?", "Read the word in the picture.", "Which word is written here?"
    )
    think = f"The letters are {'-'.join(said)}."
    return "image-word", user, f'It says "{said}".', think, f"read {said}", [image]


def two_shapes(rng: random.Random, _: str) -> Asked:
    same_color, same_shape = rng.random() < 0.5, rng.random() < 0.5
    s1, c1 = rng.choice(SHAPES), rng.choice(list(RGB))
    s2 = s1 if same_shape else rng.choice([s for s in SHAPES if s != s1])
    c2 = c1 if same_color else rng.choice([c for c in RGB if c != c1])
    images = [shape_image(rng, s1, c1), shape_image(rng, s2, c2)]
    key = f"pair {rng.random()}"
    which = rng.randrange(3)
    if which == 0:
        user = "Are the two shapes the same color?"
        answer = f"Yes, both are {c1}." if same_color else f"No, the first is {c1} and the second is {c2}."
    elif which == 1:
        user = "Are the two pictures the same shape?"
        other = f"No, the first is a {s1} and the second is a {s2}."
        answer = f"Yes, both are a {s1}." if same_shape else other
    else:
        user = pick(rng, "Describe the two pictures.", "What is in each picture?")
        answer = f"The first is a {c1} {s1} and the second is a {c2} {s2}."
    return "image-pair", user, answer, f"First: a {c1} {s1}. Second: a {c2} {s2}.", key, images


def larger_digit(rng: random.Random, split: str) -> Asked:
    (i1, d1, key), (i2, d2, _) = scan(rng, split), scan(rng, split)
    while d1 == d2:
        i2, d2, _ = scan(rng, split)
    user = pick(rng, "Which picture shows the larger digit?", "In which picture is the digit larger?")
    answer = (
        f"The first picture: {d1} is larger than {d2}."
        if d1 > d2
        else f"The second picture: {d2} is larger than {d1}."
    )
    return "image-pair", user, answer, f"The first digit is {d1}, the second is {d2}.", key, [i1, i2]


STYLES = [digit, number, one_shape, how_many, word, two_shapes, larger_digit]


def image_turn(rng: random.Random, split: str, style: int | None = None) -> Turn:
    """Image questions draw a fresh picture each time; `key` covers what must not repeat."""
    style = rng.choice([0, 1, 2, 2, 3, 3, 4, 4, 4, 5, 6]) if style is None else style
    kind, user, answer, think, key, images = STYLES[style](rng, split)
    arrays = [np.asarray(i, dtype=np.uint8) for i in images]
    return Turn(kind, user, answer, think, key, {"type": "exact", "expected": answer}, arrays)
