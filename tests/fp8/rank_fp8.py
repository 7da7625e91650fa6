"""Rank programs of the float8 tests: run a model in float8, and hand-written graphs that are float8 already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.compiler.rank_compile import FUSED, build, decisions_of, world_name
from tests.models.compare import Values, error, uncached, values
from ub_overlap import _torch_compat as compat
from ub_overlap import fp8_state
from ub_overlap.compiler.plan.decision import CastDecision, Decision
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY

E4M3 = torch.float8_e4m3fn
ROWS = compat.cpu_scales_rows()
NO_ROWS = pytest.mark.skipif(not ROWS, reason=f"torch {torch.__version__}: no scales of rows on the CPU")
RECIPES = ["tensorwise", pytest.param("rowwise", marks=NO_ROWS)]


@dataclass(frozen=True)
class Run:
    """One run of a model.

    `saved`: (shape, dtype) of what was saved for backward. `errors`: (16 bits, float8) against float64, by tensor.
    """

    values: Values
    errors: dict[str, tuple[float, float]]
    plans: list[Plan]
    saved: list[tuple[tuple[int, ...], torch.dtype]]

    @property
    def decisions(self) -> list[Decision]:
        return [d for p in self.plans for d in p.decisions]

    @property
    def casts(self) -> list[CastDecision]:
        return [c for p in self.plans for c in p.casts]

    def kinds(self, phase: str) -> list[str]:
        return sorted(d.kind.value for d in self.decisions if d.phase == phase and d.overlapped)


def float8(rank: int, world: int, module: str, variant: dict[str, Any], options: dict[str, Any]) -> Run:
    true_case = build(rank, world, module, {**variant, "exact": True})
    truth = values(true_case, true_case.module)
    eager_case, case = (build(rank, world, module, variant) for _ in range(2))
    eager = values(eager_case, eager_case.module)
    saved: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    mark = HISTORY.mark()
    with uncached(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        actual = values(case, torch.compile(case.module, backend="ub_overlap", options=options))
    errors = {n: (error(eager[n], truth[n], n), error(actual[n], truth[n], n)) for n in truth}
    return Run(actual, errors, HISTORY.since(mark), saved)


def both(rank: int, world: int, module: str, variant: dict[str, Any], options: dict[str, Any]) -> tuple[Run, Run]:
    """Run the same casts without overlap and with it."""
    return tuple(float8(rank, world, module, variant, {**options, "overlap": o}) for o in ("off", "force"))  # type: ignore[return-value]


NO_OVERLAP: dict[str, Any] = {"overrides": {"*": "none"}}
"""With overlap="force": no collective is overlapped, and no float8 matmul is refused for its small size."""
MicrobatchResult = tuple[bool, dict[str, list[str]], set[Any], set[str], dict[str, Tensor]]


def mlp_sizes(world: int) -> dict[str, Any]:
    """Return sizes of tests.models.dtensor_mlp that float8 accepts: 48 hidden channels and 16 tokens per rank, in bf16."""
    return {"dtype": torch.bfloat16, "length": 16 * world, "hidden": 48 * world}


def run_microbatches(rank: int, world: int) -> MicrobatchResult:
    """Run an MLP with delayed scaling, two steps of two microbatches.

    Return (are numbers those without overlap, kinds of sites by phase, reasons of the rest, recipes of casts, the state).
    """
    runs = []
    for name, extra in (("plain", NO_OVERLAP), ("force", {})):
        case = build(rank, world, "tests.models.dtensor_mlp", mlp_sizes(world))
        options: dict[str, Any] = {
            "fp8": {"recipe": "delayed", "state": name},
            "overlap": "force",
            "inner": "aot_eager",
            **extra,
        }
        torch._dynamo.reset()
        mark, outputs = HISTORY.mark(), []
        with uncached():
            run = torch.compile(case.module, backend="ub_overlap", options=options)
            for factor in (1.0, 3.0, 0.5, 2.0):  # gradients add up over pairs: no step writes to the weights in between
                inputs = [(x.detach() * (factor + rank)).requires_grad_() for x in case.inputs]
                y = run(*inputs)
                (y * y).sum().backward()
                outputs += [y.detach(), inputs[0].grad]
        outputs += [p.grad.to_local() for p in case.module.parameters()]
        runs.append((outputs, [p for p in HISTORY.since(mark)]))
    decisions = [d for p in runs[1][1] for d in p.decisions]
    kinds = {
        phase: sorted(d.kind.value for d in decisions if d.phase == phase and d.overlapped) for phase in ("forward", "backward")
    }
    equal = all(error(b, a, "tensor") < 0.05 for a, b in zip(runs[0][0], runs[1][0], strict=True))
    casts = {c.recipe for _, plans in runs for p in plans for c in p.casts}
    return equal, kinds, {d.reason for d in decisions if not d.overlapped}, casts, fp8_state("force").state_dict()


def run_unequal_ranks(rank: int, world: int) -> dict[str, list[float]]:
    """Return the relative errors, in norm, of outputs and gradients against 16 bits: an MLP whose ranks' values differ 8x."""
    plain, case, other = (build(rank, world, "tests.models.dtensor_mlp", mlp_sizes(world)) for _ in range(3))
    options = {"fp8": {"recipe": "delayed", "state": "unequal ranks"}, "inner": "aot_eager", "overlap": "force", **NO_OVERLAP}
    torch._dynamo.reset()
    state, errors = fp8_state("unequal ranks"), {}

    def call(run: Any, module: Any, outer: Any, size: float = 1.0, slope: float = 1.0) -> list[Tensor]:
        module.zero_grad(set_to_none=True)
        inputs = [(x.detach() * ((1 + 7 * rank / max(1, world - 1)) * size)).requires_grad_() for x in outer]
        y = run(*inputs)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape) * (8 - 7 * rank) * slope)
        return [y.detach(), inputs[0].grad, *(p.grad.to_local() for p in module.parameters())]  # type: ignore[list-item]

    def scaled_up() -> None:
        if rank == 0:
            state.load_state_dict({key: 16 * value for key, value in state.state_dict().items()})

    def nothing() -> None:
        pass

    def reset_one() -> None:
        if rank == 1:
            state.reset()

    def distances(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
        return [float((a - b).norm() / b.norm()) for a, b in zip(actual, expected, strict=True)]

    with uncached():
        run = torch.compile(case.module, backend="ub_overlap", options=options)
        changes = {"first": nothing, "second": nothing, "one history x16": scaled_up, "one reset": reset_one}
        for name, before in {**changes, "all reset": state.reset, "after": nothing}.items():
            before()
            expected = call(plain.module, plain.module, plain.inputs)
            errors[name] = distances(call(run, case.module, case.inputs), expected)
        # Another module of the same keys, of larger tensors: it has histories of its own, and a first call.
        run = torch.compile(other.module, backend="ub_overlap", options=options)
        expected = call(plain.module, plain.module, plain.inputs, 100.0)
        errors["another module"] = distances(call(run, other.module, other.inputs, 100.0, 0.0)[:1], expected[:1])
        expected = call(plain.module, plain.module, plain.inputs)
        errors["gradients of 0 before"] = distances(call(run, other.module, other.inputs), expected)
    assert {key.partition("@")[2] for key in state.state_dict()} == {"", "1"}
    return errors


def torchao(rank: int, world: int, variant: dict[str, Any], options: dict[str, Any]) -> tuple[dict[str, float], list[Decision]]:
    """Compare torchao's training with its float8 gather to eager torchao without it (gloo gathers no float8).

    Both use the amax of all ranks, so the numbers are the same.
    """
    module = "tests.models.torchao_mlp"
    case, plain = build(rank, world, module, variant), build(rank, world, module, {**variant, "gather_fp8": False})
    mark = HISTORY.mark()
    with uncached():
        actual = values(case, torch.compile(case.module, backend="ub_overlap", options=options))
    eager = values(plain, plain.module)
    return {n: error(actual[n], eager[n], n) for n in eager}, [d for p in HISTORY.since(mark) for d in p.decisions]


@dataclass(frozen=True)
class TorchaoRun:
    """torchao with gathers in 16 bits.

    `equal`: bitwise eager's where casts move and nothing is fused. `errors`: of the fused graph against eager. `exact_errors`:
    (eager, fused) against float64. `decisions`: of a training step, of a forward without gradients. `saved`: (shape, dtype) of
    what was saved for backward.
    """

    equal: bool
    errors: dict[str, float]
    exact_errors: dict[str, tuple[float, float]]
    decisions: tuple[list[Decision], list[Decision]]
    saved: list[tuple[tuple[int, ...], torch.dtype]]
    elements: int
    """The elements of the gathered tensor."""

    def kinds(self, phase: str) -> list[str]:
        return sorted(d.kind.value for d in self.decisions[0] if d.phase == phase and d.overlapped)


def torchao_16(rank: int, world: int, variant: dict[str, Any], inner: str = "aot_eager") -> TorchaoRun:
    variant = {**variant, "gather_fp8": False}
    case, plain, fused, forward_only = (build(rank, world, "tests.models.torchao_mlp", variant) for _ in range(4))
    true_case = build(rank, world, "tests.models.torchao_mlp", {**variant, "exact": True})
    truth, eager = values(true_case, true_case.module), values(case, case.module)
    options: dict[str, Any] = {"overlap": "force", "split": "off", "inner": inner}
    saved: list[tuple[tuple[int, ...], torch.dtype]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tuple(tensor.shape), tensor.dtype))
        return tensor

    def compiled(case: Any, options: dict[str, Any]) -> Any:
        torch._dynamo.reset()
        return torch.compile(case.module, backend="ub_overlap", options=options)

    with uncached():
        hoisted = values(plain, compiled(plain, {**options, "overrides": {"*": "none"}}))
        mark = HISTORY.mark()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            actual = values(fused, compiled(fused, options))
        step = [d for p in HISTORY.since(mark) for d in p.decisions]
        mark = HISTORY.mark()
        with torch.no_grad():
            output = compiled(forward_only, options)(*forward_only.inputs)
    forward = [d for p in HISTORY.since(mark) for d in p.decisions]
    errors = {n: error(actual[n], eager[n], n) for n in eager} | {"forward only": error(output, eager["output0"], "output")}
    exact_errors = {n: (error(eager[n], truth[n], n), error(actual[n], truth[n], n)) for n in truth}
    whole = case.inputs[0].numel() * world
    return TorchaoRun(
        all(torch.equal(hoisted[n], eager[n]) for n in eager), errors, exact_errors, (step, forward), saved, whole
    )


