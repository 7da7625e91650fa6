"""Rank functions of test_functional.py: the functional API and its gradients against fp64 on one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import ub_overlap
from ub_overlap.runtime import errors, ops

from .oracle import data, tolerance

C = ops.extension()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def off(name: str, got: Tensor | None, want: Tensor | None, terms: int) -> list[str]:
    """Return a list of errors in `got`. `want` is fp64."""
    if got is None or want is None:
        return [] if got is want else [f"{name}: got {type(got).__name__}, expected {type(want).__name__}"]
    if tuple(got.shape) != tuple(want.shape):
        return [f"{name}: got sizes {tuple(got.shape)}, expected {tuple(want.shape)}"]
    if not got.numel():
        return []
    error = float((got.double() - want).abs().max()) / max(1.0, float(want.abs().max()))
    limit = 2 * tolerance(got.dtype, terms)
    return [] if error <= limit else [f"{name} {got.dtype}: off by {error:.3g}, limit {limit:.3g}"]


def leaf(*sizes: int, seed: int, dtype: torch.dtype, grad: bool, turned: bool = False) -> Tensor:
    """Return a leaf that depends on the seed only. `turned`: not contiguous."""
    t = data(*sizes, seed=seed, dtype=dtype)
    if turned:
        t = t.transpose(0, -1).contiguous().transpose(0, -1)
    return t.requires_grad_(grad)


def doubles(tensors: Sequence[Tensor | None]) -> list[Any]:
    return [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in tensors]


def weighted(outs: Sequence[Tensor], seed: int) -> Tensor:
    """Return a scalar loss with gradients of varied size. The weights depend on the seed only."""
    return sum((o * data(*o.shape, seed=seed + i).to(o.dtype)).sum() for i, o in enumerate(outs))  # type: ignore[return-value]


def gather_case(
    rank: int,
    world: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    dim: int,
    widths: tuple[int, ...],
    wants: tuple[bool, bool] = (True, True),
    *,
    bias: bool = False,
    whole: bool = False,
    seed: int = 0,
    group: Any = None,
    **how: Any,
) -> list[str]:
    """Check one gather. `sizes`: of a shard. `widths`: N of each weight. `wants`: gradients of the shard, of the weights."""
    last = dim % len(sizes) == len(sizes) - 1
    inner = sizes[-1] * (world if last else 1)
    shards = [leaf(*sizes, seed=seed + r, dtype=dtype, grad=wants[0], turned=seed % 2 == 1) for r in range(world)]
    weights = [
        [
            leaf(inner, n, seed=seed + 50 + 10 * r + j, dtype=dtype, grad=wants[1], turned=j % 2 == 0)
            for j, n in enumerate(widths)
        ]
        for r in range(world)
    ]
    biases = [
        [leaf(n, seed=seed + 7 + j, dtype=dtype, grad=True) if bias else None for j, n in enumerate(widths)] for _ in shards
    ]

    exact, loss = doubles(shards), torch.zeros((), dtype=torch.float64)
    exact_weights, exact_biases = [doubles(w) for w in weights], [doubles(b) for b in biases]
    gathered = torch.cat(exact, dim)
    mine: list[Tensor] = []
    for r in range(world):
        outs = [gathered @ w if b is None else gathered @ w + b for w, b in zip(exact_weights[r], exact_biases[r], strict=True)]
        outs = [gathered, *outs] if whole else outs
        mine = outs if r == rank else mine
        loss = loss + weighted(outs, seed + 1000 * r)

    one = len(widths) == 1
    arguments = (weights[rank][0], biases[rank][0]) if one else (weights[rank], biases[rank])
    found = ub_overlap.all_gather_matmul(
        shards[rank], arguments[0], group, gather_dim=dim, bias=arguments[1], return_gathered=whole, **how
    )
    first, rest = found if whole else (None, found)
    outs = [*([first] if whole else []), *([rest] if one else rest)]
    name = f"gather {sizes} dim {dim} {widths} wants {wants} whole {whole} {how}"
    bad = [c for got, want in zip(outs, mine, strict=True) for c in off(name, got, want.detach(), inner)]
    if any(wants):
        loss.backward()
        weighted(outs, seed + 1000 * rank).backward()
        terms = max(gathered.shape.numel() // max(1, inner), sum(widths) * world, inner)
        bad += off(f"{name} dX", shards[rank].grad, exact[rank].grad, terms)
        pairs = [*zip(weights[rank], exact_weights[rank], strict=True), *zip(biases[rank], exact_biases[rank], strict=True)]
        bad += [c for t, e in pairs if t is not None for c in off(f"{name} dW", t.grad, e.grad, terms)]
    return bad


def scatter_case(
    rank: int,
    world: int,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    dim: int,
    width: int,
    inners: tuple[int, ...] = (5,),
    wants: tuple[bool, bool] = (True, True),
    *,
    bias: bool = False,
    addend: int = 0,
    seed: int = 0,
    group: Any = None,
    **how: Any,
) -> list[str]:
    """Check one scatter. `sizes`: of the product before the scatter, without its last dim `width`.

    `addend`: 0 none, 1 a row, 2 a tensor.
    """
    count = len(inners)
    xs, ws, adds, exact = [], [], [], []
    for r in range(world):
        xs.append(
            [leaf(*sizes, k, seed=seed + 20 * r + t, dtype=dtype, grad=wants[0], turned=t == 0) for t, k in enumerate(inners)]
        )
        ws.append([leaf(k, width, seed=seed + 500 + 20 * r + t, dtype=dtype, grad=wants[1]) for t, k in enumerate(inners)])
        shape = [(), (width,), (*sizes, width)][addend]
        adds.append(leaf(*shape, seed=seed + 900 + r, dtype=dtype, grad=True) if addend else None)
        exact.append((doubles(xs[r]), doubles(ws[r]), *doubles([adds[r]])))
    last = dim % (len(sizes) + 1) == len(sizes)
    offset = leaf(width // world if last else width, seed=seed + 3, dtype=dtype, grad=True) if bias else None

    total = sum(a @ w for x, w_, _ in exact for a, w in zip(x, w_, strict=True))
    total = total + sum(e[2] for e in exact) if addend else total
    total = total / world if how.get("reduce_op") == "avg" else total
    shares = total.chunk(world, dim)
    (exact_offset,) = doubles([offset])
    outs = [s if offset is None else s + exact_offset for s in shares]
    loss = sum(weighted([o], seed + 1000 * r) for r, o in enumerate(outs))

    one = count == 1
    got = ub_overlap.matmul_reduce_scatter(
        xs[rank][0] if one else xs[rank],
        ws[rank][0] if one else ws[rank],
        group,
        scatter_dim=dim,
        bias=offset,
        addend=adds[rank],
        **how,
    )
    name, terms = f"scatter {sizes} dim {dim} width {width} {inners} wants {wants} addend {addend} {how}", sum(inners) * world
    bad = off(name, got, outs[rank].detach(), terms)
    if got.requires_grad:
        weighted([got], seed + 1000 * rank).backward()
        loss.backward()  # type: ignore[union-attr]
        many = max(total.shape.numel() // max(1, width), width, terms)  # type: ignore[union-attr]
        for what, mine, want in zip("XW", (xs[rank], ws[rank]), exact[rank][:2], strict=True):
            bad += [c for t, e in zip(mine, want, strict=True) for c in off(f"{name} d{what}", t.grad, e.grad, many)]
        if addend:
            bad += off(f"{name} dA", adds[rank].grad, exact[rank][2].grad, many)
        if offset is not None:  # a rank has the gradient of its own shard
            want = data(*outs[rank].shape, seed=seed + 1000 * rank).double().reshape(-1, offset.numel()).sum(0)
            bad += off(f"{name} db", offset.grad, want, many)
    return bad


WAYS = [dict(strategy=s, save=k) for s, k in itertools.product(("pipelined", "none"), ("gathered", "shard"))]
WAYS += [dict(strategy="pipelined:chunks=1", save="shard"), dict(strategy="pipelined:chunks=8", save="gathered")]
WANTS = ((True, True), (True, False), (False, True), (False, False))


def gathers(rank: int, world: int) -> list[str]:
    bad, seed = [], 0
    for dtype, how, (sizes, dim) in itertools.product(
        DTYPES, WAYS, (((6, 8), 0), ((6, 8), -1), ((3, 4, 8), 1), ((2, 4, 3), 0), ((2, 3, 2, 5), 2), ((2, 3, 4), 2))
    ):
        seed += 10_001
        wants = WANTS[seed // 3 % 3] if seed % 4 else WANTS[0]
        widths = ((4, 7), (5,))[seed % 2]
        bad += gather_case(
            rank, world, dtype, sizes, dim, widths, wants, bias=seed % 3 == 0, whole=seed % 5 < 2, seed=seed, **how
        )
    for wants, save, dim in itertools.product(WANTS, ("gathered", "shard"), (0, 1)):  # every path through backward
        seed += 10_001
        bad += gather_case(rank, world, torch.float32, (2, 3, 4), dim, (3, 5, 2), wants, seed=seed, save=save)
    return bad


def scatters(rank: int, world: int) -> list[str]:
    bad, seed = [], 0
    shapes = (((3 * world,), 0), ((3 * world,), 1), ((2, 2 * world), 1), ((2 * world, 3), 0), ((2, 3, world), 2), ((2, 3), 2))
    for dtype, strategy, (sizes, dim) in itertools.product(
        DTYPES, ("pipelined", "none", "pipelined:chunks=1", "pipelined:stripes=3", "direct"), shapes
    ):
        seed += 10_001
        wants, inners = WANTS[seed // 3 % 3], ((5,), (4, 3))[seed % 2]
        bad += scatter_case(
            rank, world, dtype, sizes, dim, 2 * world, inners, wants, bias=seed % 3 == 0, addend=seed // 2 % 3, seed=seed,
            strategy=strategy, reduce_op=("sum", "avg")[seed // 5 % 2],
        )  # fmt: skip
    return bad


def smallest(rank: int, world: int) -> list[str]:
    """Sizes of one element per rank and of zero elements are correct."""
    bad = []
    for how in ({"strategy": "pipelined"}, {"strategy": "none"}):
        for sizes, dim, widths in (
            ((1, 1), 0, (1,)),
            ((0, 4), 0, (3,)),
            ((2, 4), 0, (0,)),
            ((1, 1), 1, (1,)),
            ((1, 1, 1), 1, (1, 1)),
        ):
            bad += gather_case(rank, world, torch.float32, sizes, dim, widths, **how)  # type: ignore[arg-type]
        bad += scatter_case(rank, world, torch.float32, (world,), 0, 1, (1,), **how)
        bad += scatter_case(rank, world, torch.float32, (0,), 0, 3, (4,), **how)
    mine = [dist.new_group([r]) for r in range(world)][rank]
    bad += gather_case(0, 1, torch.float32, (3, 4), 0, (2,), group=mine)
    bad += scatter_case(0, 1, torch.float32, (3,), 0, 2, group=mine)
    return bad + scatter_case(0, 1, torch.float32, (3,), 0, 2, group=mine, strategy="direct")


def reduces(rank: int, world: int) -> list[str]:
    bad: list[str] = []
    for seed, (dtype, strategy, op) in enumerate(itertools.product(DTYPES, ("pipelined", "none", "direct"), ("sum", "avg"))):
        xs = [leaf(2, 3, 5, seed=seed + 10 * r, dtype=dtype, grad=True) for r in range(world)]
        ws = [leaf(5, 4, seed=seed + 10 * r + 1, dtype=dtype, grad=True) for r in range(world)]
        b = leaf(4, seed=9, dtype=dtype, grad=True)
        ex, ew, (eb,) = doubles(xs), doubles(ws), doubles([b])
        want = sum(x @ w for x, w in zip(ex, ew, strict=True)) / (world if op == "avg" else 1) + eb
        got = ub_overlap.matmul_all_reduce(xs[rank], ws[rank], bias=b, strategy=strategy, reduce_op=op)
        weighted([got], 5).backward()
        weighted([want], 5).backward()
        for what, t, e in (
            ("y", got, want.detach()),
            ("dX", xs[rank].grad, ex[rank].grad),
            ("dW", ws[rank].grad, ew[rank].grad),
            ("db", b.grad, eb.grad),
        ):
            bad += off(f"all_reduce {strategy} {op} {what}", t, e, 5 * world)
    return bad


def groups(rank: int, world: int) -> list[str]:
    """Every form of the group argument works, also 2-D meshes, one of them not contiguous."""
    bad = []
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (world,))
    for group in (None, dist.group.WORLD, dist.group.WORLD.group_name, line, (line, 0)):  # type: ignore[union-attr]
        bad += gather_case(rank, world, torch.float32, (3, 4), 0, (2,), group=group)
    for dim in ("dp", "tp"):
        side = mesh.get_group(dim)
        me, ranks = dist.get_rank(side), side.size()
        for group in ((mesh, dim), mesh[dim], side):
            bad += gather_case(me, ranks, torch.float32, (3, 4), 0, (2,), group=group)
            bad += scatter_case(me, ranks, torch.float32, (3 * ranks,), 0, 2, group=group)
    return bad


def kept(rank: int, world: int) -> dict[str, list[list[int]]]:
    """Return the sizes of saved tensors that are not inputs."""
    found = {}
    x, w = leaf(4, 8, seed=rank, dtype=torch.float32, grad=True), leaf(8, 6, seed=1, dtype=torch.float32, grad=True)
    cases = {
        "gathered": dict(save="gathered"),
        "shard": dict(save="shard"),
        "no weight gradient": dict(save="gathered", frozen=True),
        "no_grad": dict(save="gathered", off=True),
    }
    for name, how in cases.items():
        sizes: list[list[int]] = []

        def pack(t: Tensor, sizes: list[list[int]] = sizes) -> Tensor:
            if t.data_ptr() not in (x.data_ptr(), w.data_ptr()):
                sizes.append(list(t.shape))
            return t

        weight = w.detach() if how.get("frozen") else w
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.set_grad_enabled(not how.get("off")):
            y = ub_overlap.all_gather_matmul(x, weight, save=how["save"])
            z = ub_overlap.matmul_reduce_scatter(y.detach(), w.detach().t())
        if name == "no_grad" and (y.requires_grad or z.requires_grad):
            sizes.append([-1])
        found[name] = sizes
    return found


def sites(rank: int, world: int) -> dict[str, dict[str, int]]:
    """Count the calls of each site in one forward and backward, by saved tensor and gathered dim."""
    found = {}
    for save, dim, wants in itertools.product(("gathered", "shard"), (0, 1), ((True, True), (True, False), (False, True))):
        name = f"{save} {dim} {'x' * wants[0]}{'w' * wants[1]}"
        x = leaf(2, 3, 4, seed=1, dtype=torch.float32, grad=wants[0])
        ws = [leaf(4, 5, seed=2 + j, dtype=torch.float32, grad=wants[1]) for j in range(2)]
        C.clear_stats()
        weighted(ub_overlap.all_gather_matmul(x, ws, gather_dim=dim, save=save, site="s"), 1).backward()
        found[name] = {site: row["calls"] for site, row in C.site_stats().items()}
    for wants in ((True, True), (True, False), (False, True)):
        x = leaf(2, 3 * world, 4, seed=1, dtype=torch.float32, grad=wants[0])
        w = leaf(4, 5, seed=2, dtype=torch.float32, grad=wants[1])
        C.clear_stats()
        weighted([ub_overlap.matmul_reduce_scatter(x, w, scatter_dim=1, site="r")], 1).backward()
        found[f"scatter {'x' * wants[0]}{'w' * wants[1]}"] = {site: row["calls"] for site, row in C.site_stats().items()}
    return found


def twice(rank: int, world: int) -> str:
    """Double backward raises an error."""
    x, w = leaf(4, 8, seed=rank, dtype=torch.float32, grad=True), leaf(8, 6, seed=1, dtype=torch.float32, grad=True)
    y = ub_overlap.all_gather_matmul(x, w)
    (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    try:
        g.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def partly_used(rank: int, world: int) -> list[str]:
    """Gradients are right if the loss uses one product of two, or the gathered tensor alone."""
    bad = []
    for save, dim in itertools.product(("gathered", "shard"), (0, 1)):
        shards = [leaf(2, 3, 4, seed=r, dtype=torch.float32, grad=True) for r in range(world)]
        ws = [leaf(4, 5, seed=7 + j, dtype=torch.float32, grad=True) for j in range(2)]
        (ex, ew) = doubles(shards), doubles(ws)
        whole = torch.cat(ex, dim)
        y = ub_overlap.all_gather_matmul(shards[rank], ws, gather_dim=dim, save=save)
        weighted([y[1]], 3).backward()
        (world * weighted([whole @ ew[1]], 3)).backward()
        bad += off("one of two dX", shards[rank].grad, ex[rank].grad, 50)
        bad += [] if ws[0].grad is None else ["the unused weight has a gradient"]
        bad += off("one of two dW", ws[1].grad * world, ew[1].grad, 50)  # type: ignore[operator]
        shards[rank].grad = ex[rank].grad = None
        g, _ = ub_overlap.all_gather_matmul(shards[rank], ws, gather_dim=dim, save=save, return_gathered=True)
        weighted([g], 3).backward()
        (world * weighted([torch.cat(ex, dim)], 3)).backward()
        bad += off("gathered alone dX", shards[rank].grad, ex[rank].grad, 50)
    return bad


def autocast(rank: int, world: int) -> list[str]:
    """Autocast acts as for torch's linear: bf16 in and out, float32 gradients of float32 leaves."""
    x, w = leaf(4, 8, seed=rank, dtype=torch.float32, grad=True), leaf(8, 6, seed=1, dtype=torch.float32, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ub_overlap.all_gather_matmul(x, w)
        z = ub_overlap.matmul_reduce_scatter(y, w.t())
    z.float().sum().backward()
    seen = [y.dtype, z.dtype, x.grad.dtype, w.grad.dtype]  # type: ignore[union-attr]
    expected = [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    return [] if seen == expected else [f"{seen}"]


def refusals(rank: int, world: int) -> list[tuple[str, str]]:
    """Return (misuse, error text or other result) for every misuse. No communication starts."""
    x, w = torch.ones(4, 8), torch.ones(8, 6)
    ag, rs = ub_overlap.all_gather_matmul, ub_overlap.matmul_reduce_scatter
    mesh = init_device_mesh("cpu", (1, world))
    cases: dict[str, Callable[[], Any]] = {
        "nn.Linear's weight": lambda: ag(x, torch.ones(6, 8)),
        "wrong K": lambda: ag(x, torch.ones(7, 6)),
        "no weights": lambda: ag(x, []),
        "dtypes": lambda: ag(x, w.bfloat16()),
        "float64": lambda: ag(x.double(), w.double()),
        "one dim": lambda: ag(torch.ones(8), w),
        "gather_dim": lambda: ag(x, w, gather_dim=2),
        "save": lambda: ag(x, w, save="all"),
        "bias": lambda: ag(x, w, bias=torch.ones(5)),
        "biases": lambda: ag(x, [w, w], bias=[torch.ones(6)]),
        "strategy": lambda: ag(x, w, strategy="fast"),
        "uneven": lambda: rs(torch.ones(2 * world + 1, 8), w),
        "reduce_op": lambda: rs(x, w, reduce_op="max"),
        "terms": lambda: rs([x, x], [w]),
        "term sizes": lambda: rs([x, torch.ones(3, 8)], [w, w]),
        "widths": lambda: rs([x, x], [w, torch.ones(8, 7)]),
        "addend": lambda: rs(x, w, addend=torch.ones(3)),
        "mesh": lambda: ag(x, w, mesh),
        "mesh dim": lambda: ag(x, w, (mesh, "tp")),
        "group name": lambda: ag(x, w, "no such group"),
        "no group": lambda: ag(x, w, 3),
        "size": lambda: ub_overlap.initialize_group(None, 0),
        "shape without dtype": lambda: ub_overlap.initialize_group(None, (3, 4)),
        "shape": lambda: ub_overlap.initialize_group(None, (3, -4), torch.float32),
    }
    found = []
    for name, act in cases.items():
        try:
            act()
            found.append((name, "nothing was raised"))
        except errors.OptionError as error:
            found.append((name, "" if error.got and error.expected else f"incomplete: {error}"))
        except Exception as error:  # noqa: BLE001  (reported to the test)
            found.append((name, f"{type(error).__name__}: {error}"))
    return found


def out_of_step(rank: int, world: int) -> str:
    """A different shape on one rank raises the session's error."""
    group = dist.new_group(list(range(world)))
    try:
        ub_overlap.all_gather_matmul(torch.ones(4 + rank, 8), torch.ones(8, 6), group, site="odd")
    except errors.UbOverlapError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
