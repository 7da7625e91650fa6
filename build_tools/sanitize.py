"""Build the CPU runtime with sanitizers, and run tests of ranks on it: `make sanitize`.

    python build_tools/sanitize.py KIND OBJECTS [TESTS...]     KIND: address (with undefined behaviour) or thread

csrc/core and csrc/cpu are instrumented. The objects of csrc/bindings are those of the last build in the folder OBJECTS: they
are glue between torch and Python, which no sanitizer sees. The tests use a copy of the installed package with this extension.
A report ends its process, so its test fails; all reports are printed at the end.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread", "-Wno-tsan"],  # fences: around words that are all atomic (core/flight.cpp)
}
LIBRARY = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    "address": {
        # Python and torch free little at their end.
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0:log_path={log}",
        "UBSAN_OPTIONS": "print_stacktrace=1:log_path={log}",
    },
    # Ranks are forked from a process that has imported torch, which has threads. What Python and torch do with files and memory
    # is not checked. Their locks are seen: objects come from thread to thread by them, so their libraries are not suppressed.
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:die_after_fork=0:ignore_noninstrumented_modules=1:log_path={log}"},
}
COMPILE = ["-std=c++17", "-O1", "-g1", "-fno-omit-frame-pointer", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden"]
NAMES = ["ops", "split", "all_to_all", "coalesced", "point_to_point", "abort", "abandoned", "blame", "memory"]
NAMES += ["fused", "hierarchical_blame", "hosts", "failures", "sessions", "stage"]
TESTS = [
    *(f"tests/runtime/test_{name}.py" for name in NAMES),
    "--deselect=tests/runtime/test_failures.py::test_errors_come_out_of_backward[True]",  # Inductor's compiler, preloaded too
]
"""Not test_thread_limits.py: its limit of the address space stops the sanitizer, which maps memory for each thread."""


def build(kind: str, objects: Path, folder: Path) -> Path:
    """Link the extension into a copy of the installed package, and return the folder to put on Python's path."""
    bindings = sorted(map(str, (objects / "csrc/bindings").rglob("*.o")))
    if not bindings or any((objects / "csrc").glob("cuda/*.o")):
        raise SystemExit(
            f"sanitize: got {len(bindings)} objects of csrc/bindings in {objects}, expected those of a build without CUDA "
            "(UB_OVERLAP_BUILD_CUDA=0)"
        )
    package = importlib.util.find_spec("ub_overlap")
    torch = importlib.util.find_spec("torch")
    assert package is not None and package.submodule_search_locations and torch is not None and torch.submodule_search_locations
    installed, libraries = Path(package.submodule_search_locations[0]), Path(torch.submodule_search_locations[0], "lib")
    copy = folder / "site" / "ub_overlap"
    copy.mkdir(parents=True, exist_ok=True)
    for entry in installed.iterdir():
        link = copy / entry.name
        link.unlink(missing_ok=True)
        if not entry.name.startswith("_C.c"):
            link.symlink_to(entry.resolve())
    compiler = os.environ.get("CXX", "g++")
    sources = sorted(path for part in ("core", "cpu") for path in (ROOT / "csrc" / part).glob("*.cpp"))

    def compile_source(source: Path) -> str:
        target = folder / f"{source.parent.name}_{source.stem}.o"
        command = [compiler, *COMPILE, *FLAGS[kind], f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return str(target)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", "2"))) as pool:
        own = list(pool.map(compile_source, sources))
    (name,) = (entry.name for entry in installed.iterdir() if entry.name.startswith("_C.c"))
    # Our objects first: of an inline function that both have, the linker takes the first, which is instrumented.
    command = [compiler, "-shared", *FLAGS[kind], *own, *bindings, f"-L{libraries}", f"-Wl,-rpath,{libraries}"]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-lrt", "-o", str(copy / name)]
    subprocess.run(command, check=True)
    return copy.parent


def environment(kind: str, site: Path, folder: Path) -> dict[str, str]:
    """Return the environment of processes that use the extension: the sanitizer's library comes before all others.

    Then libstdc++, as Python is a C program: a sanitizer looks up what it intercepts, such as throw, when the process begins.
    """
    compiler, libraries = os.environ.get("CXX", "g++"), []
    for name in (LIBRARY[kind], "libstdc++.so.6"):
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        libraries.append(os.path.realpath(path))
    options = {name: text.format(log=folder / "report") for name, text in OPTIONS[kind].items()}
    python_path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    return {**os.environ, **options, "LD_PRELOAD": " ".join(libraries), "PYTHONPATH": python_path}


def main(kind: str, objects: str, *tests: str) -> int:
    """Return 0 where the tests pass without a report."""
    folder = ROOT / "build" / "sanitize" / kind
    folder.mkdir(parents=True, exist_ok=True)
    for report in folder.glob("report.*"):
        report.unlink()
    site = build(kind, Path(objects).resolve(), folder)
    command = [sys.executable, "-m", "pytest", "-q", *(tests or TESTS)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(kind, site, folder), check=False)
    reports = sorted(folder.glob("report.*"))
    for report in reports:
        print(report.read_text(), file=sys.stderr)
    print(f"sanitize {kind}: pytest ended with {ended.returncode}, {len(reports)} reports in {folder}")
    return 1 if reports else ended.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
