"""Chat templates: what they can do for friends, and what they cannot do to anybody."""

import json
import resource
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from socket_fixtures import open_descriptors
from stages import staged
from text_tokenizers import byte_level, write_directory

from lowlat.errors import ConfigError, RequestError
from lowlat.text import TextCodec
from lowlat.text.templates.chat import ChatLimits, ChatTemplates

CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MESSAGES = [{"role": "system", "content": " be kind "}, {"role": "user", "content": "日本 <b>&</b> 😀"}]


def render(source: str, **variables: object) -> str:
    return rendered([source], None, **variables)[0]


def rendered(sources: Sequence[str], limits: ChatLimits | None = None, **variables: object) -> list[str]:
    """The text that each of these templates writes, by one worker."""
    templates = ChatTemplates({str(place): source for place, source in enumerate(sources)}, limits)
    try:
        return [templates.render(name, {"messages": MESSAGES, **variables}) for name in templates.names]
    finally:
        templates.close()


def test_chatml_from_the_config_and_from_its_own_file(tmp_path: Path) -> None:
    write_directory(tmp_path, byte_level(), chat_template=CHATML, eos_token="</s>")
    codec = TextCodec.load(tmp_path)
    assert codec is not None and codec.has_chat_template
    expected = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n日本 <b>&</b> 😀<|im_end|>\n"
    assert codec.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected
    assert codec.apply_chat_template(MESSAGES) == expected + "<|im_start|>assistant\n"
    codec.close()
    assert codec.apply_chat_template(MESSAGES, add_generation_prompt=False) == expected  # starts it again
    codec.close()
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ tools is none }}{{ mood }}")
    codec = TextCodec.load(tmp_path)
    assert codec is not None
    assert codec.apply_chat_template([], mood="glad") == "</s>Trueglad"
    codec.close()


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools|length }}"}]
    codec = TextCodec.load(write_directory(tmp_path, byte_level(), chat_template=named))
    assert codec is not None
    assert codec.apply_chat_template([]) == "plain"
    assert codec.apply_chat_template([], tools=[{"name": "f"}]) == "1"
    codec.close()
    codec = TextCodec.load(write_directory(tmp_path, byte_level(), chat_template=[{"name": "x", "template": ""}]))
    assert codec is not None
    with pytest.raises(RequestError, match="no default chat template, only x"):
        codec.apply_chat_template([])
    codec.close()


def test_what_hugging_face_templates_expect() -> None:
    expected = {
        "{{ {'b': 'é<', 'a': [1]} | tojson }}": '{"b": "é<", "a": [1]}',
        "{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}": '{\n  "a": 2,\n  "b": 1\n}',
        "{{ strftime_now('%Y') }}": time.strftime("%Y"),
        "a{% generation %}b{% endgeneration %}c": "abc",
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}": "01",
        "  {% if true %}\nx\n  {% endif %}\ny": "x\ny",  # trim_blocks and lstrip_blocks
        "{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}": "1",
    }
    assert rendered([*expected]) == [*expected.values()]


def test_templates_agree_with_transformers() -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    sources = (CHATML, "{{ messages | tojson }}", "{%- for m in messages -%}\n  {{ m }}\n{% endfor %} x")
    theirs = [utils.render_jinja_template(conversations=[MESSAGES], chat_template=source)[0][0] for source in sources]
    assert rendered(sources, add_generation_prompt=False) == theirs


