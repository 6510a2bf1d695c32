"""Chat templates in the shapes that families publish: prompts, calls and reasoning as each writes and reads them."""

import json
from functools import cache
from pathlib import Path

import pytest
from call_formats import read
from checkpoint_files import edit_json
from tiny_models import make_target
from tokenizers import AddedToken, Tokenizer
from unit.test_text_formats import TOOL

from lowlat.cli.options import bundled
from lowlat.errors import RequestError
from lowlat.models.target import read_model_config
from lowlat.options.request import SamplingParams
from lowlat.text import AnswerStream, TextCodec
from lowlat.text.answers.formats import format_of, thought_tags

SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": " Hello "}
ANSWER, AGAIN = {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye"}
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Bonn", "days": 2}}}

GEMMA3 = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set prefix = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for m in turns -%}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if m['content'] is string -%}{{ m['content'] | trim }}
    {%- elif m['content'] is iterable -%}
        {%- for part in m['content'] -%}{%- if part['type'] == 'text' -%}{{ part['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
GEMMA4 = """{%- macro value(v) -%}
    {%- if v is string -%}{{ '<|"|>' + v + '<|"|>' }}
    {%- elif v is boolean -%}{{ 'true' if v else 'false' }}
    {%- elif v is mapping -%}{{ '{' }}{%- for k, each in v | dictsort -%}{{ k }}:{{ value(each) }}
        {%- if not loop.last -%},{%- endif -%}{%- endfor -%}{{ '}' }}
    {%- elif v is sequence -%}[{%- for each in v -%}{{ value(each) }}{{ ',' if not loop.last }}{%- endfor -%}]
    {%- else -%}{{ v }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(turns=messages) -%}{{ bos_token }}
{%- if enable_thinking or tools or messages[0]['role'] in ['system', 'developer'] -%}
    {{ '<|turn>system\n' }}{%- if enable_thinking -%}{{ '<|think|>\n' }}{%- endif -%}
    {%- if messages[0]['role'] in ['system', 'developer'] -%}
        {{ messages[0]['content'] | trim }}{%- set ns.turns = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        {{ '<|tool>declaration:' + tool['function']['name'] + '{description:' }}
        {{- value(tool['function']['description']) + '}<tool|>' }}
    {%- endfor -%}{{ '<turn|>\n' }}
{%- endif -%}
{%- for m in ns.turns -%}
    {{ '<|turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' }}
    {%- for call in m['tool_calls'] or [] -%}
        {{ '<|tool_call>call:' + call['function']['name'] + value(call['function']['arguments']) + '<tool_call|>' }}
    {%- endfor -%}
    {%- if m['role'] == 'tool' -%}{{ '<|tool_response>response:' + m['name'] + '{value:' + value(m['content']) }}
        {{- '}<tool_response|>' }}
    {%- elif m['content'] -%}{{ m['content'] | trim }}{%- endif -%}
    {{ '<turn|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|turn>model\n' }}{%- endif -%}"""
MISTRAL3 = """{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = 'Today is ' + strftime_now('%Y') | length | string %}{%- set turns = messages %}{%- endif %}
{{- bos_token }}{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in turns %}
    {%- if m['role'] == 'user' %}{{- '[INST]' + m['content'] + '[/INST]' }}
    {%- elif m['role'] == 'assistant' %}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call['function']['name'] + '[ARGS]' + call['function']['arguments'] | tojson }}
        {%- endfor %}{{- (m['content'] or '') + eos_token }}
    {%- elif m['role'] == 'tool' %}{{- '[TOOL_RESULTS]' + m['content'] + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles are supported!') }}{%- endif %}
{%- endfor %}"""
GRANITE = """{%- set kind = 'tools' if tools else 'plain' %}
{{- '<|start_of_role|>system<|end_of_role|>' }}{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
{%- set messages = messages[1:] %}{%- endif %}{{- '<|end_of_text|>\n' }}
{%- if tools %}{{- '<|start_of_role|>available_tools<|end_of_role|>' }}{{- tools | tojson(indent=4) }}
{{- '<|end_of_text|>\n' }}{%- endif %}
{%- for m in messages %}{{- '<|start_of_role|>' + m['role'] + '<|end_of_role|>' }}
    {%- if m.tool_calls %}{{- '<|tool_call|>[' }}
        {%- for call in m.tool_calls %}{{- call.function | tojson }}{%- endfor %}{{- ']' }}
    {%- else %}{{- m['content'] }}{%- endif %}{{- '<|end_of_text|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
GRANITE4 = """{%- set given = messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] if given else 'You are a helpful assistant.' %}
{%- if tools %}{%- set ns = namespace(listed='') %}
    {%- for tool in tools %}{%- set ns.listed = ns.listed + '\n' + (tool | tojson) %}{%- endfor %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '\n\n<tools>' + ns.listed + '\n</tools>\n\nReturn a json '
    + 'object within XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>.'
    + '<|end_of_text|>\n' }}
{%- else %}{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}{{- '<|start_of_role|>assistant<|end_of_role|>' + (m.content or '') }}
        {%- for call in m.tool_calls or [] %}{%- set f = call.function %}
            {{- '<tool_call>\n{"name": "' + f.name + '", "arguments": ' + (f.arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}{{- '<|end_of_text|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_of_role|>user<|end_of_role|>\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {{- '<|end_of_text|>\n' }}
    {%- elif m.role == 'user' or not loop.first %}
        {{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}"""
SMOLLM3 = """{%- set thinks = enable_thinking if enable_thinking is defined else true %}
{{- '<|im_start|>system\n## Metadata\n\nReasoning Mode: ' + ('/think' if thinks else '/no_think') + '\n\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- endif %}
{%- if xml_tools or tools %}{{- '\n<tools>\n' }}{%- for tool in xml_tools or tools %}{{- tool | tojson }}{%- endfor %}
{{- '\n</tools>\nAnswer as <tool_call>\n{"name": .., "arguments": ..}\n</tool_call>' }}{%- endif %}{{- '<|im_end|>\n' }}
{%- for m in messages %}
    {%- if m.role == 'system' and loop.first %}{%- continue %}{%- endif %}
    {%- if m.role == 'assistant' %}{% generation %}{{- '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}
    {%- endgeneration %}{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' + ('' if thinks else '<think>\n\n</think>\n') }}{%- endif %}"""
PHI4 = """{% for m in messages %}
{%- if m['role'] == 'system' %}{{ '<|im_start|>system<|im_sep|>' + m['content'] + '<|im_end|>' }}
{%- elif m['role'] == 'user' %}{{ '<|im_start|>user<|im_sep|>' + m['content'] + '<|im_end|>' }}
{%- elif m['role'] == 'assistant' %}{{ '<|im_start|>assistant<|im_sep|>' + m['content'] + '<|im_end|>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
ERNIE = """{%- if not add_generation_prompt is defined -%}{%- set add_generation_prompt = true -%}{%- endif -%}
{%- if not cls_token is defined -%}{%- set cls_token = '<|begin_of_sentence|>' -%}{%- endif -%}{{- cls_token -}}
{%- for m in messages -%}
    {%- if m['role'] == 'user' -%}{{- 'User: ' + m['content'] + '\n' -}}
    {%- elif m['role'] == 'assistant' -%}{{- 'Assistant: ' + m['content'] + '</s>' -}}
    {%- elif m['role'] == 'system' -%}{{- m['content'] + '\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"""
SEED = """{%- macro kind(v) -%}
{%- set names = {'string': 'str', 'integer': 'int'} -%}{{ names.get(v, 'Any') }}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] %}{%- set messages = messages[1:] %}
{%- endif %}
{%- if system is defined or tools %}{{- '<seed:bos>system\n' + (system or '') }}
    {%- for item in tools or [] if item.type == 'function' %}
        {{- '\nFunction:\ndef ' + item.function.name + '(' }}
        {%- for name, each in item.function.parameters.properties.items() %}
            {{- name + ': ' + kind(each.type) }}{{- ', ' if not loop.last }}{%- endfor %}{{- '):' }}
    {%- endfor %}
    {%- if tools %}{{- '\n<seed:tool_call>\n<function=f>\n<parameter=x>value</parameter>\n</function>' }}
    {{- '\n</seed:tool_call>' }}{%- endif %}{{- '<seed:eos>' }}
{%- endif %}
{%- if thinking_budget is defined and thinking_budget == 0 %}
{{- '<seed:bos>system\nNo thought.<seed:eos>' }}{%- endif %}
{%- for m in messages %}{{- '<seed:bos>' + m.role + '\n' }}
    {%- if m.reasoning_content %}{{- '<seed:think>' + m.reasoning_content | trim + '</seed:think>' }}{%- endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}{{- '<seed:tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for name, each in call.function.arguments | items %}
            {{- '<parameter=' + name + '>' + (each | string) + '</parameter>\n' }}{%- endfor %}
        {{- '</function>\n</seed:tool_call>' }}
    {%- endfor %}{{- '<seed:eos>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<seed:bos>assistant\n' }}{%- endif %}"""

# template, tokens of one id, what it makes of system, user, assistant and user, and of a call and its result after
# system and user; the name of its format, and a call as the model writes it
FAMILIES: dict[str, tuple[str, tuple[str, ...], str, str, str, str]] = {
    "gemma3": (
        GEMMA3,
        ("<start_of_turn>", "<end_of_turn>"),
        "<s><start_of_turn>user\nBe kind.\n\nHello<end_of_turn>\n<start_of_turn>model\nHi.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        "",
        "generic",
        "",
    ),
    "gemma4": (
        GEMMA4,
        ("<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<|think|>"),
        "<s><|turn>system\nBe kind.<turn|>\n<|turn>user\nHello<turn|>\n<|turn>model\nHi.<turn|>\n"
        "<|turn>user\nBye<turn|>\n<|turn>model\n",
        '<|turn>model\n<|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:2}<tool_call|><turn|>\n<|turn>tool\n'
        '<|tool_response>response:weather{value:<|"|>wet<|"|>}<tool_response|><turn|>\n<|turn>model\n',
        "Gemma 4",
        '<|tool_call>call:weather{city:<|"|>Bonn<|"|>,days:2}<tool_call|>',
    ),
    "mistral3": (
        MISTRAL3,
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST] Hello [/INST]Hi.</s>[INST]Bye[/INST]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Bonn", "days": 2}</s>[TOOL_RESULTS]wet[/TOOL_RESULTS]',
        "Mistral",
        '[TOOL_CALLS]weather[ARGS]{"city": "Bonn", "days": 2}',
    ),
    "granite": (
        GRANITE,
        ("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        "<|start_of_role|>system<|end_of_role|>Be kind.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|> Hello "
        "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hi.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Bye<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        '<|start_of_role|>assistant<|end_of_role|><|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn", '
        '"days": 2}}]<|end_of_text|>\n<|start_of_role|>tool<|end_of_role|>wet<|end_of_text|>\n'
        "<|start_of_role|>assistant<|end_of_role|>",
        "listed",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}]',
    ),
    "granite4": (
        GRANITE4,
        ("<|start_of_role|>", "<|end_of_role|>", "<tool_call>", "</tool_call>"),
        "<|start_of_role|>system<|end_of_role|>Be kind.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|> Hello "
        "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Hi.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Bye<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        '<|start_of_role|>assistant<|end_of_role|><tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", '
        '"days": 2}}\n</tool_call><|end_of_text|>\n<|start_of_role|>user<|end_of_role|>\n<tool_response>\nwet\n'
        "</tool_response><|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        "Hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>',
    ),
    "smollm3": (
        SMOLLM3,
        ("<|im_start|>", "<|im_end|>", "<think>", "</think>"),
        "<|im_start|>system\n## Metadata\n\nReasoning Mode: /think\n\nBe kind.<|im_end|>\n<|im_start|>user\n Hello "
        "<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
        "",
        "Hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 2}}\n</tool_call>',
    ),
    "phi-4": (
        PHI4,
        ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
        "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|> Hello <|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hi.<|im_end|><|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_sep|>",
        "",
        "generic",
        "",
    ),
    "ernie4_5": (
        ERNIE,
        ("<|begin_of_sentence|>",),
        "<|begin_of_sentence|>Be kind.\nUser:  Hello \nAssistant: Hi.</s>User: Bye\nAssistant: ",
        "",
        "generic",
        "",
    ),
    "seed_oss": (
        SEED,
        ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        "<seed:bos>system\nBe kind.<seed:eos><seed:bos>user\n Hello <seed:eos><seed:bos>assistant\nHi.<seed:eos>"
        "<seed:bos>user\nBye<seed:eos><seed:bos>assistant\n",
        "<seed:bos>assistant\n<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</seed:tool_call><seed:eos><seed:bos>tool\nwet<seed:eos>"
        "<seed:bos>assistant\n",
        "Seed",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
}
REASONING = {
    "gemma4": "<|channel>thought\nIt is late.<channel|>Yes",
    "smollm3": "<think>\nIt is late.\n</think>\nYes",
    "seed_oss": "<seed:think>It is late.</seed:think>Yes",
}


@cache
def codec_of(family: str) -> TextCodec:
    """A tokenizer with a family's special tokens, and its template."""
    template, special, *_ = FAMILIES[family]
    tokenizer = Tokenizer.from_file(str(Path(bundled("target")) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return TextCodec(
        tokenizer, templates={"default": template}, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_are_as_the_family_writes_them(family: str) -> None:
    codec, (_, _, talk, called, name, _) = codec_of(family), FAMILIES[family]
    assert codec.apply_chat_template([SYSTEM, USER, ANSWER, AGAIN]) == talk
    kind = format_of(codec)
    assert kind is not None and kind.name == name and codec.takes_tools == (name != "generic")
    if called:
        turns = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
        result = {"role": "tool", "content": "wet", "name": "weather", "tool_call_id": "c1"}
        with_call = codec.apply_chat_template([SYSTEM, USER, *turns, result], tools=[TOOL])
        assert with_call.endswith(called) and "weather" in with_call.removesuffix(called)
    if family == "gemma3":
        with pytest.raises(RequestError, match="roles must alternate"):
            codec.apply_chat_template([USER, USER])
        parts = {"role": "user", "content": [{"type": "text", "text": " Hello "}]}
        assert codec.apply_chat_template([parts]) == codec.apply_chat_template([USER])


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each[5]])
def test_calls_are_read_as_the_family_writes_them(family: str) -> None:
    codec = codec_of(family)
    params = SamplingParams(tool_calls={"functions": [TOOL["function"]]}, parse="tools")
    tokens = codec.encode(FAMILIES[family][5], add_special_tokens=False, allow_special=True)
    content, ((name, arguments),) = read(codec, tokens, params)
    assert (content, name, json.loads(arguments)) == ("", "weather", {"city": "Bonn", "days": 2})


@pytest.mark.parametrize("family", REASONING)
def test_thoughts_are_apart_from_content(family: str) -> None:
    codec, text = codec_of(family), REASONING[family]
    assert thought_tags(codec) is not None
    tokens = codec.encode(text, add_special_tokens=False, allow_special=True)
    question = codec.encode_chat([USER])
    for num_begun in range(len(tokens)):  # of the prompt: the answer goes on wherever that leaves it
        prompt, begun = [*question, *tokens[:num_begun]], codec.decode(tokens[:num_begun])
        if begun in ("th", "tho", "thou", "thoug", "though"):
            continue  # within the label
        stream = AnswerStream(codec, "reasoning", tools=None, prefix_ids=prompt)
        deltas = [*(stream.push([token]) for token in tokens[num_begun:]), stream.finish()]
        reasoning, content = "".join(each.reasoning for each in deltas), "".join(each.text for each in deltas)
        assert "It is late.".endswith(reasoning) and "Yes".endswith(content.lstrip())
        if not begun.strip():
            assert (reasoning, content) == ("It is late.", "Yes")
        else:
            whole = "".join((begun + reasoning + content).removeprefix("thought").split())
            assert whole == "Itislate.Yes", num_begun


@pytest.mark.parametrize("family", ["gemma4_text", "gemma3_text"])
def test_stop_tokens_are_those_of_generation_config(family: str, tmp_path: Path) -> None:
    """Also of a model whose text is nested: turns end with tokens that its config does not name."""
    make_target(tmp_path, family)
    edit_json(tmp_path / "config.json", eos_token_id=1)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 6, 50], "bos_token_id": 2}))
    text = json.loads((tmp_path / "config.json").read_text())
    for config in (text, {"model_type": family.removesuffix("_text"), "text_config": text, "eos_token_id": 1}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = read_model_config(tmp_path)
        assert (found.eos_token_ids, found.bos_token_id) == ((1, 6, 50), 2)
