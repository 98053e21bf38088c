"""What every client's test has: where the server is, and a few things to ask it."""

import os

import pytest

QUESTION = [{"role": "user", "content": "What is 37 + 58?"}]

TOOL = {
    "name": "get_time",
    "description": "Get the local time of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The city"}},
        "required": ["city"],
    },
}

TOOL_QUESTION = "Tell me the local time in Prague."

BOOK = (
    "Return JSON with title (string), author (string) and year (integer). "
    "Text: Priya wrote 'The soft shoe' in 1957."
)

BOOK_SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "author": {"type": "string"}, "year": {"type": "integer"}},
    "required": ["title", "author", "year"],
    "additionalProperties": False,
}


@pytest.fixture(scope="session")
def url():
    """The server under test; it runs `--thinking off --temperature 0`."""
    return os.environ["CLARY_URL"]
