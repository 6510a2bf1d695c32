"""Commands that ask a server: the same answers as in process, conversations that remember, figures on one page."""

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_calls import answer, lowlat, refusal
from click.testing import CliRunner, Result
from tiny_models import PairPaths

from lowlat.cli import cli
from lowlat.cli.commands import chat as chat_module
from lowlat.cli.connecting import ServedModel
from lowlat.cli.failures import failure
from lowlat.engine.runtime import Runtime
from lowlat.errors import ServerGone
from lowlat.ipc import Server
from lowlat.serving.codec import ServingCodec
from lowlat.serving.engine import RuntimeEngine


def served(folder: Path, model: Path, **options: Any) -> Server:
    folder.chmod(0o700)
    codec = ServingCodec()

    def make_engine() -> RuntimeEngine:
        runtime = Runtime.load(model, max_batch=2, max_context=128, **options)
        codec.bind(runtime.codec)
        return RuntimeEngine(runtime, "a model")

    return Server(make_engine, codec, f"ipc://{folder / 's'}")


def test_a_socket_in_another_user_s_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = Path.stat

    def forbidden(self: Path, **options: bool) -> os.stat_result:
        if self.parent == tmp_path:
            raise PermissionError(13, "Permission denied", str(self))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", forbidden)
    told = refusal("top", "--endpoint", f"ipc://{tmp_path}/s", code=1)
    assert f"no lowlat server answers at ipc://{tmp_path}/s: Permission denied; its folder is another user's" in told


def test_what_may_not_be_looked_at_is_told_by_its_name(tmp_path: Path) -> None:
    error = PermissionError(13, "Permission denied", str(tmp_path))
    assert failure(error).message == f"{tmp_path} cannot be used: Permission denied"


