"""`lowlat generate`: one prompt through any model directory, or a running server, streamed as text or as JSON."""

import logging
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import click

from lowlat.cli.connecting import asked, connected, refuse_the_servers_own, server_options
from lowlat.cli.console import print_json, stream_text
from lowlat.cli.generation import Generation
from lowlat.cli.help import SectionedCommand
from lowlat.cli.options import (
    DIRECTORY,
    IntegerList,
    as_json,
    asked_sampling,
    bundled,
    defaults_option,
    runtime_options,
    runtime_values,
    sampling_options,
    sampling_params,
    sampling_values,
    speculation_options,
    speculative_config,
    trace_config,
)
from lowlat.cli.paths import check_model, check_tokenizer
from lowlat.errors import LowlatError, RequestError
from lowlat.ipc import Chunk
from lowlat.options.model_names import find_repository
from lowlat.options.request import SamplingParams

__all__ = ["command"]

logger = logging.getLogger("lowlat")
MAX_PROMPT_BYTES = 64 << 20


@click.command("generate", cls=SectionedCommand)
@click.argument("model", type=DIRECTORY, required=False)
@click.argument("text", metavar="[PROMPT]", required=False)
@click.option("--prompt", metavar="TEXT", help="The prompt.")
@click.option(
    "--prompt-file",
    type=click.File("rb"),
    metavar="FILE",
    help="Read the prompt from a file; - is stdin. A newline at its end is not of it.",
)
@click.option("--token-ids", type=IntegerList(), metavar="1,2,3", help="The prompt as token ids.")
@click.option("--chat", is_flag=True, help="The prompt is a user's message, for the chat template.")
@click.option("--system", metavar="TEXT", help="A system message before it; needs --chat.")
@click.option(
    "--allow-special", is_flag=True, help="Special tokens that the prompt spells are tokens; by default they are text."
)
@speculation_options
@sampling_options
@defaults_option
@runtime_options
@click.option("--trace", metavar="NAMES", help="Log what steps do, on stderr: step,accept,kv,tree.")
@server_options
@as_json
def command(model: Path | None, **values: Any) -> None:
    """Continue PROMPT with MODEL, a Hugging Face directory or ORG/NAME; without one, with the bundled pair.

    With --endpoint a running server does it, and PROMPT stands alone. Text, or token ids where there is no tokenizer,
    streams to stdout. With --chat a terminal shows the channels of Harmony before the final one dim, a pipe the final
    one alone.
    """
    served = values["endpoint"] is not None
    if served and not _named_prompts(values):  # PROMPT is in the place of MODEL or ENDPOINT
        if model is not None:
            model, values["text"] = None, str(model)
        elif values["endpoint"] and "://" not in values["endpoint"]:
            values["text"], values["endpoint"] = values["endpoint"], ""
    if served:
        refuse_the_servers_own(click.get_current_context(), model)
    elif values["curve_keys"] is not None:
        raise click.UsageError("--curve-keys needs --endpoint")
    prompt: str | Sequence[int] = _read_prompt(model, values)
    if values["logprobs"] is not None and not values["json_output"]:
        raise click.UsageError("--logprobs needs --json")
    sampling_params(values)  # refuse values out of range before anything is loaded or asked
    if served:
        generation, device = _ask_server(prompt, values)
        _show(generation, values, device, None)
    else:
        _run_here(model, prompt, values)


def _run_here(model: Path | None, prompt: str | Sequence[int], values: dict[str, Any]) -> None:
    traces = trace_config(values["trace"])
    if model is not None:
        check_model(model)
        if values["token_ids"] is None:
            check_tokenizer(model, "a chat" if values["chat"] else "a text prompt")
    speculative = speculative_config(values, bundled("head") if model is None else None)
    options = runtime_values(values, max_batch=1, traces=traces)

    from lowlat.cli.channels import ChannelWriter, channel_dicts
    from lowlat.cli.running import chat_ids, load_runtime, run_request
    from lowlat.models.advice import advice_line, sampling_defaults
    from lowlat.text import HarmonyParser

    directory = bundled("target") if model is None else model
    with load_runtime(directory, speculative, **{"max_context": None, **options}) as runtime:
        defaults = sampling_defaults(runtime.directory, values["sampling_defaults"])
        given = sampling_values(values)
        if taken := {name: value for name, value in defaults.items() if name not in given}:
            logger.info("sampling as the model's authors advise: %s (--sampling-defaults)", advice_line(taken))
        params = SamplingParams.from_options({**defaults, **given})
        if values["chat"]:
            prompt = chat_ids(runtime.codec, str(prompt), values["system"], allow_special=values["allow_special"])
        # a stop string may end within a token: its text is known, the channel's without it is not
        channels = values["chat"] and not params.stop and HarmonyParser.speaks(runtime.codec)
        writer = ChannelWriter(runtime.codec) if channels and runtime.codec is not None else None
        shown = None if values["json_output"] else writer or _writer(has_text=runtime.codec is not None)
        generation = run_request(runtime, prompt, params, shown, allow_special=values["allow_special"])
        if channels:
            generation.channels = channel_dicts(runtime.codec, generation.token_ids)
        if writer is not None and not writer.answered and not values["json_output"]:
            click.echo("\nno final channel came before the end; --json shows all that was written", err=True)
        _show(generation, values, str(runtime.device_choice.device), runtime.speculation_error)


