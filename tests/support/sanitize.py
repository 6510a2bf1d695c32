"""Run the first case of every GPU test of a kernel under compute-sanitizer, one tool after another.

    python tests/support/sanitize.py memcheck racecheck

Tests of whole runtimes are left out, but for one of captured steps, and so are those of which the reference takes long;
torch's own kernels run under the tool as well. Racecheck leaves out what has a product of the step in it: there a warp
comes together and one lane arrives for it (kernels/common/pipeline.py), order enough by PTX's memory model; the tool
follows the arrivals of single threads and reports hazards (with --racecheck-indirect-barrier-dependency too; where
every lane arrives for itself it reports none of thin and wide products). Of that hand-over
tests/unit/kernels/test_{decode_gemm,experts_mlp,experts_product}_walk.py and test_wide_matmul.py walk every thread,
with copies that arrive as late as they may. It leaves out prefill too, where torch's attention is reported.

Needs a GPU and compute-sanitizer (a part of the CUDA toolkit); exits with 1 where a tool complains or a test fails.
The last line of stdout is one JSON object.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LEFT_OUT = re.compile(
    r"test_(capture_traps|device_loop|executors|profile|reference_on_cuda|serving|stream_read)\.py"
    r"|test_attention\.py::test_(rows_of_a_chain|windows|equals|bits)"
)
LEFT_OUT_OF = {"racecheck": re.compile(r"test_(decode_gemm|prefill_gemm|experts_mlp|capture_traps|prefill)\.py")}
ALSO = ("tests/gpu/test_capture_traps.py::test_two_runtimes_on_one_gpu_do_not_touch_each_other",)
COMPLAINED = 9
PROCESSES = min(12, os.cpu_count() or 1)
SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: .*")


def first_cases() -> list[str]:
    """Test ids: the first case of each function."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/gpu"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    chosen: dict[str, str] = {}
    for name in (line for line in found if "::" in line and not LEFT_OUT.search(line)):
        chosen.setdefault(name.split("[")[0], name)
    return [*chosen.values(), *(name for name in ALSO if name in found)]


def check(tool: str, names: Sequence[str]) -> dict[str, object]:
    """Run the tests under a tool, shared out over some processes; what it said."""
    start = time.monotonic()
    without = LEFT_OUT_OF.get(tool)
    names = [name for name in names if without is None or not without.search(name)]
    parts = [names[number::PROCESSES] for number in range(min(PROCESSES, len(names)))]
    with ThreadPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(lambda part: _run(tool, part), parts))
    return {
        "tool": tool,
        "num_tests": len(names),
        "clean": all(clean for clean, _, _ in found),
        "summaries": sorted({summary for _, summary, _ in found}),
        "tests": [closing for _, _, closing in found],
        "seconds": round(time.monotonic() - start, 1),
    }


def _run(tool: str, names: Sequence[str]) -> tuple[bool, str, str]:
    """Whether nothing was found, the tool's summary and pytest's closing line; lines are passed on as they come."""
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "timeout=0", *names]
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []  # the bindings ask for functions by trial
    command = ["compute-sanitizer", "--tool", tool, *quiet, "--error-exitcode", str(COMPLAINED), *tests]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    summary, closing = "", ""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        match = SUMMARY.search(line)
        summary = match.group(0) if match else summary
        closing = line.strip("= \n") if re.search(r"\d+ (passed|failed|error)", line) else closing
    return process.wait() == 0, summary, closing


def main(arguments: Sequence[str]) -> int:
    """Run the tools that were named."""
    unknown = [tool for tool in arguments if tool not in TOOLS]
    if unknown or not arguments:
        print(f"name tools of {', '.join(TOOLS)}, got {', '.join(unknown) or 'none'}", file=sys.stderr)
        return 2
    names = first_cases()
    results = [check(tool, names) for tool in arguments]
    print(json.dumps({"results": results}))
    return 0 if all(result["clean"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
