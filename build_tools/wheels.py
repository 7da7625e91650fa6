"""Build one wheel per torch, each with that torch in its version: ub_overlap-0.1.0+torch2.13.0.cpu-...whl.

    python build_tools/wheels.py --torch 2.11.0 --torch 2.13.0          in new environments, torch from pip's index
    python build_tools/wheels.py --interpreter /opt/conda/bin/python    in an environment that has its torch

The extension loads only under the torch that it was built with. So every supported torch needs a wheel, also per CUDA variant.
All wheels are built from one sdist. Each is installed and imported before it counts as done. pip's settings apply, e.g.
PIP_EXTRA_INDEX_URL for CPU builds of torch. A CUDA torch needs the CUDA toolkit (CUDA_HOME), or --cuda 0.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_REQUIREMENTS = ("setuptools>=77", "wheel", "ninja", "pybind11>=2.13", "numpy")


class BuildError(Exception):
    """A command that failed, with the end of its output."""


def local_version(torch_version: str, *, with_cuda: bool) -> str:
    """Return the local version of a wheel: "torch2.13.0.cpu" for torch 2.13.0+cpu, "torch2.11.0.cu130" for 2.11.0+cu130.

    A wheel without CUDA for a torch with CUDA ends in ".nocuda"."""
    release, _, variant = torch_version.partition("+")
    tag = f"torch{release}.{re.sub(r'[^0-9a-zA-Z]+', '.', variant) or 'cpu'}"
    is_cpu_torch = variant in ("", "cpu")
    return tag if with_cuda or is_cpu_torch else f"{tag}.nocuda"


def run(command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return its stdout. BuildError if it fails."""
    command = [str(part) for part in command]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise BuildError(f"{' '.join(command)}\nexit code {done.returncode}:\n{end}")
    return done.stdout


def build_sdist(folder: Path) -> Path:
    """Build the sdist with this Python's setuptools and return its path. torch is not needed."""
    code = f"import setuptools.build_meta as backend; print(backend.build_sdist({str(folder)!r}))"
    return folder / run([sys.executable, "-c", code], cwd=ROOT).splitlines()[-1]


def make_environment(folder: Path, torch: str) -> Path:
    """Return the Python of a new environment with this torch and what builds extensions."""
    run([sys.executable, "-m", "venv", folder])
    python = folder / "bin/python"
    run([python, "-m", "pip", "install", "-q", f"torch=={torch}", *BUILD_REQUIREMENTS])
    return python


def build_wheel(sdist: Path, python: Path, output: Path, cuda: str) -> Path:
    """Build the wheel for the torch of `python`, check it there, and return its path.

    `cuda`: UB_OVERLAP_BUILD_CUDA; "auto" here means 1 for a torch with CUDA."""
    code = "import json, torch; print(json.dumps([str(torch.__version__), torch.version.cuda]))"
    version, torch_cuda = json.loads(run([python, "-c", code]).splitlines()[-1])
    with_cuda = torch_cuda is not None and cuda != "0"
    env = {
        "UB_OVERLAP_BUILD_CUDA": "1" if with_cuda else "0",
        "UB_OVERLAP_LOCAL_VERSION": local_version(version, with_cuda=with_cuda),
    }
    with tempfile.TemporaryDirectory() as built:
        run([python, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", built, sdist], env=env)
        (wheel,) = Path(built).glob("*.whl")
        check_wheel(wheel, python, version, with_cuda=with_cuda)
        return Path(shutil.move(wheel, output / wheel.name))  # the temporary folder may be on another file system


def check_wheel(wheel: Path, python: Path, torch_version: str, *, with_cuda: bool) -> None:
    """Import the extension from the wheel, next to the packages of `python`. BuildError if it is not what was asked for."""
    with tempfile.TemporaryDirectory() as site:
        run([python, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel])
        code = "import json; from ub_overlap.runtime.extension import extension; print(json.dumps(extension().build_info()))"
        info = json.loads(run([python, "-c", code], cwd=Path(site), env={"PYTHONPATH": site}).splitlines()[-1])
    if (info["torch"], info["cuda"]) != (torch_version, with_cuda):
        raise BuildError(f"{wheel.name}: expected torch {torch_version} and CUDA {with_cuda}, got {info}")


def main(argv: Sequence[str] | None = None) -> int:
    """Build the wheels. Return 0, or 1 if one failed; the others are built all the same."""
    parser = argparse.ArgumentParser(description="Build one wheel of ub_overlap per torch.")
    parser.add_argument(
        "--torch", action="append", default=[], metavar="VERSION", help="a torch, installed into a new environment"
    )
    parser.add_argument(
        "--interpreter", action="append", default=[], metavar="PYTHON", help="the Python of an existing environment"
    )
    parser.add_argument("--cuda", choices=("auto", "0"), default="auto", help="0: no CUDA sources (default: if torch has CUDA)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="default %(default)s")
    flags = parser.parse_args(argv)
    if not flags.torch and not flags.interpreter:
        parser.error("nothing to build for: give --torch VERSION or --interpreter PYTHON, each as often as needed")
    flags.output.mkdir(parents=True, exist_ok=True)
    failed = False
    try:
        sdist = build_sdist(flags.output)
    except (BuildError, OSError) as error:
        print(f"sdist: {error}", file=sys.stderr)
        return 1
    print(f"sdist  {sdist}", flush=True)
    for name, is_version in [*((torch, True) for torch in flags.torch), *((python, False) for python in flags.interpreter)]:
        with tempfile.TemporaryDirectory(prefix="ub_overlap_wheel_") as folder:
            try:
                python = make_environment(Path(folder), name) if is_version else Path(name)
                print(f"wheel  {build_wheel(sdist, python, flags.output, flags.cuda)}", flush=True)
            except (BuildError, OSError) as error:  # OSError: e.g. no such Python
                failed = True
                print(f"{'torch ' if is_version else ''}{name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
