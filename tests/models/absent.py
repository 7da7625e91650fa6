"""Mocks of packages that are imported but not called here (Triton kernels, loggers, data sets)."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that returns modules of mocks for the given top-level packages and their submodules."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__path__ = []


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


@contextlib.contextmanager
def stand_ins(*names: str) -> Iterator[None]:
    """Mock the packages of `names` that are not installed; remove the mocks on exit."""
    absent = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    finder = _Finder(absent)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for module in [m for m in sys.modules if m.split(".")[0] in absent]:
            del sys.modules[module]
