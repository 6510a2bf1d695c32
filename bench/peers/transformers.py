"""transformers: `generate`, greedy, with the cache that is fastest on the device; token times by a stopping criterion.

On a GPU a static cache, with which `generate` compiles the decode step into CUDA graphs by itself; elsewhere, and
where that fails, the dynamic one.
"""

from typing import Any

from bench.lib.subjects import known_geometry
from bench.peers.engine import Arrivals, Found, Job, Mark, Measured, found_package, prompts_of
from lowlat.tools.bench.measure import Samples

__all__ = ["Transformers"]


class Transformers:
    """transformers' `generate`."""

    name = "transformers"

    def available(self) -> Found:
        """The installed version."""
        return found_package("transformers")

    def refusal(self, job: Job) -> str:
        """It has no EAGLE3, and random weights of it are never quantised."""
        if job.depth:
            return "transformers has no EAGLE3: its assisted generation needs a whole second model"
        if job.geometry is not None and "quantization_config" in known_geometry(job.geometry).target:
            return "random experts would be bfloat16, not MXFP4: other bytes a step"
        return ""

    def arguments(self, job: Job, cache: str) -> dict[str, Any]:
        """Arguments of `generate` besides the prompts; cache: static or dynamic."""
        tokens = job.warm_up + job.steps + 2
        found: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return {**found, "cache_implementation": "static"} if cache == "static" else found

    def measure(self, job: Job, mark: Mark) -> Measured:
        """Generate once to warm up and compile, then once a repeat; without a compiler by the dynamic cache."""
        model = _load(job)
        settings = {"dtype": job.dtype, "attention": str(model.config._attn_implementation)}
        if job.device.startswith("cuda"):
            try:
                repeats = _generate(model, job, self.arguments(job, "static"))
                mark()
                return Measured(repeats, {**settings, "cache": "static"})
            except Exception as error:  # of whichever compiler
                settings["static_cache"] = f"failed: {type(error).__name__}: {error!s:.200}"
        repeats = _generate(model, job, self.arguments(job, "dynamic"))
        mark()
        return Measured(repeats, {**settings, "cache": "dynamic"})


def _load(job: Job) -> Any:
    """The model, on its device: a directory's weights, or random ones."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    dtype = getattr(torch, job.dtype)
    with torch.device(job.device):
        if job.geometry is None:
            model = AutoModelForCausalLM.from_pretrained(job.directory, dtype=dtype)
        else:
            config = AutoConfig.from_pretrained(job.directory)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no end of text: every step is wanted
    return model.to(job.device).eval()


def _generate(model: Any, job: Job, arguments: dict[str, Any]) -> list[Samples]:
    """The samples of each repeat, after one that does not count."""
    import torch
    from transformers import StoppingCriteriaList

    prompts = torch.tensor(prompts_of(job), device=job.device)
    names = [str(number) for number in range(len(prompts))]
    found = []
    for _ in range(1 + job.repeats):
        arrivals = Arrivals(job, names)

        def seen(input_ids: Any, scores: Any, arrivals: Arrivals = arrivals, **_: Any) -> Any:
            total = input_ids.shape[1] - prompts.shape[1]
            input_ids[:, -1].tolist()  # in the caller's hands: waits for the device
            arrivals.take([(name, total) for name in names])
            return torch.zeros(len(names), dtype=torch.bool, device=input_ids.device)

        attended, criteria = torch.ones_like(prompts), StoppingCriteriaList([seen])
        with torch.inference_mode():
            model.generate(prompts, attention_mask=attended, stopping_criteria=criteria, **arguments)
        found.append(arrivals.samples)
    return found[1:]
