"""`lowlat generate`: one prompt through any model directory, streamed as text or answered as JSON."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from lowlat.cli.console import print_json, stream_text
from lowlat.cli.options import (
    DIRECTORY,
    IntegerList,
    as_json,
    bundled,
    runtime_options,
    sampling_options,
    sampling_params,
    speculation_options,
    speculative_config,
    trace_config,
)
from lowlat.errors import LowlatError, RequestError

if TYPE_CHECKING:
    from lowlat.cli.running import Generation
    from lowlat.request import StepOutput
    from lowlat.runtime import Runtime

__all__ = ["command"]

MAX_PROMPT_BYTES = 64 << 20


@click.command("generate")
@click.argument("model", type=DIRECTORY, required=False)
@click.option("--prompt", metavar="TEXT", help="The prompt.")
@click.option("--prompt-file", type=click.File("rb"), metavar="FILE", help="Read the prompt from a file; - is stdin.")
@click.option("--token-ids", type=IntegerList(), metavar="1,2,3", help="The prompt as token ids.")
@click.option("--chat", is_flag=True, help="Wrap the prompt as a user's message in the model's chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it; needs --chat.")
@speculation_options
@sampling_options
@runtime_options
@click.option("--trace", metavar="NAMES", help="Log what steps do, on stderr: step,accept,kv,tree.")
@as_json
def command(model: Path | None, **values: Any) -> None:
    """Continue a prompt with MODEL, a Hugging Face directory; without one, with the bundled model and its head.

    Text streams to stdout as it is decided; without a tokenizer, token ids do. With --chat, of a model that answers in
    Harmony's channels a terminal shows the final one as it is and the others dim, a pipe gets the final one alone.
    """
    prompt: str | Sequence[int] = _read_prompt(values)
    if values["logprobs"] is not None and not values["json_output"]:
        raise click.UsageError("--logprobs needs --json")
    params = sampling_params(values)
    traces = trace_config(values["trace"])
    speculative = speculative_config(values, bundled("head") if model is None else None)

    from lowlat.cli.channels import ChannelWriter, channel_dicts
    from lowlat.cli.running import chat_ids, load_runtime, run_request
    from lowlat.text import HarmonyParser

    options = {name: values[name] for name in ("device", "dtype", "executor")}
    directory = bundled("target") if model is None else model
    context = values["max_context"]
    with load_runtime(directory, speculative, context, max_batch=1, traces=traces, **options) as runtime:
        if values["chat"]:
            prompt = chat_ids(runtime.codec, str(prompt), values["system"])
        # a stop string may end within a token: its text is known, the channel's without it is not
        channels = values["chat"] and not params.stop and HarmonyParser.speaks(runtime.codec)
        writer = ChannelWriter(runtime.codec) if channels and runtime.codec is not None else None
        generation = run_request(runtime, prompt, params, None if values["json_output"] else writer or _write)
        if values["json_output"]:
            result = _result(runtime, generation)
            if channels:
                result["channels"] = channel_dicts(runtime.codec, generation.token_ids)
            print_json(result)
        else:
            click.echo()
            if writer is not None and not writer.answered:
                click.echo("no final channel came before the end; --json shows all that was written", err=True)
            click.echo(_closing_line(generation), err=True)
    if generation.error is not None:
        raise LowlatError(f"the request failed: {generation.error}")


def _read_prompt(values: dict[str, Any]) -> str | tuple[int, ...]:
    """The prompt from the one place that was named. Raises RequestError, or a usage error."""
    named = [name for name in ("prompt", "prompt_file", "token_ids") if values[name] is not None]
    if len(named) != 1:
        raise click.UsageError("give the prompt in one of --prompt, --prompt-file and --token-ids")
    if values["system"] is not None and not values["chat"]:
        raise click.UsageError("--system needs --chat")
    if values["token_ids"] is not None:
        if values["chat"]:
            raise click.UsageError("--chat needs a text prompt, not --token-ids")
        return tuple(values["token_ids"])
    if values["prompt_file"] is not None:
        return _read_text(values["prompt_file"])
    return str(values["prompt"])


def _read_text(file: BinaryIO) -> str:
    data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(f"{file.name}: a prompt may have {MAX_PROMPT_BYTES} bytes at most")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file.name}: is not UTF-8: byte {error.start}") from error


def _write(output: "StepOutput") -> None:
    """Stream what a step decided: text, or token ids where there is no tokenizer."""
    if output.text is not None:
        stream_text(output.text)
    else:
        stream_text("".join(f"{token} " for token in output.token_ids))


def _result(runtime: "Runtime", generation: "Generation") -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": generation.text,
        "token_ids": generation.token_ids,
        "finish_reason": generation.finish_reason,
        "stop_reason": generation.stop_reason,
        "device": str(runtime.device_choice.device),
        "metrics": generation.metrics.to_dict(),
    }
    if generation.logprobs:
        result["logprobs"] = [
            {"token_id": entry.token_id, "logprob": entry.logprob, "top": [list(pair) for pair in entry.top]}
            for entry in generation.logprobs
        ]
    if runtime.speculation_error is not None:
        result["speculation_error"] = runtime.speculation_error
    if generation.simulated:
        result["simulated"] = True
    if generation.error is not None:
        result["error"] = generation.error
    return result


def _closing_line(generation: "Generation") -> str:
    metrics = generation.metrics
    parts = [f"{metrics.completion_tokens} tokens", f"{metrics.tokens_per_s:.1f} tokens/s"]
    if metrics.speculation is not None:
        parts.append(f"{metrics.speculation.mean_acceptance_length:.2f} tokens a drafted step")
    parts.append(f"finish: {generation.finish_reason}")
    if generation.simulated:
        parts.append("acceptance was simulated: the text means nothing")
    return ", ".join(parts)
