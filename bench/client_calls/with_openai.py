"""The openai package: chats, completions, responses, models; streams, tools, structured answers."""

import asyncio
import json
import time
from typing import Any, Literal

import openai
from pydantic import BaseModel, ConfigDict, Field

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Bonn?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Bonn", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS},
}
FLAT_TOOL: Any = {"type": "function", "name": "weather", "description": "The weather", "parameters": PARAMETERS}


class Place(BaseModel):
    """A structured answer."""

    model_config = ConfigDict(extra="forbid")
    country: Literal["Germany", "Italy"]
    river: str = Field(max_length=8)


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=KEY)


def models(url: str) -> None:
    client = client_of(url)
    expect(MODEL in [model.id for model in client.models.list()], why="the model is not listed")
    expect(client.models.retrieve(MODEL).id == MODEL, why="another model was shown")


def unknown_model(url: str) -> None:
    began = time.monotonic()
    try:
        client_of(url).chat.completions.create(model="gpt-4o", messages=MESSAGES, max_tokens=4)
    except openai.NotFoundError as error:
        expect(MODEL in str(error), why=f"the message does not name the model that is served: {error}")
        expect(time.monotonic() - began < 2, why="it was tried again")
        return
    raise AssertionError("another model's name was taken")


def too_long(url: str) -> None:
    try:
        client_of(url).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Bonn " * 9000}], max_tokens=4
        )
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", why=f"code {error.code}")
        return
    raise AssertionError("a prompt over the context was taken")


def chat(url: str) -> None:
    answer = client_of(url).chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, seed=1)
    expect(answer.choices[0].message.content, why="no content")
    expect(answer.usage and answer.usage.completion_tokens, why="no usage")


def chat_stream(url: str) -> None:
    options: Any = {"include_usage": True}
    chunks = list(
        client_of(url).chat.completions.create(
            model=MODEL, messages=MESSAGES, max_completion_tokens=8, stream=True, stream_options=options, temperature=0
        )
    )
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), why="no content")
    expect(chunks[-1].usage and chunks[-1].usage.completion_tokens, why="no usage at the end")


def chat_logprobs(url: str) -> None:
    answer = client_of(url).chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    expect(logprobs and logprobs.content and len(logprobs.content[0].top_logprobs) == 2, why="no logprobs")


def chat_tools(url: str) -> None:
    client = client_of(url)
    messages = list(MESSAGES)
    first = client.chat.completions.create(
        model=MODEL, messages=messages, tools=[TOOL], tool_choice="required", max_tokens=160
    )
    message = first.choices[0].message
    expect(message.tool_calls, why="no call")
    assert message.tool_calls is not None
    messages.append(message)
    for call in message.tool_calls:
        expect(call.type == "function" and json.loads(call.function.arguments)["city"], why="no arguments")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=8)
    expect(second.choices[0].message.content or second.choices[0].message.tool_calls, why="no second answer")


def chat_tools_stream(url: str) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with client_of(url).chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=160
    ) as stream:
        names = [event.name for event in stream if event.type == "tool_calls.function.arguments.done"]
    expect(names == ["weather"], why=f"calls of {names}")


def chat_parse(url: str) -> None:
    answer = client_of(url).chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Place, max_completion_tokens=96
    )
    expect(isinstance(answer.choices[0].message.parsed, Place), why="not parsed")


def chat_parse_tools(url: str) -> None:
    answer = client_of(url).chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Place)],
        tool_choice="required",
        max_tokens=160,
    )
    calls = answer.choices[0].message.tool_calls
    expect(calls and isinstance(calls[0].function.parsed_arguments, Place), why="not parsed")


def completion(url: str) -> None:
    answer = client_of(url).completions.create(model=MODEL, prompt="Bonn is", max_tokens=8, logprobs=1, stop=["\n"])
    expect(answer.choices[0].logprobs, why="no logprobs")


def completion_stream(url: str) -> None:
    chunks = list(
        client_of(url).completions.create(model=MODEL, prompt=["Bonn is", "Rome is"], max_tokens=4, stream=True)
    )
    expect({choice.index for chunk in chunks for choice in chunk.choices} == {0, 1}, why="not both prompts")


def response(url: str) -> None:
    answer = client_of(url).responses.create(
        model=MODEL, instructions="Be brief.", input="Where is Bonn?", max_output_tokens=8, store=False
    )
    expect(answer.output_text, why="no text")
    expect(answer.usage and answer.usage.output_tokens_details.reasoning_tokens == 0, why="no usage")


def response_stream(url: str) -> None:
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Where is Bonn?"}]}]
    with client_of(url).responses.stream(model=MODEL, input=items, max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
    expect("response.output_text.delta" in kinds, why=f"events {kinds}")


def response_tools(url: str) -> None:
    client = client_of(url)
    items: list[Any] = [{"role": "user", "content": "What is the weather in Bonn?"}]
    first = client.responses.create(
        model=MODEL, input=items, tools=[FLAT_TOOL], tool_choice="required", max_output_tokens=160
    )
    calls = [item for item in first.output if item.type == "function_call"]
    expect(calls and json.loads(calls[0].arguments)["city"], why=f"no call in {first.output}")
    items += first.output
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."} for call in calls]
    second = client.responses.create(model=MODEL, input=items, tools=[FLAT_TOOL], max_output_tokens=8)
    expect(second.output, why="no second answer")


def response_tools_stream(url: str) -> None:
    choice: Any = {"type": "function", "name": "weather"}
    with client_of(url).responses.stream(
        model=MODEL, input="The weather in Bonn?", tools=[FLAT_TOOL], tool_choice=choice, max_output_tokens=160
    ) as stream:
        kinds = [event.type for event in stream]
        output = stream.get_final_response().output
    expect("response.function_call_arguments.done" in kinds, why=f"events {kinds}")
    expect(output[-1].type == "function_call", why=f"output {output}")


def response_parse(url: str) -> None:
    answer = client_of(url).responses.parse(
        model=MODEL, input="Where is Bonn?", text_format=Place, max_output_tokens=96
    )
    expect(isinstance(answer.output_parsed, Place), why="not parsed")


def asyncio_client(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return list(await asyncio.gather(one(), one()))

    expect(all(asyncio.run(ask())), why="no content")


CASES: dict[str, Case] = {
    "models": models,
    "unknown model": unknown_model,
    "prompt too long": too_long,
    "chat": chat,
    "chat, stream": chat_stream,
    "chat, logprobs": chat_logprobs,
    "chat, tools and their results": chat_tools,
    "chat, tools, stream": chat_tools_stream,
    "chat, parse": chat_parse,
    "chat, parse of tools": chat_parse_tools,
    "completion": completion,
    "completion, stream": completion_stream,
    "response": response,
    "response, stream": response_stream,
    "response, tools and their results": response_tools,
    "response, tools, stream": response_tools_stream,
    "response, parse": response_parse,
    "asyncio": asyncio_client,
}

if __name__ == "__main__":
    run("openai", CASES)