def _ask_server(prompt: str | Sequence[int], values: dict[str, Any]) -> tuple[Generation, str | None]:
    messages: Any = prompt
    if values["chat"]:
        messages = [{"role": "system", "content": values["system"]}] if values["system"] is not None else []
        messages.append({"role": "user", "content": prompt})
    with connected(values["endpoint"], values["curve_keys"], "lowlat generate") as client:
        options = {**asked_sampling(values), "allow_special": values["allow_special"]}
        write = None if values["json_output"] else _writer(has_text=bool(client.server.tokenizer))
        generation = asked(client, messages, options).run(write)
        device = None
        if values["json_output"] and generation.error is None:
            device = client.stats().get("engine", {}).get("device")
        return generation, device


def _show(generation: Generation, values: dict[str, Any], device: str | None, speculation_error: str | None) -> None:
    """The JSON object, or the line after the text. Raises LowlatError where the request failed."""
    if values["json_output"]:
        print_json(generation.to_dict(device, speculation_error))
    else:
        click.echo()
        click.echo(generation.closing_line(), err=True)
    if generation.error is not None:
        raise LowlatError(f"the request failed: {generation.error}")


def _named_prompts(values: dict[str, Any]) -> list[str]:
    return [name for name in ("text", "prompt", "prompt_file", "token_ids") if values[name] is not None]


def _read_prompt(model: Path | None, values: dict[str, Any]) -> str | tuple[int, ...]:
    """The prompt from the one place that was named. Raises RequestError, or a usage error."""
    named = _named_prompts(values)
    if len(named) != 1:
        raise click.UsageError(_what_to_type(model if not named else None))
    if values["text"] is not None:
        values["prompt"] = values["text"]
    if values["system"] is not None and not values["chat"]:
        raise click.UsageError("--system needs --chat")
    if values["token_ids"] is not None:
        if values["chat"]:
            raise click.UsageError("--chat needs a text prompt, not --token-ids")
        return tuple(values["token_ids"])
    if values["prompt_file"] is not None:
        return _read_text(values["prompt_file"])
    prompt = str(values["prompt"])
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the prompt is not UTF-8: character {error.start}") from error
    return prompt


def _what_to_type(model: Path | None) -> str:
    """The advice for a command without a prompt, or with several; a text may stand where the model does."""
    advice = "give the prompt as PROMPT after MODEL, or in one of --prompt, --prompt-file and --token-ids"
    if model is None:
        return advice
    if model.exists() or find_repository(model) is not None:
        return f'{advice}: lowlat generate {shlex.quote(str(model))} "Hello"'
    text = shlex.quote(str(model))
    return (
        f"{str(model)!r:.80} stands where MODEL does, and there is no prompt; type: lowlat generate --prompt {text} "
        f"(the bundled model), or: lowlat generate ORG/NAME {text}"
    )


def _read_text(file: BinaryIO) -> str:
    data = file.read(MAX_PROMPT_BYTES + 1)
    if len(data) > MAX_PROMPT_BYTES:
        raise RequestError(f"{file.name}: a prompt may have {MAX_PROMPT_BYTES} bytes at most")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{file.name}: is not UTF-8: byte {error.start}") from error
    return text.removesuffix("\n").removesuffix("\r")  # `echo` and editors add a newline that is not part of the text


def _writer(*, has_text: bool) -> Callable[[Chunk], None]:
    """The function that streams an answer to stdout: text, or token ids where there is no tokenizer."""

    def write(chunk: Chunk) -> None:
        stream_text(chunk.text if has_text else "".join(f"{token} " for token in chunk.token_ids))

    return write
