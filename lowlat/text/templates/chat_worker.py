"""This script is the process in which chat templates run; it is not imported.

A template comes from the model directory, so it is not trusted. Jinja2's sandbox denies it access to the interpreter's
internals, but allows `'a' * 10**10`, which no thread can interrupt. So it runs in this process, whose memory
(RLIMIT_AS) and processor time (ITIMER_PROF) the kernel bounds, and whose end harms nobody. Nothing of lowlat is
imported: the process starts quickly, and holds nothing worth stealing.

Frames on stdin and stdout are 8 bytes of length, little-endian, and JSON in ASCII. The first frame is
{"templates": {name: source}, "limits": {...}}, answered by {} or a fault; every other one is
{"template": name, "variables": {...}}, answered by {"text": ...} or a fault: {"blame": "template" or
"messages", "why": ...}.
"""

import json
import os
import resource
import signal
import sys
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["main"]

HEADER_BYTES = 8
MAX_WHY = 300


class TooLong(Exception):
    """The template has written more text than its limit."""


class Refusal(jinja2.TemplateError):
    """The template itself called raise_exception: it does not accept these messages."""


class GenerationBlock(Extension):
    """Renders only the body of `{% generation %}`, which marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: object = "") -> NoReturn:
    """Raise Refusal; templates call this to refuse messages."""
    raise Refusal(str(message))


def strftime_now(format: str) -> str:
    """Format the local time, which templates put into system prompts."""
    return datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as chat templates expect it: not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> ImmutableSandboxedEnvironment:
    """Make the environment that Hugging Face's templates are written for."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def render(template: jinja2.Template, variables: dict[str, Any], max_characters: int) -> str:
    """Render piece by piece, so that endless output ends at the limit."""
    pieces = []
    total = 0
    for piece in template.generate(variables):
        total += len(piece)
        if total > max_characters:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


def fault(error: Exception, limits: dict[str, Any]) -> dict[str, str]:
    """Attribute an error to the template, or to the messages that it failed on."""
    blame, why = "template", f"{type(error).__name__}: {error}"
    if isinstance(error, Refusal):
        blame, why = "messages", str(error)
    elif isinstance(error, TooLong):
        why = f"it writes more than {limits['max_characters']} characters"
    elif isinstance(error, MemoryError):
        why = f"it needs more than {limits['max_memory_bytes']} bytes of memory"
    elif isinstance(error, jinja2.TemplateSyntaxError):
        why = f"line {error.lineno}: {error.message}"
    elif isinstance(error, jinja2.UndefinedError):
        blame = "messages"
    elif not isinstance(error, (SecurityError, RecursionError, OverflowError, SyntaxError)):
        blame, why = "messages", type(error).__name__  # its text could quote the messages
    return {"blame": blame, "why": why[:MAX_WHY]}


def read_frame(stream: BinaryIO) -> Any:
    """Read one frame; None at the end of the stream."""
    header = stream.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        return None
    return json.loads(stream.read(int.from_bytes(header, "little")))


def write_frame(stream: BinaryIO, value: dict[str, str]) -> None:
    """Write one frame."""
    data = json.dumps(value).encode("ascii")
    stream.write(len(data).to_bytes(HEADER_BYTES, "little") + data)
    stream.flush()


def main() -> None:
    """Compile the templates of the first frame, then render until the stream ends."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    start = read_frame(sys.stdin.buffer)
    if start is None:
        return
    limits = start["limits"]
    memory = limits["max_memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, even inside one long operation
    templates: dict[str, jinja2.Template] = {}
    request: Any = start
    while request is not None:
        signal.setitimer(signal.ITIMER_PROF, limits["max_cpu_s"])
        try:
            if request is start:
                made = environment()
                templates = {name: made.from_string(source) for name, source in start["templates"].items()}
                reply = {}
            else:
                template = templates[request["template"]]
                reply = {"text": render(template, request["variables"], limits["max_characters"])}
        except Exception as error:
            reply = fault(error, limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(replies, reply)
        request = read_frame(sys.stdin.buffer)


if __name__ == "__main__":
    main()
