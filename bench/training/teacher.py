"""A local Hugging Face target seen by head training: its features, its logits, and text that it writes.

Works for every causal model of transformers whose decoder layers are `model.model.layers` and take the residual stream
as first argument (llama, qwen2, qwen3, mistral, gpt_oss among them).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from bench.training.decode import can_decode, decode

__all__ = ["Teacher"]


@dataclass
class Teacher:
    """A frozen target with its tokenizer."""

    model: Any
    tokenizer: Any
    device: torch.device

    @classmethod
    def load(cls, directory: str | Path, device: str, dtype: torch.dtype | None = None) -> "Teacher":
        """Read a target directory; bf16 on a GPU and fp32 on the CPU unless `dtype` says otherwise."""
        dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        model.to(device).eval().requires_grad_(False)
        return cls(model, AutoTokenizer.from_pretrained(directory), torch.device(device))

    @property
    def num_layers(self) -> int:
        """The number of decoder layers."""
        return len(self.model.model.layers)

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a text, from the generation config or else the tokenizer."""
        ends = self.model.generation_config.eos_token_id
        ends = self.tokenizer.eos_token_id if ends is None else ends
        return [int(end) for end in (ends if isinstance(ends, list) else [ends])]

    @torch.no_grad()
    def features(self, tokens: Tensor, boundaries: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Run rows of tokens, right-padded if ragged.

        tokens   [rows, length] int64
        result   the residual streams at the boundaries, side by side [rows, length, 3 * Nt], and the hidden
                 states that the LM head reads [rows, length, Nt]
        """
        captured: dict[int, Tensor] = {}

        def hook(boundary: int) -> Any:
            def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                captured[boundary] = args[0] if args else kwargs["hidden_states"]

            return keep

        layers = self.model.model.layers
        handles = [layers[b].register_forward_pre_hook(hook(b), with_kwargs=True) for b in set(boundaries)]
        try:
            last = self.model.model(input_ids=tokens, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        return torch.cat([captured[b] for b in boundaries], dim=-1), last

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the target's embeddings of tokens, [..., Nt]."""
        return self.model.get_input_embeddings()(tokens)  # type: ignore[no-any-return]

    def logits(self, last: Tensor) -> Tensor:
        """Return fp32 logits [..., V] of hidden states as `features` gives them."""
        return self.model.get_output_embeddings()(last).float()  # type: ignore[no-any-return]

    def chat_ids(self, question: str) -> list[int]:
        """Return the token ids of one question under the chat template, ready for the answer."""
        messages = [{"role": "user", "content": question}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def imagine_questions(self, count: int, *, batch: int = 2048, max_tokens: int = 72) -> list[list[int]]:
        """Let a chat target write questions itself, from its template up to the user's turn (the Magpie method).

        Returns at most `count` different prompts, each ready for the answer; texts that do not end are dropped.
        Source: Magpie, arXiv 2406.08464.
        """
        mark = "\x00MARK\x00"
        messages = [{"role": "user", "content": mark}]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, after = text.split(mark)
        start = self.tokenizer(before, add_special_tokens=False)["input_ids"]
        ends = self.end_ids
        finish = self.tokenizer(after, add_special_tokens=False)["input_ids"]
        found: dict[tuple[int, ...], None] = {}
        for _ in range(-(-2 * count // batch)):  # about half of them end
            for new in self.generate([start] * batch, max_tokens, temperature=1.0):
                if len(new) > 4 and new[-1] in ends:
                    found[(*start, *new[:-1], *finish)] = None
            if len(found) >= count:
                break
        return [list(prompt) for prompt in found][:count]

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, temperature: float, stop: bool = True
    ) -> list[list[int]]:
        """Continue prompts as one batch; return the new tokens of each, the end id included.

        temperature   0 is greedy; otherwise the whole distribution is sampled (no top-k, no top-p)
        stop          end a text at the model's end ids; False writes on through them
        """
        ends = self.end_ids
        if can_decode(self.model):
            return decode(self.model, prompts, max_tokens, temperature=temperature, ends=ends if stop else ())
        width = max(len(prompt) for prompt in prompts)
        padding = ends[0]
        ids = torch.full((len(prompts), width), padding, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            mask[row, width - len(prompt) :] = 1
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        # the model's own generation config would fill in its end ids and sampling values
        self.model.generation_config, kept = GenerationConfig(), self.model.generation_config
        try:
            out = self.model.generate(
                ids.to(self.device),
                attention_mask=mask.to(self.device),
                generation_config=GenerationConfig(
                    max_new_tokens=max_tokens, eos_token_id=ends if stop else None, pad_token_id=padding, **options
                ),
            )
        finally:
            self.model.generation_config = kept
        new = out[:, width:].tolist()
        return [_until_end(tokens, ends) if stop else tokens for tokens in new]


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens
