"""Tokenizers with templates that mark calls as families do, and readers of their answers."""

from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from lowlat.cli.options import bundled
from lowlat.options.request import SamplingParams, ToolCallDelta
from lowlat.text import AnswerStream, TextCodec, tools_of

__all__ = ["TALK", "TEMPLATES", "TOOLS_FIRST", "codec_of", "read"]

# Templates that mark what their families' do, and no more.
TALK = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
TOOLS_FIRST = "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
TEMPLATES = {
    "Harmony": (TOOLS_FIRST + TALK, HARMONY),
    "Mistral": (TOOLS_FIRST + "{# [TOOL_CALLS]f[CALL_ID]i[ARGS]{} #}" + TALK, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "Mistral, listed": (TOOLS_FIRST + "{# [TOOL_CALLS] #}" + TALK, ("[TOOL_CALLS]",)),
    "Gemma 4": (
        TOOLS_FIRST + '{# <|tool_call>call:f{x:<|"|>y<|"|>}<tool_call|> #}' + TALK,
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "Seed": (TOOLS_FIRST + "{# <seed:tool_call><function=f><parameter=x> #}" + TALK, ("<seed:tool_call>",)),
    "Qwen3-Coder": (TOOLS_FIRST + "{# <tool_call><function=f><parameter=x> #}" + TALK, ()),
    "Hermes": (TOOLS_FIRST + "{# <tool_call> #}" + TALK, ()),
    "listed, closed": (TOOLS_FIRST + "{# <|tool_call|>[]<|/tool_call|> #}" + TALK, ("<|tool_call|>", "<|/tool_call|>")),
    "listed": (TOOLS_FIRST + "{# <|tool_call|>[] #}" + TALK, ("<|tool_call|>",)),
    "Llama 3": (TOOLS_FIRST + '{# {"name": function name, "parameters": dictionary #}' + TALK, ("<|python_tag|>",)),
    "generic": (TALK, ()),
}


@cache
def codec_of(name: str) -> TextCodec:
    """The bundled tokenizer with a family's special tokens and a template that marks calls as it does."""
    template, special = TEMPLATES[name]
    tokenizer = Tokenizer.from_file(str(Path(bundled("target")) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return TextCodec(tokenizer, templates={"default": template})


def read(codec: TextCodec, tokens: list[int], params: SamplingParams) -> tuple[str, list[tuple[str, str]]]:
    """An answer's content and calls."""
    stream = AnswerStream(codec, params.parse, tools=tools_of(params))
    deltas = [*(stream.push([token]) for token in tokens), stream.finish()]
    calls: list[list[str]] = []
    parts: list[ToolCallDelta] = [part for delta in deltas for part in delta.tool_calls]
    for part in parts:
        if part.name is not None:
            calls.append([part.name, ""])
        calls[part.index][1] += part.arguments
    return "".join(delta.text for delta in deltas), [(name, arguments) for name, arguments in calls]
