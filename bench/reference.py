"""The reference executor's speed without drafts beside transformers' `generate` on the same cores in the same run.

    python -m bench.reference --out bench/results/cpu/reference.json

Decodes the prompts one at a time, greedily, by lowlat at S = 0 and by transformers, in turns, so that other
work of the machine slows all alike; each prompt's best of the rounds counts. Prefill is in the times. All have every
core; the target is the chat pair's where the cache has it or `--target` names it. lowlat's reference reads weights as
bf16 and multiplies and adds in float32; transformers is timed with the weights in either.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.conditions import stamps_of, write_json
from lowlat import Runtime, SamplingParams
from lowlat.errors import ConfigError, RequestError
from lowlat.options.directories import cache_directory
from lowlat.text import TextCodec
from lowlat.tools.chat_model import DIRECTORY_NAME

DEMO = Path(__file__).parent.parent / "lowlat" / "demo"
Decode = Callable[[list[int]], list[int]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure both and write one JSON file."""
    options = _options(arguments)
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    context = options.max_tokens + 256
    with Runtime.load(options.target, None, device="cpu", max_batch=1, max_context=context) as runtime:
        prompts = _prompts(runtime.codec, options.prompts, options.limit)
        decoders = [_lowlat(runtime, options.max_tokens)]
        decoders += [_transformers(options, dtype) for dtype in (torch.bfloat16, torch.float32)]
        seconds, tokens, equal = _race(decoders, prompts, options.rounds)
    result = {
        "lowlat_tokens_per_s": round(tokens / seconds[0], 2),
        "transformers_tokens_per_s": round(tokens / seconds[1], 2),
        "transformers_float32_tokens_per_s": round(tokens / seconds[2], 2),
        "conditions": {
            **{key: stamps_of(torch.device("cpu"))[key] for key in ("commit", "torch")},
            "target": options.target.name,
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "load_before": round(load, 2),
            "prompts": len(prompts),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "new_tokens": options.max_tokens,
            "rounds": options.rounds,
            "weights_read": "lowlat bfloat16, added up in float32; transformers bfloat16, and float32",
            "prompts_of_equal_tokens": equal,
        },
    }
    write_json(options.out, result)
    print(json.dumps(result, indent=1))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=_chat_target())
    parser.add_argument("--prompts", type=Path, default=DEMO / "chat_prompts.json", help="JSON: domain -> prompts")
    parser.add_argument("--limit", type=int, default=1, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def _chat_target() -> Path:
    """The chat pair's target where `lowlat demo --chat` has left it, else the bundled one."""
    chat = cache_directory() / DIRECTORY_NAME
    return chat if chat.is_dir() else DEMO / "target"


def _prompts(codec: TextCodec | None, path: Path, limit: int) -> list[list[int]]:
    if codec is None:
        raise SystemExit("the target has no tokenizer.json")
    content: Any = json.loads(path.read_text(encoding="utf-8"))
    texts = content if isinstance(content, list) else [text for domain in content.values() for text in domain]
    try:
        wrapped = [codec.apply_chat_template([{"role": "user", "content": text}]) for text in texts[:limit]]
    except (ConfigError, RequestError):  # a base model has no template
        wrapped = texts[:limit]
    return [codec.encode(text, add_special_tokens=False, allow_special=True) for text in wrapped]


def _lowlat(runtime: Runtime, count: int) -> Decode:
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)

    def decode(prompt: list[int]) -> list[int]:
        runtime.submit(prompt, params)
        tokens: list[int] = []
        while runtime.busy:
            for output in runtime.step(0):
                tokens.extend(output.token_ids)
        return tokens

    return decode


def _transformers(options: argparse.Namespace, dtype: torch.dtype) -> Decode:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=dtype).eval()

    @torch.inference_mode()
    def decode(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        count = options.max_tokens
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count
        )
        new: list[int] = found[0, ids.shape[1] :].tolist()
        return new

    return decode


def _race(decoders: Sequence[Decode], prompts: list[list[int]], rounds: int) -> tuple[list[float], int, int]:
    """Seconds of each decoder over all prompts, the best round of each; tokens decoded; prompts of equal tokens."""
    seconds, tokens, equal = [0.0] * len(decoders), 0, 0
    for prompt in prompts:
        best, found = [float("inf")] * len(decoders), [[0]] * len(decoders)
        for decode in decoders:
            decode(prompt[:8])  # first calls choose and compile
        for _ in range(rounds):
            for index, decode in enumerate(decoders):
                start = time.perf_counter()
                found[index] = decode(prompt)
                best[index] = min(best[index], time.perf_counter() - start)
        seconds = [total + own for total, own in zip(seconds, best, strict=True)]
        tokens += len(found[0])
        equal += found[0] == found[-1]
    return seconds, tokens, equal


if __name__ == "__main__":
    main()
