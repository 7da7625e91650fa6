"""Programs with packed float8 operands that run on the ranks, and their comparison with the same programs without packs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ub_overlap
from tests.compiler.rank_compile import build
from tests.fp8.rank_fp8 import E4M3, gathered, scattered
from tests.harness.later_steps import compiled_before
from tests.models.case import device
from tests.models.compare import error, uncached, values
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY

FORCE: dict[str, Any] = {"overlap": "force", "split": "off", "inner": "aot_eager"}
ROWWISE: dict[str, Any] = {**FORCE, "fp8": {"recipe": "rowwise"}}
M, K = 16, 64
"""Rows of a shard, and the inner size."""


@dataclass(frozen=True)
class PackRun:
    """A program with packs and without. `differ`: the values that are not bitwise the same. `worst`: the largest difference
    of one, relative to its largest element."""

    differ: list[str]
    worst: float
    packed: list[Plan]
    apart: list[Plan]

    def gathers(self, phase: str = "forward") -> list[Decision]:
        """Return the gathers that are sites, of the program with packs."""
        return [d for p in self.packed for d in p.decisions if d.phase == phase and d.kind.value == "all_gather_matmul"]


def run_both(step: Callable[[dict[str, Any]], dict[str, Any]], options: dict[str, Any]) -> PackRun:
    """Run `step` with `options`, with packs forced if they leave that open, and with pack="off"."""
    runs = []
    for pack in (options.get("pack", "force"), "off"):
        torch._dynamo.reset()
        mark = HISTORY.mark()
        with uncached():
            runs.append((step({**options, "pack": pack}), HISTORY.since(mark)))
    (found, packed), (wanted, apart) = runs
    differ = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    return PackRun(differ, max(error(found[name], wanted[name], name) for name in wanted), packed, apart)


def run_model(rank: int, world: int, module: str, variant: dict[str, Any], options: dict[str, Any]) -> PackRun:
    def step(options: dict[str, Any]) -> dict[str, Any]:
        case = build(rank, world, module, variant)
        return values(case, torch.compile(case.module, backend="ub_overlap", options=options))

    return run_both(step, options)


class Projections(nn.Module):
    """q, k, v of a sequence-parallel attention, and the sum of their gradients."""

    def __init__(self, seed: int, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        random = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (nn.Linear(K, n, bias=False, dtype=torch.bfloat16) for n in (32, 16, 16))
        for linear in (self.q, self.k, self.v):
            linear.weight.data.normal_(generator=random)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.product, x, use_reentrant=False) if self.is_checkpointed else self.product(x)

    def product(self, x: Tensor) -> Tensor:
        g = Gathered.apply(x)
        return (self.q(g)[:, :16] * self.k(g) + self.v(g)).square().sum()


class Gathered(torch.autograd.Function):
    """An all_gather of rows, whose gradients are scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return scattered(gradient.contiguous())


