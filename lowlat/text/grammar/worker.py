"""This script is the process in which grammars are tried; it is not imported.

A grammar comes from a caller, so it is hostile until proven otherwise, and no thread can interrupt a library's work on
it. So each is tried in a child of this process, where the kernel bounds memory (RLIMIT_AS) and time (ITIMER_REAL), and
where dying harms nobody: converted, compiled, and walked for a few tokens by chance, to see how long its masks take.
Children of several trials run side by side. Nothing of lowlat is imported.

Frames on the socket at stdin are 8 bytes of length, little-endian, and a body. The first is JSON in ASCII, {"lengths":
bytes of each token, "special": ids, "end_id", "limits", "max_memory_bytes", "max_mask_s", "walk_s"}, after it a frame
of the tokens' bytes, joined; it is answered by an empty frame. Every other one comes with a pipe for its answer and is
JSON, {"kind", "text", "limit_s"}; the answer is {"grammar": text for the library} or {"why": ...}. One of the kind
"one_of" has a schema that was refused, "paths" of all `oneOf` within it, and "refusal", the library's words for one;
the answer is {"place": of the first that is why}.
"""

import copy
import json
import os
import resource
import signal
import socket
import time
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

__all__ = ["main"]

HEADER_BYTES = 8
MAX_WHY = 300
MAX_TOKEN_BYTES = 64
WALK_TOKENS = 32
STRICT_JSON: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',  # none for any character: `exact.py` says why
}


class Vocabulary:
    """The tokens as the library wants them; the ids of a text are the longest that match, not the model's own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, lengths: list[int], joined: bytes, special: list[int], end_id: int) -> None:
        self.tokens = []
        place = 0
        for length in lengths:
            self.tokens.append(joined[place : place + length])
            place += length
        self.special_token_ids = special
        self.eos_token_id = end_id
        without_text = set(special)
        self._ids = {token: number for number, token in enumerate(self.tokens) if token and number not in without_text}
        self._longest = min(MAX_TOKEN_BYTES, max(lengths, default=1))

    def __call__(self, text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        place = 0
        while place < len(data):
            sizes = range(min(self._longest, len(data) - place), 0, -1)
            size = next((size for size in sizes if data[place : place + size] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[data[place : place + size]])
            place += size
        return ids


class Refusal(Exception):
    """A grammar that cannot be served; says why."""


def library_grammar(kind: str, text: str) -> str:
    """The library's own text of a grammar. Raises Refusal, and what the library raises."""
    if kind == "json_schema":
        schema = json.loads(text) if text.strip()[:1] != "{" else {}
        if schema is False:
            raise Refusal("nothing matches it")
        if not isinstance(schema, dict) and schema is not True:
            raise Refusal("a schema is an object, true or false")
        text = "{}" if schema is True else text  # which the library takes no options with
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, STRICT_JSON))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    if kind == "choice":
        literals = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return str(llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(literals)))
    if kind == "grammar":
        text = any_to_lark(text)
    return str(llguidance.LLMatcher.grammar_from_lark(text))


def walk(matcher: Any, max_mask_s: float, walk_s: float) -> None:
    """Take tokens by chance, always the same ones, and time their masks. Raises Refusal."""
    numbers = 1
    spent = 0.0
    for place in range(WALK_TOKENS):
        begin = time.thread_time()
        mask = matcher.compute_bitmask()
        took = time.thread_time() - begin
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            said = reason(matcher)
            raise Refusal(f"after {place} tokens of a text that it takes: {said}" if place else said)
        if took > max_mask_s:
            raise Refusal(
                f"a mask takes {took * 1000:.0f} ms; at most {max_mask_s * 1000:g} ms: write it less ambiguous"
            )
        spent += took
        if spent > walk_s or matcher.is_stopped():
            return
        numbers = (numbers * 1103515245 + 12345) % (1 << 31)
        token = pick(mask, numbers)
        if token is None or matcher.try_consume_tokens([token]) != 1:
            return


def pick(mask: bytes, number: int) -> int | None:
    """An allowed token; None where none is."""
    start = number % len(mask)
    places: list[int] = [*range(start, len(mask)), *range(start)]
    for place in places:
        if mask[place]:
            return 8 * place + f"{mask[place]:b}"[::-1].index("1")
    return None


