"""Single forms that models sometimes contain: each is one function of local tensors, traced with its backward.

Legend: R ranks; x local input, G its gather; M rows, K contracted, N columns. A form that `Form.expected` marks as refused
resembles a site, but is none or a different one: a plain rewrite would give wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from tests.models.case import Case, Expected, Sites, noise


@dataclass(frozen=True)
class Env:
    """Ranks, group and dtypes of a form's function. `low` is bf16 (or the exact dtype in reference runs)."""

    rank: int
    world: int
    group: str
    low: torch.dtype
    high: torch.dtype

    def gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return funcol.all_gather_tensor_autograd(x, dim, self.group)

    def scatter(self, x: Tensor, dim: int = 0, op: str = "sum") -> Tensor:
        return funcol.reduce_scatter_tensor_autograd(x, op, dim, self.group)

    def reduce(self, x: Tensor) -> Tensor:
        return funcol.wait_tensor(torch.ops._c10d_functional.all_reduce(x.contiguous(), "sum", self.group))


Function = Callable[..., Tensor | tuple[Tensor, ...]]
AG_FORWARD, RS_FORWARD = Sites(gather=1), Sites(scatter=1)
RS_BACKWARD, AG_BACKWARD = Sites(scatter=1), Sites(gather=1, contracted=1)
GATHERED, SCATTERED = Expected(AG_FORWARD, RS_BACKWARD), Expected(RS_FORWARD, AG_BACKWARD)


@dataclass(frozen=True)
class Form:
    """A form and its expected sites.

    `shapes(world)`: local shapes of the inputs. All inputs have gradients unless `inference`.
    """

    function: Function
    shapes: Callable[[int], tuple[tuple[int, ...], ...]]
    expected: Expected
    inference: bool = False


FORMS: dict[str, Form] = {}


def form(
    shapes: Callable[[int], tuple[tuple[int, ...], ...]], expected: Expected, inference: bool = False
) -> Callable[[Function], Function]:
    """Register the decorated function under its name."""

    def register(function: Function) -> Function:
        FORMS[function.__name__] = Form(function, shapes, expected, inference)
        return function

    return register


def refused(expected: Expected, forward: str = "", backward: str = "") -> Expected:
    """Return the same collectives, marked as no plain gather or scatter in the phases with a reason."""
    return Expected(expected.forward, expected.backward, forward, backward)


# ---- all_gather -> matmul


