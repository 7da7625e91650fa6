"""The functional API: values and gradients against fp64, also compiled, saved tensors and errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.ranks import PATIENCE_S, RankPool
from tests.harness.tiers import full_but

from . import rank_compiled
from . import rank_functional as work

pytestmark = pytest.mark.tier("test")

LARGE = [("gathers", 4), ("scatters", 4), ("reduces", 4)]
KINDS = ["gathers", "scatters", "reduces", "smallest", "partly_used", "groups", "autocast"]
CASES = [(what, world) for what in KINDS for world in (2, 4)]


@pytest.mark.parametrize(("what", "world"), full_but([case for case in CASES if case not in LARGE], CASES))
def test_values_and_gradients(pools: dict[int, RankPool], world: int, what: str) -> None:
    for bad in pools[world].run(getattr(work, what)):
        assert not bad, "\n".join(bad[:20])


BACKENDS = [("aot_eager", 1), ("aot_eager", 2), ("inductor", 2), ("ub_overlap", 1), ("ub_overlap", 2)]


@pytest.mark.parametrize(("backend", "batch"), full_but([("ub_overlap", 2)], BACKENDS))
def test_compiled(pools: dict[int, RankPool], backend: str, batch: int) -> None:
    for bad in pools[2].run(rank_compiled.compiled, backend, batch):
        assert not bad, "\n".join(bad)


def test_what_is_kept(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(work.kept):
        assert found == {"gathered": [[8, 8]], "shard": [], "no weight gradient": [], "no_grad": []}


def test_what_runs(pools: dict[int, RankPool]) -> None:
    """The sites that run match the table of docs/guide/without_compile.md."""
    both, one = {"/s": 1, "/s.backward": 1, "/s.backward.gather": 1}, {"/s": 1, "/s.backward": 1}
    for found in pools[2].run(work.sites):
        scatters = {name: found.pop(name) for name in list(found) if name.startswith("scatter")}
        assert set(map(str, scatters.values())) == {str({"/r": 1, "/r.backward": 1})}
        assert found == {
            **{f"gathered {dim} {wants}": one for dim in (0, 1) for wants in ("xw", "x")},
            **{f"gathered {dim} w": {"/s": 1} for dim in (0, 1)},
            **{f"shard {dim} xw": both for dim in (0, 1)},
            **{f"shard {dim} x": one for dim in (0, 1)},
            **{f"shard {dim} w": {"/s": 1, "/s.backward.gather": 1} for dim in (0, 1)},
        }


def test_dynamic_shapes(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_compiled.dynamic) == [[]] * 2


def test_compiled_with_groups(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_compiled.named) == [[]] * 2


def test_no_second_gradients(pools: dict[int, RankPool]) -> None:
    for text in pools[2].run(work.twice):
        assert "once_differentiable" in text


def test_the_documented_layer(pools: dict[int, RankPool]) -> None:
    assert pools[2].run(rank_compiled.documented) == [[]] * 2


def test_misuse_is_refused(pools: dict[int, RankPool]) -> None:
    for found in pools[2].run(work.refusals):
        assert [case for case in found if case[1]] == []


def test_ranks_out_of_step() -> None:
    with RankPool(2) as pool:
        for rank, text in enumerate(pool.run(work.out_of_step)):
            assert text.startswith("ShapeMismatchError"), text
            assert "'/odd'" in text, rank


def test_without_a_process_group() -> None:
    code = """
import torch, ub_overlap
try:
    ub_overlap.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2))
except ub_overlap.errors.OptionError as error:
    print(error.what)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "no process group\n", done.stderr


@pytest.mark.tier("full")
def test_the_face_is_lazy() -> None:
    code = "import sys, ub_overlap; assert 'torch' not in sys.modules; print(ub_overlap.matmul_reduce_scatter.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.stdout == "matmul_reduce_scatter\n", done.stderr
