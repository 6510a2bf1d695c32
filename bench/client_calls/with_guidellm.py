"""The guidellm command: a short benchmark over chats and over completions."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.client_calls.cases import KEY, MODEL, Case, expect, run


def _benchmark(url: str, kind: str, *more: str) -> None:
    tokenizer = os.environ["LOWLAT_CLIENTS_TOKENIZER"]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-P", "-m", "guidellm", "benchmark", "run",
            "--target", url.removesuffix("/v1"), "--model", MODEL, "--processor", tokenizer,
            "--profile", "synchronous", "--max-requests", "2", "--request-type", kind,
            "--data", "prompt_tokens=16,output_tokens=6", "--backend-kwargs", json.dumps({"api_key": KEY}),
            "--output-dir", folder, "--outputs", "json", "--disable-console", *more,
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=230,
        )
        expect(done.returncode == 0, why=(done.stderr + done.stdout)[-380:])
        (report,) = Path(folder).glob("*.json")
        (benchmark,) = json.loads(report.read_text())["benchmarks"]
        requests = benchmark["requests"]
        expect(len(requests["successful"]) == 2, why=f"{requests['errored']!r:.300}")


CASES: dict[str, Case] = {
    "chat": lambda url: _benchmark(url, "chat_completions"),
    "completions": lambda url: _benchmark(url, "text_completions"),
}

if __name__ == "__main__":
    run("guidellm", CASES)
