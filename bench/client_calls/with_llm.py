"""The llm command with a model of extra-openai-models.yaml: prompts, conversations, schemas, tools, completions."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

MODELS = """
- model_id: chat
  model_name: {model}
  api_base: {url}
  api_key_name: lowlat
  supports_schema: true
  supports_tools: true
- model_id: text
  model_name: {model}
  api_base: {url}
  api_key_name: lowlat
  completion: true
"""
SHORT = ("-o", "max_tokens", "8")
SCHEMA = {
    "type": "object",
    "properties": {"country": {"type": "string", "enum": ["Germany", "Italy"]}},
    "required": ["country"],
    "additionalProperties": False,
}


def _llm(url: str, *commands: tuple[str, ...]) -> str:
    """The output of the last of the commands."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, url=url), encoding="utf-8")
        said = ""
        for command in commands:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "llm", *command, "--key", KEY],
                env={**os.environ, "LLM_USER_PATH": folder},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=120,
            )
            expect(done.returncode == 0, why=done.stderr[-300:])
            said = done.stdout.strip()
    return said


def _says(url: str, *commands: tuple[str, ...]) -> None:
    expect(_llm(url, *commands), why="nothing was printed")


def schema(url: str) -> None:
    text = _llm(url, ("-m", "chat", "--schema", json.dumps(SCHEMA), "Where is Bonn?", "-o", "max_tokens", "96"))
    expect(json.loads(text)["country"] in ("Germany", "Italy"), why=text)


CASES: dict[str, Case] = {
    "chat, stream": lambda url: _says(url, ("-m", "chat", "-s", "Be brief.", "Where is Bonn?", *SHORT)),
    "chat": lambda url: _says(url, ("-m", "chat", "--no-stream", "Where is Bonn?", *SHORT)),
    "chat, continued": lambda url: _says(
        url, ("-m", "chat", "Where is Bonn?", *SHORT), ("-m", "chat", "-c", "And Rome?", *SHORT)
    ),
    "chat, schema": schema,
    "chat, tools": lambda url: _says(url, ("-m", "chat", "-T", "llm_version", "Say hello.", *SHORT)),
    "completion": lambda url: _says(url, ("-m", "text", "--no-stream", "Bonn is", *SHORT)),
    "completion, stream": lambda url: _says(url, ("-m", "text", "Bonn is", *SHORT)),
}

if __name__ == "__main__":
    run("llm", CASES)
