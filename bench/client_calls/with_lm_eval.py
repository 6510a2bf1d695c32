"""The lm-eval command: local-completions (scored prompts, generated text) and local-chat-completions.

The task is a file next to the results, so that no dataset is fetched; the tokenizer is the served model's
(LOWLAT_CLIENTS_TOKENIZER, a directory).
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

QUESTIONS = [
    {"question": "Bonn lies in", "choices": [" Germany", " Italy"], "answer": 0},
    {"question": "Rome lies in", "choices": [" Germany", " Italy"], "answer": 1},
]
TASK = """
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {folder}/questions.jsonl
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICES = """doc_to_choice: choices
doc_to_target: answer
metric_list:
  - metric: acc
"""
GENERATED = """doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
ROLLING = """doc_to_target: "{{question}}"
metric_list:
  - metric: word_perplexity
"""


def _evaluate(url: str, model: str, path: str, kind: str, rest: str, batch_size: int = 1, **options: Any) -> None:
    arguments = {"model": MODEL, "base_url": f"{url}/{path}", "num_concurrent": 1, "max_retries": 1, **options}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
        (folder / "questions.jsonl").write_text(lines, encoding="utf-8")
        (folder / "places.yaml").write_text(
            TASK.format(task="places", folder=folder, kind=kind) + rest, encoding="utf-8"
        )
        given = ",".join(f"{key}={value}" for key, value in arguments.items())
        command = [sys.executable, "-P", "-m", "lm_eval", "--model", model, "--model_args", given, "--tasks", "places"]
        chat = ["--apply_chat_template"] if model.endswith("chat-completions") else []
        done = subprocess.run(
            [*command, "--batch_size", str(batch_size), "--include_path", name, "--output_path", f"{name}/out", *chat],
            env={**os.environ, "OPENAI_API_KEY": KEY, "HF_HOME": f"{name}/hub", "HF_HUB_OFFLINE": "1"},
            cwd=name,
            capture_output=True,
            text=True,
            timeout=600,
        )
        expect(done.returncode == 0, why=done.stderr[-380:])
        (result,) = (folder / "out").rglob("results_*.json")
        print(json.loads(result.read_text())["results"], file=sys.stderr)


def tokenized() -> dict[str, Any]:
    """The tokenizer's options: prompts are sent as token ids."""
    return {"tokenizer": os.environ["LOWLAT_CLIENTS_TOKENIZER"], "tokenizer_backend": "huggingface"}


CASES: dict[str, Case] = {
    "completions, loglikelihood": lambda url: _evaluate(
        url, "local-completions", "completions", "multiple_choice", CHOICES, **tokenized()
    ),
    "completions, loglikelihood_rolling": lambda url: _evaluate(
        url, "local-completions", "completions", "loglikelihood_rolling", ROLLING, max_length=64, **tokenized()
    ),
    "completions, loglikelihood in batches": lambda url: _evaluate(
        url, "local-completions", "completions", "multiple_choice", CHOICES, batch_size=4, **tokenized()
    ),
    "completions, generate_until": lambda url: _evaluate(
        url, "local-completions", "completions", "generate_until", GENERATED, **tokenized()
    ),
    "completions, generate_until of text": lambda url: _evaluate(
        url,
        "local-completions",
        "completions",
        "generate_until",
        GENERATED,
        tokenizer_backend="None",
        tokenized_requests=False,
    ),
    "chat, generate_until": lambda url: _evaluate(
        url, "local-chat-completions", "chat/completions", "generate_until", GENERATED
    ),
}

if __name__ == "__main__":
    run("lm-eval", CASES)
