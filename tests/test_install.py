"""Tests of the wheel's contents and of import side effects.

The layout is tested on an install from a copy of this checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IN_WHEEL = ("src", "compiler", "runtime", "tools", "csrc", "setup.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package, installed by pip without the extension, which does not affect the layout."""
    copy, target = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("site")
    for name in IN_WHEEL:
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", str(target), str(copy)]
    done = subprocess.run(
        pip, text=True, capture_output=True, timeout=280, check=False, env={**os.environ, "UB_OVERLAP_BUILD": "0"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def python(code: str, *, site: Path, cwd: Path) -> str:
    """Return the last line that `code` prints in a new interpreter, started in `cwd` with only `site` added to its path."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        text=True,
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(site)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def test_top_level_names(site: Path) -> None:
    """The folders compiler/, runtime/ and tools/ install as subpackages of ub_overlap, never as top-level modules."""
    names = {path.name for path in site.iterdir() if not path.name.endswith(".dist-info")}
    assert names - {"bin", "__pycache__"} == {"ub_overlap"}
    assert (site / "ub_overlap/compiler/plan/plan.py").is_file()
    assert (site / "ub_overlap/runtime/schedule").is_dir()


def test_every_module_is_in_the_wheel(site: Path) -> None:
    """The wheel contains every module; a new folder without a packaging entry would be missing from installs only."""
    homes = {name: f"ub_overlap/{name}" for name in ("compiler", "runtime", "tools")} | {"src/ub_overlap": "ub_overlap"}
    for folder, home in homes.items():
        for path in (p for kind in ("py", "json", "html", "css", "js") for p in (ROOT / folder).rglob(f"*.{kind}")):
            assert (site / home / path.relative_to(ROOT / folder)).is_file(), path.relative_to(ROOT)


def test_one_version(site: Path) -> None:
    """setup.py and the package have the same version."""
    import ub_overlap

    assert (site / f"ub_overlap-{ub_overlap.__version__}.dist-info").is_dir()


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
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=120, check=False)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_an_unknown_name_is_an_attribute_error() -> None:
    import ub_overlap

    with pytest.raises(AttributeError, match="no_such_name.*explain"):
        _ = ub_overlap.no_such_name
    assert set(ub_overlap.__all__) == set(dir(ub_overlap))
