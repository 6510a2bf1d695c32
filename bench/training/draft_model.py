"""Train a draft model for a local Hugging Face target (llama, qwen2, qwen3, mistral, gpt_oss and the like).

    python -m bench.training --target DIR --text FILE --out DIR [--prompts FILE] [--draft-vocab N]
        [--minutes 4] [--method peagle|dflash|dspark [--start DIR]]
    python -m bench.training --target DIR --text FILE --out DIR --start DIR --yarn 32 --rows 128
        --text-length 65536 --generated-share 0                                     for long contexts

Half or more of the data is written by the target itself: it continues windows of the text, or answers the
questions of `--prompts` under its chat template, greedy and at `--temperature`. The loss is the cross-entropy to
the target's distribution at each of `--ttt-steps` simulated draft steps (training-time test), later steps
weighing less. Tokens outside the draft vocabulary keep their share of the probability and are not learned. A parallel
draft model (`parallel`) learns the drafts of `--anchors` random positions a row.

The draft model starts from the target: its LM head, its final norm, its last layer where shapes agree, and an fc that
passes the highest feature through; or from `--start`. `--yarn FACTOR` gives it so many times the positions of its
start, and `--window` lets it see the last ones alone. Learning is driven by elapsed time or `--steps`; the rate ends at
zero.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.training.corpus import read_documents, read_prompts, split, tokenize
from bench.training.eagle3 import DraftSizes, Eagle3DraftModel, load_draft_model, save_draft_model
from bench.training.evaluate import encode_prompts, evaluate, print_table
from bench.training.parallel import (
    METHODS,
    ParallelDraftModel,
    ParallelForm,
    parallel_loss,
    save_parallel_model,
)
from bench.training.rows import WritingPlan, load_rows, mix_batches, save_rows, write_rows
from bench.training.target import learning_rate_scale
from bench.training.teacher import Teacher
from lowlat.errors import ConfigError
from lowlat.speculators.eagle3.capture import default_boundaries

__all__ = ["boundaries_of", "build_draft_model", "choose_draft_ids", "draft_loss", "train_draft_model"]


def boundaries_of(num_layers: int) -> tuple[int, int, int]:
    """The boundaries that a new draft model captures, EAGLE-3's: streams entering layers 2, L // 2 and L - 3.

    Raises ConfigError below 7 layers, where the three are not different streams.
    """
    boundaries = default_boundaries(num_layers)
    if boundaries is None:
        raise ConfigError(f"the target has {num_layers} layers; three different streams (2, L / 2, L - 3) need 7")
    return boundaries


def draft_sizes(teacher: Teacher, *, draft_vocabulary: int, ffn: int | None = None) -> DraftSizes:
    """Return the sizes of a draft model that fits a target: the target's own attention geometry, one layer."""
    config = teacher.model.config
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    vocabulary = int(teacher.model.get_output_embeddings().weight.shape[0])
    return DraftSizes(
        hidden=config.hidden_size,
        target_hidden=config.hidden_size,
        intermediate=ffn or config.intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocabulary=vocabulary,
        draft_vocabulary=min(draft_vocabulary or vocabulary, vocabulary),
        max_context=config.max_position_embeddings,
        rope_theta=float(theta),
        rms_norm_eps=config.rms_norm_eps,
        boundaries=boundaries_of(teacher.num_layers),
    )


