"""Tests of the layering: one import direction, private torch names in one file, and a limit on file size."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.fp8.numerics import E4M3, E5M2, LEAST_SCALE

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 460

# Import-name prefix -> folder. ub_overlap may import all, compiler may import runtime, runtime only itself, the extension
# and the compatibility file. The schedules are plain Python.
LAYERS = {
    "ub_overlap.compiler": ROOT / "compiler",
    "ub_overlap.runtime": ROOT / "runtime",
    "ub_overlap.tools": ROOT / "tools",
    "ub_overlap": ROOT / "src/ub_overlap",
}
FORBIDDEN = {
    "compiler": ("ub_overlap.tools", "ub_overlap._C", "ub_overlap.__main__", "torch.cuda", "triton", "cuda", "cupy"),
    "runtime": ("ub_overlap.tools", "ub_overlap.compiler", "ub_overlap.__main__", "torch.fx"),
    "runtime/schedule": ("ub_overlap.compiler", "ub_overlap._C", "ub_overlap._torch_compat", "torch"),
    "src/ub_overlap": (),
}
PRIVATE_TORCH_HOME = ROOT / "src/ub_overlap/_torch_compat.py"
NO_TORCH_HEADERS = ("csrc/core", "csrc/cpu", "csrc/cuda")


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def package_of(path: Path) -> str:
    """Return the import package of `path`, or "" for a file outside the package's folders."""
    for prefix, folder in LAYERS.items():
        if path.is_relative_to(folder):
            return ".".join((prefix, *path.relative_to(folder).parts[:-1]))
    return ""


def module_of(path: Path) -> str:
    """Return the dotted name under which `path` is imported."""
    return package_of(path) if path.stem == "__init__" else f"{package_of(path)}.{path.stem}"


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import. Relative imports are resolved; `from a import b` gives a.b."""
    package = package_of(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{home}.{alias.name}") for alias in node.names)


def is_or_is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_run_one_way(folder: str) -> None:
    """Imports go from ub_overlap (src) to compiler to runtime to _C only; runtime/schedule is plain Python."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: imports {name}"
        for path in python_files(folder)
        for line, name in imported_names(path)
        if any(is_or_is_in(name, module) for module in FORBIDDEN[folder])
    ]
    assert not found, "\n".join(found)


def with_packages(names: Iterable[str]) -> Iterator[str]:
    """Yield the names and the packages that they are in, whose __init__.py Python runs first."""
    for name in names:
        parts = name.split(".")
        yield from (".".join(parts[:n]) for n in range(1, len(parts) + 1))


def test_no_files_import_each_other() -> None:
    """There are no import cycles, including imports inside functions, and those of the packages of an imported module.

    So every module can be the first one that a process imports.
    """
    homes = {module_of(path): path for path in python_files("compiler", "runtime", "tools", "src")}
    graph = {
        home: {
            name if name in homes else name.rpartition(".")[0]
            for name in with_packages(name for _, name in imported_names(path))
            if name != "ub_overlap._C" and not is_or_is_in(home, name)  # the extension is not a Python file
        }
        & homes.keys() - {home}
        for home, path in homes.items()
    }
    assert sum(map(len, graph.values())) > len(homes), "these files import each other, or nothing is found here"
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_the_layers_are_there() -> None:
    """No layer is empty, because the other tests would pass on empty folders."""
    for folder in FORBIDDEN:
        assert python_files(folder), folder


def private_torch_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every torch name with a private part, through aliases.

    An alias is e.g. `import torch.distributed as dist`. `torch.ops` namespaces are names of operators, not of modules, and end
    the search.
    """
    tree = ast.parse(source)
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    aliases[alias.asname] = alias.name
                else:
                    root = alias.name.split(".")[0]
                    aliases[root] = root
                if is_private_torch(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = name
                if is_private_torch(name):
                    yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := dotted(node, aliases)) and is_private_torch(name):
            yield node.lineno, name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private_torch(node.value):
            yield node.lineno, repr(node.value)


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    """Return the dotted name of the expression, e.g. "torch._dynamo.reset", or "" if it is not a chain of names."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([aliases.get(node.id, ""), *reversed(parts)])


