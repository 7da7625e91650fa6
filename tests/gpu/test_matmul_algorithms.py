"""The search for algorithms in one set of ranks, and its results in the next.

pytest tests/gpu/test_matmul_algorithms.py -m gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.launch import launch, torchrun_command


@pytest.mark.gpu
@pytest.mark.timeout(500)
def test_search_then_new_processes(ranks: int, tmp_path: Path) -> None:
    for selection in ("test_search", "test_stored"):
        command = torchrun_command("test_algorithms.py", ranks, ["-k", selection, "-s"])
        finished = launch(command, 240, {"UB_OVERLAP_CACHE_DIR": str(tmp_path)})
        print(finished.output[-6000:])
        assert finished.code == 0 and " passed" in finished.output, finished.why()
        assert list((tmp_path / "algorithms").glob("*.json")), "no file of algorithms"
