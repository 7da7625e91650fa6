"""Fake ranks stand for real ones: their plans have the shared digests of the plans that ranks make."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compiler.rank_compile import FORCE, build, plans_of
from tests.harness.fake_ranks import FakeRanks
from tests.harness.ranks import RankPool


def digests(rank: int, world: int, module: str, variant: dict[str, Any], options: dict[str, Any]) -> list[str]:
    case = build(rank, world, module, variant)
    return [plan.shared_digest for plan in plans_of(case.module, case.inputs, options)]


@pytest.mark.parametrize("options", [FORCE, {"profile": "h200", "min_bytes": 0, "inner": "aot_eager"}], ids=["force", "auto"])
@pytest.mark.parametrize(
    ("module", "variant"),
    [
        ("tests.models.megatron", {"gated": True, "dims": 2, "local": 16}),
        ("tests.models.dtensor_mlp", {}),
        ("tests.models.zero3", {}),
    ],
    ids=["megatron", "dtensor", "zero3"],
)
def test_digests(module: str, variant: dict[str, Any], options: dict[str, Any], pool2: RankPool) -> None:
    """Forward and backward, decided by force and by predicted times."""
    real = pool2.run(digests, module, variant, options)
    fake = FakeRanks(2).run(digests, module, variant, options)
    assert real[0] == real[1] == fake[0] and len(fake[0]) == 2
