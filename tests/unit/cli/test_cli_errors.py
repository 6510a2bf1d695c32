"""Quick help, messages and exit codes, and what reaches a terminal."""

import inspect
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cli_calls import lowlat, refusal
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_models import PairPaths, make_target

from lowlat import Runtime
from lowlat.cli import COMMANDS, cli, console
from lowlat.cli.help import DeclaredOption
from lowlat.cli.options import parse_biases
from lowlat.engine.calls.streams import Stream

HELP_LIMIT_S = 0.3
SCREEN_LINES, SCREEN_COLUMNS = 25, 82  # click's own pages are wider than 80 where a line is one word
BUSY_MACHINE = 4  # times slower than an idle one


def command_lines(group: click.Group = cli, words: str = "") -> Iterator[tuple[str, click.Command]]:
    """Every command that runs, after the words that name it."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from command_lines(command, f"{words}{name} ")
        elif command is not None:
            yield words + name, command


COMMAND_LINES = dict(command_lines())


def test_help_is_quick_and_loads_no_torch() -> None:
    program = (
        "import sys\nfrom lowlat.cli import main\ntry:\n    main()\nfinally:\n"
        "    heavy = {'torch', 'rich', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "    print('HEAVY', sorted(heavy))\n"
    )
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True, timeout=60
        )
        times.append(time.perf_counter() - start)
        assert "HEAVY []" in done.stdout
        assert all(name in done.stdout for name in COMMANDS)
    assert statistics.median(times) < BUSY_MACHINE * HELP_LIMIT_S


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = lowlat(name, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: cli {name}")


@pytest.mark.parametrize("name", ["inspect", "bench", "draft-model"])
def test_help_of_a_group_has_whole_sentences(name: str) -> None:
    said = lowlat(name, "--help").stdout
    assert "..." not in said.split("Commands:")[1]
    own = [line for line, each in COMMAND_LINES.items() if line.startswith(f"{name} ") and not each.hidden]
    assert own and all(f"  {line.removeprefix(name).strip()} " in said for line in own)


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_help_has_two_screens_and_help_all_every_option(name: str) -> None:
    shown = lowlat(*name.split(), "--help").stdout
    assert len(shown.splitlines()) <= 2 * SCREEN_LINES and max(map(len, shown.splitlines())) <= SCREEN_COLUMNS
    if "--help-all" not in shown:
        return
    whole = lowlat(*name.split(), "--help-all").stdout
    for option in COMMAND_LINES[name].params:
        if isinstance(option, DeclaredOption) and option.hidden:
            assert f"  {option.declared.key}=" in whole
        elif isinstance(option, click.Option) and not option.hidden:
            assert all(spelling in whole for spelling in option.opts)


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_every_commands_function_takes_what_its_options_give(name: str) -> None:
    command = COMMAND_LINES[name]
    assert command.callback is not None
    names = [each.name for each in command.params if each.expose_value and each.name is not None]
    signature = inspect.signature(command.callback)
    context = [None] if next(iter(signature.parameters), None) == "context" else []  # click.pass_context gives it one
    signature.bind(*context, **dict.fromkeys(names))


QUICK = ("--version", "serve --help", "models --help", "doctor --help", "inspect step --help", "inspect model --help")


@pytest.mark.parametrize("words", QUICK)
def test_help_and_version_load_neither_torch_nor_a_compiler(words: str) -> None:
    found = loaded_by("from lowlat.cli import main\nmain()", *words.split())
    assert not {"torch", "numpy", "numba", "llvmlite", "transformers", "tokenizers"} & found


def test_the_package_alone_loads_neither_torch_nor_a_compiler() -> None:
    found = loaded_by("import lowlat, lowlat.ipc")
    assert "lowlat.ipc" in found
    assert not {"torch", "numpy", "numba", "llvmlite", "transformers", "tokenizers"} & found


@pytest.mark.second
def test_a_step_is_planned_without_symbolic_shapes() -> None:
    """gpt-oss has biases in the order of packed rows, of experts too: none is indexed as torch traces it."""
    found = loaded_by("from lowlat.cli import main\nmain()", "inspect", "step", "gpt-oss-20b")
    assert {"torch", "numba"} <= found
    assert not {"sympy", "transformers"} & found


def loaded_by(program: str, *words: str) -> set[str]:
    """The modules that a process of its own has at the end of a program."""
    ending = "\nfinally:\n    print(*sys.modules, sep='\\n', file=sys.stderr)"
    body = "\n".join(f"    {line}" for line in program.splitlines())
    code = f"import sys\ntry:\n{body}{ending}"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stderr.splitlines())


def test_unknown_command_and_option_are_usage_errors() -> None:
    assert "No such command 'nothing'" in refusal("nothing")
    assert "--nothing" in refusal("generate", "--nothing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--token-ids", "1"], "one of --prompt, --prompt-file and --token-ids"),
        ([], "one of --prompt, --prompt-file and --token-ids"),
        (["--token-ids", "1,x"], "'x' is not an integer"),
        (["--token-ids", "1", "--chat"], "--chat needs a text prompt"),
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--token-ids", "1", "--logprobs", "2"], "--logprobs needs --json"),
        (["--token-ids", "1", "--temperature", "-1"], "temperature must be from 0.0 to 100.0, got -1.0"),
        (["--token-ids", "1", "--top-p", "0"], "top_p must be above 0.0"),
        (["--token-ids", "1", "--logit-bias", "5"], "'5' is not ID=BIAS"),
        (["--token-ids", "1", "--trace", "everything"], "'everything' is no trace"),
        (["--token-ids", "1", "-S", "2"], "--num-speculative-tokens needs a draft model (--draft-model DIR)"),
        (["--token-ids", "1,97"], "prompt token 1 is 97; ids are integers from 0 to 96"),
        (["--token-ids", "-3"], "prompt token 0 is -3"),
        (["--token-ids", ""], "the prompt is empty"),
        (["--token-ids", "1", "--max-tokens", "600"], "exceed 512 (max_context)"),
        (["--token-ids", "1", "--max-context", "513"], "max_context 513 exceeds the model's"),
        (["--token-ids", "1", "--stop-token-id", "97"], "97 is not a token id"),
        (["--token-ids", "1", "--stop", "x"], "stop strings need tokenizer.json"),
        (["--prompt", "a"], "a text prompt needs tokenizer.json"),
        (["--prompt", "a", "--chat"], "a chat needs tokenizer.json"),
        (["--token-ids", "1", "--device", "tpu"], "device must be 'auto'"),
        (["--token-ids", "1", "--device", "cpu", "--executor", "graph"], "'graph' needs an NVIDIA GPU"),
    ],
)
def test_generate_refuses_by_name(pair: PairPaths, arguments: list[str], message: str) -> None:
    assert message in refusal("generate", pair.target, *arguments)


def test_unexpected_errors_are_one_line_and_debug_shows_them(pair: PairPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(Runtime, "load", fail)
    arguments = ("generate", str(pair.target), "--token-ids", "1")
    message = refusal(*arguments, code=1)
    assert "KeyError: 'surprise'" in message and "--debug" in message
    result = CliRunner().invoke(cli, ["--debug", *arguments])
    assert isinstance(result.exception, KeyError)


def test_interruption_ends_with_130(pair: PairPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_arguments: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stream, "__next__", interrupt)
    assert refusal("generate", pair.target, "--token-ids", "1", code=130).endswith("interrupted")


def test_terminals_get_no_control_characters_and_pipes_the_very_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b]0;title\x07b\tc\n"
    console.stream_text(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console.stream_text(text)
    assert capsys.readouterr().out == "a\N{REPLACEMENT CHARACTER}]0;title\N{REPLACEMENT CHARACTER}b\tc\n"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 << 20, "5.00 MiB"), (3 << 40, "3072.00 GiB")],
)
def test_bytes_in_words(count: int, text: str) -> None:
    assert console.format_bytes(count) == text


def test_json_holds_no_nan() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        console.print_json({"x": float("nan")})


def test_biases_are_read_or_refused() -> None:
    assert parse_biases(("3=1.5", "7=-2")) == {3: 1.5, 7: -2.0}
    for entries in (("3",), ("=1",), ("3=x",), ("3=1", "3=2")):
        with pytest.raises(Exception, match=r"is not ID=BIAS|is given twice"):
            parse_biases(entries)


def test_a_broken_checkpoint_is_one_line(pair: PairPaths, tmp_path: Path) -> None:
    make_target(tmp_path, "llama", num_hidden_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = refusal("generate", tmp_path, "--token-ids", "1")
    assert "error: " in message and "model.norm.weight" in message
