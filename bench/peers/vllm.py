"""vLLM: steps of its own `LLMEngine` in the offline interface, prompts as token ids, without a tokenizer.

Random weights are its own (`load_format="dummy"`). Its synthetic rejection sampler imposes acceptance.
Source: docs.vllm.ai, features/speculative_decoding, and the fields of vllm/config/speculative.py.
"""

from typing import Any

from bench.peers.engine import Arrivals, GpuEngine, Job, Mark, Measured, prompts_of

__all__ = ["Vllm"]


class Vllm(GpuEngine):
    """vLLM's `LLM`."""

    name = "vllm"
    package = "vllm"
    shown = "vLLM's CUDA build"

    def arguments(self, job: Job) -> dict[str, Any]:
        """The arguments of `LLM`."""
        found: dict[str, Any] = {
            "model": job.directory,
            "skip_tokenizer_init": True,
            "load_format": "auto" if job.geometry is None else "dummy",
            "dtype": job.dtype,
            "max_model_len": job.case.context + job.room,
            "max_num_seqs": job.case.batch,
            "enable_prefix_caching": False,
            "seed": 0,
        }
        if job.depth:
            drafts: dict[str, Any] = {
                "method": "eagle3",
                "model": job.draft_directory,
                "num_speculative_tokens": job.depth,
            }
            if job.imposed_length is not None:
                drafts |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": job.imposed_length}
            found["speculative_config"] = drafts
        return found

    def measure(self, job: Job, mark: Mark) -> Measured:
        """Submit the prompts of each repeat together, and step until there are enough steps."""
        from vllm import LLM, SamplingParams

        arguments = self.arguments(job)
        engine = LLM(**arguments).llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=job.room, ignore_eos=True, detokenize=False)
        shown = {key: str(value) for key, value in arguments.items() if key not in ("model", "seed")}
        measured = Measured(settings=shown)
        for repeat in range(job.repeats):
            prompts = {f"{repeat}-{number}": prompt for number, prompt in enumerate(prompts_of(job))}
            arrivals = Arrivals(job, list(prompts))
            for name, prompt in prompts.items():
                engine.add_request(name, {"prompt_token_ids": prompt}, params)
            while not arrivals.complete and engine.has_unfinished_requests():
                outputs = engine.step()
                arrivals.take([(each.request_id, len(each.outputs[0].token_ids)) for each in outputs])
            engine.abort_request(list(prompts))
            while engine.has_unfinished_requests():
                engine.step()
            measured.repeats.append(arrivals.samples)
        mark()
        return measured
