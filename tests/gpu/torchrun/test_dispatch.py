"""Run-time dispatch and float8 models: autotuned alternatives, tables by rows in eager calls and CUDA graphs, compiled float8
steps against 16 bits, and casts hoisted before gathers.

"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.fp8.rank_hoist import graph, operands
from tests.gpu import captures
from tests.gpu.cases import BF16, Maker, differs
from tests.gpu.lockstep import Lockstep
from tests.harness.traces import as_loss
from tests.models.compare import uncached
from tests.models.megatron import MLP, Mappings
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.plan.strategy import Mode
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.runtime import autotune, ops, stats
from ub_overlap.runtime.session import session

U8 = {"tensorwise": 2.0**-3, "rowwise": 2.0**-4, "delayed": 2.0**-3}
"""Unit roundoff of the coarsest float8 of a recipe: e5m2's and e4m3's."""


def layer(lockstep: Lockstep, dim: int, seed: int = 3) -> nn.Module:
    """A sequence-parallel MLP in bf16."""
    ends = Mappings("functional", 0, str(dist.group.WORLD.group_name))  # type: ignore[union-attr]
    torch.manual_seed(seed + lockstep.rank)
    with torch.device(lockstep.device):
        return MLP(dim, 4 * dim // lockstep.ranks, ends, False, False).to(BF16)


def shard(lockstep: Lockstep, rows: int, dim: int) -> Tensor:
    generator = torch.Generator(lockstep.device).manual_seed(lockstep.rank)
    x = torch.randn(rows // lockstep.ranks, 1, dim, device=lockstep.device, generator=generator)
    return x.to(BF16).requires_grad_()


def step(run: Any, module: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return output and gradients of one step."""
    x.grad = None
    module.zero_grad(set_to_none=True)
    out = run(x)
    as_loss(out).backward()
    grads = {name: p.grad for name, p in (("input", x), *module.named_parameters()) if p.grad is not None}
    return {"output": out.detach().clone(), **{name: g.clone() for name, g in grads.items()}}


