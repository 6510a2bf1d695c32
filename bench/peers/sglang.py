"""SGLang: its offline `Engine`, streaming, prompts as token ids, without a tokenizer and without its prefix cache.

Random weights are its own (`load_format="dummy"`). `SGLANG_SIMULATE_ACC_LEN` imposes acceptance.
Source: docs.sglang.io, advanced_features/speculative_decoding and server_arguments; python/sglang/srt/entrypoints.
"""

import os
from typing import Any

from bench.peers.engine import Arrivals, GpuEngine, Job, Mark, Measured, prompts_of

__all__ = ["Sglang"]


class Sglang(GpuEngine):
    """SGLang's `Engine`."""

    name = "sglang"
    package = "sglang"
    shown = "SGLang's CUDA build"

    def arguments(self, job: Job) -> dict[str, Any]:
        """The arguments of `Engine`: fields of its ServerArgs."""
        found: dict[str, Any] = {
            "model_path": job.directory,
            "skip_tokenizer_init": True,
            "load_format": "auto" if job.geometry is None else "dummy",
            "dtype": job.dtype,
            "context_length": job.case.context + job.room,
            "max_running_requests": job.case.batch,
            "disable_radix_cache": True,
            "random_seed": 0,
        }
        if job.depth:
            found |= {
                "speculative_algorithm": "EAGLE3",
                "speculative_draft_model_path": job.draft_directory,
                "speculative_num_steps": job.depth,
                "speculative_eagle_topk": 1,
                "speculative_num_draft_tokens": job.depth + 1,
            }
        return found

    def environment(self, job: Job) -> dict[str, str]:
        """The variables that impose acceptance."""
        if job.imposed_length is None:
            return {}
        return {"SGLANG_SIMULATE_ACC_LEN": str(job.imposed_length), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}

    def measure(self, job: Job, mark: Mark) -> Measured:
        """Submit the prompts of each repeat together, and read their streams to the end."""
        os.environ.update(self.environment(job))
        import sglang

        arguments = self.arguments(job)
        engine = sglang.Engine(**arguments)
        params = {"temperature": 0.0, "max_new_tokens": job.room, "ignore_eos": True}
        shown = {key: str(value) for key, value in arguments.items() if not key.endswith(("path", "seed"))}
        measured = Measured(settings={**shown, **self.environment(job)})
        for _ in range(job.repeats):
            prompts = prompts_of(job)
            arrivals = Arrivals(job, [str(number) for number in range(len(prompts))])
            for chunk in engine.generate(input_ids=prompts, sampling_params=params, stream=True):
                arrivals.take([(str(chunk.get("index", 0)), chunk["meta_info"]["completion_tokens"])])
            measured.repeats.append(arrivals.samples)
        mark()
        engine.shutdown()
        return measured
