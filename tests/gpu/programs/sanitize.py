"""compute-sanitizer over our kernels: memcheck, racecheck (shared memory) and synccheck, each on two ranks with tiny shapes.

    python tests/gpu/programs/sanitize.py [--tool memcheck] [--ranks 2] [--quick]

Only kernels whose name holds "ub_overlap" are checked, where the installed version can choose. Every rank runs under a
sanitizer of its own, and each one's summary must be clean. That they look at all is shown by a control: a kernel that writes
out of bounds, which memcheck must find. As a worker (under torchrun) it runs each kernel of csrc/cuda/*.cu, the poisoning of
a failed call included, over gloo alone.
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.gpu.frame import Frame, options, text_table  # isort: skip

import torch

from tests.gpu import cases
from tests.gpu.cases import BF16, F16, F32, Case, Maker
from tests.gpu.launch import PROGRAMS, run
from ub_overlap.runtime import errors
from ub_overlap.runtime.session import session

TOOLS = ("memcheck", "racecheck", "synccheck")
LIMIT_S = 240
BROKEN = "Internal Sanitizer Error"
SUMMARY = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+) (?:errors?|hazards?)")

# Odd sizes take the kernels' narrow paths, even ones the 16-byte ones.
CASES: dict[str, Callable[[Maker], tuple[Case, str]]] = {
    "gather, even": lambda m: (m.gather(BF16, 1, 16, 32, [0, 2], False, True), "pipelined"),
    "gather, odd, all modes": lambda m: (m.gather(F32, 3, 3, 5, [0, 1, 2, 3], False, True), "pipelined:chunks=5"),
    "gather, last": lambda m: (m.gather(F16, 1, 5, 6, [0, 2], True, True), "pipelined"),
    "scatter, even": lambda m: (m.scatter(BF16, 1, 16, 32), "pipelined:chunks=4"),
    "scatter, stripes": lambda m: (m.scatter(BF16, 1, 16, 32), "pipelined:stripes=3"),
    "scatter, odd, out fp32": lambda m: (m.scatter(BF16, 3, 3, 5, out_dtype=F32), "pipelined"),
    "scatter, last, avg": lambda m: (m.scatter(F16, 1, 5, 6, last=True, by="avg"), "pipelined"),
    "scatter, fp32": lambda m: (m.scatter(F32, 1, 8, 16, out_dtype=BF16), "pipelined"),
    "all_reduce, odd": lambda m: (m.reduce(BF16, 13, 7, 8), "pipelined"),
    "bulk gather": lambda m: (m.bulk(BF16, "all_gather", 6, 10), "bulk"),
    "bulk scatter": lambda m: (m.bulk(F32, "reduce_scatter", 6 * m.ranks, 8), "bulk"),
    "bulk reduce": lambda m: (m.bulk(F16, "all_reduce", 7, 9), "bulk"),
}


def once(frame: Frame, group: str, what: str) -> str:
    case, strategy = CASES[what](Maker(frame.device, frame.ranks))
    for _ in range(3):
        outs = cases.run_op(case, strategy, group, f"sanitize.{what}")
    frame.sync()
    session.check(group)
    if not all(bool(out.isfinite().all()) for out in outs):
        raise AssertionError("outputs are not finite")
    return ""


def fails(frame: Frame, group: str) -> str:
    """Rank 1 is at another site: the outputs are poisoned."""
    case, strategy = CASES["gather, even"](Maker(frame.device, frame.ranks))
    outs: list[torch.Tensor] = []
    try:
        outs = cases.run_op(case, strategy, group, f"sanitize.site{min(frame.rank, 1)}")
        frame.sync()
        session.check(group)
    except errors.SiteMismatchError:
        frame.sync()
    else:
        raise AssertionError("no SiteMismatchError")
    if frame.cuda and not all(bool(out.isnan().all()) for out in outs):
        raise AssertionError("the outputs are not poisoned")
    return ""


CONTROL = 'extern "C" __global__ void ub_overlap_control(float* x) { x[1 << 20] = 1.0f; }'


def control() -> int:
    """Writes out of bounds, by a kernel that the filter lets through. 3: this torch compiles no kernels."""
    build = getattr(torch.cuda, "_compile_kernel", None)
    if build is None:
        return 3
    kernel = build(CONTROL, "ub_overlap_control")
    kernel((1, 1, 1), (1, 1, 1), (torch.empty(16, device="cuda"),))
    torch.cuda.synchronize()
    return 0


def worker() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    with Frame("kernels", parser, step_timeout_s=150, nccl=False) as frame:
        for what in CASES:
            frame.row(what, lambda g, w=what: once(frame, g, w), 200)
        frame.row("a failed call", lambda g: fails(frame, g), 200, own=True)
    return frame.code


def sanitizer() -> str:
    """The tool's path; "" where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    places = [Path(home, "bin"), Path(home, "compute-sanitizer"), Path("/usr/local/cuda/bin")]
    return shutil.which("compute-sanitizer") or next(
        (str(p / "compute-sanitizer") for p in places if (p / "compute-sanitizer").exists()), ""
    )


