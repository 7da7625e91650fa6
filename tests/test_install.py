"""Tests of the sdist, of the wheel built from it, and of import side effects.

`make test` runs on a package that is compiled from the sdist (.ci/install). Here the extension is left out to save a minute.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.harness.ranks import PATIENCE_S

pytestmark = pytest.mark.tier("full")

ROOT = Path(__file__).resolve().parents[1]
GENERATED = (".*", "__pycache__", "*.egg-info", "*.so", "_C_build.json", "build", "dist")
OTHERS = ("tabulate", "jinja2", "rich>=13", "msgspec>=0.19", "shtab>=1.7")
"""What the package needs besides torch."""
HIDDEN_SOURCES = (".ci", ".clang-format", ".gitignore")


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """Return the stdout of a command that succeeds."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str | Path) -> None:
    """Run pip without build isolation and without compiling the extension."""
    run(sys.executable, "-m", "pip", *arguments, UB_OVERLAP_BUILD="0")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository without generated files, as a build writes next to the sources."""
    copy = tmp_path_factory.mktemp("checkout") / "ub_overlap"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*GENERATED))
    for name in HIDDEN_SOURCES:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sdist, a tar.gz."""
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", f"import setuptools.build_meta as b; b.build_sdist({str(folder)!r})", cwd=checkout)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root folder of the unpacked sdist."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