@form(lambda r: ((8, 64), (64, 48)), GATHERED)
def gather_mm(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.gather(x) @ w


@form(lambda r: ((8, 64), (48, 64)), GATHERED)
def gather_transposed_weight(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.gather(x) @ w.t()


@form(lambda r: ((8, 64), (48, 64)), GATHERED)
def gather_transposed_product(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """(G w^T)^T in the form w G^T: the gather is the right operand, transposed."""
    return w @ env.gather(x).t()


@form(lambda r: ((8, 64), (48, 64), (48,)), GATHERED)
def gather_linear_bias(env: Env, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.nn.functional.linear(env.gather(x), w, b)


@form(lambda r: ((8, 3, 64), (48, 64)), GATHERED)
def gather_linear_3d(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(env.gather(x), w)


@form(lambda r: ((3, 8, 64), (48, 64)), GATHERED)
def gather_linear_3d_dim1(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(env.gather(x, 1), w)


@form(lambda r: ((3, 8, 64), (64, 48)), GATHERED)
def gather_einsum(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsk,kn->bsn", env.gather(x, 1), w)


@form(lambda r: ((1, 8, 64), (1, 64, 48)), GATHERED)
def gather_bmm_one(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """A batched matmul of batch 1 is a 2D matmul."""
    return torch.bmm(env.gather(x, 1), w)


@form(lambda r: ((3, 8, 64), (3, 64, 48)), refused(GATHERED, "bmm", "bmm"))
def gather_bmm(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """A batched matmul with one weight per batch is not a 2D matmul."""
    return torch.bmm(env.gather(x, 1), w)


@form(lambda r: ((8, 64), (64, 48), (64, 32), (64, 16)), GATHERED)
def gather_three_users(env: Env, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    g = env.gather(x)
    return g @ a, g @ b, g @ c


@form(lambda r: ((8, 64), (64, 48)), GATHERED)
def gather_other_user(env: Env, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The gathered tensor is also an output, and is also normalised."""
    g = env.gather(x)
    return g @ w, g.square().mean(-1), g


@form(lambda r: ((8, 64), (64, 48)), refused(GATHERED, backward="narrowed before the sum"))
def gather_cast(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Gather in low precision, multiply in high precision."""
    return env.gather(x.to(env.low)).to(env.high) @ w


@form(lambda r: ((8, 64), (64, 48)), GATHERED)
def gather_cast_down(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Gather in high precision, multiply in low precision."""
    return (env.gather(x).to(env.low) @ w.to(env.low)).to(env.high)


@form(lambda r: ((16, 64 // r), (64, 48)), GATHERED)
def gather_k(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Gather along the contracted dim."""
    return env.gather(x, 1) @ w


@form(lambda r: ((3, 8, 64 // r), (48, 64)), GATHERED)
def gather_k_3d(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(env.gather(x, 2), w)


@form(lambda r: ((8, 64), (8 * r, 48)), GATHERED)
def gather_contracted(env: Env, x: Tensor, y: Tensor) -> Tensor:
    """Weight gradient: G^T y."""
    return env.gather(x).t() @ y


@form(lambda r: ((24, 64), (64 // r, 48)), GATHERED)
def gather_weight(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Gather the right operand along its rows (ZeRO-3 with [in, out] weights)."""
    return x @ env.gather(w)


@form(lambda r: ((8, 64), (64, 48)), refused(GATHERED, "order", "order"))
def gather_permuted(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """A gather with permuted shards must not be matched as a plain gather."""
    raw = funcol.all_gather_tensor_autograd(x.view(2, 4, 64), 0, env.group)
    return torch.cat(list(raw.split(2))[::-1], 1).view(-1, 64) @ w


@form(lambda r: ((2, 8, 64), (64, 48)), refused(GATHERED, "bounds", "bounds"))
def gather_wrong_bounds(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Overlapping slices with the right shapes, the first one repeated, must not be matched as a plain gather."""
    raw = env.gather(x)
    pieces = [raw[2 * s : 2 * s + 2] for s in range(env.world)]
    return torch.cat([pieces[0], *pieces[:-1]], 1) @ w


@form(lambda r: ((2, 8, 64), (64, 48)), refused(GATHERED, "bounds", "bounds"))
def gather_shifted(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Slices that are shifted by one row must not be matched as a plain gather."""
    raw = env.gather(x)
    pieces = [raw[min(2 * s + 1, 2 * env.world - 2) : min(2 * s + 3, 2 * env.world)] for s in range(env.world)]
    return torch.cat(pieces, 1) @ w


@form(lambda r: ((2, 8, 64), (64, 48)), refused(GATHERED, "trim", "padded"))
def gather_trimmed(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Gather along dim 1 of padded shards, with the padding trimmed."""
    whole = env.gather(x, 1)
    return whole[:, : 8 * env.world - 3] @ w


@form(lambda r: ((8, 64), (64, 48)), refused(GATHERED, "trim", "padded"))
def gather_trimmed_rows(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.gather(x)[:-1] @ w


@form(lambda r: ((8, 64), (64, 64)), refused(GATHERED, "depends on itself"))
def gather_squared(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Both operands are the same gathered tensor."""
    g = env.gather(x)
    return g @ g.t()


@form(lambda r: ((8, 64), (64, 48)), Expected(Sites(plain_gather=1), Sites(plain_scatter=1)))
def gather_without_matmul(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return (env.gather(x) * 2.0).relu() + (w.sum() * 0.0)


@form(lambda r: ((8, 64), (64, 48)), Expected(Sites(gather=1), Sites()), inference=True)
def gather_in_place(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Gather in the legacy in-place form."""
    out = x.new_empty(x.shape[0] * env.world, x.shape[1])
    dist.all_gather_into_tensor(out, x)
    return out @ w


@form(lambda r: ((8 * r, 64), (64, 48)), Expected(Sites(scatter=1), Sites()), inference=True)
def scatter_in_place(env: Env, x: Tensor, w: Tensor) -> Tensor:
    full = x @ w
    out = full.new_empty(full.shape[0] // env.world, full.shape[1])
    dist.reduce_scatter_tensor(out, full)
    return out


# ---- matmul -> reduce_scatter


@form(lambda r: ((8 * r, 32), (32, 64)), SCATTERED)
def mm_scatter(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.scatter(x @ w)


@form(lambda r: ((8 * r, 32), (32, 64)), Expected(RS_FORWARD), inference=True)
def mm_scatter_avg(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Reduce-scatter with average, for which torch has no backward."""
    return env.scatter(x @ w, 0, "avg")


@form(lambda r: ((8 * r, 32), (64, 32), (64,)), SCATTERED)
def linear_bias_scatter(env: Env, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return env.scatter(torch.nn.functional.linear(x, w, b))


@form(lambda r: ((3, 8 * r, 32), (64, 32)), SCATTERED)
def linear_scatter_dim1(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.scatter(torch.nn.functional.linear(x, w), 1)


@form(lambda r: ((1, 8 * r, 32), (64, 32)), SCATTERED)
def linear_scatter_dim1_one(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.scatter(torch.nn.functional.linear(x, w), 1)


@form(lambda r: ((16, 32), (32, 64)), SCATTERED)
def mm_scatter_n(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Reduce-scatter along the columns."""
    return env.scatter(x @ w, 1)


@form(lambda r: ((8 * r, 32), (32, 64), (8 * r, 48), (48, 64)), SCATTERED)
def two_mm_scatter(env: Env, x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return env.scatter(x @ w + y @ v)


@form(lambda r: ((8 * r, 32), (32, 64), (8 * r, 48), (48, 64)), SCATTERED)
def addmm_scatter(env: Env, x: Tensor, w: Tensor, y: Tensor, v: Tensor) -> Tensor:
    return env.scatter(torch.addmm(x @ w, y, v))


@form(lambda r: ((2, 8 * r, 32), (64, 32), (64, 32), (64, 32)), SCATTERED)
def three_linear_scatter(env: Env, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    linear = torch.nn.functional.linear
    return env.scatter(linear(x, a) + linear(x, b) + linear(x, c), 1)


@form(lambda r: ((8 * r, 32), (32, 64), (8 * r, 64)), SCATTERED)
def residual_scatter(env: Env, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
    return env.scatter(x @ w + residual)


@form(lambda r: ((8 * r, 32), (32, 64)), refused(SCATTERED, backward="scaled"))
def scaled_scatter(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.scatter((x @ w) * 0.25)


@form(lambda r: ((8 * r, 32), (32, 64)), refused(SCATTERED, backward="scaled"))
def divided_scatter(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.scatter((x @ w) / 8)


@form(lambda r: ((8 * r, 32), (32, 64)), SCATTERED)
def cast_scatter(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Low-precision matmul with a high-precision sum (mixed-precision weight gradients)."""
    return env.scatter((x.to(env.low) @ w.to(env.low)).to(env.high))


@form(lambda r: ((8 * r, 32), (32, 64)), refused(SCATTERED, "nonlinear", "masked"))
def relu_scatter(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """A relu before the scatter must not be matched: it is row-wise but does not commute with the sum."""
    return env.scatter((x @ w).relu())


@form(lambda r: ((8 * r, 32), (32, 64)), refused(SCATTERED, backward="added"))
def mm_scatter_users(env: Env, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The matmul's result is also an output."""
    product = x @ w
    return env.scatter(product), product


@form(lambda r: ((8 * r, 32), (32, 64)), SCATTERED)
def mm_scatter_result_users(env: Env, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    out = env.scatter(x @ w)
    return out.relu(), out * 2.0, out


@form(lambda r: ((3, 8 * r, 32), (64, 32)), refused(SCATTERED, "order", "order"))
def scatter_permuted(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """A scatter of blocks in reverse order must not be matched as a plain scatter."""
    product = torch.nn.functional.linear(x, w)
    return env.scatter(torch.cat(list(product.chunk(env.world, 1))[::-1]))


@form(lambda r: ((3, 8 * r, 32), (64, 32)), refused(SCATTERED, "bounds", "bounds"))
def scatter_wrong_bounds(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """A scatter that sends one block to all ranks must not be matched as a plain scatter."""
    product = torch.nn.functional.linear(x, w)
    return env.scatter(torch.cat([product[:, :8]] * env.world))


@form(lambda r: ((8 * r - 3, 32), (32, 64)), refused(SCATTERED, "padded", "trim"))
def scatter_padded(env: Env, x: Tensor, w: Tensor) -> Tensor:
    """Rows are padded to a multiple of the ranks before the scatter."""
    return env.scatter(torch.nn.functional.pad(x @ w, (0, 0, 0, 3)))


# ---- matmul -> all_reduce


@form(lambda r: ((16, 32), (32, 64)), Expected(Sites(reduce=1), Sites()), inference=True)
def mm_reduce(env: Env, x: Tensor, w: Tensor) -> Tensor:
    return env.reduce(x @ w)


@form(lambda r: ((16, 32), (32, 64), (32, 64)), Expected(Sites(reduce=1, merged=1), Sites()), inference=True)
def two_reduces(env: Env, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Two all_reduces merge: all_reduce(a) + all_reduce(b) = all_reduce(a + b)."""
    return env.reduce(x @ w) + env.reduce(x @ v)


@form(lambda r: ((16, 32), (32, 64), (32, 64), (32, 64)), Expected(Sites(reduce=1, merged=2), Sites()), inference=True)
def three_reduces(env: Env, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return env.reduce(x @ a) + env.reduce(x @ b) + env.reduce(x @ c)


@form(lambda r: ((16, 32), (32, 64), (32, 64)), Expected(Sites(reduce=2), Sites()), inference=True)
def two_reduces_apart(env: Env, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two all_reduces stay if one of the summed results has another user."""
    a, b = env.reduce(x @ w), env.reduce(x @ v)
    return a + b, a.relu()


@form(lambda r: ((8 * r, 32), (32, 64), (32, 64)), Expected(Sites(scatter=1, merged_scatters=1)), inference=True)
def two_scatters(env: Env, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Two reduce_scatters merge: reduce_scatter(a) + reduce_scatter(b) = reduce_scatter(a + b)."""
    return env.scatter(x @ w) + env.scatter(x @ v)


@form(lambda r: ((3, 8 * r, 32), *[(64, 32)] * 3), Expected(Sites(scatter=1, merged_scatters=2)), inference=True)
def three_scatters_dim1(env: Env, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    linear = torch.nn.functional.linear
    return env.scatter(linear(x, a), 1) + env.scatter(linear(x, b), 1) + env.scatter(linear(x, c), 1)


@form(lambda r: ((8 * r, 32), (32, 64), (32, 64)), Expected(Sites(scatter=2)), inference=True)
def two_scatters_apart(env: Env, x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Two reduce_scatters stay if one of the summed results has another user."""
    a, b = env.scatter(x @ w), env.scatter(x @ v)
    return a + b, a.relu()


@form(lambda r: ((8, 64), (64, 48), (64, 32)), Expected(Sites(gather=1, merged_gathers=1)), inference=True)
def two_gathers(env: Env, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Two all_gathers of one tensor merge."""
    return env.gather(x) @ a, env.gather(x) @ b


# ---- bulk


@form(lambda r: ((8, 64), (48, 32), (32, 64)), Expected(Sites(plain_gather=1), Sites(plain_scatter=1)))
def bulk_gather(env: Env, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """All-gather with an independent matmul."""
    return env.gather(x) * 2.0, a @ b


class Single(nn.Module):
    """Module of one form."""

    def __init__(self, function: Function, env: Env, inference: bool) -> None:
        super().__init__()
        self.function, self.env, self.inference = function, env, inference

    def forward(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.function(self.env, *tensors)


def build(
    rank: int,
    world: int,
    name: str = "gather_mm",
    dtype: torch.dtype = torch.float32,
    exact: bool = False,
    dynamic: bool | None = None,
) -> Case:
    """Build one of FORMS on all ranks. Inputs are leaves with gradients, except for forms without a backward."""
    chosen = FORMS[name]
    high = torch.float64 if exact else dtype
    env = Env(rank, world, dist.group.WORLD.group_name, torch.float64 if exact else torch.bfloat16, high)
    shapes = chosen.shapes(world)
    inputs = tuple(noise(s, 100 * rank + i, dtype, exact, grad=not chosen.inference) for i, s in enumerate(shapes))
    return Case(Single(chosen.function, env, chosen.inference), inputs, chosen.expected, dynamic=dynamic)
