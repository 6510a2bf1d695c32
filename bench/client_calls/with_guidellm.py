"""The guidellm command: a short benchmark over chats and over completions."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.client_calls.cases import KEY, MODEL, Case, expect, run

REQUESTS = 2


def _benchmark(url: str, form: str) -> None:
    tokenizer = os.environ["LOWLAT_CLIENTS_TOKENIZER"]
    backend = f"kind=openai_http,target={url.removesuffix('/v1')},model={MODEL},request_format={form},api_key={KEY}"
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-P", "-m", "guidellm", "run", "--disable-console", "--backend", backend,
            "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={REQUESTS}",
            "--tokenizer", f"kind=huggingface_auto,model={tokenizer}",
            "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=6",
            "--output", f"kind=json,path={folder}/report.json",
        ]  # fmt: skip
        done = subprocess.run(
            command,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        expect(done.returncode == 0, why=(done.stderr + done.stdout)[-380:])
        (benchmark,) = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))["benchmarks"]
        requests = benchmark["requests"]
        expect(requests["successful"] and not requests["errored"], why=f"{requests['errored']!r:.380}")


CASES: dict[str, Case] = {
    "chat": lambda url: _benchmark(url, "/v1/chat/completions"),
    "completions": lambda url: _benchmark(url, "/v1/completions"),
    "responses": lambda url: _benchmark(url, "/v1/responses"),
}

if __name__ == "__main__":
    run("guidellm", CASES)
