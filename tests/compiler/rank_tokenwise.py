"""Tokenwise layers that run on the ranks: cases for tests.models.compare, the example's layer, and choices for large layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ub_overlap
from examples.expert_parallel.model import MoELayer
from examples.expert_parallel.model import build as build_layers
from tests.models import moe
from tests.models.case import Case, Expected, noise, settle
from tests.models.compare import Comparison, compare, error, uncached
from tests.runtime.rank_failures import attempt, fresh
from tests.runtime.rank_sessions import reset
from ub_overlap import _torch_compat as compat
from ub_overlap.compiler.options import parse
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.compiler.tokens import choose_halves
from ub_overlap.compiler.tokens.trace_layer import TracedTokens
from ub_overlap.runtime import settings

FORCE: dict[str, Any] = {"inner": "aot_eager", "split_tokens": "force"}
SPLIT: dict[str, Any] = {**FORCE, "overrides": [{"kind": "all_to_all", "strategy": "split"}]}


def build(
    rank: int, world: int, kind: str = "moe", exact: bool = False, tokens: tuple[int, ...] = (24,), **variant: Any
) -> Case:
    """Return a case whose module is tokenwise.

    `kind`: "moe", the block of tests/models/moe.py, with `tokens` of each rank; or a block of transformers with this rank's
    experts in float32, with `tokens` [B, S]. `variant`: of moe.build.
    """
    if kind == "moe":
        case = moe.build(rank, world, tokens=tokens * (world // len(tokens)), exact=exact, **variant)
        ub_overlap.tokenwise(case.module, arguments=2)
        return case
    from tests.models.hf_moe import WIDTH, RankExperts, make_block

    group = dist.group.WORLD
    assert group is not None
    block = make_block(kind)
    block.experts = RankExperts(block.experts, group)
    settle(block, torch.float32, exact)
    ub_overlap.tokenwise(block)
    x = noise((*tokens, WIDTH), 100 + rank, torch.float32, exact)
    return Case(block, (x,), Expected(), context=lambda: compat.dynamo_config.patch(capture_scalar_outputs=True))


def compare_split(
    rank: int, world: int, variant: dict[str, Any], options: dict[str, Any] = SPLIT, device: torch.device | str = "cpu"
) -> tuple[Comparison, list[str]]:
    """Compare one case with eager. Return the form of each tokenwise layer as well."""
    mark = HISTORY.mark()
    found = compare(rank, world, __name__, variant, options, device=device)
    return found, forms_since(mark)


def forms_since(mark: int) -> list[str]:
    return [str(choice).partition(": ")[2] for choice in HISTORY.token_splits(mark)]


@dataclass(frozen=True)
class Found:
    """Errors of a compiled layer of the example against the plain one, by name; exchanges of each graph; forms of layers."""

    errors: dict[str, float]
    exchanges: list[int]
    forms: list[str]


def compare_example(
    rank: int, world: int, tokens: Sequence[int], options: dict[str, Any], dynamic: bool | None = None
) -> Found:
    """Run the example's layer for each number of tokens, and once without gradients."""
    group = dist.group.WORLD
    (plain,), (layer,) = (build_layers(32, 48, 8, 2, 1, group) for _ in range(2))
    ub_overlap.tokenwise(layer)
    errors: dict[str, float] = {}
    mark = HISTORY.mark()
    with uncached(), compat.dynamo_config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(layer, backend="ub_overlap", fullgraph=True, dynamic=dynamic, options=options)
        for n in tokens:
            x = torch.randn(n, 32, generator=torch.Generator().manual_seed(n + rank))
            ours, truth = (_outputs(f, module, x) for f, module in ((compiled, layer), (plain, plain)))
            errors |= {f"{n}: {name}": error(ours[name], truth[name], name) for name in truth}
        with torch.no_grad():
            errors["no_grad"] = error(compiled(x), plain(x), "no_grad")
    exchanges = [sum(d.kind.value == "all_to_all" for d in plan.decisions) for plan in HISTORY.since(mark)]
    return Found(errors, exchanges, forms_since(mark))


def _outputs(layer: Any, module: Any, values: Tensor) -> dict[str, Tensor | None]:
    """Return the result of `layer` and the gradients of the input and the parameters, which are those of `module`."""
    x = values.clone().requires_grad_()
    module.zero_grad()
    out = layer(x)
    out.square().sum().backward()
    return {"out": out.detach(), "x.grad": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def compile_unlike(rank: int, world: int, tokens: tuple[int, ...]) -> dict[str, Any]:
    """Run a layer on ranks with other numbers of tokens. Return the error."""
    with reset():
        settings.configure(init_timeout_s=60, step_timeout_s=60)
        layer = ub_overlap.tokenwise(MoELayer(32, 48, 8, 2, compat.group_of(fresh(world))))
        with uncached(), torch.no_grad(), compat.dynamo_config.patch(capture_scalar_outputs=True):
            compiled = torch.compile(layer, backend="ub_overlap", fullgraph=True, options=SPLIT)
            return attempt(lambda: compiled(torch.randn(tokens[rank], 32)))


# --- choices for large layers, which are traced and not run -------------------------------------------------------------

TOKENS, WIDTH, HIDDEN, EXPERTS = 16384, 2048, 768, 8


def choose_on(rank: int, world: int, hosts: str) -> tuple[int, float, float]:
    """Return (dim, microseconds of the whole layer, of halves) for a group on declared hosts."""
    with reset():
        settings.configure(hosts=hosts)
        groups = moe.Groups(compat.group_of(fresh(world)))
        layer = moe.MoE(moe.Sizes(WIDTH, HIDDEN, EXPERTS), groups, "grouped", shared=False).bfloat16()
        cpu = torch.device("cpu")
        given = [TracedTokens((TOKENS, n), torch.bfloat16, cpu, grad) for n, grad in ((WIDTH, True), (EXPERTS, False))]
        choose_halves._CHOSEN.clear()
        choice = choose_halves._choose(ub_overlap.tokenwise(layer), tuple(given), parse({"profile": "h200"}, frozenset())[0])
        return choice.dim, choice.whole_us, choice.halves_us
