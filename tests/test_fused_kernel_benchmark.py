"""The table of benchmarks.fused_kernel, and what the program says without a GPU. The times need one: tests/gpu."""

from __future__ import annotations

import sys

import pytest
import torch

from benchmarks.fused_kernel.__main__ import main
from benchmarks.fused_kernel.table import exposed, text
from benchmarks.report import TEXTS

US = {"norm": 2.0, "sum": 3.0, "fused": 4.0, "norm behind a matmul": 2.5, "fused behind a matmul": 5.25}


def test_exposed_is_what_the_collective_adds_behind_a_matmul() -> None:
    assert exposed(US) == 2.75
    shown = text({"rows": [{"ranks": 2, "rows": 16, "cols": 4096, "us": US}]}).splitlines()
    assert shown[0].split()[:7] == ["ranks", "rows", "cols", "KiB", "norm", "sum", "fused"]
    assert shown[2].split() == ["2", "16", "4096", "128", "2.0", "3.0", "4.0", "2.5", "5.2", "2.8"]
    assert TEXTS["fused_kernel"] is text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_program_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fused_kernel"])
    with pytest.raises(SystemExit, match="needs a GPU"):
        main()
