"""The benchmark of context parallelism runs on CPU ranks and stores a complete document. No result depends on timing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.context_parallel.__main__ import ContextParallelRun, parse_flags
from benchmarks.context_parallel.model import ZigzagSdpa
from benchmarks.context_parallel.table import baseline_of, text
from benchmarks.parallel.table import hidden
from tests.harness.ranks import RankPool
from tests.test_benchmarks import FACTS, on_cpu_ranks, printed
from ub_overlap.tools.rank_process import World

SITES = {"gathered": "4 split", "ring": "3 split", "ulysses": "8 split", "halves": "16 split"}
FORMS = ("--forms", ",".join(SITES))


@pytest.mark.tier("full")
def test_context_parallel_on_cpu_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All forms compute the same, in eager mode and by our backend, whose exchanges are all split."""
    path = tmp_path / "context_parallel.json"
    split = 'split={"overlap": "off", "overrides": [{"strategy": "split"}]}'
    arguments = ["--tiny", "--device", "cpu", *FORMS, "--systems", "compute,eager,split", "--ours", split, "--json", str(path)]
    on_cpu_ranks(2, "benchmarks.context_parallel", arguments)
    document: dict[str, Any] = json.loads(path.read_text())
    assert document.keys() >= FACTS and document["benchmark"] == "context_parallel"
    (size,) = document["rows"]
    variants = size["variants"]
    assert list(variants) == ["compute", *(f"{system}_{form}" for system in ("eager", "split") for form in SITES)]
    for name, variant in variants.items():
        assert variant["step"] > 0 and not variant["why"], name
        assert name in ("compute", "eager_gathered") or 0 <= variant["error"] < 1e-4
    assert {form: variants[f"split_{form}"]["sites"] for form in SITES} == SITES
    assert "tiny, 1 layers, 64 tokens" in printed(path, capsys, monkeypatch)


def measure_causal(rank: int, world: int, arguments: list[str]) -> dict[str, Any]:
    """Return the document of a run with causal masks."""
    group: Any = dist.group.WORLD
    here = World(rank, world, torch.device("cpu"), group.group_name, dist.new_group(backend="gloo"))
    run = ContextParallelRun(parse_flags(["--tiny", "--causal", *arguments]), here, {"rows": []}, text)
    run.measure()
    return run.document


@pytest.mark.tier("full")
def test_causal_masks(pool2: RankPool) -> None:
    """Gathered keys and values and the ring compute the same on balanced positions; Ulysses has positions of its own."""
    split = 'split={"overlap": "off", "overrides": [{"strategy": "split"}]}'
    document = pool2.run(measure_causal, [*FORMS, "--systems", "compute,eager,split", "--ours", split])[0]
    variants = document["rows"][0]["variants"]
    assert all(variant["step"] > 0 and not variant["why"] for variant in variants.values())
    assert {name for name in variants if "error" not in variants[name]} == {"compute", "eager_gathered", "eager_ulysses"}
    assert all(0 <= variant.get("error", 0.0) < 1e-4 for variant in variants.values())
    assert {form: variants[f"split_{form}"]["sites"] for form in SITES} == SITES
    assert "tiny, 1 layers, 64 tokens, causal" in text(document)


def test_causal_compute_attends_alike_without_copies() -> None:
    """The compute attends to as many keys as the gathered form. Only that form puts keys and values in another order."""
    mesh: Any = SimpleNamespace(get_local_rank=lambda: 1, size=lambda: 2)
    q, k, v = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 16, 4), torch.randn(1, 2, 16, 4)

    def sizes(in_rank_order: bool) -> dict[str, list[tuple[int, ...]]]:
        """Return the shapes of the keys of each attention, and of the results of cats."""
        graph = make_fx(ZigzagSdpa(mesh, 8, in_rank_order))(q, k, v).graph
        nodes = graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default)
        attention = [n for n in graph.nodes if "scaled_dot_product" in str(n.target)]
        assert attention
        keys = [tuple(n.args[1].meta["val"].shape) for n in attention]
        return {"keys": keys, "cats": [tuple(n.meta["val"].shape) for n in nodes]}

    gathered, local = sizes(True), sizes(False)
    assert gathered["keys"] == local["keys"] == [(1, 2, 8, 4), (1, 2, 12, 4)]
    assert local["cats"] == [tuple(q.shape)] and gathered["cats"] == [tuple(k.shape)] * 2 + local["cats"]


def test_variants_are_compared_with_inductor_in_the_same_form() -> None:
    variants = {"compute": {"step": 10.0}, "inductor_ring": {"step": 14.0}, "ours_ring": {"step": 11.0}, "ours_gathered": {}}
    shares = {name: hidden(variants, name, "step", baseline_of(name)) for name in variants}
    assert shares == {"compute": None, "inductor_ring": None, "ours_ring": 0.75, "ours_gathered": None}
