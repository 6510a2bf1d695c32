"""A recording of transformers: every boundary's residual stream, the final hidden states and the logits.

    python -m bench.peers.tensors.transformers MODEL --token-ids 1,2,3 --out transformers.safetensors
    lowlat compare MODEL --against transformers.safetensors

`output_hidden_states=True` returns the streams entering layers 0 to L - 1, and after them the stream that has passed
the final norm; the one that enters that norm is kept by a forward pre-hook.
Source: huggingface.co/docs/transformers, main_classes/output.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bench.peers.tensors.arguments import arguments, target_recording, write
from lowlat.tools.compare.recording import Recording

__all__ = ["main", "record_target"]


@torch.no_grad()
def record_target(model: Any, prompt: Sequence[int], num_tokens: int) -> Recording:
    """Decode greedily, then run all tokens but the last once more, without a cache."""
    start = torch.tensor([prompt], device=model.device)
    decoded = model.generate(
        start, attention_mask=torch.ones_like(start), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
    )
    entering: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda module, given: entering.append(given[0]))
    try:
        run = model(decoded[:, :-1], output_hidden_states=True, use_cache=False)
    finally:
        hook.remove()
    *streams, final = run.hidden_states
    residuals = {boundary: stream[0] for boundary, stream in enumerate([*streams, entering[-1]])}
    return target_recording(decoded[0].tolist(), len(prompt), residuals, pre_head_hidden=final[0], logits=run.logits[0])


def main(given: Sequence[str] | None = None) -> None:
    """Load the model, decode, and write the file."""
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    options = parser.parse_args(given)
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, attn_implementation="eager")
    recording = record_target(model.to(options.device).eval(), options.token_ids, options.num_tokens)
    write(recording, options.out)


if __name__ == "__main__":
    main()