def run_steps(rank: int, world: int, options: dict[str, Any], is_checkpointed: bool = False) -> PackRun:
    """Run three optimizer steps of two microbatches each, and an evaluation with swapped weights inside of the second."""

    def steps(options: dict[str, Any]) -> dict[str, Any]:
        model, random = Projections(rank, is_checkpointed).to(device()), torch.Generator().manual_seed(rank)
        run: Any = torch.compile(model, backend="ub_overlap", options=options)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        results: dict[str, Any] = {}
        for step in range(3):
            for microbatch in range(2):
                x = torch.randn(M, K, generator=random).to(device(), torch.bfloat16).requires_grad_()
                with compiled_before(step):
                    loss = run(x)
                if (step, microbatch) == (1, 0):
                    with torch.no_grad():
                        model.k.weight.neg_()
                        results["evaluation"] = run(x.detach())
                        model.k.weight.neg_()
                else:
                    with compiled_before(step):
                        loss.backward()
                    results[f"input gradient {step}.{microbatch}"] = x.grad
                results[f"loss {step}.{microbatch}"] = loss.detach()
            results |= {f"gradient {step} of {name}": p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad(set_to_none=bool(step))
        return results

    return run_both(steps, options)


def scaled(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
    return torch._scaled_mm(a, b.t(), sa, sb, bias=bias, **{"out_dtype": torch.bfloat16, **more})


def operands(rank: int, by_rows: bool) -> tuple[Tensor, ...]:
    """Return (x, its scale, then three weights and their scales): x [16, 64] of this rank; 48, 32 and 16 columns."""
    draw = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(M, K, generator=draw).to(E4M3)
    result = [x, torch.rand(M, 1, generator=draw) + 0.5 if by_rows else torch.tensor(0.5)]
    for n in (48, 32, 16):
        result.append(torch.randn(n, K, generator=draw).to(E4M3))
        result.append(torch.rand(1, n, generator=draw) + 0.5 if by_rows else torch.rand((), generator=draw) + 0.5)
    return tuple(result)


def parts(x: Tensor, sx: Tensor, *pairs: Tensor) -> tuple[Tensor, ...]:
    """Also read the gathered rows and scales elsewhere."""
    g, s = gathered(x), gathered(sx) if sx.dim() else sx
    return *(scaled(g, w, s, sw) for w, sw in zip(pairs[::2], pairs[1::2], strict=True)), g.float() * s


def biases(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c: Tensor, sc: Tensor) -> tuple[Tensor, ...]:
    """One of three matmuls has no bias."""
    g, s = gathered(x), gathered(sx)
    first, last = (torch.linspace(-1, 1, w.shape[0], dtype=torch.bfloat16) for w in (a, c))
    return scaled(g, a, s, sa, first), scaled(g, b, s, sb), scaled(g, c, s, sc, last)


def flattened(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Views that strides of slices do not allow, and parts that are quantized again."""
    first, second, *_ = parts(x, sx, a, sa, b, sb)
    return first.view(-1) * 2, scaled(second.to(E4M3), second.to(E4M3), *(torch.ones(()),) * 2)


def accumulation(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Not packed: one matmul with fast accumulation, one without."""
    g, s = gathered(x), gathered(sx)
    return scaled(g, a, s, sa), scaled(g, b, s, sb, use_fast_accum=True)


def result_types(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Not packed: results in bf16 and in fp32."""
    g, s = gathered(x), gathered(sx)
    return scaled(g, a, s, sa), scaled(g, b, s, sb, out_dtype=torch.float32)


def operand_types(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Not packed: operands in e4m3 and in e5m2."""
    g, s = gathered(x), gathered(sx)
    return scaled(g, a, s, sa), scaled(g, b.float().to(torch.float8_e5m2), s, sb)


def other_scales(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """Not packed: the same rows with other scales."""
    g = gathered(x)
    return scaled(g, a, gathered(sx), sa), scaled(g, b, gathered(sx * 2), sb)


def mixed(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c: Tensor, sc: Tensor) -> tuple[Tensor, ...]:
    """Two float8 matmuls are packed. One in 16 bits reads the same gather."""
    g, s = gathered(x), gathered(sx)
    return scaled(g, a, s, sa), scaled(g, b, s, sb), (g.bfloat16() * s.bfloat16()) @ c.bfloat16().t()


def summed(x: Tensor, sx: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, c: Tensor, sc: Tensor) -> Tensor:
    """Not packed: terms of a sum whose rows have scales of their own."""
    other = torch.cat([x, x.float().mul(2).to(E4M3)])[M // 2 : M + M // 2]
    return scattered(scaled(x, a, sx, sa) + scaled(other, a, sx * 3, sa * 2))


Case = tuple[Callable[..., Any], bool, list[list[int]], str]
CASES: dict[str, Case] = {
    # function, whether rows have scales, packs of the forward's sites, the beginning of the reason
    "parts": (parts, True, [[3]], "packed as 3"),
    "biases": (biases, True, [[2, 1]], "packed as 2+1"),
    "flattened": (flattened, True, [[2]], "packed as 2"),
    "mixed": (mixed, True, [[2]], "packed as 2"),
    "one scale each": (parts, False, [[]], "not packed: each operand has one scale"),
    "accumulation": (accumulation, True, [[]], ""),
    "result types": (result_types, True, [[]], "not packed: the float8 matmuls differ in type"),
    "operand types": (operand_types, True, [[]], "not packed: the float8 matmuls differ in type"),
    "other scales": (other_scales, True, [[]], ""),
    "summed": (summed, True, [[]], "not packed: each term of a float8 sum has scales of its own"),
}


def run_case(rank: int, world: int, name: str, options: dict[str, Any]) -> tuple[list[str], list[list[int]], list[str]]:
    """Return the outputs that differ from those without packs, the packs of the sites, and why."""
    function, by_rows, _, _ = CASES[name]

    def step(options: dict[str, Any]) -> dict[str, Any]:
        outputs = torch.compile(function, backend="ub_overlap", options=options)(*operands(rank, by_rows))
        return dict(enumerate(outputs if isinstance(outputs, tuple) else (outputs,)))  # type: ignore[arg-type]

    run = run_both(step, options)
    sites = [d for p in run.packed for d in p.decisions if d.overlapped and d.strategy.mode.value != "merged"]
    return run.differ, [list(d.packs) for d in sites], [d.detail for d in sites]


def run_saved(rank: int, world: int) -> list[list[list[int]]]:
    """Return the packs under overrides that are a packed plan and one without packs, by the options "auto", "force", "off"."""
    plans = {pack: plan_of_parts(rank, pack, None) for pack in ("force", "off")}
    return [
        [list(d.packs) for d in plan_of_parts(rank, pack, plans[saved]).decisions if d.matmuls]
        for saved in ("force", "off")
        for pack in ("auto", "force", "off")
    ]


def plan_of_parts(rank: int, pack: str, overrides: Any) -> Plan:
    torch._dynamo.reset()
    mark = HISTORY.mark()
    with torch.no_grad(), uncached():
        run = torch.compile(parts, backend="ub_overlap", options={**FORCE, "pack": pack, "overrides": overrides})
        run(*operands(rank, True))
    (plan,) = HISTORY.since(mark)
    return plan


def verified(rank: int, world: int) -> list[tuple[tuple[int, ...], float | None]]:
    """Return the packs of each site, and the largest difference of its results from the matmuls apart."""
    with uncached():
        report = ub_overlap.explain(parts, {**FORCE, "pack": "force", "verify": True})(*operands(rank, True))
    return [(d.packs, d.error) for d in report.decisions if d.matmuls]
