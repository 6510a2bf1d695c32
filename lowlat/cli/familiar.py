"""This module has the names of other tools' commands and options, for error messages that suggest lowlat's.

The tools are vLLM, SGLang, TensorRT-LLM, llama.cpp and Ollama.
"""

import click

__all__ = ["COMMANDS", "OPTIONS", "meant_option"]

COMMANDS = {
    "benchmark": "bench",
    "complete": "generate",
    "download": "pull",
    "launch": "serve",
    "list": "models",
    "ls": "models",
    "ps": "top",
    "run": "chat",
    "server": "serve",
    "show": "inspect",
    "start": "serve",
    "stop": "sleep",
}
# an option of lowlat -> how others spell it; a command that has no such option says nothing of it
_SPELLINGS = {
    "--draft-model": ("--speculative-model", "--speculative-draft-model-path", "--model-draft", "-md"),
    "--http": ("--host", "--port"),
    "--kv-cache-gib": (
        *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override"),
        *("--mem-fraction-static", "--max-total-tokens"),
        *("--free-gpu-memory-fraction", "--kv-cache-free-gpu-memory-fraction"),
    ),
    "--kv-cache-dtype": ("--cache-type-k", "-ctk"),
    "--max-batch": ("--max-num-seqs", "--max-running-requests", "--parallel", "-np"),
    "--max-context": ("--max-model-len", "--context-length", "--ctx-size", "-c"),
    "--max-tokens": ("--max-new-tokens", "--n-predict", "--predict", "-n"),
    "--method": ("--speculative-config", "--speculative-algorithm"),
    "--model": ("--model", "--model-path", "-m"),
    "--name": ("--served-model-name", "--alias"),
    "--prompt": ("-p",),
    "--prompt-file": ("-f",),
    "--quantize": ("--quantization", "-q"),
    "--seed": ("-s",),
    "--system": ("-sys",),
    "--temperature": ("--temp",),
    "--tensor-parallel": ("--tp", "--tp-size", "-tp"),
    "-S": ("--draft-max", "--draft", "--speculative-num-steps"),
}
OPTIONS = {theirs: ours for ours, spellings in _SPELLINGS.items() for theirs in spellings}


def meant_option(error: click.NoSuchOption) -> str | None:
    """The option of the command that an unknown one is meant to be, as it is typed; None where none is sure."""
    if error.ctx is None:
        return None
    name = error.option_name
    options = {spelling: each for each in error.ctx.command.params for spelling in each.opts}
    for spelling in (name.replace("_", "-"), OPTIONS.get(name.replace("_", "-"), "")):
        if spelling in options and spelling != name:
            each = options[spelling]
            value = "" if getattr(each, "is_flag", False) else f" {each.make_metavar(error.ctx)}"
            return spelling + value
    arguments = [each for each in error.ctx.command.params if isinstance(each, click.Argument)]
    if OPTIONS.get(name) == "--model" and any(each.name == "model" for each in arguments):
        return f"{error.ctx.command_path} MODEL"
    return None