@pytest.fixture(scope="module")
def site(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package, installed by pip from the sdist."""
    target = tmp_path_factory.mktemp("site")
    pip("install", "--no-deps", "--no-build-isolation", "--target", target, sdist)
    return target


def files(folder: Path) -> set[str]:
    """Return the relative names of the files of `folder`, without bytecode."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


def test_the_sdist_is_the_repository(unpacked: Path) -> None:
    """Every tracked file is in the sdist, so that it builds, tests and documents itself."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, text=True, capture_output=True, check=False, timeout=60)
    if git.returncode:
        pytest.skip("not a git checkout")
    tracked = {name for name in git.stdout.splitlines() if (ROOT / name).exists()}
    assert sorted(tracked - files(unpacked)) == []
    generated = {"PKG-INFO", "setup.cfg"}
    untracked = {name for name in files(unpacked) - tracked if not (ROOT / name).exists()}
    assert sorted(name for name in untracked - generated if ".egg-info/" not in name) == []


def test_every_include_is_in_the_sdist(unpacked: Path) -> None:
    """Every `#include "..."` of csrc resolves inside the sdist: one that is missing fails the build after minutes."""
    sources = [path for path in (unpacked / "csrc").rglob("*.*") if path.suffix in (".cpp", ".cu", ".h", ".cuh")]
    included = [(path, name) for path in sources for name in re.findall(r'#\s*include\s*"([^"]+)"', path.read_text())]
    missing = [
        f"{path.relative_to(unpacked)}: {name}"
        for path, name in included
        if not (path.parent / name).is_file() and not (unpacked / "csrc" / name).is_file()
    ]
    assert len(included) > 100
    assert missing == []


def test_wheel_of_the_checkout_equals_wheel_of_the_sdist(checkout: Path, site: Path, tmp_path: Path) -> None:
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheel", checkout)
    (wheel,) = (tmp_path / "wheel").iterdir()
    pip("install", "--no-deps", "--target", tmp_path / "site", wheel)
    ignored = (".dist-info/direct_url.json",)
    assert {n for n in files(tmp_path / "site") if not n.endswith(ignored)} == {
        n for n in files(site) if not n.endswith(ignored)
    }


def requirements(metadata: Path) -> list[str]:
    """Return what a METADATA file requires without extras."""
    message = email.message_from_string(metadata.read_text())
    return [line for line in message.get_all("Requires-Dist") or () if "extra ==" not in line]


def test_a_wheel_with_the_extension_needs_its_torch(checkout: Path, site: Path, unpacked: Path, tmp_path: Path) -> None:
    """The sdist, and a wheel without the extension, have the range. pip reads the metadata of a wheel before it builds it."""
    code = f"import setuptools.build_meta as b; print(b.prepare_metadata_for_build_wheel({str(tmp_path)!r}))"
    folder = run(sys.executable, "-c", code, cwd=checkout, UB_OVERLAP_BUILD="1").splitlines()[-1]
    release = ".".join(version("torch").split(".")[:2])
    pinned, open_range = (sorted([torch, *OTHERS]) for torch in (f"torch=={release}.*", "torch<2.16,>=2.11"))
    assert sorted(requirements(tmp_path / folder / "METADATA")) == pinned
    (installed,) = site.glob("ub_overlap-*.dist-info/METADATA")
    assert sorted(requirements(installed)) == sorted(requirements(unpacked / "PKG-INFO")) == open_range


def python(code: str, *, site: Path, cwd: Path) -> str:
    """Return the last line that `code` prints in a new interpreter, started in `cwd` with only `site` added to its path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_top_level_names(site: Path) -> None:
    """The folders compiler/, runtime/ and tools/ install as subpackages of ub_overlap, never as top-level modules.

    What torch calls in every process is a module of its own (src/_ub_overlap_autoload.py).
    """
    names = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert names - {"bin", "__pycache__"} == {"ub_overlap", "_ub_overlap_autoload.py"}
    assert (site / "ub_overlap/compiler/plan/plan.py").is_file()
    assert (site / "ub_overlap/runtime/schedule").is_dir()


def test_every_module_is_in_the_wheel(site: Path) -> None:
    """The wheel contains every module; a new folder without a packaging entry would be missing from installs only."""
    homes = {name: f"ub_overlap/{name}" for name in ("compiler", "runtime", "tools")} | {"src/ub_overlap": "ub_overlap"}
    for folder, home in homes.items():
        for path in (p for kind in ("py", "json", "html", "css", "js") for p in (ROOT / folder).rglob(f"*.{kind}")):
            assert (site / home / path.relative_to(ROOT / folder)).is_file(), path.relative_to(ROOT)


def test_one_version(site: Path) -> None:
    """The wheel, the package and the extension have the same version."""
    import ub_overlap
    from ub_overlap.runtime.extension import extension

    assert (site / f"ub_overlap-{ub_overlap.__version__}.dist-info").is_dir()
    assert extension().build_info()["version"] == ub_overlap.__version__


def test_the_extension_has_a_record_of_its_build() -> None:
    """The record says why CUDA is part of the extension or not, and agrees with it."""
    from ub_overlap.cli.info import info
    from ub_overlap.runtime.extension import cuda_note, extension

    built = extension().build_info()["cuda"]
    assert re.search(r"nvcc \d+\.\d+ in " if built else r"without CUDA|no nvcc|CUDA_HOME|UB_OVERLAP_BUILD_CUDA=0", cuda_note())
    assert info()["extension"]["cuda_note"] == cuda_note()


@pytest.mark.parametrize("name", ["compiler", "runtime", "tools"])
def test_no_such_module_from_elsewhere(name: str, site: Path, tmp_path: Path) -> None:
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    assert python(code, site=site, cwd=tmp_path) == "None"


@pytest.mark.parametrize("where", ["root", "elsewhere"])
def test_a_checkout_does_not_shadow_the_install(where: str, site: Path, tmp_path: Path) -> None:
    code = "import ub_overlap, ub_overlap.compiler, ub_overlap.runtime as r; print(ub_overlap.__file__); print(r.__file__)"
    found = python(code, site=site, cwd=ROOT if where == "root" else tmp_path)
    assert Path(found).is_relative_to(site)


def test_torch_finds_the_backend_without_an_import(site: Path, tmp_path: Path) -> None:
    code = (
        "import json, sys, torch; found = torch.compiler.list_backends(); "
        "print(json.dumps(['ub_overlap' in found, 'ub_overlap' in sys.modules]))"
    )
    assert json.loads(python(code, site=site, cwd=tmp_path)) == [True, False]


def test_importing_is_cheap(site: Path, tmp_path: Path) -> None:
    """Importing ub_overlap does not import torch, so it creates no device, process group or thread."""
    code = "import sys, ub_overlap; dir(ub_overlap); print('torch' in sys.modules)"
    assert python(code, site=site, cwd=tmp_path) == "False"


def test_importing_everything_touches_no_gpu() -> None:
    """Loading all public names and the extension initialises neither CUDA nor a process group."""
    code = (
        "import torch, torch.distributed as dist, ub_overlap; "
        "[getattr(ub_overlap, name) for name in ub_overlap.__all__]; "
        "print(torch.cuda.is_initialized(), dist.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import ub_overlap

    with pytest.raises(AttributeError, match="no_such_name.*explain"):
        _ = ub_overlap.no_such_name
    assert set(ub_overlap.__all__) == set(dir(ub_overlap))