def gathered(x: Tensor, dim: int = 0) -> Tensor:
    """Gather the rows of all ranks, float8 as bytes."""
    raw = x.view(torch.uint8) if x.dtype.itemsize == 1 else x
    whole = funcol.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(raw, dist.get_world_size(), world_name()))
    if dim:
        whole = torch.cat(whole.chunk(dist.get_world_size()), dim)
    return whole.view(x.dtype)


def scattered(x: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    return funcol.wait_tensor(torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", ranks, world_name()))


def scaled(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch._scaled_mm(a, b, sa, sb, bias=bias, out_dtype=torch.bfloat16)


def _operands(rank: int, rows: bool, dims: int = 2) -> tuple[Tensor, ...]:
    """Return (x, its scale, w, its scale, v, its scale): x [16, 32] or [2, 8, 32] of this rank, w and v [48, 32]."""
    draw = torch.Generator().manual_seed(5 + rank)
    x = torch.randn(16, 32, generator=draw).to(E4M3)
    w, v = (torch.randn(48, 32, generator=draw).to(E4M3) for _ in range(2))
    if rows:
        scales = [torch.rand(n, 1, generator=draw) + 0.5 for n in (16, 48, 48)]
        scales[1:] = [s.view(1, 48) for s in scales[1:]]
    else:
        scales = [torch.tensor(s) for s in (0.5, 2.0, 0.25)]
    sx, sw, sv = scales
    if dims == 3:
        x, sx = x.view(2, 8, 32), sx.view(2, 8, 1) if rows else sx
    return x, sx, w, sw, v, sv


def _several(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> tuple[Tensor, ...]:
    g, s = gathered(x), gathered(sx) if sx.dim() else sx
    return scaled(g, w.t(), s, sw), scaled(g, v.t(), s, sv, torch.ones(48, dtype=torch.bfloat16)), g.float() * s


def _along(dim: int) -> Any:
    def run(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
        g, s = gathered(x, dim), gathered(sx, dim) if sx.dim() else sx
        y = scaled(g.reshape(-1, 32), w.t(), s.reshape(-1, 1) if sx.dim() else s, sw)
        return y.view(*g.shape[:-1], 48)

    return run


def _scatter(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    return scattered(scaled(x, w.t(), sx, sw) + scaled(x, v.t(), sx, sv))


def _scatter_mixed(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    return scattered(scaled(x, w.t(), sx, sw) + x.bfloat16() @ v.bfloat16().t())


def _other_rows(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    """Gather the scales and swap their halves."""
    first, second = gathered(sx).chunk(2)
    return scaled(gathered(x), w.t(), torch.cat([second, first]), sw)


def _not_gathered(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    return scaled(gathered(x), w.t(), torch.cat([sx] * dist.get_world_size()), sw)


def _right(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    return scaled(w, gathered(x).t(), sw, sx)


def _trimmed(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    return scaled(gathered(x)[:16], w.t(), sx, sw)


def _other_forms(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> tuple[Tensor, ...]:
    """Other nodes read the gathered scales, in another dtype and transposed."""
    g, s = gathered(x), gathered(sx) if sx.dim() else sx
    y = scaled(g.reshape(-1, 32), w.t(), s.reshape(-1, 1) if sx.dim() else s, sw)
    return y, s.double() / 3, s.transpose(0, 1).contiguous() + 1 if s.dim() else s + 1


def _softmax(x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, v: Tensor, sv: Tensor) -> Tensor:
    """Softmax of float8 logits whose columns are sharded."""
    y = scaled(x, w.t(), sx, sw).float()
    return (y - funcol.all_reduce(y.amax(-1, True), "max", world_name())).exp()


GRAPHS = {
    "several": (_several, 2), "dim1": (_along(1), 3), "dim0": (_along(0), 3), "scatter": (_scatter, 2),
    "scatter_mixed": (_scatter_mixed, 2), "other_rows": (_other_rows, 2), "not_gathered": (_not_gathered, 2),
    "right": (_right, 2), "trimmed": (_trimmed, 2), "other_forms": (_other_forms, 3), "softmax": (_softmax, 2),
}  # fmt: skip


def graphs(rank: int, world: int) -> dict[tuple[str, str], tuple[float, list[tuple[str, str, str | None]]]]:
    """Return by graph and scaling: the largest relative difference from eager, (kind, strategy, reason) of its decisions."""
    results = {}
    for name, (function, dims) in GRAPHS.items():
        for scaling in ("tensor", "rows") if ROWS else ("tensor",):
            if name in (("other_rows", "not_gathered") if scaling == "tensor" else ("right", "softmax")):
                continue
            inputs = _operands(rank, scaling == "rows", dims)
            torch._dynamo.reset()
            decisions = decisions_of(function, inputs, FUSED)
            with uncached():
                actual = torch.compile(
                    function, backend="ub_overlap", options={"overlap": "force", "split": "off", "inner": "aot_eager"}
                )(*inputs)
            expected = function(*inputs)
            pairs = list(zip(*((t,) if isinstance(t, Tensor) else t for t in (actual, expected)), strict=True))
            assert all(a.dtype == b.dtype for a, b in pairs), (name, scaling)
            worst = max(float((a.double() - b.double()).abs().max() / b.double().abs().max()) for a, b in pairs)
            results[name, scaling] = (
                worst,
                [(d.kind.value, str(d.strategy), d.reason.value if d.reason else None) for d in decisions],
            )
    return results


def wire(rank: int, world: int) -> tuple[float, float]:
    """Return the largest difference of a scattered sum of float8 matmuls from eager, relative to the largest value.

    First sent in bf16, then in float8.
    """
    draw = torch.Generator().manual_seed(9 + rank)
    x, w = (torch.randn(n, 32, generator=draw).to(E4M3) for n in (32, 128))
    one = torch.ones(())

    def function(x: Tensor, w: Tensor) -> Tensor:
        return scattered(scaled(x, w.t(), one, one))

    expected = function(x, w).double()
    errors = []
    for reduced in (False, True):
        torch._dynamo.reset()
        options = {"overlap": "force", "inner": "aot_eager", "fp8": {"products": "off", "reduce_scatter": reduced}}
        with uncached():
            actual = torch.compile(function, backend="ub_overlap", options=options)(x, w)
        errors.append(float((actual.double() - expected).abs().max() / expected.abs().max()))
    return errors[0], errors[1]
