"""Each model runs eagerly, forward and backward, and its traced graphs hold the collectives that its structure says."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.harness.traces import capture
from tests.models.case import Expected, Sites
from tests.models.catalogue import DTENSOR, EXTERNAL, FSDP, MEGATRON, MESH, SINGLE, Named
from tests.models.compare import values


def run_eager(rank: int, world: int, named: Named) -> dict[str, str]:
    """Name -> what is wrong with the model's eager run; empty when all is well."""
    wrong = {}
    for name, (module, variant) in named.items():
        case = importlib.import_module(module).build(rank, world, **variant)
        found = values(case, case.module)
        bad = [key for key, value in found.items() if value is not None and not torch.isfinite(value).all()]
        missing = [key for key, value in found.items() if value is None]
        grads = any(isinstance(t, torch.Tensor) and t.requires_grad for t in (*case.inputs, *case.module.parameters()))
        if bad or (grads and missing and not key_is_input(missing)):
            wrong[name] = f"not finite: {bad}; no gradient: {missing}"
    return wrong


def key_is_input(keys: list[str]) -> bool:
    """Token inputs take no gradient."""
    return all(key.startswith("input") for key in keys)


def count(rank: int, world: int, named: Named) -> dict[str, tuple[Expected, dict[str, tuple[int, int, int]]]]:
    """Name -> (expected, phase -> all_gathers, reduce_scatters, all_reduces as traced)."""
    found = {}
    for name, (module, variant) in named.items():
        torch._dynamo.reset()
        case = importlib.import_module(module).build(rank, world, **variant)
        phases: dict[str, tuple[int, int, int]] = {"forward": (0, 0, 0), "backward": (0, 0, 0)}
        for trace in capture(case):
            targets = [str(node.target) for node in trace.module.graph.nodes if node.op == "call_function"]
            kinds = ("all_gather_into_tensor.", "reduce_scatter_tensor.", "all_reduce.")
            now = [sum(f"_c10d_functional.{kind}" in t for t in targets) for kind in kinds]
            phase = "backward" if trace.phase == "backward" else "forward"
            a, b, c = phases[phase]
            phases[phase] = (a + now[0], b + now[1], c + now[2])
        found[name] = (case.expected, phases)
    return found


def totals(sites: Sites) -> tuple[int, int, int]:
    return sites.all_gathers, sites.reduce_scatters, sites.all_reduces


def check_counts(pool: RankPool, named: Named) -> None:
    """Traced collectives equal the structure's on rank 0."""
    for name, (expected, phases) in pool.run(count, named, timeout=180)[0].items():
        wanted = {"forward": totals(expected.forward), "backward": totals(expected.backward)}
        assert phases == wanted, name


GROUPS: dict[str, Named] = {"dtensor": DTENSOR, "megatron": MEGATRON, "fsdp": FSDP, "single": SINGLE}


@pytest.mark.parametrize("group", GROUPS)
def test_eager(pool2: RankPool, group: str) -> None:
    assert pool2.run(run_eager, GROUPS[group], timeout=120) == [{}, {}]


@pytest.mark.parametrize("group", GROUPS)
def test_traced_collectives(pool2: RankPool, group: str) -> None:
    check_counts(pool2, GROUPS[group])


def test_mesh(pool4: RankPool) -> None:
    assert pool4.run(run_eager, MESH, timeout=120) == [{}] * 4
    check_counts(pool4, MESH)


def external(prefix: str) -> Named:
    """Entries of one package."""
    return {name: entry for name, entry in EXTERNAL.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("prefix", "package"), [("hf", "transformers"), ("titan", "torchtitan")])
@pytest.mark.parametrize("world", [2, 4])
def test_external(world: int, prefix: str, package: str) -> None:
    """In ranks of their own: torchtitan traced after transformers in one process fails in AOTAutograd's partitioner (torch
    2.13)."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps -r tests/models/requirements.txt")
    with RankPool(world) as pool:
        assert pool.run(run_eager, external(prefix), timeout=180) == [{}] * world
        check_counts(pool, external(prefix) if world == 2 else {name: EXTERNAL[name] for name in (prefix,)})
