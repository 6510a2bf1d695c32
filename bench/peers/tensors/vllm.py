"""A recording of vLLM: residual streams at chosen boundaries, by its extraction of hidden states.

    python -m bench.peers.tensors.vllm MODEL --token-ids 1,2,3 --layers 0,2,16,29,32 --out vllm.safetensors
    lowlat compare MODEL --against vllm.safetensors --dtype bfloat16 --min-cosine 0.99

The method `extract_hidden_states` keeps the stream entering each layer of `eagle_aux_hidden_state_layer_ids`, as
lowlat counts boundaries, and of the number of layers the one leaving the last layer, not normed. Its connector writes a
file for each request: `token_ids` [n] and `hidden_states` [n, boundaries, N]. It saves no logits and nothing of a draft
model. Chunked prefill must be off.
Source: docs.vllm.ai, features/speculative_decoding/extract_hidden_states.
"""

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bench.peers.tensors.arguments import arguments, target_recording, write
from lowlat.errors import ConfigError
from lowlat.tools.compare.recording import Recording

__all__ = ["engine_arguments", "main", "recording_of"]


def engine_arguments(model: str, dtype: str, layers: Sequence[int], folder: str) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`; files of requests are written into the folder."""
    return {
        "model": model,
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    }


def recording_of(
    saved: Mapping[str, torch.Tensor], tokens: Sequence[int], num_prompt: int, layers: Sequence[int]
) -> Recording:
    """The recording of a request over all tokens but the last, as its file has it.

    saved  token_ids [n] and hidden_states [n, boundaries, N]
    Raises ConfigError for the file of another request, or of other boundaries.
    """
    run = len(tokens) - 1
    ids, states = saved["token_ids"].tolist(), saved["hidden_states"]
    if ids[:run] != list(tokens[:-1]):
        raise ConfigError(f"the file is of {len(ids)} other tokens than the {run} that were run")
    if states.dim() != 3 or states.shape[1] != len(layers):
        raise ConfigError(f"hidden_states is {list(states.shape)}, and must have {len(layers)} boundaries")
    return target_recording(tokens, num_prompt, {layer: states[:run, place] for place, layer in enumerate(layers)})


def main(given: Sequence[str] | None = None) -> None:
    """Decode greedily, run all tokens but the last as a prompt, and write what the connector saved of that."""
    options = arguments(__doc__, layers="boundaries, 0 to L").parse_args(given)
    from vllm import LLM, SamplingParams
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as connector

    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(**engine_arguments(options.model, options.dtype, options.layers, folder))
        greedy = SamplingParams(temperature=0.0, max_tokens=options.num_tokens, ignore_eos=True, detokenize=False)
        (decoded,) = engine.generate([{"prompt_token_ids": options.token_ids}], greedy)
        tokens = [*options.token_ids, *decoded.outputs[0].token_ids]
        once = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        (found,) = engine.generate([{"prompt_token_ids": tokens[:-1]}], once)
        saved = connector.load_hidden_states(found.kv_transfer_params["hidden_states_path"])
    write(recording_of(saved, tokens, len(options.token_ids), options.layers), options.out)


if __name__ == "__main__":
    main()
