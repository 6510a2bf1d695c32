"""Train a small Llama target on a text, from scratch or from another target on.

    python -m bench.training.target --text FILE --tokenizer DIR --out DIR [--minutes 8] [--device cuda]
    python -m bench.training.target --text FILE --start DIR --yarn 64 --length 8192 32768 131072 --rows 16 --out DIR

`--start` goes on from a target of a Hugging Face directory; `--yarn FACTOR` gives it so many times the positions that
it has, by YaRN, which long rows then teach it to use. Of several `--length` each step takes the next, and the batches
of all hold as many tokens. With `--minutes 0` nothing is trained: the start is written as it is, with the positions
that `--yarn` gives it.

The learning rate is driven by elapsed time: it rises, holds, and falls to zero when `--minutes` are over, so that
a run always ends annealed. Writes a Hugging Face directory (bf16, shards of at most `--shard-mb`) and loss.json.
"""

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from bench.training.corpus import pack, read_documents, split, tokenize
from bench.training.long_texts import read_texts
from lowlat.errors import ConfigError

__all__ = ["LossModule", "build_target", "extend_target", "learning_rate_scale", "rows_of", "save_target", "train"]

HELD_OUT_TOKENS = 256 * 2048  # of which the loss is told while training


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


def extend_target(directory: str, factor: float) -> LlamaForCausalLM:
    """Read a Llama target, fp32, on the CPU, with `factor` times its positions by YaRN where that is above 1.

    Raises ConfigError for another architecture, and where a target's positions are scaled already.
    Source: YaRN, arXiv 2309.00071.
    """
    config: Any = AutoConfig.from_pretrained(directory)
    if config.model_type != "llama":
        raise ConfigError(f"--start {directory} is of model_type {config.model_type}; expected llama")
    if factor > 1:
        rope = dict(config.rope_parameters)
        if rope.get("rope_type", "default") != "default":
            raise ConfigError(f"--start {directory} has rope_type {rope['rope_type']}; --yarn scales default alone")
        positions = config.max_position_embeddings
        config.rope_parameters = {
            "rope_type": "yarn",
            "rope_theta": rope["rope_theta"],
            "factor": factor,
            "original_max_position_embeddings": positions,
        }
        config.max_position_embeddings = int(factor * positions)
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)


