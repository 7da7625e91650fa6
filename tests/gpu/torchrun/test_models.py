"""The models of tests/models under torch.compile: numbers against float64 and the unfused graph, and their sites."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.lockstep import Lockstep
from tests.models.catalogue import ALL, EXTERNAL, MESH, ODD, unfit
from tests.models.compare import compare
from ub_overlap.runtime.session import session

EAGER, INDUCTOR = {"overlap": "force", "inner": "aot_eager"}, {"overlap": "force"}
FIRST = (
    "llama_b2",
    "mlp_dim0",
    "mlp_gated_bias",
    "mlp_reduce_gated",
    "fsdp_2d",
    "gather_k",
    "mm_scatter_n",
    "gather_other_user",
)
INNER = ("llama_b2", "mlp_gated_bias", "fsdp_mixed_2d", "mlp_reduce_gated", "llama_dynamic")
LOW = ("llama_b2", "mlp_gated_bias", "mlp_dim1", "mlp_reduce_gated", "gather_k", "mm_scatter_n")


def run(lockstep: Lockstep, entry: tuple[str, dict[str, Any]], options: dict[str, Any], group: str) -> str:
    module, variant = entry
    torch._dynamo.reset()
    outcome = compare(lockstep.rank, lockstep.ranks, module, dict(variant), dict(options), device=lockstep.device)
    lockstep.sync()
    session.check()
    outcome.check()
    outcome.check_sites()
    counts = Counter(d["kind"] for d in outcome.decisions if d["strategy"].partition(":")[0] in ("pipelined", "direct", "bulk"))
    sites = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "no sites"
    worst = max((pair[1] for pair in outcome.errors.values()), default=0.0)
    eager = max((pair[0] for pair in outcome.errors.values()), default=0.0)
    return f"{sites}; error {worst:.2g}, eager {eager:.2g}"


def package_of(name: str) -> str:
    """Return why a foreign package's model cannot run here, "" if it can."""
    package = "transformers" if name.startswith("hf") else "torchtitan"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return f"torch {torch.__version__} is too old for torchtitan" if package == "torchtitan" and version < (2, 12) else ""


RANKS = int(os.environ.get("WORLD_SIZE", "2"))
Entry = tuple[str, dict[str, Any]]


def cases() -> Iterator[Any]:
    """Yield (name, model and variant, options), the most important first, with --quick's omissions marked."""

    def case(name: str, entry: Entry, options: dict[str, Any], quick: bool = True) -> Any:
        return pytest.param(name.split()[0], entry, options, id=name, marks=[] if quick else pytest.mark.full)

    if RANKS not in (2, 4, 8):
        yield from (case(f"{name} aot_eager", ALL[name], EAGER) for name in ODD)
        return
    yield from (case(f"{name} aot_eager", ALL[name], EAGER) for name in FIRST)
    yield from (case(f"{name} inductor", ALL[name], INDUCTOR, i < 2) for i, name in enumerate(INNER))
    for dtype in (torch.bfloat16, torch.float16):
        for i, name in enumerate(LOW):
            module, variant = ALL[name]
            entry = (module, {**variant, "dtype": dtype})
            yield case(f"{name} {str(dtype)[6:]} aot_eager", entry, EAGER, i < 2 and dtype is torch.bfloat16)
    if RANKS == 4:
        yield from (case(f"{name} aot_eager", entry, EAGER) for name, entry in MESH.items())
    for chunks in (1, 2, 2 * RANKS):
        options = {**EAGER, "overrides": {"*": f"chunks={chunks}"}}
        yield case(f"llama_b2 chunks={chunks}", ALL["llama_b2"], options, quick=False)
    yield from (case(f"{name} aot_eager", entry, EAGER, False) for name, entry in ALL.items() if name not in FIRST)
    if RANKS in (2, 4):
        # torchtitan after transformers in one process breaks the partitioner: torchtitan's own cases run elsewhere.
        yield from (case(f"{name} aot_eager", entry, EAGER, False) for name, entry in EXTERNAL.items() if name.startswith("hf"))


@pytest.mark.deadline(120)
@pytest.mark.parametrize(("name", "entry", "options"), list(cases()))
def test_model(lockstep: Lockstep, group: str, name: str, entry: Entry, options: dict[str, Any]) -> None:
    if why := unfit(name) or (package_of(name) if name in EXTERNAL else ""):
        pytest.skip(why)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    lockstep.note(run(lockstep, entry, options, group))