def errors(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Return ||a - b|| / ||b|| per tensor."""
    found = {}
    for name, b in theirs.items():
        gap = (mine[name].float() - b.float()).norm() / b.float().norm().clamp_min(1e-30)
        found[name] = float("inf") if not bool(gap.isfinite()) else gap.item()
    return found


def tuned(lockstep: Lockstep) -> str:
    """All ranks pick the same measured strategy, and a second compilation reads it from disk."""
    rows, dim = (4096, 4096) if lockstep.cuda else (1024, 512)
    module, x = layer(lockstep, dim), shard(lockstep, rows, dim)
    plain = step(module, module, x)
    options = {"autotune": True, "min_bytes": 0, **({} if lockstep.cuda else {"profile": "cpu"})}
    autotune.clear_results()
    picks: list[dict[str, Any]] = []
    for life in range(2):
        torch._dynamo.reset()
        if life:
            lockstep.barrier()
            session.close()
            autotune.clear_results()  # as in a later process: measured times are on disk
        mark = HISTORY.mark()
        with uncached():
            run = torch.compile(module, backend="ub_overlap", options=options)
            for _ in range(3):
                worst = max(errors(step(run, module, x), plain).values())
        lockstep.sync()
        session.check()
        sites = [(p.digest, d.id) for p in HISTORY.since(mark) for d in p.decisions]
        found = {f"{digest}/{site}": autotune.tuned_strategies(f"{digest}/{site}") for digest, site in sites}
        mine = {site: {n: t.to_dict() for n, t in by.items()} for site, by in found.items() if by}
        timed = sum(of.calls for site, of in stats.site_stats().items() if site.endswith(".tuning"))
        if any(theirs != mine for theirs in lockstep.gather(mine)):
            raise AssertionError(f"the ranks picked differently: {lockstep.gather(mine)}")
        if not mine or worst > 0.02:
            chosen = [str(d.strategy) for p in HISTORY.since(mark) for d in p.decisions]
            raise AssertionError(f"{len(mine)} of {len(sites)} sites were timed; error {worst:.2g}; chosen: {chosen}")
        picks.append(mine)
        if life == 0:
            before = timed
        elif timed != before:
            raise AssertionError("the second life timed again")
    if picks[0] != picks[1]:
        raise AssertionError(f"picked {picks[0]}, then {picks[1]}")
    texts = [t["strategy"] for by in picks[0].values() for t in by.values()]
    return f"{len(texts)} of {len(sites)} sites timed: {', '.join(sorted(texts))}; error {worst:.1e}"


def tables(lockstep: Lockstep, group: str) -> str:
    """A table of strategies by rows picks by the real size: "none" below, pipelined above; eager and captured, bitwise."""
    make = Maker(lockstep.device, lockstep.ranks)
    limit = 128 * lockstep.ranks
    table = f"{limit}=none;*=pipelined"
    weight = make.randn(256, 384, dtype=BF16, scale=0.1)
    sizes = {"none": make.randn(1, 128, 256, dtype=BF16), "pipelined": make.randn(1, 136, 256, dtype=BF16)}

    def call(x: Tensor, strategy: str, site: str) -> Tensor:
        return torch.ops.ub_overlap.all_gather_matmul(
            x, [weight], [False], [False], 1, False, False, [], [], strategy, group, site
        )[1][0]

    done = []
    for picked, x in sizes.items():
        want, got = call(x, picked, "plain"), call(x, table, f"table.{picked}")
        lockstep.sync()
        if differs([got], [want]):
            raise AssertionError(f"{picked}: the table's result differs")
        ran = stats.site_stats()[f"table.{picked}"].strategy
        if ran.partition(":")[0] != picked:
            raise AssertionError(f"{tuple(x.shape)} ran by {ran}, not {picked}")
        done.append(picked)
        if not lockstep.cuda or (picked == "none" and lockstep.shares_gpu):
            continue  # gloo's collectives cannot be captured
        lockstep.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = call(x, table, f"captured.{picked}")
        lockstep.sync()
        lockstep.barrier()
        for _ in range(3):
            out.zero_()
            graph.replay()
            lockstep.sync()
            if differs([out], [want]):
                raise AssertionError(f"{picked}: the captured table's result differs")
        session.check(group)
        done.append(f"{picked} captured")
    return ", ".join(done)


def float8(lockstep: Lockstep, recipe: str, graphs: bool) -> str:
    """Compare an overlapped float8 step with the same casts without overlap, and with 16 bits.

    Inputs differ 8x between the first and the last rank.

    The bound against 16 bits: of the four products that a gradient of `up` goes through, each rounds two operands to float8; an
    element's error is uniform within u of it, so u / sqrt(3) of it at most; errors add as squares, and three of them lie behind
    each other twice (forward and backward).
    """
    if graphs and not lockstep.cuda:
        pytest.skip("the CPU has no graphs")
    rows, dim = (4096, 2048) if lockstep.cuda else (64, 64)
    module = layer(lockstep, dim)
    x = (shard(lockstep, rows, dim).detach() * 8 ** (lockstep.rank / max(1, lockstep.ranks - 1))).requires_grad_()
    plain = step(module, module, x)
    found: dict[str, list[dict[str, Tensor]]] = {}
    sites, note = 0, ""
    for overlap in ("off", "force"):
        torch._dynamo.reset()
        if graphs:
            captures.reset()
        ops.extension().clear_stats()
        options: dict[str, Any] = {"overlap": overlap, "fp8": {"recipe": recipe}}
        if recipe == "delayed":
            options["fp8"]["state"] = f"{overlap}, {graphs}"  # both start with an empty history
        if graphs:
            options["triton.cudagraphs"] = True
        if lockstep.cuda:
            options["profile"] = "cpu"  # it has no float8 rates: every linear is computed in float8
        mark = HISTORY.mark()
        with uncached():
            run = torch.compile(module, backend="ub_overlap", options=options)
            found[overlap] = []
            for _ in range(6):
                if lockstep.cuda:
                    torch.compiler.cudagraph_mark_step_begin()
                found[overlap].append(step(run, module, x))
        lockstep.sync()
        session.check()
        if graphs:
            note = f", {captures.count(lockstep.device)} graphs captured"
        plans = HISTORY.since(mark)
        casts = sum(bool(c.recipe) for p in plans for c in p.casts)
        sites = sum(d.overlapped for p in plans for d in p.decisions)
        if casts < 4:
            raise AssertionError(f"{casts} products in float8: {[str(c) for p in plans for c in p.casts]}")
    if sites < 4:
        raise AssertionError(f"{sites} sites overlapped")
    apart = max(max(errors(a, b).values()) for a, b in zip(found["force"], found["off"], strict=True))
    far = [max(errors(one, plain).values()) for one in found["force"]]
    bound = (8 * 2) ** 0.5 * U8[recipe] / 3**0.5
    if apart > 0.05 or max(far) > bound or min(far) < 1e-3:
        raise AssertionError(f"overlap moves {apart}; against 16 bits {far}, bound {bound:.2g}")
    return f"{casts} products, {sites} sites; overlap moves {apart:.1e}, float8 {max(far):.1e}{note}"


def casts_hoisted(lockstep: Lockstep) -> str:
    """Hoist casts before gathers in graphs that are already float8, as torchao's are, and fold scales. Compared with eager."""
    if not lockstep.cuda and not compat.cpu_scales_rows():
        pytest.skip("this torch's CPU has no scales of rows")
    inputs, done = operands(lockstep.rank, lockstep.device), []
    for name in ("rows", "any_scale", "dim1", "columns", "scaled_after"):
        _, far, decisions = graph(name, inputs)
        lockstep.sync()
        session.check()
        sites = [d.kind.value for d in decisions if d.strategy.mode is Mode.PIPELINED]
        if far > 2.0**-6 or len(sites) != 1:
            raise AssertionError(f"{name}: {far:.2g} from eager, sites {sites}")
        done.append(f"{name} {far:.1e}")
    return ", ".join(done)


def test_tables_by_rows(lockstep: Lockstep, group: str) -> None:
    lockstep.note(tables(lockstep, group))


@pytest.mark.deadline(120)
def test_autotune(lockstep: Lockstep) -> None:
    lockstep.note(tuned(lockstep))


@pytest.mark.deadline(120)
@pytest.mark.parametrize("graphs", [False, pytest.param(True, marks=pytest.mark.full)], ids=["eager", "CUDA graphs"])
@pytest.mark.parametrize("recipe", U8)
def test_compiled_float8(lockstep: Lockstep, recipe: str, graphs: bool) -> None:
    lockstep.note(float8(lockstep, recipe, graphs))


@pytest.mark.deadline(120)
def test_casts_hoisted_before_gathers(lockstep: Lockstep) -> None:
    lockstep.note(casts_hoisted(lockstep))
