"""Train a small hybrid of gated delta nets and gated attention with an MTP layer, on a text.

    python -m bench.training.hybrid --text FILE --out DIR [--minutes 5] [--device cuda]
    python -m bench.acceptance --target DIR --method mtp --num-speculative-tokens 1 2 3 4 --out FILE

The first part of the time trains the target, and the MTP layer with it as in pretraining: one draft, whose loss also
reaches the target. In what is left (`--mtp-share`) the target stays as it is, and the layer learns the target's
distribution over several draft steps, each fed with the one before.

Each part's learning rate is driven by elapsed time, so that a run always ends annealed. Writes a Hugging Face directory
(bf16) with the tokenizer's files and loss.json, at the end and every `--save-s` seconds.
"""

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from bench.training.corpus import END_OF_TEXT, pack, read_documents, split, tokenize
from bench.training.hybrid_model import Hybrid, HybridSizes, save_hybrid
from bench.training.target import learning_rate_scale

__all__ = ["draft_loss", "main", "target_loss"]

TOKENIZER = Path(__file__).parents[2] / "lowlat" / "demo" / "target"
Loss = Callable[[Tensor], tuple[Tensor, Tensor]]


def target_loss(model: Hybrid, tokens: Tensor, *, mtp_weight: float) -> tuple[Tensor, Tensor]:
    """Return the loss of the target with that of the MTP layer's first draft, and both apart, [2].

    tokens  [rows, length] int64
    """
    states = model.model(tokens)
    own = functional.cross_entropy(model.logits(states[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    drafted = next(model.mtp.steps(model.embed(tokens[:, 1:]), states[:, :-1], 1))
    other = functional.cross_entropy(model.logits(drafted[:, :-1]).flatten(0, 1), tokens[:, 2:].flatten())
    return own + mtp_weight * other, torch.stack((own.detach(), other.detach()))


def draft_loss(model: Hybrid, tokens: Tensor, *, steps: int, decay: float, sharpness: float) -> tuple[Tensor, Tensor]:
    """Return the weighted loss of draft steps, and the share of drafts that are the target's argmax, [steps].

    tokens     [rows, length] int64
    decay      the weight of each step over the one before
    sharpness  the target's distribution is learned at this temperature
    The target gets no gradient.
    """
    with torch.no_grad():
        states = model.model(tokens)
        embedded = model.embed(tokens[:, 1:])
        logits = model.logits(states[:, steps:])  # from the first row that the last step has
        best, probabilities = logits.argmax(-1), (logits / sharpness).softmax(-1)
        del logits
        head = model.model.embed_tokens.weight.detach()
    loss: Any = 0.0
    matches = []
    for step, drafted in enumerate(model.mtp.steps(embedded, states[:, :-1], steps)):
        scores = functional.linear(drafted[:, steps - 1 :], head).float()
        entropy = -(probabilities * scores.log_softmax(-1)).sum(-1).mean()
        loss = loss + decay**step / sum(decay**each for each in range(steps)) * entropy
        matches.append((scores.detach().argmax(-1) == best).float().mean())
    return loss, torch.stack(matches)


class _Run:
    """One run: where it writes, and what it has told."""

    def __init__(self, model: Hybrid, options: argparse.Namespace, end_of_text: int, held_out: Tensor) -> None:
        self.model, self.options, self.end_of_text, self.held_out = model, options, end_of_text, held_out
        self.device = torch.device(options.device)
        self.log: list[dict[str, Any]] = []
        self.saved = time.monotonic()

    def part(self, name: str, share: float, learned: nn.Module, loss_of: Loss, batches: Iterator[Tensor]) -> None:
        """Train a module for a share of the steps or minutes."""
        options = self.options
        parameters = list(learned.parameters())
        groups = [
            {"params": [each for each in parameters if (each.ndim >= 2) == decays], "weight_decay": 0.1 * decays}
            for decays in (True, False)
        ]
        rate = options.learning_rate
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8, fused=self.device.type == "cuda")
        running: list[Tensor] = []
        start, step, progress = time.monotonic(), 0, 0.0
        while progress < 1:
            loss, figures = self._computed(loss_of, next(batches).to(self.device))
            loss.backward()
            elapsed = (time.monotonic() - start) / (60 * share * options.minutes) if step else 0.0
            progress = (step + 1) / (share * options.steps) if options.steps else elapsed
            for group in optimizer.param_groups:
                group["lr"] = rate * learning_rate_scale(progress)
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            running.append(torch.cat((loss.detach()[None], norm.detach()[None], figures)))
            step += 1
            if step % options.log_every == 0 or progress >= 1:
                entry = {"part": name, "step": step, "s": round(time.monotonic() - start, 1)}
                entry["tokens"] = step * options.rows * options.length
                self._tell(entry, torch.stack(running).mean(0).tolist())
                running.clear()
                if time.monotonic() - self.saved > options.save_s:
                    self.save()
        with torch.no_grad():
            kept = [self._computed(loss_of, rows.to(self.device))[1] for rows in self.held_out.split(options.rows)]
        self._tell({"part": f"{name}, held out", "step": step}, [0.0, 0.0, *torch.stack(kept).mean(0).tolist()])
        self.save()

    def _computed(self, loss_of: Loss, rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            return loss_of(rows.long())

    def _tell(self, entry: dict[str, Any], figures: Sequence[float]) -> None:
        loss, norm, *others = (round(figure, 4) for figure in figures)
        self.log.append({**entry, "loss": loss, "gradient": norm, "figures": others})
        print(json.dumps(self.log[-1]), flush=True)

    def save(self) -> None:
        """Write the directory as it stands."""
        out = Path(self.options.out)
        save_hybrid(self.model, out, self.end_of_text)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(self.options.tokenizer) / name, out / name)
        (out / "loss.json").write_text(json.dumps({"parameters": _count(self.model), "log": self.log}))
        self.saved = time.monotonic()


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _batches(tokens: "np.ndarray[Any, Any]", length: int, rows: int, seed: int) -> Iterator[Tensor]:
    generator = np.random.default_rng(seed)
    while True:
        packed = torch.from_numpy(pack(tokens, length, generator))
        if len(packed) < rows:
            raise ValueError(f"the text gives {len(packed)} rows of {length} (--length); a batch (--rows) needs {rows}")
        yield from (some for some in packed.split(rows) if len(some) == rows)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small hybrid with an MTP layer on a text.")
    parser.add_argument("--text", required=True, help="documents separated by <|endoftext|> lines; .xz is read too")
    parser.add_argument("--tokenizer", default=TOKENIZER, help="directory of the tokenizer; the bundled target's")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time, without reading the text")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: train for --minutes")
    parser.add_argument("--mtp-share", type=float, default=0.3, help="share of it that trains the MTP layer alone")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(HybridSizes):
        if field.type is int and field.name != "vocabulary":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--length", type=int, default=1024, help="tokens a row")
    parser.add_argument("--rows", type=int, default=64, help="rows a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="of the first draft's loss next to the target's")
    parser.add_argument("--draft-steps", type=int, default=4, help="simulated when the MTP layer is trained alone")
    parser.add_argument("--decay", type=float, default=0.8, help="weight of each draft step over the one before")
    parser.add_argument("--label-temperature", type=float, default=0.7, help="of the distribution that drafts learn")
    parser.add_argument("--log-every", type=int, default=20, help="steps between entries of the log")
    parser.add_argument("--held-out-tokens", type=int, default=1 << 18, help="whose loss is told after each part")
    parser.add_argument("--save-s", type=float, default=60.0, help="seconds between checkpoints")
    options = parser.parse_args(given)
    if not 0 < options.mtp_share < 1:
        parser.error(f"--mtp-share {options.mtp_share:g} must be between 0 and 1")
    return options


def main(given: Sequence[str] | None = None) -> None:
    """Train, and write the directory."""
    options = _arguments(given)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every shape of a draft step's mask
    begin = time.monotonic()
    tokenizer = Tokenizer.from_file(str(Path(options.tokenizer) / "tokenizer.json"))
    end = int(tokenizer.encode(END_OF_TEXT).ids[0])

    def ids(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return {"input_ids": [each.ids for each in found]}

    training, held_out = (tokenize(ids, part, separator=end) for part in split(read_documents(options.text)))
    kept = pack(held_out, options.length, np.random.default_rng(0))[: max(1, options.held_out_tokens // options.length)]
    sizes = {field.name: getattr(options, field.name) for field in fields(HybridSizes) if hasattr(options, field.name)}
    model = Hybrid(HybridSizes(vocabulary=tokenizer.get_vocab_size(), **sizes)).to(options.device)
    counts = f"{_count(model)} parameters, {_count(model.mtp)} of them the MTP layer's"
    print(f"{len(training)} tokens to train on, {counts}, {time.monotonic() - begin:.0f} s", flush=True)
    run = _Run(model, options, end, torch.from_numpy(kept))
    batches = _batches(training, options.length, options.rows, 0)

    def first(rows: Tensor) -> tuple[Tensor, Tensor]:
        return target_loss(model, rows, mtp_weight=options.mtp_weight)

    def second(rows: Tensor) -> tuple[Tensor, Tensor]:
        return draft_loss(
            model, rows, steps=options.draft_steps, decay=options.decay, sharpness=options.label_temperature
        )

    run.part("target", 1 - options.mtp_share, model, first, batches)
    run.part("mtp", options.mtp_share, model.mtp, second, batches)


if __name__ == "__main__":
    main()
