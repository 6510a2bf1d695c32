"""TensorRT-LLM: its `LLM` of the PyTorch backend, streaming, prompts as token ids, without a tokenizer.

Random weights are its own (`load_format="dummy"`). `TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS` imposes acceptance: it
counts drafts, without the bonus token. Its EAGLE3 chain runs in one engine with the target (`eagle3_one_model`).
Source: nvidia.github.io/TensorRT-LLM, features/speculative-decoding and llm-api/reference; tensorrt_llm/llmapi and
tensorrt_llm/_torch/speculative/interface.py.
"""

import asyncio
import os
from typing import Any

from bench.peers.engine import Arrivals, GpuEngine, Job, Mark, Measured, prompts_of

__all__ = ["TensorrtLlm"]

FORCED = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"


class TensorrtLlm(GpuEngine):
    """TensorRT-LLM's `LLM`."""

    name = "tensorrt-llm"
    package = "tensorrt_llm"
    shown = "TensorRT-LLM"

    def arguments(self, job: Job) -> dict[str, Any]:
        """The arguments of `LLM`; those that are configurations of their own are dicts, by the names of its fields."""
        found: dict[str, Any] = {
            "model": job.directory,
            "backend": "pytorch",
            "skip_tokenizer_init": True,
            "load_format": "auto" if job.geometry is None else "dummy",
            "dtype": job.dtype,
            "max_seq_len": job.case.context + job.room,
            "max_batch_size": job.case.batch,
            "kv_cache_config": {"enable_block_reuse": False},
            "cuda_graph_config": {"max_batch_size": job.case.batch},
        }
        if job.depth:
            found["speculative_config"] = {
                "decoding_type": "Eagle3",
                "max_draft_len": job.depth,
                "speculative_model": job.draft_directory,
                "eagle3_one_model": True,
            }
        return found

    def environment(self, job: Job) -> dict[str, str]:
        """The variable that imposes acceptance."""
        return {} if job.imposed_length is None else {FORCED: f"{job.imposed_length - 1:g}"}

    def measure(self, job: Job, mark: Mark) -> Measured:
        """Submit the prompts of each repeat together, and read their streams until there are enough steps."""
        os.environ.update(self.environment(job))
        from tensorrt_llm import LLM, SamplingParams
        from tensorrt_llm.llmapi import CudaGraphConfig, Eagle3DecodingConfig, KvCacheConfig

        kinds = {
            "kv_cache_config": KvCacheConfig,
            "cuda_graph_config": CudaGraphConfig,
            "speculative_config": Eagle3DecodingConfig,
        }
        arguments = self.arguments(job)
        shown = {key: str(value) for key, value in arguments.items() if key not in ("model", "speculative_config")}
        if job.depth:
            shown["speculative_config"] = f"Eagle3, max_draft_len {job.depth}, one model"
        own = {key: kinds[key](**_fields(value)) if key in kinds else value for key, value in arguments.items()}
        engine = LLM(**own)
        params = SamplingParams(
            temperature=0.0, max_tokens=job.room, ignore_eos=True, end_id=-1, pad_id=-1, detokenize=False
        )
        measured = Measured(settings={**shown, **self.environment(job)})
        for _ in range(job.repeats):
            arrivals = Arrivals(job, [str(number) for number in range(job.case.batch)])
            asyncio.run(_read(engine, prompts_of(job), params, arrivals))
            measured.repeats.append(arrivals.samples)
        mark()
        engine.shutdown()
        return measured


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration, whose class says its kind."""
    return {name: value for name, value in values.items() if name != "decoding_type"}


async def _read(engine: Any, prompts: list[list[int]], params: Any, arrivals: Arrivals) -> None:
    """Read all streams side by side; what is left when there are enough steps is aborted."""
    requests = [engine.generate_async(prompt, sampling_params=params, streaming=True) for prompt in prompts]

    async def follow(name: str, request: Any) -> None:
        async for output in request:
            arrivals.take([(name, len(output.outputs[0].token_ids))])
            if arrivals.complete:
                return

    await asyncio.gather(*(follow(str(number), request) for number, request in enumerate(requests)))
    for request in requests:
        request.abort()
