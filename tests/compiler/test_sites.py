"""Every model and form of the catalogue, compiled forward and backward.

Results are compared with float64, and sites with the expected structure. Structure without ranks: test_site_structure.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.compiler.rank_compile import FORCE, INDUCTOR, check
from tests.harness.ranks import RankPool
from tests.harness.tiers import full_but, in_full
from tests.models.catalogue import ALL, EXTERNAL, MESH, ODD, REPEATED, unfit

pytestmark = pytest.mark.tier("test")

INNER = ("llama_b1", "llama_b2", "llama_dynamic", "mlp_gated_bias", "fsdp_mixed_2d", "mlp_reduce_gated", "attention_dim1_bias")
INNER_REPEATED = {"llama_b1", "llama_dynamic", "attention_dim1_bias"}
LOW = ("llama_b2", "mlp_gated_bias", "mlp_dim1", "mlp_reduce_gated", "gather_k", "mm_scatter_n", "gather_other_user")


@pytest.mark.parametrize("name", full_but(ALL.keys() - REPEATED, ALL))
def test_every_case(pool2: RankPool, name: str) -> None:
    if why := unfit(name):
        pytest.skip(why)
    check(pool2, *ALL[name], FORCE)


@pytest.mark.parametrize("name", full_but(["mlp_mesh"], MESH))
def test_mesh(pool4: RankPool, name: str) -> None:
    """Models on a 2D mesh have correct results and sites. The groups are {0, 2} and {1, 3} of 4 ranks."""
    check(pool4, *MESH[name], FORCE)


@pytest.mark.parametrize("name", full_but({*INNER} - INNER_REPEATED - {"fsdp_mixed_2d"}, [*INNER, "gather_other_user"]))
def test_inductor(pool2: RankPool, name: str) -> None:
    check(pool2, *ALL[name], INDUCTOR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", full_but(LOW[1:], LOW))
def test_low_precision(pool2: RankPool, name: str, dtype: torch.dtype) -> None:
    module, variant = ALL[name]
    check(pool2, module, {**variant, "dtype": dtype}, FORCE)


@pytest.mark.parametrize("name", full_but(ODD[1:], ODD))
def test_three_ranks(pool3: RankPool, name: str) -> None:
    check(pool3, *ALL[name], FORCE)


@pytest.mark.parametrize("name", [in_full("llama_b2"), "mlp_dim1", "gather_weight", "fsdp_2d"])
def test_four_ranks(pool4: RankPool, name: str) -> None:
    check(pool4, *ALL[name], FORCE)


@pytest.mark.tier("full")
@pytest.mark.parametrize("chunks", [4, 8])
def test_more_chunks_than_ranks(pool2: RankPool, chunks: int) -> None:
    for outcome in check(pool2, *ALL["mlp_gated_bias"], {**FORCE, "overrides": {"*": f"chunks={chunks}"}}):
        assert {d["strategy"] for d in outcome.decisions} == {f"pipelined:chunks={chunks}"}


@pytest.fixture(scope="module", params=[(w, p) for w in (2, 4) for p in ("hf", "titan")], ids=lambda p: f"{p[1]}-{p[0]}")
def package_pool(request: pytest.FixtureRequest) -> Iterator[tuple[RankPool, dict[str, Any]]]:
    """Ranks that import only one third-party package.

    Importing torchtitan after transformers in one process breaks the partitioner.
    """
    world, prefix = request.param
    package = {"hf": "transformers", "titan": "torchtitan"}[prefix]
    if prefix == "titan" and tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12):
        pytest.skip(f"torch {torch.__version__}: torchtitan 0.3.0 imports torch.distributed.fsdp.DataParallelMeshDims")
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r tests/models/requirements.txt")
    with RankPool(world) as pool:
        yield pool, {name: entry for name, entry in EXTERNAL.items() if name.startswith(prefix)}


@pytest.mark.tier("full")
def test_external(package_pool: tuple[RankPool, dict[str, Any]]) -> None:
    """Third-party models, parallelised by their own code, are overlapped: all on 2 ranks, and one on 4 and under Inductor.

    tests/compiler/test_sharded_llama.py and tests/data_parallel/test_hf.py have one of each in the tier "test".
    """
    pool, named = package_pool
    one = dict(list(named.items())[:1])
    runs = [(named, "aot_eager"), (one, "inductor")] if pool.world == 2 else [(one, "aot_eager")]
    for chosen, inner in runs:
        for module, variant in chosen.values():
            check(pool, module, variant, {"overlap": "force", "inner": inner})
