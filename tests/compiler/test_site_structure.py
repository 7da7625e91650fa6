"""The sites of the catalogue's models, decided in one process over fake ranks: which, of which kind, in which form."""

from __future__ import annotations

import pytest

from tests.compiler.rank_compile import FORCE
from tests.harness.fake_ranks import FakeRanks
from tests.harness.tiers import full_but
from tests.models.catalogue import MESH, MODELS, REPEATED, unfit
from tests.models.compare import decide_sites

pytestmark = pytest.mark.tier("test")

SLOW = {"llama_dynamic"}
"""DTensor takes a minute to trace symbolic sizes. Models of other forms have dynamic sizes too."""


@pytest.mark.parametrize("name", full_but(REPEATED & MODELS.keys() - SLOW, MODELS))
def test_structure(fake2: FakeRanks, name: str) -> None:
    if why := unfit(name):
        pytest.skip(why)
    fake2.run(decide_sites, *MODELS[name], FORCE)[0].check_sites()


@pytest.mark.parametrize("name", MESH)
def test_structure_on_a_mesh(fake4: FakeRanks, name: str) -> None:
    fake4.run(decide_sites, *MESH[name], FORCE)[0].check_sites()
