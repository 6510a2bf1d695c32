"""Run the first case of every GPU test of a kernel under compute-sanitizer, one tool after another.

    python tests/sanitize.py memcheck racecheck

Tests of whole runtimes are left out, but for one of captured steps, and so are those of which the reference takes long;
torch's own kernels run under the tool as well. Needs a card and compute-sanitizer (a part of the CUDA toolkit); exits
with 1 where a tool complains or a test fails. The last line of stdout is one JSON object.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LEFT_OUT = re.compile(
    r"test_(capture_traps|device_loop|executors|profile|reference_on_cuda|stream_read)\.py"
    r"|test_attention\.py::test_(rows_of_a_chain|windows|equals|bits)"
)
ALSO = ("tests/gpu/test_capture_traps.py::test_two_runtimes_on_one_card_do_not_touch_each_other",)
COMPLAINED = 9
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
    """Run the tests under a tool; what it said."""
    tests = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "timeout=0", *names]
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(COMPLAINED), *tests]
    start = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    summary, closing = "", ""
    for line in process.stdout or ():
        print(line, end="", flush=True)
        found = SUMMARY.search(line)
        summary = found.group(0) if found else summary
        closing = line.strip("= \n") if re.search(r"\d+ (passed|failed|error)", line) else closing
    clean = process.wait() == 0
    seconds = round(time.monotonic() - start, 1)
    return {"tool": tool, "clean": clean, "summary": summary, "tests": closing, "seconds": seconds}


def main(arguments: Sequence[str]) -> int:
    """Run the tools that were named."""
    unknown = [tool for tool in arguments if tool not in TOOLS]
    if unknown or not arguments:
        print(f"name tools of {', '.join(TOOLS)}, got {', '.join(unknown) or 'none'}", file=sys.stderr)
        return 2
    names = first_cases()
    results = [check(tool, names) for tool in arguments]
    print(json.dumps({"num_tests": len(names), "results": results}))
    return 0 if all(result["clean"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
