"""A copy of the package in a temporary folder, first on PYTHONPATH: processes import it, and not what is installed.

    tree       compiler/ runtime/ tools/ src/ub_overlap/                   sources of the tests' own checkout
    overlay    ub_overlap/compiler ub_overlap/runtime ... ub_overlap/_C*.so   what is imported

The checkout and the virtual environment stay as they are. A mutated C++ file is compiled by the command that built the
package, and linked with the objects of its other files.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .mutation import Mutation

TREES = {"compiler": "compiler", "runtime": "runtime", "tools": "tools", "src/ub_overlap": ""}
"""Folder of the checkout -> folder in the package."""
LIMIT_S = 300.0
"""For one start of ranks, or one file of C++."""
_PROBE = """
def where(rank, world):
    import ub_overlap, ub_overlap._C
    return ub_overlap.__file__, ub_overlap._C.__file__
"""


class Overlay:
    """The copy. `tree`: the checkout whose sources are copied, and whose tests run. `objects`: of its C++ files."""

    def __init__(self, tree: Path, folder: Path, objects: Path) -> None:
        self.tree, self.folder, self._objects = tree, folder, objects
        self.package = folder / "ub_overlap"
        for source, place in TREES.items():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(tree / source, self.package / place, ignore=ignore, dirs_exist_ok=True)
        installed = Path(sysconfig.get_paths()["purelib"]) / "ub_overlap"
        for file in (*installed.glob("_C.*"), *installed.glob("_C_build.json")):
            shutil.copy2(file, self.package)
        (folder / "ub_overlap_probe.py").write_text(_PROBE)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of processes that import the copy."""
        before = os.environ.get("PYTHONPATH", "")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(self.folder), before)))}

    def check(self) -> None:
        """Show that this process's children import the copy, and so do ranks. RuntimeError where they do not."""
        program = (
            "from tests.harness.ranks import run_ranks\n"
            "import ub_overlap_probe\n"
            "for file in (*ub_overlap_probe.where(0, 1), *run_ranks('ub_overlap_probe:where', 2)[1]): print(file)\n"
        )
        command = [sys.executable, "-c", program]
        where = {"cwd": self.tree, "env": self.environment}
        done = subprocess.run(command, **where, capture_output=True, text=True, timeout=LIMIT_S)
        files = done.stdout.split()
        if done.returncode or len(files) != 4 or not all(Path(f).is_relative_to(self.package) for f in files):
            raise RuntimeError(f"tests do not import {self.package}, but:\n{done.stdout}{done.stderr}")

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Have the fault in the copy, within the block."""
        text = mutation.apply((self.tree / mutation.file).read_text())
        if mutation.is_cpp:
            target, content = next(self.package.glob("_C.*.so")), self._link(mutation.file, text)
        else:
            target, content = self._place(mutation.file), text.encode()
        before = target.read_bytes()
        try:
            self._replace(target, content)
            yield
        finally:
            self._replace(target, before)

    def _place(self, file: str) -> Path:
        source, place = next((s, p) for s, p in TREES.items() if file.startswith(f"{s}/"))
        return self.package / place / Path(file).relative_to(source)

    @staticmethod
    def _replace(target: Path, content: bytes) -> None:
        """Write a new file: processes may have mapped the old one. Python compares times in seconds: drop its cache."""
        part = target.with_name(f".{target.name}.part")
        part.write_bytes(content)
        part.replace(target)
        for cached in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
            with suppress(FileNotFoundError):
                cached.unlink()

    def _link(self, file: str, text: str) -> bytes:
        """Return the extension with another text of one C++ file."""
        objects = Objects(self._objects)
        objects.check_sources(self.tree)
        work = self.folder / "link"
        work.mkdir(exist_ok=True)
        source = work / Path(file).name
        source.write_text(text)
        return objects.link(file, source, work).read_bytes()


class Objects:
    """The compiled files that `.ci/install` keeps. `tree`: the unpacked sources, with build/."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        found = list(tree.glob("build/temp.*/build.ninja"))
        if len(found) != 1:
            raise RuntimeError(f"no objects in {tree}/build: make install compiles them")
        self.folder, text = found[0].parent, found[0].read_text()
        self._values = dict(re.findall(r"^(\w+) = (.*)$", text, re.MULTILINE))

    def check_sources(self, checkout: Path) -> None:
        """RuntimeError where the objects are of other sources than those of `checkout`."""
        for file in sorted((checkout / "csrc").rglob("*.*")):
            if file.suffix in (".cpp", ".h") and (self.tree / file.relative_to(checkout)).read_bytes() != file.read_bytes():
                raise RuntimeError(f"{file} was not compiled as it is: make install")

    def link(self, file: str, source: Path, work: Path) -> Path:
        """Return an extension in which `source` takes the place of the C++ file `file`."""
        import torch

        made, extension = work / "mutated.o", work / "_C.so"
        own = rf"-I{self.tree}/csrc"  # the folder may have moved since
        flags = [shlex.split(re.sub(r"-I\S+/csrc(?=\s)", own, self._values[n])) for n in ("cflags", "post_cflags")]
        _run(["c++", *flags[0], str(source), "-o", str(made), *flags[1]])
        replaced = (self.folder / file).with_suffix(".o")
        others = [str(o) for o in sorted(self.folder.rglob("*.o")) if o != replaced]
        libraries = Path(torch.__file__).parent / "lib"
        names = ("c10", "torch", "torch_cpu", "torch_python", "rt")
        linked = ["-shared", *others, str(made), f"-L{libraries}", *(f"-l{name}" for name in names), "-l:libstdc++.so.6"]
        _run(["c++", *linked, "-o", str(extension)])
        return extension


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:1])} failed:\n{done.stderr[-3000:]}")
