"""The `openai` package against the server."""

import json

import openai
import pytest
from pydantic import BaseModel

from conftest import BOOK, BOOK_SCHEMA, QUESTION, TOOL, TOOL_QUESTION

TOOLS = [{"type": "function", "function": TOOL}]
FLAT_TOOLS = [{"type": "function", **TOOL}]


class Book(BaseModel):
    title: str
    author: str
    year: int


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").owned_by == "clary"


def test_chat_whole_and_streamed_are_one(client):
    whole = client.chat.completions.create(model="demo", messages=QUESTION)
    assert "95" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_reasoning(client):
    extra = {"chat_template_kwargs": {"enable_thinking": True}}
    reply = client.chat.completions.create(model="demo", messages=QUESTION, extra_body=extra)
    message = reply.choices[0].message
    assert "7 + 8 = 15" in message.model_extra["reasoning_content"]
    assert "95" in message.content
    assert reply.usage.completion_tokens_details.reasoning_tokens > 10


def test_several_choices_and_logprobs(client):
    reply = client.chat.completions.create(
        model="demo", messages=QUESTION, n=2, temperature=1, seed=7, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    first = reply.choices[0].logprobs.content[0]
    assert len(first.top_logprobs) >= 3 and first.logprob <= 0


def test_stop_and_length(client):
    stopped = client.chat.completions.create(model="demo", messages=QUESTION, stop=["="])
    assert "=" not in stopped.choices[0].message.content
    cut = client.chat.completions.create(model="demo", messages=QUESTION, max_completion_tokens=2)
    assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 2


def test_tools_there_and_back(client):
    messages = [{"role": "user", "content": TOOL_QUESTION}]
    reply = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS)
    assert reply.choices[0].finish_reason == "tool_calls"
    call = reply.choices[0].message.tool_calls[0]
    assert call.function.name == "get_time"
    assert json.loads(call.function.arguments) == {"city": "Prague"}
    messages += [
        reply.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"time": "22:48"}'},
    ]
    answer = client.chat.completions.create(model="demo", messages=messages, tools=TOOLS)
    assert "22:48" in answer.choices[0].message.content


def test_tools_streamed(client):
    messages = [{"role": "user", "content": TOOL_QUESTION}]
    with client.chat.completions.stream(model="demo", messages=messages, tools=TOOLS) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Prague"}


def test_a_named_tool_is_called(client):
    choice = {"type": "function", "function": {"name": "get_time"}}
    reply = client.chat.completions.create(model="demo", messages=QUESTION, tools=TOOLS, tool_choice=choice)
    assert reply.choices[0].message.tool_calls[0].function.name == "get_time"


def test_json_schema(client):
    reply = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": BOOK}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "book", "schema": BOOK_SCHEMA, "strict": True},
        },
    )
    assert set(json.loads(reply.choices[0].message.content)) == {"title", "author", "year"}


def test_json_schema_parsed_from_a_class(client):
    reply = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": BOOK}], response_format=Book
    )
    assert reply.choices[0].message.parsed.author


def test_completions(client):
    reply = client.completions.create(model="demo", prompt="37 + 58 =", max_tokens=4, logprobs=2, echo=True)
    choice = reply.choices[0]
    assert choice.text.startswith("37 + 58 =")
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.tokens) == reply.usage.total_tokens


def test_responses_whole_and_streamed(client):
    whole = client.responses.create(model="demo", input="What is 37 + 58?", instructions="Be brief.")
    assert whole.status == "completed" and "95" in whole.output_text
    with client.responses.stream(model="demo", input="What is 37 + 58?", instructions="Be brief.") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.output_text.delta" in kinds
    assert final.output_text == whole.output_text


def test_responses_tools(client):
    reply = client.responses.create(model="demo", input=TOOL_QUESTION, tools=FLAT_TOOLS)
    call = next(item for item in reply.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Prague"}
    turn = [
        {"role": "user", "content": TOOL_QUESTION},
        *reply.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"time": "22:48"}'},
    ]
    assert "22:48" in client.responses.create(model="demo", input=turn, tools=FLAT_TOOLS).output_text


def test_responses_schema(client):
    reply = client.responses.parse(model="demo", input=BOOK, text_format=Book)
    assert isinstance(reply.output_parsed.year, int)


def test_errors_have_their_classes(client):
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=QUESTION, temperature=9)
    assert bad.value.param == "temperature" and bad.value.code == "invalid_value"
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "a b " * 9000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=client.base_url.join("v1"), api_key="none").models.list()
