"""First tokens: from the submission of a request that is alone to its first token, in the process and by a socket.

    python -m pytest bench/test_first_token.py --context 128,2048,8192 --geometry llama-8b

Every prompt is of new random tokens, so that none is cached. A geometry has no files, so no server can load it:
the socket is for the bundled pair and for `--model`; `python -m bench.first_token` writes a checkpoint for it.
"""

from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.first_token import MAX_TOKENS, ask_often, asking, asking_server
from bench.lib.clock import percentile
from bench.samples import MEASURED, record
from bench.stage import Stage, suite_cases
from lowlat.tools.bench.scenarios import Case

pytestmark = MEASURED


@pytest.mark.parametrize("through", ["process", "socket"], scope="module")  # one after the other: fewer loads
def test_first_token(
    stage: Stage, prompt_case: Case, through: str, benchmark: BenchmarkFixture, pytestconfig: pytest.Config
) -> None:
    depth, subject = prompt_case.num_speculative_tokens, stage.subject
    runs = max(5, stage.rounds // 10)
    if through == "process":
        cases = suite_cases("prompt_case", pytestconfig.option)
        runtime = stage.runtime([case for case in cases if case.num_speculative_tokens == depth])
        first, later = ask_often(asking(runtime), subject.config.vocab_size, prompt_case.context, runs)
    else:
        if not isinstance(subject.target, Path):
            pytest.skip("a server loads files, and a geometry has none")
        stage.close()
        head = subject.speculation["model"] if depth and subject.speculation is not None else None
        size = {"max_context": prompt_case.context + 2 * MAX_TOKENS, "device": pytestconfig.option.device}
        with asking_server(subject.target, head, depth, **size) as ask:
            first, later = ask_often(ask, subject.config.vocab_size, prompt_case.context, runs)
    assert min(first) > 0
    record(benchmark, first, {"through": through, "next_ms_p50": round(percentile(later, 50), 4)})
