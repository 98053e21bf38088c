"""The `ollama` package against the server."""

import json

import ollama
import pytest

from conftest import BOOK, BOOK_SCHEMA, QUESTION, TOOL, TOOL_QUESTION

TOOLS = [{"type": "function", "function": TOOL}]


@pytest.fixture(scope="module")
def client(url):
    return ollama.Client(host=url)


def test_what_is_there(client):
    assert [model.model.split(":")[0] for model in client.list().models] == ["demo"]
    assert len(client.ps().models) == 1
    shown = client.show("demo")
    assert "completion" in shown.capabilities and "tools" in shown.capabilities


def test_chat_whole_and_streamed_are_one(client):
    whole = client.chat("demo", QUESTION)
    assert whole.done and whole.done_reason == "stop" and "95" in whole.message.content
    parts = list(client.chat("demo", QUESTION, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert parts[-1].eval_count == whole.eval_count and parts[-1].eval_duration > 0


def test_thinking(client):
    reply = client.chat("demo", QUESTION, think=True)
    assert "7 + 8 = 15" in reply.message.thinking and "95" in reply.message.content


def test_tools_there_and_back(client):
    messages = [{"role": "user", "content": TOOL_QUESTION}]
    reply = client.chat("demo", messages, tools=TOOLS)
    call = reply.message.tool_calls[0].function
    assert (call.name, dict(call.arguments)) == ("get_time", {"city": "Prague"})
    messages += [reply.message, {"role": "tool", "tool_name": "get_time", "content": '{"time": "22:48"}'}]
    assert "22:48" in client.chat("demo", messages, tools=TOOLS).message.content


def test_format_and_generate(client):
    reply = client.chat("demo", [{"role": "user", "content": BOOK}], format=BOOK_SCHEMA)
    assert set(json.loads(reply.message.content)) == {"title", "author", "year"}
    assert "95" in client.generate("demo", "What is 37 + 58?").response
    cut = client.generate("demo", "What is 37 + 58?", options={"num_predict": 2})
    assert cut.done_reason == "length" and cut.eval_count == 2


def test_what_is_not_done_is_said(client):
    with pytest.raises(ollama.ResponseError) as refused:
        client.pull("other")
    assert refused.value.status_code == 501
    with pytest.raises(ollama.ResponseError) as bad:
        client.chat("demo", QUESTION, options={"num_ctx": 10_000_000})
    assert bad.value.status_code == 400
