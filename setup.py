"""Builds ub_overlap: three pure Python trees mapped to one package, and the extension ub_overlap._C.

UB_OVERLAP_BUILD=1|0             0: no extension, for those who only look at graphs (the ops then say what is missing)
UB_OVERLAP_BUILD_CUDA=auto|0|1   CUDA sources: if nvcc and a CUDA torch are here (auto), never (0), or fail (1)
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import torch
from setuptools import find_packages, setup
from torch.utils import cpp_extension

try:
    import pybind11
except ImportError:  # torch carries its headers
    pybind11 = None

ROOT = Path(__file__).resolve().parent
VERSION = "0.1.0"
# Import name -> folder. Nothing named `compiler` or `runtime` may come to lie on anyone's path.
TREES = {
    "ub_overlap": "src/ub_overlap",
    "ub_overlap.compiler": "compiler",
    "ub_overlap.runtime": "runtime",
    "ub_overlap.tools": "tools",
}


def packages() -> dict[str, str]:
    """Every package of the trees and its folder."""
    found = {}
    for name, folder in TREES.items():
        found[name] = folder
        for sub in find_packages(str(ROOT / folder)):
            found[f"{name}.{sub}"] = f"{folder}/{sub.replace('.', '/')}"
    return found


def cuda_sources() -> tuple[list[str], str]:
    """The CUDA sources to build, and why these."""
    requested = os.environ.get("UB_OVERLAP_BUILD_CUDA", "auto")
    if requested not in ("auto", "0", "1"):
        sys.exit(f"UB_OVERLAP_BUILD_CUDA={requested!r}: expected auto, 0 or 1")
    sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda").glob("*.c[up]*"))
    lacks = []
    if not sources:
        lacks.append("this version has no CUDA sources")
    if torch.version.cuda is None:
        lacks.append(f"torch {torch.__version__} is a CPU build")
    if not (shutil.which("nvcc") or cpp_extension.CUDA_HOME):
        lacks.append("no nvcc found (PATH, CUDA_HOME)")
    if requested == "1" and lacks:
        sys.exit(f"UB_OVERLAP_BUILD_CUDA=1, but {'; '.join(lacks)}")
    if requested == "0":
        return [], "no (UB_OVERLAP_BUILD_CUDA=0)"
    return ([], f"no ({'; '.join(lacks)})") if lacks else (sources, f"yes (CUDA {torch.version.cuda})")


def extension() -> cpp_extension.CppExtension:
    cuda, said = cuda_sources()
    sources = [str(p.relative_to(ROOT)) for part in ("core", "cpu", "bindings") for p in (ROOT / "csrc" / part).rglob("*.cpp")]
    cxx = ["-O3", "-g0", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra", "-DUSE_C10D"]
    system = [f"-isystem{path}" for path in cpp_extension.include_paths()]  # torch's headers are not ours to warn about
    macros = [("UB_OVERLAP_VERSION", f'"{VERSION}"'), ("UB_OVERLAP_TORCH_VERSION", f'"{torch.__version__}"')]
    if cuda:
        macros.append(("UB_OVERLAP_CUDA", "1"))
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    make = cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension
    nvcc = ["-O3", "--extended-lambda", "-Xcompiler=-fvisibility=hidden"]
    flags = {"cxx": cxx + system, "nvcc": nvcc} if cuda else {"cxx": cxx + system}
    print(
        f"ub_overlap {VERSION} build summary\n"
        f"  sources   {len(sources)} C++, {len(cuda)} CUDA\n"
        f"  flags     {' '.join(cxx)}\n"
        f"  torch     {torch.__version__}\n"
        f"  pybind11  {pybind11.__version__ if pybind11 else 'in torch'}\n"
        f"  python    {sys.version.split()[0]}\n"
        f"  CUDA      {said}",
        file=sys.stderr,
    )
    return make(
        "ub_overlap._C",
        sorted(sources) + cuda,
        # pybind11's own headers before the copy that torch carries: one version in all of our files.
        include_dirs=[str(ROOT / "csrc"), *([pybind11.get_include()] if pybind11 else [])],
        define_macros=macros,
        extra_compile_args=flags,
        libraries=["rt"],
        # By name: some compilers carry only a static libstdc++, and a second copy of it in one process breaks iostreams.
        extra_link_args=["-l:libstdc++.so.6"] if sys.platform == "linux" else [],
    )


class BuildExtension(cpp_extension.BuildExtension):
    """torch's, with as many compilers as MAX_JOBS says (ninja: all cores)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **{**kwargs, "use_ninja": True})  # type: ignore[arg-type]


found = packages()
setup(
    version=VERSION,
    packages=list(found),
    package_dir=found,
    package_data={
        "ub_overlap": ["py.typed", "_C.pyi"],
        "ub_overlap.compiler": ["**/*.json", "**/*.html", "**/*.css", "**/*.js"],
    },
    ext_modules=[extension()] if os.environ.get("UB_OVERLAP_BUILD", "1") != "0" else [],
    cmdclass={"build_ext": BuildExtension},
)