def test_refusals_are_the_messages_fault() -> None:
    with pytest.raises(RequestError, match="does not accept the messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="has no attribute 'nothing'"):
        render("{{ messages[0].nothing.more }}")
    with pytest.raises(RequestError, match="TypeError") as caught:
        render("{{ messages[0].content + 5 }}")
    assert "be kind" not in str(caught.value)


def test_bad_messages() -> None:
    wrong: list[tuple[Any, str]] = [
        ("hi", "messages must be a list"),
        ({"role": "user"}, "messages must be a list"),
        (["hi"], r"messages\[0\] must be a mapping with a role"),
        ([{"role": "user"}, {"content": "x"}], r"messages\[1\] must be a mapping with a role"),
        ([{"role": "user", "content": {1, 2}}], "must be JSON values"),
        ([{"role": "user", "content": float("nan")}], "must be JSON values"),
        ([{"role": "user", "content": "x" * (8 << 20)}], r"at most 8388608 \(max_input_bytes\)"),
    ]
    codec = TextCodec(byte_level(), templates={"default": CHATML})
    for messages, match in wrong:
        with pytest.raises(RequestError, match=match):
            codec.apply_chat_template(messages)
    codec.close()


@pytest.mark.parametrize("source", ["{% for %}", "{{ " + "(" * 100_000, "{{ 1 | absent }}"])
def test_a_template_that_does_not_compile_is_a_config_error(source: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(source)
    write_directory(tmp_path, byte_level())
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: the chat template cannot be used"):
        TextCodec.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: the chat template cannot be used"):
        TextCodec.load(tmp_path)


DOUBLING = "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
HOSTILE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "nested loops that write": "{% for i in range(90000) %}{% for j in range(90000) %}x{% endfor %}{% endfor %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "subclasses": "{{ ''['__class__'].__base__.__subclasses__() }}",
    "attr filter": "{{ (''|attr('__class__')).__mro__ }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "cycler": "{{ cycler.__init__.__globals__.os.environ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "multiplied string": "{{ 'a' * 10**10 }}",
    "multiplied at compile time": "{% set x = 'a' * 1000000000 %}{{ x[0] }}",
    "multiplied list": "{% set x = [0] * 10**10 %}{{ x[0] }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "format width": "{{ '%999999999d' % 1 }}{{ '{:999999999}'.format(1) }}",
    "center": "{{ 'a'.center(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}{{ messages | tojson(indent=10**9) }}",
    "doubling by tilde": DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "doubling by join": DOUBLING + "{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}{{ ns.x }}",
    "doubling by block": DOUBLING + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling by list": DOUBLING + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "doubling by replace": DOUBLING + "{% set ns.x = ns.x | replace('a', 'aa') %}{% endfor %}{{ ns.x }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "double recursion": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "sleepless": "{% for i in range(99999) %}{{ messages * 1000 | tojson }}{% endfor %}",
}


@pytest.mark.parametrize("name", staged(HOSTILE, first=["format", "power", "sleepless"], second=[*HOSTILE][::4]))
def test_hostile_templates_end_in_errors_soon_and_small(name: str) -> None:
    """Two seconds of processor time for the worker, next to no memory for this process."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises((ConfigError, RequestError)) as caught:
        rendered([HOSTILE[name]], ChatLimits(max_cpu_s=0.2))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 64 << 10
    if name not in ("class", "subclasses", "attr filter", "globals", "cycler", "format", "mutation"):
        assert isinstance(caught.value, ConfigError) or name in ("include", "sleepless", "center")


def test_insides_are_out_of_reach() -> None:
    insides = ("''.__class__", "messages.__class__", "cycler.__init__", "self._TemplateReference__context")
    for expression in insides:
        with pytest.raises((ConfigError, RequestError)):
            render("{{ (" + expression + ").mro() }}")
    shown = rendered(["{{ " + each + " | default('nothing') | string | truncate(7) }}" for each in insides])
    assert not any("class" in text for text in shown)


def test_limits_are_named_and_a_killed_worker_is_replaced() -> None:
    source = "{% if messages[0] == 'spin' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    source += "{% endfor %}{% elif messages[0] == 'write' %}{{ 'x' * 2000 }}{% else %}fine{% endif %}"
    templates = ChatTemplates({"t": source}, ChatLimits(max_cpu_s=0.2, max_characters=1000))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"more than 0\.2 s of processor time"):
            templates.render("t", {"messages": ["spin"]})
        with pytest.raises(ConfigError, match="more than 1000 characters"):
            templates.render("t", {"messages": ["write"]})
        assert templates.render("t", {"messages": ["fine"]}) == "fine"
    templates.close()


def test_the_worker_holds_no_secrets_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    before = open_descriptors()  # others than the worker's may be closed meanwhile, with a test's garbage
    templates = ChatTemplates({"t": "x"})
    worker = templates._worker
    assert worker is not None
    assert b"hunter2" not in Path(f"/proc/{worker.pid}/environ").read_bytes()
    limits = Path(f"/proc/{worker.pid}/limits").read_text().splitlines()
    assert [line.split()[3:5] for line in limits if "address space" in line] == [[str(512 << 20)] * 2]
    del templates  # no close: the finaliser ends it
    assert worker.returncode is not None
    del worker
    assert open_descriptors().items() <= before.items()


def test_threads_get_their_own_answers() -> None:
    templates = ChatTemplates({"t": "{{ messages | tojson }}"})
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = templates.render("t", {"messages": [number] * 3000})

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {number: json.loads(text) for number, text in answers.items()} == {n: [n] * 3000 for n in range(8)}
    templates.close()
