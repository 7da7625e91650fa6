"""Programs with packed operands that run on the ranks, and their comparison with eager.

All values are small integers, so every sum is exact in any order and results must be bit-equal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F

from tests.compiler.rank_compile import FORCE, world_name
from tests.compiler.test_fuzz import Chain, after, differ, run_ops, values
from tests.models.compare import uncached
from ub_overlap.compiler.plan.plan import Plan
from ub_overlap.compiler.reports.history import HISTORY

PACK: dict[str, Any] = {**FORCE, "pack": "force"}
Shapes = tuple[tuple[int, ...], ...]


def gather(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor_autograd(x.contiguous(), dim, world_name())


def scatter(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd(x.contiguous(), "sum", dim, world_name())


@torch.library.custom_op("ub_overlap_tests::needs_contiguous", mutates_args=())
def needs_contiguous(x: Tensor) -> Tensor:
    """Double a tensor whose layout an unaware kernel would misread."""
    assert x.is_contiguous(), x.stride()
    return x * 2


@needs_contiguous.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


needs_contiguous.register_autograd(lambda ctx, grad: grad * 2)


def parts(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    g = gather(x)
    return tuple(g @ w for w in weights)


def flattened(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Views that strides of slices do not allow, in forward and in backward."""
    q, k, v = parts(x, a, b, c)
    return q.view(-1) * 2, k.view(2, -1).t() + 1, (v.view(-1) * v.view(-1)).view(v.shape[1], -1)