def is_private_torch(name: str) -> bool:
    """Return whether a torch name has a private part.

    torch.a._b has one. torch.ops._c10d_functional (an operator namespace) and dunders (torch.__version__) have none.
    """
    if not re.fullmatch(r"torch(\.\w+)+(:[\w.]+)?", name) or is_or_is_in(name, "torch.ops"):
        return False
    return any(part.startswith("_") and not part.startswith("__") for part in re.split(r"[.:]", name))


@pytest.mark.parametrize(
    ("source", "private"),
    [
        ("import torch._inductor", True),
        ("from torch._inductor import config", True),
        ("from torch.distributed import _functional_collectives as f", True),
        ("import torch\ntorch._dynamo.reset()", True),
        ("import torch.distributed as dist\ndist._symmetric_memory.rendezvous(x)", True),
        ("import importlib\nimportlib.import_module('torch._inductor.config')", True),
        ("import torch\ntorch.ops._c10d_functional.wait_tensor.default", False),
        ("import torch\ntorch.__version__", False),
        ("self._torch.x\nx = 'see torch._inductor for more'", False),
    ],
)
def test_the_scan_for_private_names(source: str, private: bool) -> None:
    assert bool(list(private_torch_names(source))) is private


def test_private_torch_names_sit_in_one_file() -> None:
    """Private torch names are in one file.

    A torch release can then break only that file, and tests/test_torch_compat.py gives the name.
    """
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files("src", "compiler", "runtime", "tools", "examples")
        if path != PRIVATE_TORCH_HOME
        for line, name in private_torch_names(path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", NO_TORCH_HEADERS)
def test_executors_include_no_torch_header(folder: str) -> None:
    """Executors include no torch header; csrc/bindings injects matmuls as functions."""
    header = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|caffe2|pybind11|Python\.h)', re.MULTILINE)
    found = [
        f"{path.relative_to(ROOT)}: {match.group().strip()}"
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".h", ".hpp", ".cpp", ".cu", ".cuh"}
        for match in header.finditer(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_sources_of_a_folder_have_names_of_their_own() -> None:
    """Object files are named without the ending of their source, so x.cpp and x.cu cannot be built together."""
    sources = [path.with_suffix("") for ending in ("cpp", "cu") for path in (ROOT / "csrc").rglob(f"*.{ending}")]
    assert not [path for path in sources if sources.count(path) > 1]


def test_float8_numbers_are_those_of_the_kernels() -> None:
    """The FP8 constants of compiler, runtime and kernels are equal, so that casts agree bitwise."""
    literal = re.compile(r"2(\.0)?\s*\*\*\s*-120")
    homes = [
        path.relative_to(ROOT).as_posix() for path in python_files("compiler", "runtime") if literal.search(path.read_text())
    ]
    assert homes == ["runtime/fp8/numerics.py"]
    numbers = (LEAST_SCALE, *(torch.finfo(format).max for format in (E4M3, E5M2)))
    assert extension().testing.float8_numbers == numbers
    sources = {path.relative_to(ROOT / "csrc").as_posix(): path.read_text() for path in (ROOT / "csrc").rglob("*.*")}
    literal = re.compile(r"\b(448|57344)(\.0)?f?;|p-120f|7\.523163")
    assert [name for name, text in sources.items() if literal.search(text)] == ["core/float8.h"]


def test_the_compilers_folders_are_its_parts() -> None:
    """The architecture page names every compiler folder; at most 7 files are outside of folders."""
    folders = [path.parent.name for path in sorted((ROOT / "compiler").glob("*/__init__.py"))]
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    assert not [name for name in folders if f"{name}/" not in text]
    assert len(list((ROOT / "compiler").glob("*.py"))) <= 7


def test_python_files_stay_small() -> None:
    sizes = {
        path.relative_to(ROOT): len(path.read_text().splitlines())
        for path in [
            *python_files("src", "compiler", "runtime", "tools", "build_tools", "examples", "tests", "benchmarks"),
            ROOT / "setup.py",
        ]
    }
    assert not {str(path): lines for path, lines in sizes.items() if lines > MAX_LINES}
