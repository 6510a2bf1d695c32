"""A recording of TensorRT-LLM: residual streams after chosen layers, and the final hidden states.

    python -m bench.peers.tensors.tensorrt_llm MODEL --token-ids 1,2,3 --layers 1,15,28 --out trt.safetensors
    lowlat compare MODEL --against trt.safetensors --dtype bfloat16 --min-cosine 0.99

`SaveHiddenStatesDecodingConfig` captures what leaves each layer of `eagle3_layers_to_capture`: layer i's is what lowlat
calls boundary i + 1. It decodes one token a request, so a recording is of the prompt's rows and that token. Its files
hold a dict for each request: `input_ids` [n], `hidden_state` [n, N] after the final norm, and the captured streams side
by side, [n, layers x N], in the layers' order, as `hidden_state_features` or, by its documentation,
`aux_hidden_states`. It saves no logits and nothing of a draft model.
Source: nvidia.github.io/TensorRT-LLM, llm-api/reference/SaveHiddenStatesDecodingConfig.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.peers.tensors.arguments import arguments, target_recording, write
from lowlat.errors import ConfigError
from lowlat.tools.compare.recording import Recording

__all__ = ["config_arguments", "main", "recording_of"]

STREAMS = ("hidden_state_features", "aux_hidden_states")
FINAL = ("hidden_state", "hidden_states")


def config_arguments(layers: Sequence[int], folder: str) -> dict[str, Any]:
    """The arguments of `SaveHiddenStatesDecodingConfig`: a file after each request."""
    return {"output_directory": folder, "write_interval": 1, "eagle3_layers_to_capture": set(layers)}


def recording_of(saved: Mapping[str, Any], following: int, layers: Sequence[int]) -> Recording:
    """The recording of a request's dict, and the token that was decoded after its prompt.

    Raises ConfigError for a dict that lacks a tensor, or has other layers.
    """
    streams, final = (next((saved[name] for name in names if name in saved), None) for names in (STREAMS, FINAL))
    if streams is None or final is None:
        raise ConfigError(f"a request has {', '.join(saved)}, and must have {STREAMS[0]} and {FINAL[0]}")
    width = final.shape[-1]
    if streams.shape[-1] != width * len(layers):
        raise ConfigError(f"{STREAMS[0]} is {list(streams.shape)}, and must have {len(layers)} streams of {width}")
    prompt = saved["input_ids"].tolist()[: final.shape[0]]
    parts = zip(sorted(layers), streams.split(width, dim=-1), strict=True)
    residuals = {layer + 1: part for layer, part in parts}
    return target_recording([*prompt, following], len(prompt), residuals, pre_head_hidden=final)


def main(given: Sequence[str] | None = None) -> None:
    """Run the prompt and write what was captured."""
    options = arguments(__doc__, layers="layers, 0 to L - 1").parse_args(given)
    from tensorrt_llm import LLM, SamplingParams
    from tensorrt_llm.llmapi import KvCacheConfig, SaveHiddenStatesDecodingConfig

    with tempfile.TemporaryDirectory() as folder:
        engine = LLM(
            model=options.model,
            backend="pytorch",
            dtype=options.dtype,
            skip_tokenizer_init=True,
            kv_cache_config=KvCacheConfig(enable_block_reuse=False),
            speculative_config=SaveHiddenStatesDecodingConfig(**config_arguments(options.layers, folder)),
        )
        params = SamplingParams(temperature=0.0, max_tokens=1, end_id=-1, pad_id=-1, detokenize=False)
        found = engine.generate(options.token_ids, params)
        engine.shutdown()
        (path,) = sorted(Path(folder).glob("*.pt"))
        (saved,) = torch.load(path, map_location="cpu", weights_only=True)
    write(recording_of(saved, int(found.outputs[0].token_ids[0]), options.layers), options.out)


if __name__ == "__main__":
    main()
