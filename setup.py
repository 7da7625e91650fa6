"""Build ub_overlap: three pure Python trees mapped to one package, and the extension ub_overlap._C.

UB_OVERLAP_BUILD=1|0             0: no extension, for those who only look at graphs (the ops then say what is missing)
UB_OVERLAP_BUILD_CUDA=auto|0|1   CUDA sources: if the toolkit and a CUDA torch are here (auto), never (0), or fail (1)
UB_OVERLAP_LOCAL_VERSION=TAG     version 0.1.0+TAG: names the torch of a prebuilt wheel (build_tools/wheels.py)
TORCH_CUDA_ARCH_LIST, MAX_JOBS, CUDA_HOME, CXX: as in any extension of torch

docs/guide/installation.md explains them. Static metadata is in pyproject.toml; supported versions are in _versions.py.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import setuptools

# Python 3.11 puts setuptools 65 into new environments, which cannot read the licence in pyproject.toml and says so at length.
if int(setuptools.__version__.partition(".")[0]) < 77:
    raise SystemExit(f"ub_overlap: got setuptools {setuptools.__version__}, expected 77 or later: pip install 'setuptools>=77'")

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # builds through pyproject.toml do not put this folder on the path

from build_tools import cuda_toolkit, index_readme  # noqa: E402

VERSIONS = runpy.run_path(str(ROOT / "src/ub_overlap/_versions.py"))
VERSION: str = VERSIONS["VERSION"]
# Import name -> folder. Nothing named `compiler` or `runtime` may come to lie on anyone's path.
TREES = {
    "ub_overlap": "src/ub_overlap",
    "ub_overlap.compiler": "compiler",
    "ub_overlap.runtime": "runtime",
    "ub_overlap.tools": "tools",
}
COMPILING = {"build", "build_ext", "bdist_wheel", "install", "develop", "editable_wheel"}


def packages() -> dict[str, str]:
    """Return every package of the trees and its folder."""
    mapped = {}
    for name, folder in TREES.items():
        mapped[name] = folder
        for sub in setuptools.find_packages(str(ROOT / folder)):
            mapped[f"{name}.{sub}"] = f"{folder}/{sub.replace('.', '/')}"
    return mapped


def import_torch() -> Any:
    """Return torch. SystemExit with one line if there is none, or one that ub_overlap does not support."""
    supported = VERSIONS["SUPPORTED_TORCH"]
    fix = "install one of these and build with pip install --no-build-isolation"
    # Next to the metadata of this build, torch would load the package that is being built (entry point torch.backends).
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            f"ub_overlap: the build needs torch {supported}, and {sys.executable} imports none ({error}): {fix}"
        ) from None
    if not VERSIONS["is_supported_torch"](str(torch.__version__)):
        raise SystemExit(f"ub_overlap: got torch {torch.__version__} in {sys.executable}, expected torch {supported}: {fix}")
    return torch


def check_compiler(name: str) -> None:
    """SystemExit with one line if there is no C++ compiler of this name: the build would fail later, with a traceback."""
    if not shutil.which(name.split()[0]):
        raise SystemExit(
            f"ub_overlap: the build needs a C++ compiler, and {name} is not on PATH: apt install g++, or set CXX to one; "
            "UB_OVERLAP_BUILD=0 builds no extension"
        )


def relative(paths: Any) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def extension() -> dict[str, Any]:
    """Return the arguments of setup() that compile ub_overlap._C. SystemExit if this torch or CUDA toolkit cannot."""
    torch = import_torch()
    from torch.utils import cpp_extension

    try:
        import pybind11
    except ImportError:  # torch carries its headers
        pybind11 = None
    cuda_files = list((ROOT / "csrc/cuda").glob("*.*"))
    check_compiler(cpp_extension.get_cxx_compiler())
    with_cuda, cuda_note = cuda_toolkit.decide(
        os.environ.get("UB_OVERLAP_BUILD_CUDA", "auto"),
        cuda_toolkit.TorchCuda(
            version=str(torch.__version__),
            cuda=torch.version.cuda,
            home=cpp_extension.CUDA_HOME,
            include=cpp_extension.include_paths("cuda") if torch.version.cuda and cpp_extension.CUDA_HOME else (),
        ),
        cuda_toolkit.toolkit_headers(cuda_files),
    )
    if with_cuda:
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
        cuda_note += f", architectures {os.environ['TORCH_CUDA_ARCH_LIST']}"
    sources = relative(p for part in ("core", "cpu", "bindings") for p in (ROOT / "csrc" / part).rglob("*.cpp"))
    cuda_sources = relative(p for p in cuda_files if p.suffix in (".cpp", ".cu")) if with_cuda else []
    cxx = ["-O3", "-g0", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra", "-DUSE_C10D"]
    system = [f"-isystem{path}" for path in cpp_extension.include_paths()]  # torch's headers are not ours to warn about
    nvcc = ["-O3", "--extended-lambda", "-Xcompiler=-fvisibility=hidden"]
    print(
        f"ub_overlap {VERSION} build summary\n"
        f"  sources   {len(sources)} C++, {len(cuda_sources)} CUDA\n"
        f"  flags     {' '.join(cxx)}\n"
        f"  torch     {torch.__version__}\n"
        f"  pybind11  {pybind11.__version__ if pybind11 else 'in torch'}\n"
        f"  python    {sys.version.split()[0]}\n"
        f"  CUDA      {'yes' if with_cuda else 'no'}: {cuda_note}",
        file=sys.stderr,
    )
    make = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    module = make(
        "ub_overlap._C",
        sources + cuda_sources,
        # pybind11's own headers before the copy that torch carries: one version in all of our files.
        include_dirs=[str(ROOT / "csrc"), *([pybind11.get_include()] if pybind11 else [])],
        define_macros=[
            ("UB_OVERLAP_VERSION", f'"{VERSION}"'),
            ("UB_OVERLAP_TORCH_VERSION", f'"{torch.__version__}"'),
            *([("UB_OVERLAP_CUDA", "1")] if with_cuda else []),
        ],
        extra_compile_args={"cxx": cxx + system, **({"nvcc": nvcc} if with_cuda else {})},
        libraries=["rt"],
        # By name: some compilers carry only a static libstdc++, and a second copy of it in one process breaks iostreams.
        extra_link_args=["-l:libstdc++.so.6"] if sys.platform == "linux" else [],
    )

    class BuildExtension(cpp_extension.BuildExtension):
        """torch's, and a record of the build next to the extension.

        pip shows no output of a build that succeeds: `info`, `doctor` and reports print the record."""

        def run(self) -> None:
            super().run()
            folder = Path(self.get_ext_fullpath("ub_overlap._C")).parent
            (folder / "_C_build.json").write_text(json.dumps({"cuda": with_cuda, "cuda_note": cuda_note}))

    return {"ext_modules": [module], "cmdclass": {"build_ext": BuildExtension}}


def project() -> dict[str, Any]:
    """Return the metadata that depends on the version and on the address of the repository."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ub_overlap"]
    repository, local = settings["repository"], os.environ.get("UB_OVERLAP_LOCAL_VERSION")
    pages = {"Documentation": "blob/main/docs/index.md", "Changelog": "blob/main/CHANGELOG.md", "Issues": "issues"}
    return {
        "version": f"{VERSION}+{local}" if local else VERSION,
        "long_description": index_readme.rewrite((ROOT / "README.md").read_text(), repository, f"v{VERSION}"),
        "long_description_content_type": "text/markdown",
        "project_urls": {
            "Repository": repository,
            **{name: f"{repository}/{page}" for name, page in pages.items()},
        }
        if repository
        else {},
    }


def dependencies(is_pinned: bool) -> list[str]:
    """Return what the package needs. `is_pinned`: it holds an extension, which loads only under the torch of its build."""
    listed: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ub_overlap"]["dependencies"]
    if not is_pinned:
        return listed
    release = ".".join(str(import_torch().__version__).split(".")[:2])
    return [f"torch=={release}.*" if name == VERSIONS["REQUIREMENT"] else name for name in listed]


BUILDS = os.environ.get("UB_OVERLAP_BUILD", "1") != "0"
compiles = BUILDS and not COMPILING.isdisjoint(sys.argv)
package_dir = {"": "src", **packages()}
is_pinned = compiles or (BUILDS and "dist_info" in sys.argv)  # the metadata that pip reads before it builds the wheel
setuptools.setup(
    packages=[name for name in package_dir if name],
    py_modules=["_ub_overlap_autoload"],
    package_dir=package_dir,
    install_requires=dependencies(is_pinned),
    **project(),
    **(extension() if compiles else {}),
)