@pytest.fixture(scope="module")
def running(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model with a chat template."""
    with served(tmp_path_factory.mktemp("run"), talker) as server:
        yield server.endpoint


@pytest.fixture
def endpoint(running: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """That server, where the default endpoint leads."""
    monkeypatch.setenv("LOWLAT_ENDPOINT", running)
    return running


@pytest.fixture
def wordless(pair: PairPaths, tmp_path: Path) -> Iterator[str]:
    """A server of a model without a tokenizer."""
    with served(tmp_path, pair.target) as server:
        yield server.endpoint


def chatted(lines: str | bytes, *arguments: object) -> Result:
    result = CliRunner().invoke(cli, ["chat", *map(str, arguments)], input=lines)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


SAMPLING = ("--max-tokens", 12, "--temperature", 0.9, "--seed", 3, "--logprobs", 2, "--logit-bias", "7=1.5", "--json")
CHAT = ("--chat", "--prompt", "hello", "--system", "be kind", *SAMPLING)


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    metrics = {
        name: value
        for name, value in found["metrics"].items()
        if not name.endswith("_s") and name not in ("request_id", "server")
    }
    return {**found, "metrics": metrics}


@pytest.mark.parametrize("prompt", [("--prompt", "naïve fox", *SAMPLING), CHAT, ("--token-ids", "5,6,7", *SAMPLING)])
def test_a_server_answers_as_the_process_itself_does(endpoint: str, talker: Path, prompt: tuple[object, ...]) -> None:
    here = answer("generate", talker, "--max-context", 128, *prompt)
    for connect in (["--connect"], ["--endpoint", endpoint]):
        there = answer("generate", *connect, *prompt)
        assert list(there) == list(here) and "request_id" in there["metrics"]
        assert without_times(there) == without_times(here)


def test_streamed_text_is_the_same(endpoint: str, talker: Path) -> None:
    common = ("--prompt", "the quick", "--max-tokens", 20)
    result = lowlat("generate", "--connect", endpoint, *common)
    assert result.stdout == lowlat("generate", talker, *common).stdout
    alone = "the quick", "--max-tokens", 20  # PROMPT in its place
    for where in (["--endpoint", endpoint], ["--endpoint"]):
        assert lowlat("generate", *where, *alone).stdout == result.stdout
    assert lowlat("generate", talker, *alone).stdout == result.stdout
    assert "20 tokens, " in result.stderr and "cut at 20 tokens; --max-tokens allows more" in result.stderr


def test_a_model_without_a_tokenizer_gives_token_ids(wordless: str, pair: PairPaths) -> None:
    common = ("--token-ids", "5,6,7", "--max-tokens", 6)
    assert lowlat("generate", "--connect", wordless, *common).stdout == lowlat("generate", pair.target, *common).stdout
    assert answer("generate", "--connect", wordless, *common, "--json")["text"] is None
    assert "has no tokenizer; send token ids" in refusal("generate", "--connect", wordless, "--prompt", "x")
    assert "has no tokenizer" in refusal("chat", "--endpoint", wordless)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--head", "x"), "--draft-model is settled where the server is started"),
        (("--device", "cpu"), "--device is settled"),
        (("--max-context", 8), "--max-context is settled"),
        (("--trace", "step"), "--trace is settled"),
        (("-S", 2), "--num-speculative-tokens is settled"),
        (("--strict",), "--strict is settled"),
        (("--temperature", -1), "temperature must be from 0.0 to 100.0"),
        (("--max-tokens", 1000), "exceed 128 (max_context)"),
    ],
)
def test_what_a_server_cannot_be_asked_is_refused(endpoint: str, option: tuple[object, ...], message: str) -> None:
    assert message in refusal("generate", "--connect", endpoint, "--prompt", "x", *option)


def test_options_of_a_model_want_one_where_no_server_is_named() -> None:
    advice = "leave it out to talk with a running server, or name MODEL"
    assert f"--device is settled where the server is started; {advice}" in refusal("chat", "--device", "cpu")


def test_a_model_is_refused_beside_connect(endpoint: str, talker: Path) -> None:
    assert "MODEL is settled" in refusal("generate", talker, "--connect", endpoint, "--prompt", "x")
    assert "--curve-keys needs --endpoint" in refusal("generate", "--curve-keys", talker, "--prompt", "x")
    assert "server.key" in refusal("generate", "--connect", endpoint, "--curve-keys", talker, "--prompt", "x")


def test_where_no_server_answers_the_message_says_what_to_do(tmp_path: Path) -> None:
    from lowlat.ipc import Client

    with pytest.raises(ServerGone, match="`lowlat serve` starts one"):
        Client(f"ipc://{tmp_path / 'none'}", connect_timeout_s=0.1).connect()
    assert "must be ipc://" in refusal("top", "--endpoint", "nonsense")


def test_a_chat_goes_on_where_its_file_ended(talker: Path, tmp_path: Path) -> None:
    """In another runtime, with the answers of one chat; the file is refused by name where results' bits differ."""
    own, file = (talker, "--max-context", 160, "--max-tokens", 6), tmp_path / "chat"
    whole = chatted("hello\nand then?\n", *own, "--system", "be kind")
    parts = [
        chatted("hello\n", *own, "--system", "be kind", "--session", file),
        chatted("and then?\n", *own, "--session", file),
    ]
    assert [each.exit_code for each in parts] == [0, 0], parts[0].output
    assert "".join(each.stdout for each in parts) == whole.stdout and file.stat().st_mode & 0o777 == 0o600
    refused = chatted("hello\n", *own, "--dtype", "bfloat16", "--session", file)
    assert refused.exit_code != 0 and "has numerics" in refused.stderr
    file.write_bytes(file.read_bytes()[:-1])
    refused = chatted("hello\n", *own, "--session", file)
    assert refused.exit_code != 0 and "is torn or altered" in refused.stderr
    assert "leave out --system" in chatted("x\n", *own, "--system", "y", "--session", file).output


@pytest.mark.parametrize("local", [False, True])
def test_a_chat_remembers_what_was_said(endpoint: str, talker: Path, local: bool) -> None:
    where = (talker, "--max-context", 128) if local else ()
    result = chatted("hello\n\nand then?\n", *where, "--max-tokens", 6, "--system", "be kind")
    assert result.exit_code == 0, result.output
    first = answer(
        "generate", talker, "--chat", "--prompt", "hello", "--system", "be kind", "--max-tokens", 6, "--json"
    )
    said = f"[system] be kind\n[user] hello\n[assistant] {first['text']}\n[user] and then?\n> "
    from text_tokenizers import byte_level

    ids = byte_level().encode(said, add_special_tokens=False).ids
    second = answer("generate", talker, "--token-ids", ",".join(map(str, ids)), "--max-tokens", 6, "--json")
    assert result.stdout == f"{first['text']}\n{second['text']}\n"
    assert result.stderr.count("the answer was cut at 6 tokens; --max-tokens allows more\n") == 2


def test_a_plain_chat_continues_each_line_alone(endpoint: str, talker: Path) -> None:
    result = chatted("the quick\nthe quick\n", "--plain", "--max-tokens", 6)
    once = lowlat("generate", talker, "--prompt", "the quick", "--max-tokens", 6).stdout
    assert result.stdout == 2 * once
    assert chatted(b"the quick\nthe \xff", "--plain", "--max-tokens", 6).stderr.endswith(
        "error: <stdin>: line 2 is not UTF-8: byte 4\n"
    )
    assert "leave out --plain" in refusal("chat", "--plain", "--system", "x")
    assert "--logprobs is for" in refusal("chat", "--logprobs", 1)


def test_a_conversation_that_grew_too_long_ends_without_a_terminal(endpoint: str) -> None:
    result = chatted("hello " * 60 + "\nnever\n", "--max-tokens", 6)
    assert result.exit_code == 2 and "exceed 128 (max_context)" in result.stderr


def test_on_a_terminal_commands_work_and_errors_do_not_end_the_chat(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lowlat.ipc import Client

    lines = ["/help", "hello", "/retry", "hello " * 60, "/nonsense", "/clear", "/retry", "a\nb", "/quit", "never"]
    monkeypatch.setattr(chat_module, "_lines", lambda on_terminal: iter(lines))
    with Client(endpoint) as client:
        chat = chat_module._Chat(ServedModel(client), {"max_tokens": 4}, None, plain=False)
        chat._on_terminal = True
        chat.run()
        assert [message["content"] for message in chat._messages][:1] == ["a\nb"] and len(chat._messages) == 2
    shown = capsys.readouterr()
    hello, again, _ = shown.out.split("\n", 2)
    assert hello == again  # greedy, and the same conversation
    assert "/retry          answer" in shown.err and "/clear forgets the conversation" in shown.err
    assert (
        "/nonsense is no command; /help lists them" in shown.err
        and "/retry answers the last message again, and" in shown.err
    )
    assert f" at {client.endpoint}; /help says more" in shown.err


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("local", [False, True])
def test_ctrl_c_ends_an_answer_and_not_the_chat(
    endpoint: str, talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], local: bool
) -> None:
    from lowlat.cli.local import LocalModel
    from lowlat.ipc import Client

    monkeypatch.setattr(chat_module, "_lines", lambda on_terminal: iter(["hello", "again"]))
    num_interrupts = 0

    def write(output: Any) -> None:
        nonlocal num_interrupts
        if not num_interrupts and output.token_ids:
            num_interrupts += 1
            signal.raise_signal(signal.SIGINT)

    def slow_step(runtime: Runtime, *arguments: Any) -> Any:
        time.sleep(0.05)  # so the server cannot have ended the answer before it hears of Ctrl-C
        return step(runtime, *arguments)

    monkeypatch.setattr(chat_module, "_Writer", lambda: write)
    step = Runtime.step
    monkeypatch.setattr(Runtime, "step", slow_step)
    with Client(endpoint) as client, Runtime.load(talker, max_batch=1, max_context=128) as runtime:
        model = LocalModel(runtime) if local else ServedModel(client)
        chat = chat_module._Chat(model, {"max_tokens": 12}, None, plain=False)
        chat._on_terminal = True
        chat.run()
        assert [message["role"] for message in chat._messages] == ["user", "assistant"] * 2
        assert client.health().num_running == 0 and not runtime.busy
        runtime.kvcache.invariants()
    assert "[cancelled]" in capsys.readouterr().err


def test_top_shows_a_snapshot_as_a_page_and_as_json(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served(tmp_path, talker) as server:
        monkeypatch.setenv("LOWLAT_ENDPOINT", server.endpoint)
        check_top(server.endpoint)


def check_top(endpoint: str) -> None:
    """A server that has answered nobody yet is asked once."""
    answer("generate", "--connect", endpoint, "--prompt", "the quick", "--max-tokens", 6, "--json")
    found = answer("top", "--once", "--json")
    assert found["endpoint"] == endpoint and found["num_requests"] == 1 and found["ends"] == {"length": 1}
    assert found["inter_token_ms"]["count"] <= 5  # several steps may share a message, the first of all too
    deadline = time.monotonic() + 10.0
    while answer("top", "--once", "--json")["engine"]["kv"]["num_used"]:  # the engine's own figures come a moment later
        assert time.monotonic() < deadline
    result = lowlat("top")
    assert result.exit_code == 0
    parts = ("a model on cpu, serving", "tokens/s", "0/2", "free", "first token", "between tokens", "length 1", "KV")
    assert all(part in result.stdout for part in parts), result.stdout


def test_top_ends_at_q_and_gives_the_terminal_back_as_it_was(endpoint: str) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-c", "from lowlat.cli import main; main()", "top", "--interval", "3600"]
    given: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "env": {**os.environ, "TERM": "xterm"}}
    with subprocess.Popen(command, **given) as process:
        shown = b""
        while b"serving" not in shown:
            assert select.select([ours], [], [], 20.0)[0], shown
            shown += os.read(ours, 65536)
        os.write(ours, b"xq")
        while process.poll() is None:  # a terminal that nobody reads from would stop it
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 65536)
        assert process.wait() == 0
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_top_shows_slots_and_acceptance(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    from lowlat.cli.commands.top import render

    times = {"count": 9, "p50": 1.5, "p90": 2.5, "p99": 3.5, "max": 1234.0}
    slot = {"slot": 1, "phase": "decoding", "prompt_tokens": 7, "completion_tokens": 50, "max_tokens": 100}
    speculation = {
        "mean_acceptance_length": 2.5,
        "mean_acceptance_rate": 0.5,
        "simulated": True,
        "acceptance_by_position": [0.8, 0.4, 0.0],
        "drafted_by_position": [10, 10, 0],
    }
    engine = {"device": "cuda:0", "slots": [slot], "eagle_speculation": speculation}
    engine["specpv"] = {"lossy": True, "partial_steps": 77, "refreshes": 3}
    held = {"ranks": [0], "weights_bytes": 40 << 30, "kv_bytes": 12 << 30, "state_bytes": 1 << 30} | {
        "scratch_bytes": 1 << 30, "prefill_bytes": 0, "free_bytes": 20 << 30, "total_bytes": 80 << 30
    }  # fmt: skip
    full = {**held, "device": "cuda:1", "ranks": [1], "free_bytes": 0}
    engine["memory"] = [{**held, "device": "cuda:0"}, full]
    stats = {"model": "m", "num_slots": 2, "uptime_s": 3700.0, "inter_token_ms": times, "engine": engine}
    Console(width=100).print(render({**stats, "refusals": {"busy": 3}}, "ipc:///x"))
    shown = capsys.readouterr().out
    parts = ("1 h 1 min", "decoding", "50", "1,234.00", "refused: busy 3", "2.50 tokens", "(simulated)", " 80%", " 40%")
    assert "SpecPV    lossy: 77 partial steps" in shown
    assert all(part in shown for part in parts), shown
    assert "draft 3" not in shown
    rows = [line for line in shown.splitlines() if line.startswith("memory")]
    assert len(rows) == 2 and "cuda:0" in rows[0] and "cuda:1" in rows[1]
    assert "60.00 GiB/80.00 GiB" in rows[0] and "20.00 GiB free" in shown and "80.00 GiB/80.00 GiB" in rows[1]
    Console(width=100).print(render({}, "ipc:///x"))  # a server of another version may say less


def test_commands_that_ask_a_server_load_neither_torch_nor_numpy() -> None:
    import subprocess

    code = (
        "import sys, lowlat.cli.connecting; from lowlat.cli.commands import chat, top, serve\n"
        "import lowlat.cli.commands.generate; print(sorted({'torch', 'numpy', 'numba'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_figures_are_redrawn_where_a_terminal_can(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowlat.cli.commands import top

    assert not top.can_redraw()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    for term, redrawn in (("xterm", True), ("dumb", False)):
        monkeypatch.setenv("TERM", term)
        assert top.can_redraw() is redrawn
