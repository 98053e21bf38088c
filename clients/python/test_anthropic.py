"""The `anthropic` package against the server."""

import anthropic
import pytest

from conftest import QUESTION, TOOL, TOOL_QUESTION

TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]


@pytest.fixture(scope="module")
def client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def text_of(message):
    return "".join(block.text for block in message.content if block.type == "text")


def test_message_whole_and_streamed_are_one(client):
    wish = {"model": "demo", "max_tokens": 200, "messages": QUESTION, "system": "You are a tiny assistant."}
    whole = client.messages.create(**wish)
    assert whole.stop_reason == "end_turn" and "95" in text_of(whole)
    with client.messages.stream(**wish) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == text_of(whole) == text_of(final)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_thinking(client):
    wish = {"model": "demo", "max_tokens": 2000, "messages": QUESTION}
    with client.messages.stream(**wish, thinking={"type": "enabled", "budget_tokens": 1024}) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text"]
    assert "7 + 8 = 15" in final.content[0].thinking and final.content[0].signature
    again = [
        *QUESTION,
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": "Thank you!"},
    ]
    assert text_of(client.messages.create(model="demo", max_tokens=100, messages=again))


def test_tools_there_and_back(client):
    messages = [{"role": "user", "content": TOOL_QUESTION}]
    with client.messages.stream(model="demo", max_tokens=200, messages=messages, tools=TOOLS) as stream:
        reply = stream.get_final_message()
    assert reply.stop_reason == "tool_use"
    call = next(block for block in reply.content if block.type == "tool_use")
    assert call.input == {"city": "Prague"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"time": "22:48"}'}
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model="demo", max_tokens=200, messages=messages, tools=TOOLS)
    assert "22:48" in text_of(answer)


def test_stops(client):
    stopped = client.messages.create(model="demo", max_tokens=200, messages=QUESTION, stop_sequences=["="])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "=")
    assert client.messages.create(model="demo", max_tokens=2, messages=QUESTION).stop_reason == "max_tokens"


def test_count_tokens(client):
    counted = client.messages.count_tokens(model="demo", messages=QUESTION, tools=TOOLS)
    usage = client.messages.create(model="demo", max_tokens=1, messages=QUESTION, tools=TOOLS).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_have_their_classes(client):
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(model="demo", max_tokens=0, messages=QUESTION)
    assert bad.value.body["error"]["type"] == "invalid_request_error"
    assert bad.value.request_id
