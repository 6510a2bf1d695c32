"""Train a small Llama target from scratch on a text.

    python -m lowlat.tools.train.target --text FILE --tokenizer DIR --out DIR [--minutes 8] [--device cuda]

The learning rate is driven by elapsed time: it rises, holds, and falls to zero when `--minutes` are over, so that
a run always ends annealed. Writes a Hugging Face directory (bf16, shards of at most `--shard-mb`) and loss.json.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from lowlat.tools.train.corpus import pack, read_documents, split, tokenize

__all__ = ["LossModule", "build_target", "learning_rate_scale", "save_target", "train"]


def build_target(arguments: argparse.Namespace, vocabulary: int, end_of_text: int) -> LlamaForCausalLM:
    """Return a randomly initialised Llama with tied embeddings, fp32, on the CPU."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.ffn,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        max_position_embeddings=arguments.context,
        rope_parameters={"rope_type": "default", "rope_theta": float(arguments.rope_theta)},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        pad_token_id=None,
        attention_dropout=0.0,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    depth_scale = 1 / math.sqrt(2 * arguments.layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                scale = depth_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=scale / math.sqrt(arguments.hidden))
    return model


class LossModule(nn.Module):
    """Next-token cross-entropy over whole rows, with causal attention and no mask tensor.

    It walks the layers itself, so that attention gets no mask and takes the fast causal kernel when compiled.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of rows [rows, length] int64, a scalar."""
        decoder: Any = self.model.model
        hidden = decoder.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rope = decoder.rotary_emb(hidden, position_ids=positions)
        for layer in decoder.layers:
            out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
            hidden = out[0] if isinstance(out, tuple) else out
        logits = self.model.lm_head(decoder.norm(hidden))[:, :-1]
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def learning_rate_scale(progress: float, *, warmup: float = 0.01, hold: float = 0.3) -> float:
    """Return the share of the peak learning rate at a progress in [0, 1]: rise, hold, fall linearly to zero."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return 1.0 if progress < hold else max(0.0, (1 - progress) / (1 - hold))


def _batches(tokens: "np.ndarray[Any, Any]", length: int, rows: int, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    while True:
        packed = pack(tokens, length, generator)
        for begin in range(0, packed.shape[0] - rows + 1, rows):
            yield packed[begin : begin + rows]
        if packed.shape[0] < rows:
            raise ValueError(f"the text gives {packed.shape[0]} rows of {length}; --rows is {rows}")


def _optimizer(model: nn.Module, rate: float, device: torch.device) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=device.type == "cuda")


@torch.no_grad()
def _held_out_loss(module: Callable[[Tensor], Tensor], rows: Tensor, batch: int) -> float:
    losses = [float(module(rows[i : i + batch])) for i in range(0, rows.shape[0] - batch + 1, batch)]
    return sum(losses) / max(1, len(losses))


def train(model: LlamaForCausalLM, tokens: Any, held_out: Any, arguments: argparse.Namespace) -> list[dict[str, float]]:
    """Train in place until the minutes are over; return the log (seconds, tokens, loss, held-out loss)."""
    device = torch.device(arguments.device)
    model.to(device).train()
    plain: Any = LossModule(model)
    module: Any = torch.compile(plain) if arguments.compile else plain
    optimizer = _optimizer(model, arguments.learning_rate, device)
    batches = _batches(tokens, arguments.length, arguments.rows, seed=0)
    test_rows = torch.from_numpy(held_out).long().to(device)
    log: list[dict[str, float]] = []
    running: list[Tensor] = []
    step, start = 0, time.monotonic()
    while True:
        batch = torch.from_numpy(next(batches)).to(device, non_blocking=True).long()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            try:
                loss = module(batch)
                loss.backward()
            except RuntimeError as error:
                if step or not arguments.compile:
                    raise
                print(f"compilation failed, going on without: {str(error)[:300]}", flush=True)
                optimizer.zero_grad(set_to_none=True)
                module = plain
                loss = module(batch)
                loss.backward()
        progress = (time.monotonic() - start) / (60 * arguments.minutes) if step else 0.0
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * learning_rate_scale(progress)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running.append(loss.detach())
        step += 1
        if step == 1:  # compilation does not count
            loss.item()
            start = time.monotonic()
        last = progress >= 1
        if step % arguments.log_every == 0 or last:
            entry = {"step": step, "s": time.monotonic() - start, "tokens": step * batch.numel()}
            entry["loss"] = float(torch.stack(running).mean())
            running.clear()
            if last or step % (10 * arguments.log_every) == 0:
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    entry["held_out"] = _held_out_loss(plain, test_rows, arguments.rows)
            log.append({key: round(value, 4) for key, value in entry.items()})
            if len(log) % 5 == 1 or last:
                print(log[-1], flush=True)
        if last:
            return log


def save_target(model: LlamaForCausalLM, tokenizer_directory: str, out: Path, shard_mb: float) -> None:
    """Write the model in bf16 with its tokenizer as a Hugging Face directory."""
    out.mkdir(parents=True, exist_ok=True)
    model.config.use_cache = True
    model.to("cpu", dtype=torch.bfloat16)
    end = int(model.config.eos_token_id)
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    model.save_pretrained(out, max_shard_size=f"{int(shard_mb * 1000)}KB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(tokenizer_directory) / name, out / name)


@torch.no_grad()
def _samples(model: LlamaForCausalLM, tokenizer: Any, prompts: list[str], device: str) -> list[str]:
    model.to(device).eval()
    model.config.use_cache = True
    texts = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(max_new_tokens=96, do_sample=True, temperature=0.7, top_k=0),
        )
        texts.append(tokenizer.decode(out[0]))
    return texts


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama target from scratch on a text.")
    parser.add_argument("--text", required=True, help="documents separated by <|endoftext|> lines; .xz is read too")
    parser.add_argument("--tokenizer", required=True, help="directory with tokenizer.json and tokenizer_config.json")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time, compilation not counted")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile; falls back when it fails")
    for name, value in (("hidden", 320), ("layers", 8), ("heads", 5), ("kv-heads", 1), ("head-dim", 64), ("ffn", 896)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--context", type=int, default=2048, help="max_position_embeddings")
    parser.add_argument("--rope-theta", type=float, default=10000.0)
    parser.add_argument("--length", type=int, default=2048, help="tokens a row")
    parser.add_argument("--rows", type=int, default=64, help="rows a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=20, help="steps between entries of the log")
    parser.add_argument("--shard-mb", type=float, default=11.0, help="largest shard, megabytes")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    begin = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    training, held_out = split(read_documents(arguments.text))
    end = int(tokenizer.eos_token_id)
    tokens = tokenize(tokenizer, training, separator=end)
    test = pack(tokenize(tokenizer, held_out, separator=end), arguments.length, np.random.default_rng(0))[:256]
    print(f"{len(tokens)} tokens to train on, {test.size} held out, {time.monotonic() - begin:.0f} s", flush=True)
    model = build_target(arguments, len(tokenizer), end)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters", flush=True)
    log = train(model, tokens, test, arguments)
    out = Path(arguments.out)
    prompts = [document[: document.find(" ", 120)] for document in held_out[:: max(1, len(held_out) // 8)]]
    for text in _samples(model, tokenizer, prompts, arguments.device):
        print("-----", text, sep="\n", flush=True)
    save_target(model, arguments.tokenizer, out, arguments.shard_mb)
    summary = {"parameters": parameters, "train_tokens": len(tokens), "log": log}
    (out / "loss.json").write_text(json.dumps(summary))
    print(json.dumps({"parameters": parameters, **log[-1]}), flush=True)


if __name__ == "__main__":
    main()
