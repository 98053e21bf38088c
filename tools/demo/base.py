"""What all kinds of conversations share: tokens, splits, turns, and words to ask about."""

from __future__ import annotations

import random
import string
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Json = dict[str, Any]

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
]  # fmt: skip
PLAIN = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
         "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
         "<|file_sep|>"}  # added tokens that are not "special"  # fmt: skip
BPE_SIZE = 3000
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GRIDS = [
    (4, 4),
    (4, 8),
    (6, 6),
    (8, 8),
    (8, 4),
    (4, 6),
    (6, 4),
    (6, 8),
    (8, 6),
    (2, 4),
]  # patches, (rows, columns)


def split_of(key: str) -> str:
    h = zlib.crc32(key.encode()) % 100
    return "dev" if h < 3 else "held" if h < 6 else "train"


@dataclass
class Turn:
    """One question and its answer."""

    kind: str
    user: str
    answer: str
    think: str = ""
    key: str = ""
    check: Json = field(default_factory=dict)
    images: list[np.ndarray] = field(default_factory=list)
    call: tuple[str, Json] | None = None  # the tool call made before the answer
    result: str = ""  # what the tool returned


@dataclass
class Chat:
    kind: str
    messages: list[Json]
    tools: list[Json] | None = None
    thinking: bool = False
    images: list[np.ndarray] = field(default_factory=list)
    check: Json = field(default_factory=dict)
    key: str = ""


# ---------------------------------------------------------------- words

NOUNS = """apple bread chair river stone cloud tiger lemon house garden window table bottle candle
pencil paper mirror basket carpet hammer ladder button pocket ticket rocket bridge castle forest
island valley desert market school office kitchen teacher doctor farmer sailor painter singer dancer
writer baker driver pilot nurse judge king queen prince rabbit monkey donkey turtle spider falcon
pigeon salmon lizard kitten puppy horse sheep goat mouse snake eagle whale shark zebra camel panda
orange banana cherry grape peach melon tomato potato carrot onion pepper garlic butter cheese honey
sugar coffee juice water winter summer spring autumn morning evening night monday friday sunday
january march august silver golden copper marble cotton leather velvet rubber plastic glass engine
wheel pedal brake mirror camera laptop screen keyboard printer cable battery signal planet comet
star moon ocean beach harbor boat ferry train plane truck bicycle helmet jacket shirt shoe glove
scarf hat coat ring crown sword shield arrow drum flute guitar piano violin song story letter
number color shape square circle triangle music dance picture flower tree leaf root branch seed""".split()
ADJECTIVES = """big small red blue green old new happy sad quick slow bright dark warm cold soft loud
quiet clever brave gentle heavy light round tall short clean shiny""".split()
NAMES = """Anna Ben Clara David Emma Felix Grace Hugo Ida Jack Kate Leo Mia Noah Olga Paul Quinn Rosa
Sam Tina Uma Victor Wendy Xavier Yara Zoe Alice Bruno Carla Diego Elena Frank Gina Henry Irene Jonas
Karin Lukas Maria Nina Oscar Petra Ralf Sofia Tom Ursula Vera Walter Yusuf Zara Amir Bella Cyrus Dora
Erik Fatima George Hana Ivan Julia Kenji Lara Marco Nadia Otto Priya Ravi Sara Tariq Viola""".split()
CITIES = """Paris London Berlin Madrid Rome Vienna Lisbon Dublin Oslo Athens Prague Warsaw Helsinki
Stockholm Copenhagen Budapest Brussels Tokyo Seoul Beijing Delhi Cairo Nairobi Lagos Toronto Boston
Chicago Denver Seattle Miami Lima Quito Havana Sydney Perth Auckland Dubai Istanbul Zurich Geneva
Munich Hamburg Milan Naples Porto Seville Lyon Nice Kyoto Osaka""".split()
COLORS = "red blue green yellow orange purple black white pink brown gray".split()
ITEMS = """books lamps chairs pens mugs plates towels shoes shirts phones cables boxes bags clocks
tables knives forks spoons bottles candles pillows blankets jackets hats gloves""".split()
JOBS = (
    "teacher doctor farmer baker driver pilot nurse judge painter singer writer engineer chef lawyer".split()
)
PETS = "cat dog rabbit parrot hamster turtle goldfish pony".split()
CAPITALS = dict(
    p.split(":")
    for p in """France:Paris Germany:Berlin Spain:Madrid Italy:Rome Austria:Vienna Portugal:Lisbon
Ireland:Dublin Norway:Oslo Greece:Athens Poland:Warsaw Finland:Helsinki Sweden:Stockholm
Denmark:Copenhagen Hungary:Budapest Belgium:Brussels Japan:Tokyo Egypt:Cairo Kenya:Nairobi Canada:Ottawa
Peru:Lima Cuba:Havana Australia:Canberra China:Beijing India:Delhi Russia:Moscow Turkey:Ankara
Switzerland:Bern Iceland:Reykjavik Chile:Santiago Thailand:Bangkok Vietnam:Hanoi Iran:Tehran Iraq:Baghdad
Nepal:Kathmandu Croatia:Zagreb Serbia:Belgrade Ukraine:Kyiv Romania:Bucharest Bulgaria:Sofia
Estonia:Tallinn Latvia:Riga Lithuania:Vilnius""".split()
)
OPPOSITES = dict(
    p.split(":")
    for p in """hot:cold big:small fast:slow up:down left:right day:night happy:sad old:new open:closed
full:empty hard:soft high:low early:late strong:weak rich:poor wet:dry light:dark loud:quiet near:far
true:false first:last long:short clean:dirty thick:thin sweet:sour young:old""".split()
)
FRENCH = dict(
    p.split(":")
    for p in (
        """cat:chat dog:chien house:maison water:eau bread:pain milk:lait book:livre tree:arbre sun:soleil
moon:lune red:rouge blue:bleu green:vert white:blanc black:noir day:jour night:nuit friend:ami school:école
city:ville river:fleuve king:roi queen:reine apple:pomme cheese:fromage fish:poisson bird:oiseau
flower:fleur thanks:merci hello:bonjour""".split()
    )
)
SOUNDS = dict(
    p.split(":")
    for p in "cat:meow dog:woof cow:moo duck:quack sheep:baa horse:neigh pig:oink lion:roar owl:hoot".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
LETTERS = string.ascii_uppercase


def pseudo(rng: random.Random, low: int = 3, high: int = 7) -> str:
    """A pronounceable made-up word."""
    size = rng.randint(low, high)
    word = ""
    vowel = rng.random() < 0.3
    while len(word) < size:
        word += rng.choice("aeiou") if vowel else rng.choice("bcdfghjklmnprstvwz")
        vowel = not vowel if rng.random() < 0.9 else vowel
    return word


def some_word(rng: random.Random, low: int = 3, high: int = 7) -> str:
    return rng.choice(NOUNS) if rng.random() < 0.4 else pseudo(rng, low, high)


def pick(rng: random.Random, *options: str) -> str:
    return rng.choice(options)