def command(tool: str, path: str, help_text: str, ranks: int, arguments: list[str]) -> list[str]:
    """`ranks` 0: the control, without a launcher."""
    flags = ["--tool", tool]
    # The option had several names; without any of them all kernels are checked.
    for name in ("--kernel-name", "--kernel-regex", "--filter"):
        if f"{name} " in help_text or f"{name}=" in help_text:
            flags += [name, "kns=ub_overlap"]
            break
    if tool == "memcheck" and "--report-api-errors" in help_text:
        flags += ["--report-api-errors", "no"]  # torch asks the driver what it may do, and is told no
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", f"--nproc-per-node={ranks}"]
    what = "--worker" if ranks else "--control"
    return [*(launcher if ranks else []), path, *flags, sys.executable, str(PROGRAMS / "sanitize.py"), what, *arguments]


def judge(code: int | None, output: str, ranks: int) -> tuple[str, str]:
    summaries = [int(n) for n in SUMMARY.findall(output)]
    found = [line.strip("= ") for line in output.splitlines() if "ub_overlap" in line and "=====" in line]
    note = f"{len(summaries)} summaries, {sum(summaries)} errors, exit code {code}"
    if BROKEN in output:  # racecheck of CUDA 13.0 does, at the first kernel that touches memory that ranks share
        return "skip", f"the sanitizer itself failed: {BROKEN}"
    if code == 0 and len(summaries) >= ranks and not any(summaries):
        return "ok", note
    return "FAIL", f"{note}; {' | '.join(found[:3])}"


def main() -> int:
    parser = options(argparse.ArgumentParser(description="compute-sanitizer"))
    parser.add_argument("--tool", choices=TOOLS, action="append", help="default: all three")
    parser.add_argument("--ranks", type=int, default=2)
    chosen = parser.parse_args()
    path, rows = sanitizer(), list[tuple[str, str, str]]()
    if not path:
        print(text_table("sanitizer", [("compute-sanitizer", "skip", "not found on this machine")]))
        return 0
    shown = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=60, check=False)
    done = run(command("memcheck", path, shown.stdout + shown.stderr, 0, []), LIMIT_S)
    found = sum(int(n) for n in SUMMARY.findall(done.output))
    absent = done.code == 3 and not found
    rows.append(("control", "skip" if absent else "ok" if found else "FAIL", f"{found} errors found in a wrong kernel"))
    for tool in chosen.tool or (TOOLS[:1] if chosen.quick else TOOLS):
        done = run(command(tool, path, shown.stdout + shown.stderr, chosen.ranks, ["--device", chosen.device]), LIMIT_S)
        word, note = judge(done.code, done.output, chosen.ranks)
        if word == "FAIL":
            lines = [line for line in done.output.splitlines() if line.startswith("=====")]
            print("\n".join(lines[:80]), done.output[-4000:], sep="\n", flush=True)
        rows.append((tool, word, f"{note}, {done.seconds:.0f} s"))
    print(text_table(f"sanitizer, {chosen.ranks} ranks", rows), flush=True)
    return int(any(row[1] == "FAIL" for row in rows))


if __name__ == "__main__":
    sys.exit(worker() if "--worker" in sys.argv else control() if "--control" in sys.argv else main())
