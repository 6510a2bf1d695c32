"""Faults are found before torch is imported, and told in one line, as JSON under --json, whatever is wrong."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from cli_calls import answer, lowlat, refusal
from click.testing import CliRunner
from cuda import pathfinder
from served import eventually

from lowlat.cli import cli
from lowlat.tools import precompile

LOAD_S = 20.0  # in which Ctrl-C ends what loads; the answer takes longer
LOWLAT = (sys.executable, "-m", "lowlat.cli")
FULL = Path("/dev/full")
MISSING = "no such directory; expected a Hugging Face model directory, or ORG/NAME of a repository"

# the paths that stand for a kind of wrong one, and what each command says of it; {out} is a file, not a directory
WRONG_PATHS = [
    ("generate /no/model Hello", MISSING),
    ("generate {file} Hello", "is a file; expected"),
    ("generate {empty} Hello", "has no config.json"),
    ("generate --prompt Hello --draft-model /no/model --strict", MISSING),
    ("generate --prompt-file /no/file", "No such file or directory"),
    ("generate --prompt-file {empty}", "Is a directory"),
    ("generate --prompt x --endpoint ipc:///no/server.sock", "there is no such socket; `lowlat serve` starts one"),
    ("chat /no/model", MISSING),
    ("chat --endpoint ipc:///no/server.sock", "there is no such socket"),
    ("top --endpoint ipc:///no/server.sock", "there is no such socket"),
    ("inspect /no/model", MISSING),
    ("inspect qwen", MISSING),
    ("inspect {file}", "is a file; expected"),
    ("inspect model --draft-model /no/model", MISSING),
    ("inspect draft-model /no/model --target org/name", MISSING),
    ("inspect tree /no/file.json", "no such file"),
    ("inspect tree {empty}", "is a directory; a file is expected"),
    ("inspect run /no/model", MISSING),
    ("inspect run --prompts /no/file", "no such file"),
    ("inspect quality --text /no/file", "no such file"),
    ("serve --model /no/model", MISSING),
    ("serve --config /no/file", "no such file"),
    ("serve --config {empty}", "is a directory; a file is expected"),
    ("serve --config {toml}", "unknown setting 'modl'; did you mean 'model'?"),
    ("serve --curve-keys /no/keys", "no such directory"),
    ("serve --endpoint ipc://{empty}/" + "s" * 120, "a socket's may have 107"),
    ("serve --max-batch 99", "max_batch must be from 1 to 32"),
    ("serve --cache-dir {file}/new", "cache_dir {file}/new cannot be used: Not a directory; name another"),
    ("serve --http eighty", "is not [HOST:]PORT"),
    ("serve --http 70000", "is not [HOST:]PORT"),
    ("http ::1:8000", "an IPv6 address stands in brackets"),
    ("quantize /no/model --format fp8 --out {empty}/new", MISSING),
    ("quantize org/name --format fp8 --out {file}/new", "{file} is a file"),
    ("draft-model shrink org/name --out {empty}/new --draft-vocab 9 --text /no/file", "no such file"),
    ("compare /no/model", MISSING),
    ("compare org/name --save /etc/passwd/file", "/etc/passwd is no directory"),
    ("compare org/name --save {empty}", "it is a directory; name a file"),
    ("doctor --prompts /no/file", "no such file"),
    ("doctor --target /no/model --draft-model org/name", MISSING),
    ("bench run single --model /no/model", MISSING),
    ("bench run single --out {file}/new", "{file} is a file"),
    ("bench report {file}", "is a file; a directory is expected"),
    ("bench compare /no/old {file}", "no such file or directory"),
    ("tune --model /no/model", MISSING),
    ("compile /no/model", MISSING),
    ("profile /no/model", MISSING),
    ("demo --chat --from /no/file", "no such file"),
    ("serv", "Did you mean 'serve'?"),
    ("inspect modl", "Did you mean 'model'?"),
    ("org/name", "Did you mean `lowlat chat org/name`?"),
    ("generate --promt x", "Did you mean"),
    ("run org/name", "No such command 'run'. Did you mean 'chat'?"),
    ("serve --port 8000", "No such option '--port'. Did you mean '--http [HOST:]PORT'?"),
    ("serve --gpu-memory-utilization 0.9", "Did you mean '--kv-cache-gib X|free'?"),
    ("serve --mem_fraction_static 0.9", "Did you mean '--kv-cache-gib X|free'?"),
    ("serve --kv-cache-gib most", "must be a number or 'free', got 'most'"),
    ("serve --kv-cache-gib 1 --set kv_blocks=9", "kv_cache_gib 1.0 and kv_blocks 9 both size the KV cache"),
    ("serve -c 512", "Did you mean '--max-context N'?"),
    ("generate --max_tokens 3 x", "Did you mean '--max-tokens N'?"),
    ("generate --model org/name x", "generate MODEL'?"),
    ("generate {gguf} x", "GGUF is not read"),
    ("generate {mute} x", "a text prompt needs tokenizer.json"),
    ("generate --set max_contxt=1 x", "no option is called 'max_contxt'; did you mean '--max-context'?"),
    ("generate --set forced_rows=32 x", "generate --help-all` says more"),
    ("generate --set max_context x", "max_context has a flag: --max-context"),
    ("generate --set max_path_len x", "--set takes NAME=VALUE, got 'max_path_len'"),
    ("generate -S two x", "must be an integer or 'auto', got 'two'"),
    ("serve /no/model", MISSING),
    ("serve /no/model --model /no/other", "give the model once"),
    ("chat org/name --session /no/folder/file", "there is no directory /no/folder"),
    ("chat org/name --session {empty}", "it is a directory; name a file"),
]
PROGRAM = """
import json, sys
from click.testing import CliRunner
from lowlat.cli import cli
for line in sys.stdin:
    result = CliRunner().invoke(cli, json.loads(line))
    heavy = sorted({"torch", "numpy", "transformers"} & set(sys.modules))
    print(json.dumps([result.exit_code, result.stdout, result.stderr, heavy]))