class LossModule(nn.Module):
    """Next-token cross-entropy over whole rows, with causal attention and no mask tensor.

    It walks the layers itself, so that attention gets no mask and takes the fast causal kernel when compiled.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, reduction: str = "mean") -> Tensor:
        """Return the mean loss of rows [rows, length] int64, a scalar; by token, [rows * (length - 1)], with "none"."""
        decoder: Any = self.model.model
        hidden = decoder.embed_tokens(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        rope = decoder.rotary_emb(hidden, position_ids=positions)
        for layer in decoder.layers:
            out = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rope)
            hidden = out[0] if isinstance(out, tuple) else out
        logits = self.model.lm_head(decoder.norm(hidden))[:, :-1]
        return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


def learning_rate_scale(progress: float, *, warmup: float = 0.01, hold: float = 0.3) -> float:
    """Return the share of the peak learning rate at a progress in [0, 1]: rise, hold, fall linearly to zero."""
    progress = min(max(progress, 0.0), 1.0)
    if progress < warmup:
        return max(progress / warmup, 0.02)
    return 1.0 if progress < hold else max(0.0, (1 - progress) / (1 - hold))


def rows_of(rows: int, lengths: Sequence[int]) -> list[int]:
    """The rows a batch of each length: `rows` of the first, and of the others as many as have no more tokens."""
    return [max(1, rows * lengths[0] // length) for length in lengths]


def _batches(tokens: "np.ndarray[Any, Any]", lengths: Sequence[int], rows: int) -> Any:
    """Batches of each length in turn."""
    kinds = [_rows(tokens, length, count, 0) for length, count in zip(lengths, rows_of(rows, lengths), strict=True)]
    while True:
        for kind in kinds:
            yield next(kind)


def _rows(tokens: "np.ndarray[Any, Any]", length: int, rows: int, seed: int) -> Any:
    generator = np.random.default_rng(seed)
    while True:
        packed = pack(tokens, length, generator)
        for begin in range(0, packed.shape[0] - rows + 1, rows):
            yield packed[begin : begin + rows]
        if packed.shape[0] < rows:
            raise ValueError(f"the text gives {packed.shape[0]} rows of {length}; a batch (--rows) needs {rows}")


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
    batches = _batches(tokens, arguments.length, arguments.rows)
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
                    entry["held_out"] = _held_out_loss(plain, test_rows, min(arguments.rows, len(test_rows)))
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


def _documents(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """The documents to train on, and those that the held-out loss is told of."""
    if arguments.held_out is None:
        return split(read_documents(arguments.text))
    return read_documents(arguments.text), list(read_texts(arguments.held_out).values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama target on a text.")
    parser.add_argument("--text", help="documents separated by <|endoftext|> lines; .xz is read too")
    parser.add_argument("--held-out", help="JSON of name -> text to tell the loss of; by default one document in 64")
    parser.add_argument("--tokenizer", help="directory with tokenizer.json and tokenizer_config.json; --start has them")
    parser.add_argument("--start", help="directory of a Llama target to go on from; sizes are then its own")
    parser.add_argument("--yarn", type=float, default=1.0, help="times the positions of --start that it gets, by YaRN")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=8.0, help="training time, compilation not counted; 0: none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile; falls back when it fails")
    for name, value in (("hidden", 320), ("layers", 8), ("heads", 5), ("kv-heads", 1), ("head-dim", 64), ("ffn", 896)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--context", type=int, default=2048, help="max_position_embeddings")
    parser.add_argument("--rope-theta", type=float, default=10000.0)
    parser.add_argument("--length", type=int, nargs="+", default=[2048], help="tokens a row; several: step by step")
    parser.add_argument("--rows", type=int, default=64, help="rows a step, of the first length")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--log-every", type=int, default=20, help="steps between entries of the log")
    parser.add_argument("--shard-mb", type=float, default=11.0, help="largest shard, megabytes")
    parser.add_argument("--samples", type=int, default=8, help="texts to write at the end")
    arguments = parser.parse_args()
    if arguments.start is None and (arguments.tokenizer is None or arguments.yarn != 1 or not arguments.minutes):
        parser.error("without --start there must be --tokenizer, minutes to train for, and no --yarn")
    if arguments.minutes and arguments.text is None:
        parser.error("--minutes above 0 need --text")
    if arguments.yarn < 1:
        parser.error(f"--yarn {arguments.yarn:g} must be at least 1")
    arguments.tokenizer = arguments.tokenizer or arguments.start
    return arguments


def main() -> None:
    arguments = _arguments()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    begin = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    end = int(tokenizer.eos_token_id)
    if arguments.start is None:
        model = build_target(arguments, len(tokenizer), end)
    else:
        model = extend_target(arguments.start, arguments.yarn)
    out = Path(arguments.out)
    if not arguments.minutes:
        save_target(model, arguments.tokenizer, out, arguments.shard_mb)
        return
    training, held_out = _documents(arguments)
    tokens = tokenize(tokenizer, training, separator=end)
    first = arguments.length[0]
    test = pack(tokenize(tokenizer, held_out, separator=end), first, np.random.default_rng(0))
    test = test[: max(1, HELD_OUT_TOKENS // first)]
    print(f"{len(tokens)} tokens to train on, {test.size} held out, {time.monotonic() - begin:.0f} s", flush=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters", flush=True)
    log = train(model, tokens, test, arguments)
    step = max(1, len(held_out) // max(1, arguments.samples))
    prompts = [document[: document.find(" ", 120)] for document in held_out[::step]][: arguments.samples]
    for text in _samples(model, tokenizer, prompts, arguments.device):
        print("-----", text, sep="\n", flush=True)
    save_target(model, arguments.tokenizer, out, arguments.shard_mb)
    summary = {"parameters": parameters, "train_tokens": len(tokens), "log": log}
    (out / "loss.json").write_text(json.dumps(summary))
    print(json.dumps({"parameters": parameters, **log[-1]}), flush=True)


if __name__ == "__main__":
    main()
