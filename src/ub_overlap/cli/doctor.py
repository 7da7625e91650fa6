"""`doctor`: report what works on this machine, what does not, and what to do. It never fails.

It uses the standard library only. torch and the extension may be missing or broken, or hang on a device. So probe.py checks
them in a separate process, with a time limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import Any

from ub_overlap import __version__
from ub_overlap._versions import REQUIREMENT, SUPPORTED_TORCH, is_supported_torch
from ub_overlap.compiler.text.terminal import paint, wants_color

from .cache import size_text
from .parsers import Parser, add_verb, input_file, input_folder, input_path, non_negative_int, output_file
from .redact import redact_variable

DEADLINE_S = 120
VARIABLES = (
    "UB_OVERLAP_", "TORCH_LOGS", "TORCH_TRACE", "NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS",
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
)  # fmt: skip
MIN_MEMORY = 64 << 20
"""Minimum of free bytes of memory for small models on the CPU."""


@dataclass(frozen=True)
class Verdict:
    """Whether a feature works on this machine, why or why not, and what to do."""

    what: str
    works: bool
    why: str
    fix: str = ""


def collect_facts() -> dict[str, Any]:
    """Return all facts and their verdicts. Never raise."""
    facts: dict[str, Any] = {"ub_overlap": __version__, "system": _guarded(_system), "store": _guarded(_store)}
    facts["nvidia_smi"] = _guarded(_nvidia_smi)
    facts["environment"] = {k: redact_variable(k, v) for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)}
    facts["probe"] = _guarded(_probe)
    facts["verdicts"] = [asdict(v) for v in verdicts(facts)]
    return facts


def _guarded(check: Any) -> Any:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  (doctor never fails)
        return {"problem": f"{type(error).__name__}: {error}"}


def _system() -> dict[str, Any]:
    kernel = os.uname()  # platform.platform() starts a process
    name = "-".join((kernel.sysname, kernel.release, kernel.machine, "with", "".join(platform.libc_ver())))
    found: dict[str, Any] = {"python": platform.python_version(), "platform": name, "cpus": os.cpu_count()}
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as file:
        sizes = dict(line.split(":") for line in file)
        found["memory_free"] = 1024 * int(sizes.get("MemAvailable", "0").split()[0])
    found["compiler"] = _compiler()
    return found


def _compiler() -> str:
    """Return the path of the C++ compiler that Inductor takes, "" where there is none."""
    return shutil.which(os.environ.get("CXX", "").strip() or "g++") or ""


def _store() -> dict[str, Any]:
    from ub_overlap.runtime import plan_store

    folder = plan_store.directory()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder):
        return {"folder": str(folder), "plans": sum(1 for _ in folder.glob("*.json"))}


def _nvidia_smi() -> dict[str, Any]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"gpus": []}
    query = [tool, "--query-gpu=index,name,driver_version,memory.total", "--format=csv,noheader"]
    rows = subprocess.run(query, capture_output=True, text=True, timeout=DEADLINE_S, check=False).stdout
    matrix = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=DEADLINE_S, check=False).stdout
    links = [line for line in matrix.splitlines() if line.startswith("GPU")]
    return {"gpus": [row.strip() for row in rows.splitlines() if row.strip()], "topology": links}


def _probe() -> dict[str, Any]:
    """Return the findings of probe.py by name, and "crashed" if it did not finish."""
    command = [sys.executable, "-m", "ub_overlap.cli.probe"]
    path = os.pathsep.join(p for p in sys.path[1:] if p)  # the same ub_overlap as in this process
    done, out, error = None, "", ""
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env={**os.environ, "PYTHONPATH": path}
        )
        done, out, error = run.returncode, run.stdout, run.stderr
    except subprocess.TimeoutExpired as late:
        out = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        error = f"no answer within {DEADLINE_S} s"
    found: dict[str, Any] = {}
    for line in out.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # printed by a library at import
        if isinstance(row, dict) and "name" in row:
            found[row["name"]] = row.get("found", {"problem": row.get("problem")})
    if done != 0:
        last = error.strip().splitlines()
        found["crashed"] = f"exit code {done}: {last[-1] if last else 'no message'}"
    return found


def verdicts(facts: dict[str, Any]) -> list[Verdict]:
    """Return the verdict on each feature, from the facts of `collect_facts`."""
    probe = facts["probe"]

    def problem_of(name: str) -> str:
        found = probe.get(name)
        return probe.get("crashed", "not checked") if found is None else str(found.get("problem") or "")

    out = []
    torch = problem_of("torch")
    version = str(probe.get("torch", {}).get("version", ""))
    install = f"pip install '{REQUIREMENT}', then ub_overlap again"
    out.append(Verdict("import torch", not torch, torch or f"torch {version}", install if torch else ""))
    if torch:
        return [*out, _reading()]
    missing = probe.get("private_names", {}).get("missing") or []
    known = is_supported_torch(version) and not missing
    why = f"torch {version}; {SUPPORTED_TORCH} are supported" + (f"; it has no {', '.join(missing)}" if missing else "")
    out.append(Verdict("this torch", known, why, "" if known else install))
    out.append(_built(problem_of("extension"), probe))
    built = out[-1].works
    free = facts["system"].get("memory_free")
    enough = free is not None and free >= MIN_MEMORY
    room = f"{free >> 20} MiB of memory are free" if free is not None else "/proc does not show the free memory"
    out.append(Verdict("overlap between CPU ranks of this host", built and enough, room if built else "no extension",
                       "" if enough else "give the container more memory and a /proc of its own"))  # fmt: skip
    out.append(_on_gpus(facts, built))
    if "compiler" in facts["system"]:
        out.append(_compiling(facts["system"]["compiler"]))
    store = facts["store"]
    fix = "set UB_OVERLAP_CACHE_DIR" if "problem" in store else ""
    out.append(Verdict("keep plans and graphs", "problem" not in store, store.get("problem") or store["folder"], fix))
    profile = problem_of("profile")
    why_profile = profile or f"the device profile {probe['profile']['name']}"
    out.append(Verdict('overlap="auto"', not profile, why_profile, "torchrun ... -m ub_overlap calibrate" if profile else ""))
    return [*out, _reading()]


def _compiling(compiler: str) -> Verdict:
    """Return whether code that Inductor generates for CPUs, and the extension, can be compiled here."""
    what, fix = (
        "compile for CPUs: Inductor, and builds of the extension",
        "apt install g++, or export CXX=clang++; inner='aot_eager' needs none",
    )
    wanted = os.environ.get("CXX", "").strip() or "g++"
    return Verdict(what, bool(compiler), compiler or f"no C++ compiler: {wanted} is not on PATH", "" if compiler else fix)


def _built(problem: str, probe: dict[str, Any]) -> Verdict:
    if problem:
        return Verdict("the extension", False, problem, "pip install --no-build-isolation . with this torch")
    info = probe["extension"]
    return Verdict("the extension", True, ", ".join(f"{key} {value}" for key, value in info.items()))


def _on_gpus(facts: dict[str, Any], built: bool) -> Verdict:
    """Return whether all pairs of GPUs have peer access over NVLink."""
    what, probe = "overlap between GPUs of this host", facts["probe"]
    devices = probe.get("devices", {})
    count = devices.get("count") or 0
    if devices.get("problem"):
        return Verdict(what, False, devices["problem"], "check the driver: nvidia-smi")
    if count < 2:
        seen = len(facts["nvidia_smi"].get("gpus", []))
        why = f"torch sees {count} GPU{'' if count == 1 else 's'}" + (f", nvidia-smi {seen}" if seen != count else "")
        return Verdict(what, False, why, "check CUDA_VISIBLE_DEVICES and the build of torch" if seen != count else "")
    if not built or str(probe["extension"].get("cuda")) != "True":
        note = probe["extension"].get("cuda_note", "") if built else "no extension"
        fix = "build again with UB_OVERLAP_BUILD_CUDA=1, which fails where CUDA cannot be built"
        return Verdict(what, False, f"the extension has no CUDA executor ({note})", fix)
    if "problem" in probe.get("symmetric", {}):
        return Verdict(what, False, probe["symmetric"]["problem"], "a torch with symmetric memory")
    pairs = [(i, j) for i in range(count) for j in range(i)]
    apart = [f"{j} and {i}" for i, j in pairs if not devices["peers"][i][j]]
    if apart:
        return Verdict(what, False, f"no peer access between GPUs {', '.join(apart[:4])}", "use GPUs with peer access")
    links = probe.get("nvlink", {}).get("links")
    slow = [f"{j} and {i}" for i, j in pairs if links and not links[i][j]]
    if slow:
        fix = "UB_OVERLAP_LINKS=any accepts PCIe peers too"
        return Verdict(what, False, f"no NVLink between GPUs {', '.join(slow[:4])}", fix)
    links_text = "NVLink and peer access between all" if links else "peer access between all; the links are unknown"
    return Verdict(what, True, f"{count} x {devices['names'][0]}: {links_text}")


def _reading() -> Verdict:
    return Verdict("read reports: explain, diff, report", True, "needs no torch")


def add(verbs: Any, as_json: argparse.ArgumentParser) -> None:
    parser = add_verb(
        verbs, "doctor", "report what works on this machine, what does not, and why", parents=[as_json],
        examples=["doctor", "doctor --json", "doctor --bundle report.zip --log train.log", "doctor --flight flight/"],
        exits={
            0: "some overlap works here, the bundle was written, or no rank is at fault",
            1: "no overlap works, or a rank is at fault",
        },
    )  # fmt: skip
    bundle = parser.add_argument_group("a bug report")
    bundle.add_argument(
        "--bundle", type=output_file, metavar="FILE.zip", help="write one file for a bug report, with secrets redacted"
    )
    bundle.add_argument("--plan", action="append", default=[], metavar="DIGEST", help="a plan to include (default: the newest)")
    bundle.add_argument("--newest", type=non_negative_int, default=4, metavar="N", help="newest plans to include (default 4)")
    bundle.add_argument(
        "--report", action="append", default=[], type=input_file, metavar="FILE", help="a report of to_json() to include"
    )
    bundle.add_argument(
        "--log",
        action="append",
        default=[],
        type=input_path,
        metavar="PATH",
        help="a log, or a folder of logs or flight records, to include; the end of large files",
    )
    parser.add_argument(
        "--flight", type=input_folder, metavar="DIR",
        help="merge the flight records of all ranks in DIR: which rank is behind, at which site, and who disagrees",
    )  # fmt: skip
    parser.set_defaults(run=lambda flags: run(flags, parser))


def run(flags: argparse.Namespace, parser: Parser) -> int:
    """Print the facts and verdicts. Return 0 if some overlap works, else 1. With --bundle write them to a file."""
    if flags.flight:
        return show_flight(flags)
    if flags.bundle:
        return write_bundle(flags)
    if flags.plan or flags.report or flags.log:
        parser.error("--plan, --report and --log need --bundle FILE.zip")
    facts = collect_facts()
    if flags.json:
        print(json.dumps(facts, default=str))
    else:
        print(text(facts))
    return 0 if any(v["works"] for v in facts["verdicts"] if v["what"].startswith("overlap between")) else 1


def show_flight(flags: argparse.Namespace) -> int:
    """Print what the flight records of all ranks say. Return 1 if a rank is at fault, else 0."""
    from . import flight
    from .stored import report_skipped

    findings = flight.merge(flight.read_folder(flags.flight, report_skipped))
    print(json.dumps([finding.to_dict() for finding in findings]) if flags.json else flight.text(findings))
    return 1 if any(finding.ranks_at_fault for finding in findings) else 0


def write_bundle(flags: argparse.Namespace) -> int:
    """Write the file for a bug report and list its contents."""
    from ub_overlap.compiler.text.table import render_table
    from ub_overlap.compiler.text.terminal import output_width

    from . import bundle

    entries = [*bundle.plan_entries(flags.plan, flags.newest), *bundle.file_entries(flags.report, flags.log)]
    facts = collect_facts()
    contents = bundle.write_bundle(flags.bundle, facts, text(facts, color=False), entries)
    if flags.json:
        print(json.dumps({"bundle": str(flags.bundle), "contents": contents}))
    else:
        print(render_table(contents, width=output_width(), optional=("about",)))
        print(f"wrote {flags.bundle}. Secrets are redacted, but plans, graphs and reports contain source lines of the model:")
        print("look into the file before you send it")
    return 0


def _with_unit(key: str, value: Any) -> Any:
    return size_text(value) if key == "memory_free" else "none" if value == "" else value


def text(facts: dict[str, Any], color: bool | None = None) -> str:
    """Return the facts and verdicts as text. `color`: None for what stdout shows."""
    color = wants_color() if color is None else color
    mark = {True: paint("works", 32, color), False: paint("no   ", 31, color)}
    lines = [f"ub_overlap {facts['ub_overlap']}"]
    for name in ("system", "store"):
        lines += [f"  {key:<12} {_with_unit(key, value)}" for key, value in facts[name].items()]
    packages = facts["probe"].get("packages") or {}
    lines.append("  packages     " + ", ".join(f"{k} {v}" for k, v in packages.items() if v))
    lines += [f"  GPU          {row}" for row in facts["nvidia_smi"].get("gpus", [])]
    lines += [f"  {k}={v}" for k, v in facts["environment"].items()]
    lines.append("")
    for v in facts["verdicts"]:
        lines.append(f"{mark[v['works']]}  {v['what']}: {v['why']}")
        if v["fix"]:
            lines.append(f"       -> {v['fix']}")
    return "\n".join(lines)
