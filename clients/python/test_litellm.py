"""`litellm` against the server, through its OpenAI and Anthropic providers and its Ollama one."""

import json

import litellm
import pytest

from conftest import BOOK, BOOK_SCHEMA, QUESTION, TOOL, TOOL_QUESTION

TOOLS = [{"type": "function", "function": TOOL}]
PROVIDERS = {
    "hosted_vllm/demo": "/v1",
    "openai/demo": "/v1",
    "anthropic/demo": "",
    "ollama_chat/demo": "",
}


@pytest.fixture(params=PROVIDERS)
def ask(request, url):
    """Completion through one provider."""
    place = {"model": request.param, "api_base": f"{url}{PROVIDERS[request.param]}", "api_key": "none"}
    return lambda **wish: litellm.completion(**place, max_tokens=200, num_retries=0, timeout=60, **wish)


def test_chat(ask):
    reply = ask(messages=QUESTION)
    assert "95" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop" and reply.usage.completion_tokens > 0


def test_stream(ask):
    chunks = list(ask(messages=QUESTION, stream=True))
    assert "95" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_tools(ask):
    reply = ask(messages=[{"role": "user", "content": TOOL_QUESTION}], tools=TOOLS)
    call = reply.choices[0].message.tool_calls[0].function
    assert (call.name, json.loads(call.arguments)) == ("get_time", {"city": "Prague"})


def test_json_schema(url):
    wish = {"type": "json_schema", "json_schema": {"name": "book", "schema": BOOK_SCHEMA, "strict": True}}
    reply = litellm.completion(
        model="hosted_vllm/demo",
        api_base=f"{url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": BOOK}],
        response_format=wish,
    )
    assert set(json.loads(reply.choices[0].message.content)) == {"title", "author", "year"}


def test_too_long_has_its_class(url):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model="hosted_vllm/demo",
            api_base=f"{url}/v1",
            api_key="none",
            messages=[{"role": "user", "content": "a b " * 9000}],
        )