def heads(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Attention's views: they stay views of slices."""
    q, k, v = (p.view(2, -1, p.shape[1] // 2, 2).transpose(1, 2) for p in parts(x, a, b, c))
    return (q * 2).sum((1, 3)) + k.square().sum((1, 3)) + v.split(1, 1)[0].sum((1, 3))


def strict_readers(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Readers that take contiguous tensors only: a collective, a custom op, as_strided."""
    q, k, v = parts(x, a, b, c)
    return gather(q), needs_contiguous(k), v.as_strided((2, v.shape[1]), (v.shape[1], 1), v.shape[1])


def complex_pairs(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """A view that odd strides do not allow, in place of which there is no reshape."""
    q, k = parts(x, a, b)
    return torch.view_as_real(torch.view_as_complex(q.view(q.shape[0], -1, 2)) * (1 + 1j)), k


def unaligned_attention(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Attention on rows that do not begin at multiples of 16 bytes: one of four matmuls has three columns."""
    g = gather(x)
    q, k, v = ((g @ w).view(1, -1, 2, w.shape[1] // 2).transpose(1, 2) for w in (a, b, c))
    return F.scaled_dot_product_attention(q * 0, k * 0, v), g @ d


def written(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """A part that the program writes to, and one that it returns twice."""
    q, k = parts(x, a, b)
    q.mul_(3)
    return q, k, k.t()


def views_of_views(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Aliases of a part that is not returned itself: AOTAutograd rebuilds them from the part."""
    q, k = parts(x, a, b)
    return q[1:].t(), q[2:], k.view(4, -1)[1:]


def biases(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    g = gather(x)
    return F.linear(g, a, bias), F.linear(g, b)


def transposed(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """G^T @ B and A @ G: the gathered rows are summed over."""
    g = gather(x)
    return g.t() @ a, g.t() @ b, c @ g, d @ g


def rows_of_results(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """(G @ B)^T: the parts are blocks of rows."""
    g = gather(x)
    return a @ g.t(), b @ g.t()


def last_dim(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    g = gather(x, 1)
    return g @ a, g @ b


def summed(x: Tensor, y: Tensor, z: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Terms with operands in both storage orders, an addend, and another reader of the sum."""
    total = x @ a + y @ b.t() + z @ c + 1
    return scatter(total), total.relu()


def summed_transposed(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return scatter((x @ a + y @ b).t())


def summed_everywhere(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return funcol.all_reduce(x @ a + y @ b, "sum", world_name())


def one_weight_twice(x: Tensor, a: Tensor) -> tuple[Tensor, ...]:
    """Equal operands next to each other."""
    g = gather(x)
    return g @ a, (g * 1) @ a, g @ (a * 1)


def dependent(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Not packed: one operand needs the other's result."""
    g = gather(x)
    q = g @ a
    return q, g @ (b * q.sum())


def orientations(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Not packed: G, G^T on the left, G on the right."""
    g = gather(x)
    return g @ a, g.t() @ b, c @ g


def two_gathers(x: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Not packed: the same weights' widths, but other rows."""
    return gather(x) @ a, gather(y) @ b


def two_types(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Not packed: one matmul in 16 bits, one in 32 bits, of one gather of 16 bits."""
    g = gather(x.bfloat16())
    return (g @ a.bfloat16()).float(), g.float() @ b


M, K = 16, 32  # so small matmuls do not hide the gather alone: then all consumers belong to the site
W: Shapes = ((M, K), (K, 8), (K, 4), (K, 4))
CASES: dict[str, tuple[Callable[..., Any], Callable[[int], Shapes], list[list[int]]]] = {
    # function, local shapes of inputs by number of ranks, packs of the forward's sites
    "parts": (parts, lambda r: W, [[3]]),
    "one part is empty": (parts, lambda r: (*W, (K, 0)), [[3]]),
    "flattened": (flattened, lambda r: W, [[3]]),
    "heads": (heads, lambda r: W, [[3]]),
    "strict readers": (strict_readers, lambda r: W, [[2], []]),
    "complex pairs": (complex_pairs, lambda r: (*W[:2], (K, 3)), [[2]]),
    "unaligned attention": (
        unaligned_attention, lambda r: ((M, K), (K, 8), (K, 8), (K, 8), (K, 3)), [[4]],
    ),
    "written": (written, lambda r: W[:3], [[2]]),
    "views of views": (views_of_views, lambda r: ((M, K), (K, 8), (K, 8)), [[2]]),
    "biases": (biases, lambda r: ((M, K), (8, K), (4, K), (8,)), [[2]]),
    "transposed": (transposed, lambda r: ((M, K), (M * r, 8), (M * r, 4), (3, M * r), (5, M * r)), [[2, 2]]),
    "rows of results": (rows_of_results, lambda r: ((M, K), (8, K), (4, K)), [[2]]),
    "last dim": (last_dim, lambda r: ((M, K), (K * r, 8), (K * r, 4)), [[2]]),
    "summed": (
        summed, lambda r: ((M * r, 3), (M * r, 5), (M * r, 2), (3, K), (K, 5), (2, K)), [[3]],
    ),
    "summed, transposed": (summed_transposed, lambda r: ((M, 3), (M, 5), (3, K * r), (5, K * r)), [[2]]),
    "summed everywhere": (summed_everywhere, lambda r: ((M, 3), (M, 5), (3, K), (5, K)), [[2]]),
    "one weight twice": (one_weight_twice, lambda r: W[:2], [[2]]),
    "dependent": (dependent, lambda r: W[:3], [[]]),
    "orientations": (orientations, lambda r: ((M, K), (K, 8), (M * r, 4), (3, M * r)), [[]]),
    "two gathers": (two_gathers, lambda r: ((M, K), (M, K), (K, 8), (K, 8)), [[], []]),
    "two types": (two_types, lambda r: W[:3], [[]]),
}  # fmt: skip
WITHOUT_GRADIENT = {"summed everywhere"}


def mostly_saved(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Backward needs the first two parts."""
    q, k, v = parts(x, a, b, c)
    return q.square().sum() + k.square().sum() + v.sum()


def hardly_saved(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Backward needs the last part."""
    q, k, v = parts(x, a, b, c)
    return q.sum() + k.sum() + v.square().sum()


def saved_bytes(rank: int, world: int, options: dict[str, Any]) -> list[list[int]]:
    """Return the bytes of the storages that hold parts saved for backward, of `mostly_saved` and of `hardly_saved`."""
    random = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(shape, generator=random, requires_grad=True) for shape in W]
    sizes: list[list[int]] = []
    for function in (mostly_saved, hardly_saved):
        kept: dict[int, int] = {}

        def note(t: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if t.dim() == 2 and t.shape[0] == M * world:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        torch._dynamo.reset()
        with uncached(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            torch.compile(function, backend="ub_overlap", options={**options, "memory_budget": 0})(*inputs).backward()
        sizes.append(sorted(kept.values()))
    return sizes


def run_case(rank: int, world: int, name: str, options: dict[str, Any]) -> tuple[list[int], list[str], list[list[int]]]:
    """Return the values that differ from eager, outputs with other strides, and the packs of the forward's sites."""
    function, shapes, _ = CASES[name]
    random = torch.Generator().manual_seed(rank)
    inputs = [torch.randint(-2, 3, shape, generator=random).float() for shape in shapes(world)]
    strides: list[list[tuple[int, ...]]] = []

    def noted(f: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = f(*tensors)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            strides.append([o.stride() for o in outputs])
            return outputs

        return run

    grad = name not in WITHOUT_GRADIENT
    truth, mark = values(noted(function), inputs, grad), HISTORY.mark()
    torch._dynamo.reset()
    with uncached():
        found = values(noted(torch.compile(function, backend="ub_overlap", options=options)), inputs, grad)
    other = [f"output {i}: {b}, eager {a}" for i, (a, b) in enumerate(zip(*strides, strict=True)) if a != b]
    return differ(truth, found), other, [list(d.packs) for d in HISTORY.since(mark)[0].decisions]


def run_chains(rank: int, world: int, seeds: list[int]) -> tuple[list[str], int]:
    """Return the failures of random chains in front of and behind packed consumers, and how many sites were packed."""
    wrong, packed = [], 0
    for seed in seeds:
        c = Chain(seed, rank, world)
        shape = tuple(c.dim() for _ in range(c.draw.randint(2, 3)))
        dim = c.draw.randrange(len(shape))
        full = (*shape[:dim], shape[dim] * world, *shape[dim + 1 :])
        ops = c.steps(full, 2)
        end = after(full, ops)
        rows, x = torch.Size(end[:-1]).numel(), c.tensor(*shape)
        weights = [c.tensor(end[-1], c.dim()) for _ in range(c.draw.choice([2, 3]))]
        tails = [c.steps((rows, c.inputs[w].shape[1]), 3) for w in weights]

        def function(*t: Tensor, dim=dim, ops=ops, rows=rows, last=end[-1], x=x, weights=weights, tails=tails):  # type: ignore[no-untyped-def]
            matrix = run_ops(gather(t[x], dim), ops, []).reshape(rows, last)
            return tuple(run_ops(matrix @ t[w], tail, []) * 2 for w, tail in zip(weights, tails, strict=True))

        truth = values(function, c.inputs, True)
        torch._dynamo.reset()
        mark = HISTORY.mark()
        with uncached():
            found = values(torch.compile(function, backend="ub_overlap", options=PACK), c.inputs, True)
        packed += sum(bool(d.packs) for plan in HISTORY.since(mark) for d in plan.decisions)
        if bad := differ(truth, found):
            wrong.append(f"seed {seed}: values {bad} differ: gather {shape} dim {dim} -> {' -> '.join(c.text)}")
    return wrong, packed


def run_saved(rank: int, world: int) -> dict[str, list[list[int]]]:
    """Return the packs of the forward under overrides that are its packed plan, by the option `pack`; and of an older plan."""
    random = torch.Generator().manual_seed(rank)
    inputs = [torch.randint(-2, 3, shape, generator=random).float() for shape in W]

    def packs_under(pack: str, overrides: Any = None) -> tuple[list[list[int]], Plan]:
        torch._dynamo.reset()
        mark = HISTORY.mark()
        options = {**FORCE, "pack": pack, "overrides": overrides}
        with torch.no_grad(), uncached():
            found = torch.compile(parts, backend="ub_overlap", options=options)(*inputs)
        assert all(map(torch.equal, found, parts(*inputs)))
        (plan,) = HISTORY.since(mark)
        return [list(d.packs) for d in plan.decisions], plan

    packed, apart = packs_under("force")[1], packs_under("off")[1]
    older = {**json.loads(packed.to_json()), "version": 2}
    older["sites"] = [{name: value for name, value in site.items() if name != "packs"} for site in older["sites"]]
    return {
        "packed": [p for pack in ("auto", "force", "off") for p in packs_under(pack, packed)[0]],
        "apart": [p for pack in ("auto", "force", "off") for p in packs_under(pack, apart)[0]],
        "older": [p for pack in ("auto", "force", "off") for p in packs_under(pack, older)[0]],
    }


class Projections(nn.Module):
    """q, k, v of a sequence-parallel attention, and the sum of their gradients."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = (nn.Linear(K, n, bias=False) for n in (8, 4, 4))
        for linear in (self.q, self.k, self.v):
            linear.weight.data = torch.randint(-1, 2, linear.weight.shape, generator=random).float()

    def forward(self, x: Tensor) -> Tensor:
        g = gather(x)
        return (self.q(g)[:, :4] * self.k(g) + self.v(g)).square().sum()


def run_microbatches(rank: int, world: int, to_none: bool, options: dict[str, Any]) -> list[str]:
    """Return what differs from eager in two steps of two microbatches each, with gradients set to None or to zero."""
    eager, ours = Projections(rank), Projections(rank)
    random = torch.Generator().manual_seed(rank)
    wrong = []
    with uncached():
        compiled = torch.compile(ours, backend="ub_overlap", options=options)
        for step in range(2):
            for module, run in ((eager, eager), (ours, compiled)):
                state = random.get_state()
                for _ in range(2):
                    run(torch.randint(-1, 2, (M, K), generator=random).float()).backward()
                if module is eager:
                    random.set_state(state)
            for (name, a), b in zip(eager.named_parameters(), ours.parameters(), strict=True):
                assert a.grad is not None and b.grad is not None
                wrong += [] if torch.equal(a.grad, b.grad) else [f"step {step}: {name}"]
            for module in (eager, ours):
                module.zero_grad(set_to_none=to_none)
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.neg_()
    return wrong


def run_by_hand(rank: int, world: int) -> bool:
    """Return whether the packed site gives the bits of the op on joined weights."""
    random = torch.Generator().manual_seed(rank)
    x, a, b = (torch.randn(s, generator=random) for s in ((16, 32), (32, 24), (32, 8)))
    with torch.no_grad(), uncached():
        found = torch.compile(parts, backend="ub_overlap", options=PACK)(x, a, b)
        _, (whole,) = torch.ops.ub_overlap.all_gather_matmul(
            x, [torch.cat([a, b], 1)], [False], [False], 1, False, False, [], [], "pipelined", world_name(), "by_hand"
        )
    return torch.equal(torch.cat(found, 1), whole)
