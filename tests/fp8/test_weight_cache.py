"""Cached casts of weights: repeated where a weight has changed, and nowhere else."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ub_overlap.runtime.ops  # noqa: F401  (registers the ops)
from tests.harness.later_steps import compiled_before
from tests.harness.tiers import full_but
from tests.models.compare import uncached
from ub_overlap.compiler.fp8.state.cached_weights import copy_returned_casts
from ub_overlap.runtime.extension import extension
from ub_overlap.runtime.fp8.weight_cache import cast_in_aten, weight_cast

pytestmark = pytest.mark.tier("test")

BF16 = torch.bfloat16
AXES = (None, -1, -2)
ROWS, COLS = 48, 32
OP = torch.ops.ub_overlap.fp8_cached_weight.default


def fp8_cached_weight(w: Tensor, round_to: torch.dtype, axis: int | None, reuse_forward: bool = False) -> tuple[Tensor, Tensor]:
    return OP(w, round_to, axis, None, reuse_forward, [])


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that were really cast."""
    made: list[tuple[int, ...]] = []
    plain = weight_cast.cast_in_aten

    def counted(weight: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
        made.append(tuple(weight.shape))
        return plain(weight, axis)

    monkeypatch.setattr(weight_cast, "cast_in_aten", counted)
    return made


def noise(*shape: int, dtype: torch.dtype = BF16, seed: int = 1) -> Tensor:
    """Over many binades."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp2(torch.randint(-12, 6, shape, generator=g).float())).to(dtype)


def same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    def bits(t: Tensor) -> Tensor:
        return t.view(torch.uint8 if t.dtype.itemsize == 1 else torch.int32)

    return all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(("dtype", "round_to"), [(BF16, BF16), (torch.float16,) * 2, (torch.float32, BF16)])
def test_against_float64(axis: int | None, dtype: torch.dtype, round_to: torch.dtype) -> None:
    """Every element is the nearest float8 of itself in units of its scale: off by half a step, 2^-4 of itself, or 2^-10."""
    w = noise(ROWS, COLS, dtype=dtype)
    w[3] = 0
    q, scale = fp8_cached_weight(w, round_to, axis)
    exact = w.to(round_to).double()
    amax = exact.abs().amax() if axis is None else exact.abs().amax(axis, keepdim=True)
    assert scale.shape == amax.shape
    torch.testing.assert_close(scale.double(), (amax / 448).clamp_min(2.0**-120), rtol=2**-22, atol=0)
    off = (q.double() * scale.double() - exact).abs()
    assert (off <= exact.abs() * 2.0**-4 * 1.001 + scale.double() * 2.0**-10).all()
    assert same((q, scale), cast_in_aten(w.to(round_to), axis))


def test_not_finite() -> None:
    w = noise(ROWS, COLS)
    w[1, 2], w[5, 6] = float("nan"), float("inf")
    _, scale = fp8_cached_weight(w, BF16, None)
    assert scale.isnan()
    q, scale = fp8_cached_weight(w, BF16, -1)
    assert scale[1].isnan() and scale[5].isinf() and scale.isfinite().sum() == ROWS - 2
    assert q[1].isnan().all() and q[5, 6].isnan() and (q[5].float().nan_to_num(0) == 0).all()


@pytest.mark.parametrize("axis", AXES)
def test_transposed_copies(axis: int | None, casts: list[Any]) -> None:
    """The copy of a cast is kept, and written again with it. That of another tensor is a new one."""
    transposed = torch.ops.ub_overlap.fp8_cached_weight_transposed.default
    w = noise(ROWS, COLS)
    q, _ = fp8_cached_weight(w, BF16, axis)
    kept = transposed(w, BF16, axis, q)
    assert kept.is_contiguous() and kept.shape == (COLS, ROWS)
    for _ in range(3):
        w.data.mul_(-1.5)
        q, scale = fp8_cached_weight(w, BF16, axis)
        again = transposed(w, BF16, axis, q)
        assert again.data_ptr() == kept.data_ptr() and same((kept.t().contiguous(), scale), cast_in_aten(w, axis))
    assert len(casts) == 4
    other = q.clone()
    own = transposed(w, BF16, axis, other)
    assert own.data_ptr() != kept.data_ptr() and same((own, own), (kept, kept))
    torch.library.opcheck(transposed, (w, BF16, axis, q.view(torch.uint8)), test_utils=("test_schema", "test_faketensor"))


def poke(w: Tensor) -> None:
    w.data[7, 9] += 1  # which autograd's version counters do not show


def scaled(w: Tensor) -> None:
    with torch.no_grad():
        w.mul_(2)


def swapped(w: Tensor) -> None:
    w.data.copy_(torch.cat([w.data[1:2], w.data[:1], w.data[2:]]))


def negated(w: Tensor) -> None:
    w.data.view(torch.int16)[11, 3] ^= -0x8000  # of one element the sign: no absolute value changes


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("change", [poke, scaled, swapped, negated])
def test_every_change_is_seen(axis: int | None, change: Callable[[Tensor], None], casts: list[Any]) -> None:
    w = noise(ROWS, COLS)
    first = fp8_cached_weight(w, BF16, axis)
    again = fp8_cached_weight(w, BF16, axis, reuse_forward=True)
    assert len(casts) == 1 and all(a.data_ptr() == b.data_ptr() for a, b in zip(first, again, strict=True))
    fp8_cached_weight(w, BF16, axis)
    assert len(casts) == 1
    before = tuple(t.clone() for t in first)
    change(w)
    in_backward = fp8_cached_weight(w, BF16, axis, reuse_forward=True)
    assert len(casts) == 1 and same(in_backward, before)  # what the forward cast
    new = fp8_cached_weight(w, BF16, axis)
    assert len(casts) == 2 and same(new, cast_in_aten(w, axis)) and new[0].data_ptr() == first[0].data_ptr()


def test_memory_goes_with_the_weight() -> None:
    gc.collect()
    both = noise(2 * ROWS, COLS)  # two weights of one storage
    memory = []
    for part in both.split(ROWS):
        cast = fp8_cached_weight(part, BF16, None)
        assert same(cast, cast_in_aten(part, None))
        memory += [StorageWeakRef(t.untyped_storage()) for t in cast]
    del part, cast
    view = both.view(-1)
    del both
    gc.collect()
    assert not any(ref.expired() for ref in memory)
    del view
    gc.collect()
    assert all(ref.expired() for ref in memory)


def test_when_backward_may_reuse_the_cast_of_its_forward() -> None:
    """The table of csrc/core/forward_uses.h, which the caches of Python and C++ both ask."""
    for forwards, can_reuse in ((0, False), (1, True), (2, False), (3, False)):
        uses = extension().ForwardUses()
        for n in range(forwards):
            assert not uses.can_reuse(False), "a forward always compares"
            uses.record(False)
            assert uses.count == n + 1
        assert uses.can_reuse(True) == can_reuse
        uses.record(True)
        assert uses.count == 0 and not uses.can_reuse(True)


def test_a_capture_counts_its_own_forwards() -> None:
    """A forward in a capture and a backward outside it share nothing, nor do two captures."""
    for of_forward, of_backward in itertools.product((0, 7, 8), repeat=2):
        uses = extension().ForwardUses()
        uses.record(False, of_forward)
        assert uses.can_reuse(True, of_backward) == (of_forward == of_backward)
        uses.record(False, of_backward)
        assert uses.count == (2 if of_forward == of_backward else 1)
        assert uses.can_reuse(True, of_backward) == (of_forward != of_backward)


def test_the_cache_counts_by_that_rule(casts: list[Any]) -> None:
    """Every sequence of up to five calls with changed elements before each: the op casts where the rule says so."""
    for calls in itertools.chain.from_iterable(itertools.product((False, True), repeat=n) for n in range(1, 6)):
        w, uses = noise(ROWS, COLS), extension().ForwardUses()
        for number, reuse_forward in enumerate(calls):
            w.data[0, 0] = number + 1
            before, reuses = len(casts), uses.can_reuse(reuse_forward)
            fp8_cached_weight(w, BF16, None, reuse_forward)
            uses.record(reuse_forward)
            assert len(casts) - before == (0 if reuses else 1), calls


class Mlp(nn.Module):
    """[.., COLS] -> [.., COLS]; `again`: the second half is computed again in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(COLS, ROWS, bias=False), nn.Linear(ROWS, COLS, bias=False)
        self.out = nn.Linear(COLS, COLS, bias=False)
        self.again = again

    def tail(self, x: Tensor) -> Tensor:
        return self.out(torch.nn.functional.silu(self.down(x)))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.silu(self.up(x))
        return x + (checkpoint(self.tail, h, use_reentrant=False) if self.again else self.tail(h))


def model(dtype: torch.dtype = BF16, again: bool = False) -> Mlp:
    torch.manual_seed(3)
    return Mlp(again).to(dtype)


def train(module: Mlp, options: dict[str, Any], steps: int = 2, microbatches: int = 3, autocast: bool = False) -> list[Tensor]:
    """Outputs and the weights in the end."""
    torch._dynamo.reset()
    outputs = []
    with uncached():
        run = torch.compile(module, backend="ub_overlap", options={"fp8": "all", **options})
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        for step in range(steps):
            for m in range(microbatches):
                x = noise(64, COLS, seed=10 * step + m).clamp(-4, 4)
                x.requires_grad_()
                with compiled_before(step):
                    with torch.autocast("cpu", BF16, enabled=autocast):
                        y = run(x)
                    (y.float() ** 2).mean().backward()
                outputs += [y.detach(), x.grad]
            optimizer.step()
            optimizer.zero_grad()
    return [*outputs, *(p.detach() for p in module.parameters())]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("recipe", full_but(["tensorwise", "rowwise"], ["tensorwise", "delayed", "rowwise"]))
def test_cast_once_a_step(recipe: str, again: bool, casts: list[Any]) -> None:
    """Bit for bit what casts in every call give; rows need two casts, one for each operand's side."""
    from ub_overlap import _torch_compat as compat

    if recipe == "rowwise" and not compat.cpu_scales_rows():
        pytest.skip("this torch's CPU multiplies float8 by one scale a tensor alone")
    kinds = ("cached", "per_call")
    options = [{"fp8": {"recipe": recipe, "weights": k, "state": f"{k} {again}"}, "inner": "aot_eager"} for k in kinds]
    ours = train(model(again=again), options[0])
    shapes = [(ROWS, COLS), (COLS, ROWS), (COLS, COLS)]
    assert sorted(casts) == sorted(shapes * 2 * (2 if recipe == "rowwise" else 1))
    theirs = train(model(again=again), options[1])
    assert len(casts) == 6 * (2 if recipe == "rowwise" else 1)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.tier("full")
@pytest.mark.parametrize("again", [False, True])
def test_inductor_leaves_them_alone(again: bool, casts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor computes into memory that it takes for free (here: wherever it may), and what a graph returns counts as its own
    in the next."""
    name = "torch._inductor.codegen.wrapper.AllocateLine.should_reuse_buffer"
    monkeypatch.setattr(name, lambda *line: True, raising=False)
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(COLS, COLS, bias=False), nn.SiLU()) for _ in range(3)]
    # As many tokens as columns: what is cast of them has the size of a weight.
    module = nn.Sequential(*layers, model(again=again)).to(BF16)
    torch._dynamo.reset()
    with uncached():
        run = torch.compile(module, backend="ub_overlap", options={"fp8": "all"})
        for m in range(3):
            with compiled_before(m):
                run(noise(COLS, COLS, seed=m).requires_grad_()).sum().backward()
            for w in module.parameters():
                assert same(fp8_cached_weight(w, BF16, None, reuse_forward=True), cast_in_aten(w, None))
    assert len(casts) == 6
    if not again:
        for a, b in zip(train(model(), {}), train(model(), {"fp8": {"weights": "per_call"}}), strict=True):
            assert float((a.float() - b.float()).norm() / b.float().norm()) < 0.02


def test_autocast(casts: list[Any]) -> None:
    """float32 weights under autocast: cast from what autocast would have rounded them to."""
    runs = [
        train(model(torch.float32), {"inner": "aot_eager", "fp8": {"weights": kind}}, autocast=True)
        for kind in ("cached", "per_call")
    ]
    assert len(casts) == 6
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


class Reshaped(nn.Module):
    """Linears of a weight in other shapes than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(ROWS, COLS))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.view(COLS, ROWS) @ self.weight @ self.weight.t()


def test_reshaped_weights() -> None:
    """The transposed copy of a weight is not that of the weight in another shape."""
    torch.manual_seed(3)
    first, results = Reshaped(), []
    for kind in ("cached", "per_call"):
        torch._dynamo.reset()
        module, x = copy.deepcopy(first), noise(64, COLS).requires_grad_()
        with uncached():
            run = torch.compile(module, backend="ub_overlap", options={"fp8": {"weights": kind}, "inner": "aot_eager"})
            y = run(x)
            y.float().square().sum().backward()
        results.append((y.detach(), x.grad, module.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_forward_alone(casts: list[Any]) -> None:
    """Inference casts each weight once for good."""
    module = model()
    torch._dynamo.reset()
    with uncached(), torch.inference_mode():
        run = torch.compile(module, backend="ub_overlap", options={"fp8": "forward"})
        for m in range(3):
            run(noise(64, COLS, seed=m))
    assert len(casts) == 3


def test_weights_written_between_forward_and_backward() -> None:
    """As without us: autograd tells, and nothing is multiplied by half of the old and half of the new."""
    module = model()
    torch._dynamo.reset()
    with uncached():
        run = torch.compile(module, backend="ub_overlap", options={"fp8": "all", "inner": "aot_eager"})
        y = run(noise(64, COLS).requires_grad_())
        with torch.no_grad():
            module.up.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_no_graph_returns_them() -> None:
    from torch._inductor.fx_passes.post_grad import remove_noop_ops
    from torch.fx import Graph

    from ub_overlap import _torch_compat as compat
    from ub_overlap.compiler.graph.aten import aten
    from ub_overlap.compiler.graph.emitter import Emitter

    graph, mode = Graph(), compat.FakeTensorMode()
    w = graph.placeholder("w")
    with mode:
        w.meta["val"] = torch.empty(ROWS, COLS, dtype=BF16)
    e = Emitter(graph, w, {})
    op = e.call(OP, w, BF16, None, None, False, [])
    q, scale = e.item(op, 0), e.item(op, 1)
    transposed, own = e.call(aten.permute.default, q, [1, 0]), e.call(aten.mul.Tensor, scale, 2.0)
    graph.output((transposed, scale, own, w))
    assert copy_returned_casts(graph) == 2
    remove_noop_ops(graph)  # Inductor's, which comes later
    (returned,) = graph.output_node().args
    copies = [torch.ops.ub_overlap.fp8_cached_weight_copy.default] * 2
    assert [n.target for n in returned[:2]] == copies and returned[2:] == (own, w)


def test_swapped_for_a_while(casts: list[Any]) -> None:
    """Between forward and backward an evaluation runs with other elements, and autograd's versions do not show it."""
    runs = []
    for kind in ("cached", "per_call"):
        module = model()
        torch._dynamo.reset()
        options = {"fp8": {"weights": kind}, "inner": "aot_eager"}
        with uncached():
            run = torch.compile(module, backend="ub_overlap", options=options)
            x = noise(64, COLS).clamp(-4, 4).requires_grad_()
            y = run(x)
            own = [p.data.clone() for p in module.parameters()]
            for p in module.parameters():
                p.data.mul_(-3)
            with torch.no_grad():
                run(x)
            for p, w in zip(module.parameters(), own, strict=True):
                p.data.copy_(w)
            y.sum().backward()
        runs.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert len(casts) == 9


def test_what_ends_early_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    w = noise(ROWS, COLS)
    fp8_cached_weight(w, BF16, None)
    w.mul_(3)

    def broken(weight: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(weight_cast, "cast_in_aten", broken)
        with pytest.raises(MemoryError):
            fp8_cached_weight(w, BF16, None)
    assert same(fp8_cached_weight(w, BF16, None), cast_in_aten(w, None))


def test_threads() -> None:
    """Two threads meet a weight that has changed: neither goes on with what was there before."""
    w = noise(256, 256)
    with ThreadPoolExecutor(2) as pool:
        for turn in range(40):
            w.mul_(0.5 if turn % 2 else 3)
            both = list(pool.map(lambda _: [t.clone() for t in fp8_cached_weight(w, BF16, None)], range(2)))
            assert all(same((q, scale), cast_in_aten(w, None)) for q, scale in both), turn


def test_activations_are_not_cached(casts: list[Any]) -> None:
    """A product of two inputs of the graph: only parameters come again."""
    torch._dynamo.reset()

    def product(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return x @ (w * scale)

    with uncached():
        run = torch.compile(product, backend="ub_overlap", options={"fp8": "all", "inner": "aot_eager"})
        run(noise(64, COLS), nn.Parameter(noise(COLS, ROWS)), torch.tensor(2.0, dtype=BF16)).sum().backward()
    assert not casts