"""


def test_what_is_wrong_is_found_before_torch_is_imported(tmp_path: Path) -> None:
    places = {"file": tmp_path / "file", "empty": tmp_path / "empty", "toml": tmp_path / "a.toml"}
    places |= {"gguf": tmp_path / "a.gguf", "mute": tmp_path / "mute"}
    places["gguf"].write_text("GGUF")
    places["mute"].mkdir()
    (places["mute"] / "config.json").write_text("{}")
    places["file"].write_text("text")
    places["toml"].write_text('modl = "x"')
    places["empty"].mkdir()
    lines = [json.dumps([word.format(**places) for word in command.split()]) for command, _ in WRONG_PATHS]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input="\n".join(lines), capture_output=True, text=True, check=True, timeout=120
    )
    answers = (json.loads(line) for line in done.stdout.splitlines())
    for (command, message), (code, stdout, stderr, heavy) in zip(WRONG_PATHS, answers, strict=True):
        assert heavy == [], command
        assert message.format(**places) in stderr, (command, stderr)
        assert code == (1 if "no such socket" in message else 2), command
        assert stdout == "" and stderr.startswith("error: ") and len(stderr.splitlines()) == 1, (command, stderr)


def test_compiling_tells_at_once_which_library_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load(library: str) -> None:
        if library == "nvrtc":
            raise pathfinder.DynamicLibNotFoundError(library)

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", load)
    monkeypatch.setattr(precompile, "kernels_of", lambda *_: pytest.fail("programs are lowered before it is told"))
    found = refusal("compile", "--gpu", "h100", "--out", tmp_path / "kernels", code=1)
    assert "nvrtc was not found; pip install 'nvidia-cuda-nvrtc>=13,<14'" in found


def test_kernels_are_compiled_into_a_folder_that_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWLAT_KERNEL_CACHE", "/dev/null/kernels")
    assert "/dev/null/kernels cannot be made: /dev/null is a file" in refusal("compile")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["inspect", "/no/model", "--json"], 2),
        (["generate", "--json"], 2),
        (["generate", "--json", "--max-tokens", "x", "--prompt", "y"], 2),
        (["doctor", "--json", "--head", "org/name"], 2),
        (["top", "--json", "--endpoint", "ipc:///no/server.sock"], 1),
        (["inspect", "quality", "--text", "/no/file", "--json"], 2),
        (["serve", "--json", "--http", "eighty"], 2),
    ],
)
def test_an_error_is_json_where_json_is_asked_for(arguments: list[str], code: int) -> None:
    found = answer(*arguments, code=code)
    assert set(found) == {"error"} and found["error"] in lowlat(*arguments).stderr


def test_ports_and_keys_are_checked_before_anything_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr("lowlat.cli.serving.Server", None)
    own = ("serve", "--endpoint", f"ipc://{tmp_path}/s.sock")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        for where in (f"127.0.0.1:{taken.getsockname()[1]}", f"[::1]:{six.getsockname()[1]}"):
            assert "Address already in use; choose another" in refusal(*own, "--http", where)
            assert "Address already in use" in refusal("serve", "--endpoint", f"tcp://{where}")
    assert "Name or service not known" in refusal(*own, "--http", "no.invalid:8000")
    monkeypatch.setenv("LOWLAT_API_KEY", "short")
    for command in ((*own, "--http", "0"), ("http", "0")):
        assert "LOWLAT_API_KEY must have 16 characters at least, got 5" in refusal(*command)
    monkeypatch.setenv("LOWLAT_API_KEY", "a key with spaces in it")
    assert "LOWLAT_API_KEY must be of printable ASCII without spaces, and its character 2" in refusal("http", "0")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--show-config"], ["serve", "--show-config", "--json"]])
def test_a_full_disk_is_told_in_a_line(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run([*LOWLAT, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


def test_a_reader_that_leaves_and_a_closed_stdout_are_no_news() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        gone = subprocess.run(
            [*LOWLAT, "serve", "--show-config"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(writing)
    assert gone.returncode == 1 and gone.stderr == ""
    closed = subprocess.run(["sh", "-c", f"{' '.join(LOWLAT)} --help >&-"], capture_output=True, text=True, timeout=60)
    assert closed.returncode == 0 and closed.stderr == ""


@pytest.mark.second
def test_the_newline_at_a_prompts_end_is_not_of_it(talker: Path, tmp_path: Path) -> None:
    def num_tokens(text: bytes) -> int:
        file = tmp_path / "prompt"
        file.write_bytes(text)
        arguments = ["generate", str(talker), "--max-tokens", "1", "--json", "--prompt-file"]
        read = answer(*arguments, file)
        piped = CliRunner().invoke(cli, [*arguments, "-"], input=text)
        assert json.loads(piped.stdout)["token_ids"] == read["token_ids"]
        return int(read["metrics"]["prompt_tokens"])

    assert num_tokens(b"ab\n") == num_tokens(b"ab\r\n") == num_tokens(b"ab") == num_tokens(b"ab\n\n") - 1


def test_a_prompt_that_is_not_utf8_is_refused(talker: Path) -> None:
    arguments: list[str | bytes] = [*LOWLAT, "generate", str(talker), b"a\xff", "--max-tokens", "1"]
    done = subprocess.run(arguments, capture_output=True, env={**os.environ, "LC_ALL": "C"}, timeout=120)
    assert done.returncode in (1, 2) and done.stderr.splitlines()[-1].startswith(b"error: ")
    assert b"not UTF-8" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.second
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("command", ["serve", "generate --prompt Hello --max-tokens 1900 --ignore-eos"])
def test_ctrl_c_ends_quietly_while_it_loads(command: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    with subprocess.Popen(
        [*LOWLAT, *command.split()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stderr is not None
        maps = Path(f"/proc/{process.pid}/maps")
        eventually(lambda: "libtorch" in maps.read_text(), timeout_s=60.0)  # its import has begun, and takes a while
        process.send_signal(signal.SIGINT)
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(LOAD_S)
        error = process.stderr.read() if code is not None else ""
        process.kill()
    assert "Traceback" not in error and "terminate" not in error
    assert code == 130 or (command == "serve" and code == 0)  # one that served already is drained


def test_sigterm_ends_a_containers_first_process_while_it_loads() -> None:
    """The kernel drops a signal that the first process of a container has no handler for."""
    program = (
        "import os, signal; import lowlat.cli as cli; os.getpid = lambda: 1\n"
        "cli.cli = lambda **_: signal.raise_signal(signal.SIGTERM)\n"
        "cli.main()"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 128 + signal.SIGTERM
