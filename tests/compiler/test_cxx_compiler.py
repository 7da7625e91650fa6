"""Without a C++ compiler the first compilation for CPUs is one error that says what to install."""

from __future__ import annotations

import pytest
import torch

from tests.models.compare import uncached
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.inductor import require_cxx_compiler
from ub_overlap.runtime.errors import UbOverlapError

MISSING = {"cpp.cxx": (None, "no-such-compiler")}


def test_a_compilation_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(*_: object, **__: object) -> None:
        raise AssertionError("Inductor was asked to compile")

    monkeypatch.setattr(compat, "compile_fx", reached, raising=False)
    with uncached(), pytest.raises(Exception) as raised:
        torch.compile(lambda x: x + 1, backend="ub_overlap", options=MISSING)(torch.ones(4))
    error = getattr(raised.value, "inner_exception", raised.value)
    assert type(error) is UbOverlapError
    assert error.got == "no-such-compiler is not on PATH" and "apt install g++" in error.fix and "aot_eager" in error.fix


def test_where_no_compiler_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs, where the compiler is there under another name, and where Inductor installs one."""
    require_cxx_compiler([torch.ones(4, device="meta"), 3], MISSING)
    require_cxx_compiler([torch.ones(4)], {"cpp.cxx": ("no-such-compiler", "sh")})
    with pytest.raises(UbOverlapError, match="a or b is not on PATH"):
        require_cxx_compiler([torch.ones(4)], {"cpp.cxx": ("a", "b")})
    monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
    require_cxx_compiler([torch.ones(4)], MISSING)
