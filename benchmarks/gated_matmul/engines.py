"""The matmuls that are compared: cuBLAS whole and in pieces, our CUTLASS kernel, QuACK's where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from .clock import quick, quick_replay
from .library import ORDERS, Instance, KernelLibrary, Order
from .shapes import Shape

QUACK_CONFIGS = (
    (128, 192, 2, 1, True),
    (128, 256, 2, 1, False),
    (256, 128, 2, 1, False),
    (256, 192, 2, 1, False),
    (128, 128, 2, 1, True),
)
"""Tile, cluster, whether pingpong."""


@dataclass(frozen=True)
class RandomMatmul:
    """Random operands of a shape, and room for the result."""

    shape: Shape
    a: Tensor
    b: Tensor
    out: Tensor

    @classmethod
    def random(cls, shape: Shape) -> RandomMatmul:
        made = torch.Generator("cuda").manual_seed(shape.m + shape.n + shape.k)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=made, device="cuda", dtype=torch.bfloat16)

        return cls(shape, draw(shape.m, shape.k), draw(shape.n, shape.k), draw(shape.m, shape.n))

    def whole(self) -> None:
        torch.mm(self.a, self.b.t(), out=self.out)

    def rows(self, first: int, end: int) -> None:
        """One cuBLAS matmul of the shards `first` to `end`."""
        size = self.shape.rows
        torch.mm(self.a[first * size : end * size], self.b.t(), out=self.out[first * size : end * size])

    def pieces(self) -> None:
        for shard in range(self.shape.ranks):
            self.rows(shard, shard + 1)

    def expected(self) -> Tensor:
        """In fp32."""
        return self.a.float() @ self.b.float().t()

    def error(self, expected: Tensor) -> float:
        """Of `out`, relative; not finite where an element is not."""
        return float((self.out.float() - expected).norm() / expected.norm())


Choice = tuple[Instance, Order]


def describe(choice: Choice) -> str:
    instance, order = choice
    return f"{instance.name} {'N' if order.along_n else 'M'}{order.swizzle}"


def described(library: KernelLibrary, text: str) -> Choice:
    """Return the choice of a description."""
    name, order = text.split()
    instance = next(x for x in library.instances if x.name == name)
    return instance, Order(order[0] == "N", int(order[1:]))


def ranked(library: KernelLibrary, x: RandomMatmul, shards: int, count: int = 3) -> list[tuple[float, Choice]]:
    """Return all kernels that take the shape, fastest first, with microseconds of a short run."""
    found = []
    for instance in library.instances:
        for order in ORDERS:
            if not library.matmul(instance, order, x.a, x.b, x.out, shards):
                break

            def body(instance: Instance = instance, order: Order = order) -> object:
                return library.matmul(instance, order, x.a, x.b, x.out, shards)

            found.append((quick(body, count), (instance, order)))
    return sorted(found, key=lambda pair: pair[0])


def distinct(found: list[tuple[float, Choice]], count: int) -> Iterator[Choice]:
    """Yield the first `count` choices of different instances."""
    seen: set[str] = set()
    for _, choice in found:
        if choice[0].name not in seen and len(seen) < count:
            seen.add(choice[0].name)
            yield choice


class Quack:
    """QuACK's matmul (quack-kernels), with its gate for gathered operands."""

    def __init__(self) -> None:
        module: Any = import_module("quack.gemm")
        self._gemm, self._arguments = module.gemm, module.AllGatherArguments
        self._epoch = torch.full((1,), 0x01010101, dtype=torch.int32, device="cuda")

    def body(
        self, config: tuple[int, int, int, int, bool], x: RandomMatmul, flags: Tensor | None = None, swizzle: int = 8
    ) -> Callable[[], Any]:
        """Return the call. `flags`: one a shard, of bytes 1 once it has arrived."""
        tile_m, tile_n, cluster_m, cluster_n, pingpong = config
        gate = None if flags is None else self._arguments(flags, self._epoch, flags.numel(), 0)

        def call() -> None:
            self._gemm(
                x.a, x.b, x.out, None, None, tile_m, tile_n, cluster_m, cluster_n,
                pingpong=pingpong, max_swizzle_size=swizzle, ag_args=gate,
            )  # fmt: skip

        return call

    def ranked(
        self, x: RandomMatmul, flags: Tensor | None = None, count: int = 3
    ) -> list[tuple[float, str, Callable[[], Any]]]:
        """Return what takes the shape, fastest first: microseconds, name, call. `flags`: all have arrived."""
        found = []
        for config in QUACK_CONFIGS:
            for swizzle in (1, 8):
                try:
                    body = self.body(config, x, flags, swizzle)
                    name = f"{'ping' if config[4] else 'coop'}_{config[0]}x{config[1]}_{config[2]}x{config[3]} {swizzle}"
                    found.append((quick_replay(body, count), name, body))
                except Exception as error:  # noqa: BLE001
                    print(f"quack {config} refuses {x.shape.name}: {type(error).__name__} {str(error)[:200]}", flush=True)
                    break
        return sorted(found, key=lambda item: item[0])


def quack() -> Quack | None:
    """Return QuACK's engine, None where it is missing."""
    try:
        return Quack()
    except ImportError as error:
        print(f"no QuACK: {error}", flush=True)
        return None