def reason(matcher: Any) -> str:
    """Why the library gave up, in one line."""
    text = str(matcher.get_error()) or "nothing matches it"
    if text.startswith("NoExtension"):
        return "nothing matches it"
    return " ".join(text.partition("<non-verbose")[0].split())


def overlapping(job: dict[str, Any], tokenizer: Any, limits: Any) -> int:
    """The place of the first path whose `oneOf` the library does not take, with `anyOf` for all later ones."""
    schema, paths = json.loads(job["text"]), job["paths"]
    taken, refused = -1, len(paths) - 1
    while refused - taken > 1:
        middle = (taken + refused) // 2
        text = json.dumps(with_any_of(schema, paths[middle + 1 :]))
        matcher = llguidance.LLMatcher(tokenizer, library_grammar("json_schema", text), log_level=0, limits=limits)
        if matcher.is_error() and job["refusal"] in matcher.get_error():
            refused = middle
        else:
            taken = middle
    return refused


def with_any_of(schema: Any, paths: list[list[Any]]) -> Any:
    """A copy of a schema that has `anyOf` for the `oneOf` of these paths, outer ones first."""
    made = copy.deepcopy(schema)
    for path in reversed(paths):
        holder = made
        for step in path:
            holder = holder[step]
        branches = {"anyOf": holder.pop("oneOf")}
        if "anyOf" in holder:
            holder["allOf"] = [*holder.get("allOf", []), branches]
        else:
            holder.update(branches)
    return made


def attempt(job: dict[str, Any], tokenizer: Any, limits: Any, start: dict[str, Any]) -> dict[str, Any]:
    """Try one grammar."""
    try:
        if job["kind"] == "one_of":
            return {"place": overlapping(job, tokenizer, limits)}
        grammar = library_grammar(job["kind"], job["text"])
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise Refusal(reason(matcher))
        walk(matcher, start["max_mask_s"], start["walk_s"])
    except Refusal as error:
        return {"why": str(error)[:MAX_WHY]}
    except MemoryError:
        return {"why": f"it needs more than {start['max_memory_bytes'] >> 20} MiB of memory"}
    except Exception as error:
        return {"why": " ".join(str(error).split())[:MAX_WHY] or type(error).__name__}
    return {"grammar": grammar}


def run_child(job: dict[str, Any], reply: int, tokenizer: Any, limits: Any, start: dict[str, Any]) -> None:
    """Answer one job within its limits."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, even inside one long operation
    signal.setitimer(signal.ITIMER_REAL, job["limit_s"])
    resource.setrlimit(resource.RLIMIT_AS, (start["max_memory_bytes"], start["max_memory_bytes"]))
    answer = json.dumps(attempt(job, tokenizer, limits, start)).encode("ascii")
    with os.fdopen(reply, "wb") as pipe:
        pipe.write(answer)


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes; fewer at the end of the stream."""
    received = bytearray()
    while len(received) < size:
        piece = connection.recv(min(size - len(received), 1 << 20))
        if not piece:
            break
        received += piece
    return bytes(received)


def receive_frame(connection: socket.socket) -> bytes:
    """A frame without a pipe."""
    return receive(connection, int.from_bytes(receive(connection, HEADER_BYTES), "little"))


def main() -> None:
    """Build the tokenizer of the first frames, then try grammars until the stream ends."""
    connection = socket.socket(fileno=os.dup(0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children: the kernel does
    start = json.loads(receive_frame(connection))
    vocabulary = Vocabulary(start["lengths"], receive_frame(connection), start["special"], start["end_id"])
    tokenizer: Any = llguidance.LLTokenizer(vocabulary, eos_token=[start["end_id"]])  # type: ignore[arg-type]
    limits = llguidance.LLParserLimits(**start["limits"])
    connection.sendall(bytes(HEADER_BYTES))
    while True:
        header, pipes, _, _ = socket.recv_fds(connection, HEADER_BYTES, 1)
        if not header:
            return
        header += receive(connection, HEADER_BYTES - len(header))
        job = json.loads(receive(connection, int.from_bytes(header, "little")))
        if os.fork() == 0:
            try:
                connection.close()
                run_child(job, pipes[0], tokenizer, limits, start)
            finally:
                os._exit(0)
        os.close(pipes[0])


if __name__ == "__main__":
    main()
