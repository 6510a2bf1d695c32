"""`lowlat serve` on a GPU: other processes get the runtime's own tokens, and the server ends when it is told to."""

import threading
from pathlib import Path
from typing import Any

import pytest
from needed_gpus import need_gpus
from serving_process import serving

import lowlat
from lowlat.ipc import Client

PROMPTS = ("The President shall", "Once upon a time", "def main(", "In the beginning", "A function is", "import os")
OPTIONS: dict[str, Any] = {"max_batch": 4, "max_context": 1024, "device": "cuda", "executor": "graph"}
DEMO = Path(lowlat.__file__).parent / "demo"


def sampling(number: int) -> dict[str, Any]:
    """Greedy and drawn by turns."""
    return {"max_tokens": 120, "seed": number, "temperature": 0.8 * (number % 2)}


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("device_loop", [False, True])
def test_streams_are_the_runtime_s_tokens(tmp_path: Path, device_loop: bool, gpus: int) -> None:
    """More clients than slots at once, one that leaves early among them; by two GPUs what one GPU has."""
    need_gpus(gpus)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    options.append("--device-loop" if device_loop else "--no-device-loop")
    invariant = gpus > 1
    if invariant:
        options += [f"--tensor-parallel={gpus}", "--set", "tp_invariant=yes"]
    got: dict[int, list[int]] = {}

    with serving(tmp_path, [*options, "--num-speculative-tokens=3"]) as server:
        assert server.ready["executor"] == "graph" and server.ready["num_speculative_tokens"] == 3

        def ask(number: int) -> None:
            with Client(server.endpoint) as client:
                chunks = client.generate(PROMPTS[number], **sampling(number))
                got[number] = [token for chunk in chunks for token in chunk.token_ids]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        with Client(server.endpoint) as leaving:
            next(iter(leaving.generate([5, 6, 7], max_tokens=800, ignore_eos=True)))
        for thread in threads:
            thread.join()

    head = lowlat.SpeculativeConfig(model=DEMO / "head", num_speculative_tokens=3)
    with lowlat.Runtime.load(DEMO / "target", speculative=head, tp_invariant=invariant, **OPTIONS) as runtime:
        for number, prompt in enumerate(PROMPTS):
            runtime.submit(prompt, lowlat.SamplingParams(**sampling(number)))
            own: list[int] = []
            while runtime.busy:
                own += [token for output in runtime.step() for token in output.token_ids]
            assert got[number] == own