def choose_draft_ids(tokens: Tensor, sizes: DraftSizes) -> Tensor:
    """Return the target ids kept as draft vocabulary: the most frequent among the tokens to learn, sorted."""
    counts = torch.bincount(tokens, minlength=sizes.vocabulary)
    order = counts.argsort(descending=True, stable=True)
    total = int(counts.sum())
    for size in (sizes.draft_vocabulary * k // 4 for k in (2, 3, 4, 5, 6, 8)):
        share = 100 * int(counts[order[:size]].sum()) / max(1, total)
        print(f"the {min(size, len(order))} most frequent ids are {share:.2f} % of {total} tokens", flush=True)
    return order[: sizes.draft_vocabulary].sort().values


def _written(teacher: Teacher, text: Any, arguments: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Read the rows that an earlier run kept, or let the target write them and keep them; none where none are used."""
    if not arguments.generated_share:
        width = arguments.length + 1
        return torch.zeros(0, width, dtype=torch.int32), torch.zeros(0, width, dtype=torch.bool)
    if arguments.written and Path(arguments.written).exists():
        return load_rows(arguments.written)
    questions: list[list[int]] = []
    if arguments.prompts:
        for some in read_prompts(arguments.prompts).values():
            questions += [teacher.chat_ids(question) for question in some]
        imagined = teacher.imagine_questions(arguments.imagined, batch=arguments.generate_batch)
        for prompt in imagined[:12]:
            print(repr(teacher.tokenizer.decode(prompt)[-200:]), flush=True)
        print(f"{len(questions)} questions given, {len(imagined)} of the target's own", flush=True)
        questions += imagined
    plan = WritingPlan(
        length=arguments.length,
        max_rows=arguments.generated_rows,
        minutes=arguments.generate_minutes,
        batch=arguments.generate_batch,
        answer_tokens=arguments.answer_tokens,
        temperature=arguments.temperature,
    )
    rows = write_rows(teacher, plan, text, questions)
    if arguments.written:
        save_rows(rows, arguments.written)
    return rows


@torch.no_grad()
def build_draft_model(teacher: Teacher, sizes: DraftSizes, draft_ids: Tensor) -> Eagle3DraftModel:
    """Return a draft model that starts from the target's weights, fp32."""
    head = Eagle3DraftModel(sizes, draft_ids)
    model = teacher.model
    head.lm_head.weight.copy_(model.get_output_embeddings().weight[draft_ids.to(teacher.device)].float())
    head.norm.weight.copy_(model.model.norm.weight.float())
    nn.init.normal_(head.fc.weight, std=0.02 / sizes.hidden**0.5)
    if sizes.hidden == sizes.target_hidden:
        head.fc.weight[:, 2 * sizes.hidden :] += torch.eye(sizes.hidden)
    source = dict(model.model.layers[-1].named_parameters())
    for name, parameter in head.midlayer.named_parameters():
        weight = source.get(name)
        if name in ("input_layernorm.weight", "hidden_norm.weight"):
            parameter.fill_(1.0)
            if name == "hidden_norm.weight" and "input_layernorm.weight" in source:
                parameter.copy_(source["input_layernorm.weight"].float())
        elif weight is not None and weight.shape == parameter.shape:
            parameter.copy_(weight.float())
        elif parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5)
            if weight is not None and weight.shape == (parameter.shape[0], sizes.hidden):
                parameter[:, sizes.hidden :] = weight.float()
    return head


def draft_loss(
    teacher: Teacher,
    head: Eagle3DraftModel,
    tokens: Tensor,
    keep: Tensor,
    *,
    steps: int,
    decay: float,
    sharpness: float,
) -> tuple[Tensor, Tensor]:
    """Return the weighted loss over draft steps and the share of rows whose draft is the target's argmax, by step.

    tokens     [rows, length + 1] int64
    keep       [rows, length + 1] bool   the tokens worth predicting (not the prompt, not padding)
    sharpness  the target's distribution is taken at this temperature
    """
    rows = torch.cat([keep[:, 2:], keep[:, -1:]], dim=1)
    rows[:, : steps - 1] = False  # where a later step has no true row to start from
    with torch.no_grad():
        features, last = teacher.features(tokens, head.sizes.boundaries)
        embedded = teacher.embed(tokens[:, 1:])
        logits = teacher.logits(last[:, 1:][rows])
        best = logits.argmax(-1)
        total = (logits / sharpness).logsumexp(-1, keepdim=True)
        probabilities = (logits[:, head.draft_ids] / sharpness - total).exp()
        del logits
    draft_ids = head.draft_ids
    loss: Any = 0.0
    matches = []
    for step, state in enumerate(head.steps(embedded, features[:, :-1], steps)):
        drafted = head.lm_head(state[rows])
        entropy = -(probabilities * drafted.float().log_softmax(-1)).sum(-1)
        loss = loss + decay**step / sum(decay**k for k in range(steps)) * entropy.mean()
        matches.append((draft_ids[drafted.detach().argmax(-1)] == best).float().mean())
    return loss, torch.stack(matches)


def _subject(
    teacher: Teacher, sizes: DraftSizes, draft_ids: Tensor, arguments: argparse.Namespace
) -> tuple[Eagle3DraftModel | ParallelDraftModel, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]:
    """The draft model to train, and its loss."""
    common = {"decay": arguments.decay, "sharpness": arguments.label_temperature}
    if arguments.method == "eagle3":
        head = load_draft_model(arguments.start) if arguments.start else build_draft_model(teacher, sizes, draft_ids)
        stretched = round(head.sizes.max_context * arguments.yarn / head.sizes.yarn_factor)
        if arguments.yarn > 1:
            head.sizes = replace(head.sizes, yarn_factor=arguments.yarn, max_context=stretched)
        head.sizes = replace(head.sizes, window=arguments.window or head.sizes.window)
        return head, partial(draft_loss, teacher, head, steps=arguments.ttt_steps, **common)
    mask = teacher.end_ids[0] if arguments.mask_token is None else arguments.mask_token
    rank = arguments.markov_rank if arguments.method == "dspark" else 0
    form = ParallelForm(arguments.method, arguments.layers, arguments.drafts, mask, rank)
    start = load_draft_model(arguments.start) if arguments.start else None
    parallel = ParallelDraftModel(sizes, form, teacher.model.get_input_embeddings().weight.detach().float())
    parallel.start_from(teacher, start)
    return parallel, partial(parallel_loss, teacher, parallel, anchors=arguments.anchors, **common)


def train_draft_model(
    head: nn.Module,
    batches: Iterator[tuple[Tensor, Tensor]],
    loss_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    device: torch.device,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Train in place for `--steps` steps or `--minutes`, whichever is given; return the log.

    loss_of  of tokens and the mask of those worth predicting: the loss, and the share of right drafts by step
    """
    head.to(device).train()
    learned = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        learned, lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    log: list[dict[str, Any]] = []
    running: list[Tensor] = []
    start, step, tokens_seen, progress = time.monotonic(), 0, 0, 0.0
    while progress < 1:
        tokens, keep = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=arguments.bf16):
            loss, matches = loss_of(tokens, keep)
        step += 1
        elapsed = (time.monotonic() - start) / (60 * arguments.minutes)
        progress = step / arguments.steps if arguments.steps else elapsed
        for group in optimizer.param_groups:
            group["lr"] = arguments.learning_rate * learning_rate_scale(progress, warmup=0.02, hold=0.2)
        loss.backward()
        nn.utils.clip_grad_norm_(learned, 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens_seen += tokens.numel()
        running.append(torch.cat([loss.detach()[None], matches]))
        if step % arguments.log_every == 0 or progress >= 1:
            mean = torch.stack(running).mean(0).tolist()
            running.clear()
            entry = {"step": step, "s": round(time.monotonic() - start, 1), "tokens": tokens_seen}
            log.append({**entry, "loss": round(mean[0], 4), "match_by_step": [round(m, 4) for m in mean[1:]]})
            if len(log) % 5 == 1 or progress >= 1:
                print(log[-1], flush=True)
    return log


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.training", description="Train a draft model for a local Hugging Face target."
    )
    parser.add_argument("--target", required=True, help="Hugging Face directory of the target")
    parser.add_argument("--text", required=True, help="documents separated by <|endoftext|> lines; .xz is read too")
    parser.add_argument("--prompts", help="questions for the chat template: JSON, or one a line")
    parser.add_argument("--out", help="directory to write; without it only the target writes its rows (--written)")
    parser.add_argument("--written", help="file of rows the target wrote: read if it exists, else made")
    parser.add_argument("--imagined", type=int, default=0, help="questions that a chat target makes up itself")
    parser.add_argument("--eval-prompts", help="held-out prompts, JSON by domain; measured at the end")
    parser.add_argument("--draft-vocab", type=int, default=0, help="ids that can be drafted; 0: the target's all")
    parser.add_argument("--ffn", type=int, help="the draft model's FFN width; the target's own by default")
    parser.add_argument("--method", choices=("eagle3", *METHODS), default="eagle3")
    parser.add_argument("--start", help="an EAGLE3 draft model of the same target to go on from")
    parser.add_argument("--yarn", type=float, default=1.0, help="times the positions of --start that it gets, by YaRN")
    parser.add_argument("--window", type=int, help="positions that a row sees, its own included; all by default")
    parser.add_argument("--layers", type=int, default=2, help="of a parallel draft model")
    parser.add_argument("--drafts", type=int, default=7, help="of a parallel draft model's pass")
    parser.add_argument("--anchors", type=int, default=48, help="a row, of which a parallel draft model drafts")
    parser.add_argument("--mask-token", type=int, help="id of a parallel draft model's mask; by default an end of text")
    parser.add_argument("--markov-rank", type=int, default=64, help="of DSpark's Markov head")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="arithmetic; by default on a GPU alone")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: train for --minutes")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=64, help="rows of --length tokens a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row written by the target")
    parser.add_argument(
        "--text-length", type=int, nargs="+", default=[1024], help="tokens of a row of text; several: batch by batch"
    )
    parser.add_argument(
        "--generated-share", type=float, default=0.6, help="share of batches written by the target; 0: text"
    )
    parser.add_argument("--generated-rows", type=int, default=20_000, help="rows the target writes at most")
    parser.add_argument("--generate-minutes", type=float, default=2.0, help="time for that at most")
    parser.add_argument("--generate-batch", type=int, default=1024)
    parser.add_argument("--answer-tokens", type=int, default=256, help="longest answer to a question")
    parser.add_argument("--temperature", type=float, default=0.7, help="of three in five written batches")
    parser.add_argument("--ttt-steps", type=int, default=4, help="draft steps simulated in training")
    parser.add_argument("--decay", type=float, default=0.8, help="weight of each draft step over the one before")
    parser.add_argument("--label-temperature", type=float, default=0.7, help="of the distribution that is learned")
    parser.add_argument("--text-mb", type=float, default=0.0, help="megabytes of text to use; 0: all")
    parser.add_argument("--log-every", type=int, default=20)
    arguments = parser.parse_args(given)
    if arguments.method != "eagle3" and (arguments.eval_prompts or arguments.draft_vocab):
        parser.error(f"--eval-prompts and --draft-vocab are for --method eagle3 alone, got {arguments.method}")
    if arguments.method != "eagle3" and (arguments.yarn != 1 or arguments.window is not None):
        parser.error(f"--yarn and --window are for --method eagle3 alone, got {arguments.method}")
    if arguments.yarn < 1 or (arguments.yarn > 1 and not arguments.start):
        parser.error(f"--yarn {arguments.yarn:g} must be at least 1, and above it stretches the positions of --start")
    if arguments.window is not None and arguments.window <= arguments.ttt_steps:
        parser.error(f"--window {arguments.window} must be above --ttt-steps {arguments.ttt_steps}")
    arguments.bf16 = arguments.device != "cpu" if arguments.bf16 is None else arguments.bf16
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    """Train, and write the draft model with its log."""
    arguments = _arguments(given)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every shape, and long rows attend in many
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    teacher = Teacher.load(arguments.target, arguments.device, dtype)
    training, _ = split(read_documents(arguments.text))
    if arguments.text_mb:
        training = training[:: max(1, int(sum(map(len, training)) / 1e6 / arguments.text_mb))]
    text = tokenize(teacher.tokenizer, training, separator=teacher.tokenizer.eos_token_id)
    sizes = draft_sizes(teacher, draft_vocabulary=arguments.draft_vocab, ffn=arguments.ffn)
    written = _written(teacher, text, arguments)
    seen = written[0][written[1]].long()
    if not arguments.prompts:
        seen = torch.cat([seen, torch.from_numpy(text.astype(np.int64))])
    draft_ids = choose_draft_ids(seen, sizes)
    if not arguments.out:
        return
    head, loss_of = _subject(teacher, sizes, draft_ids, arguments)
    learned = sum(p.numel() for p in head.parameters() if p.requires_grad)
    print(f"{learned} parameters of the draft model are trained", flush=True)
    batches = mix_batches(
        text,
        written,
        batch=arguments.rows,
        length=arguments.length,
        text_lengths=arguments.text_length,
        own_share=arguments.generated_share,
    )
    log = train_draft_model(head, batches, loss_of, teacher.device, arguments)
    out = Path(arguments.out)
    if isinstance(head, Eagle3DraftModel):
        save_draft_model(head, out)
    else:
        save_parallel_model(head, out, teacher.num_layers)
    kept = ("method", "rows", "length", "text_length", "drafts", "layers", "anchors", "yarn", "window", "learning_rate")
    told = {name: getattr(arguments, name) for name in kept}
    told["start"] = None if arguments.start is None else Path(arguments.start).name
    (out / "loss.json").write_text(json.dumps({"parameters": learned, "training": told, "log": log}))
    if arguments.eval_prompts and isinstance(head, Eagle3DraftModel):
        prompts = encode_prompts(teacher, read_prompts(arguments.eval_prompts), chat=bool(arguments.prompts))
        result = evaluate(teacher, head, prompts)
        (out / "acceptance.json").write_text(json.dumps(result, indent=1) + "\n")
        print_table(result)


if __name__ == "__main__":
    main()
