"""Tests that every private torch name used by the package exists on the installed torch."""

from __future__ import annotations

import inspect

import pytest

from ub_overlap import _torch_compat


@pytest.mark.parametrize("name", _torch_compat.names())
def test_name_resolves(name: str) -> None:
    assert getattr(_torch_compat, name) is not None


def test_unlisted_name() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = _torch_compat.no_such_name


def test_a_name_that_this_torch_lacks_names_the_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_torch_compat._PRIVATE, "gone", ("torch._nowhere:gone", "torch:gone"))
    with pytest.raises(ImportError, match=r"torch 2\.\d+.*'gone' at none of torch\._nowhere:gone, torch:gone"):
        _ = _torch_compat.gone


def test_imports_of_torch_are_inside_functions() -> None:
    """Importing ub_overlap, and through it _torch_compat.py, must not import torch."""
    for line in inspect.getsource(_torch_compat).splitlines():
        assert not line.startswith(("import torch", "from torch")), line
