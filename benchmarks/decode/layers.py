"""Time layers of a decode step: compute alone, Inductor with NCCL, Inductor with torch's symmetric memory, and ours.

compute    the products are not summed
inductor   torch.compile: all_reduces by NCCL, residual and norm by Inductor
torch      the same with Inductor's option that selects one-shot all_reduces of torch's symmetric memory
ours       backend="ub_overlap"

Microseconds per layer. Hidden = (inductor - variant) / (inductor - compute).
"""

from __future__ import annotations

import argparse
import gc
import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

import ub_overlap
from ub_overlap.compiler.reports.history import HISTORY
from ub_overlap.tools.rank_process import World

from ..blocks.model import SIZES
from ..bounds import GRADIENT
from ..variant_run import VariantRun
from .model import DecodeModel, make_layers, with_reduce
from .table import BASELINE, text


@dataclass
class DecodeVariant:
    """A compiled model with its input. `sites`: the strategies of its collectives, e.g. "16 one_shot"."""

    call: Any
    x: Tensor
    sites: str = ""

    def step(self) -> Tensor:
        with torch.no_grad():
            return self.call(self.x)


class LayersRun(VariantRun):
    """One run over sizes and batches."""

    def __init__(self, args: argparse.Namespace, world: World, document: dict[str, Any]) -> None:
        super().__init__(args, world, document, text)
        self.dtype = torch.bfloat16 if world.cuda else torch.float32
        self.group = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
        self.compiler = "inductor" if world.cuda else "aot_eager"

    def size(self, size: str) -> None:
        """Measure all batches of one model size. Its weights are made once."""
        world, args = self.world, self.args
        if math.gcd(SIZES[size].kv_heads, world.ranks) < world.ranks:
            world.say(f"{size}: {SIZES[size].kv_heads} key and value heads for {world.ranks} ranks")
            return
        with self.deadline(f"weights of {size}"):
            torch.manual_seed(1 + world.rank)
            model = make_layers(SIZES[size], world.ranks, args.layers, world.device, self.dtype)
            if args.pack_weights:  # in place; the other variants do not look where their weights lie
                ub_overlap.pack(model)
        for batch in args.batches:
            if self.is_spent():
                world.say(f"--budget-s {args.budget_s:g} is spent: no batch {batch} of {size}")
                return
            self.batch(size, model, batch)
            self.save()
            gc.collect()

    def batch(self, size: str, model: DecodeModel, batch: int) -> None:
        args, world = self.args, self.world
        for layer in model.layers:
            layer.make_cache(batch, args.context)
        x = torch.randn(batch, 1, SIZES[size].dim, device=world.device).to(self.dtype)
        dist.broadcast(x, 0)
        rows: dict[str, Any] = {}
        self.document["layers"].append(
            {"size": size, "batch": batch, "layers": args.layers, "context": args.context, "variants": rows}
        )
        torch._dynamo.reset()
        variants: dict[str, DecodeVariant] = {}
        for name in ("compute", BASELINE, "torch", *args.options):
            rows[name] = {"why": {}}
            if name == "torch" and not world.cuda:
                rows[name]["why"]["*"] = "needs CUDA"
                continue
            self.compile(name, lambda n=name: self.make(n, model, x), variants, rows)
        self.compare(variants, rows)
        calls = {f"{name} step": variant.step for name, variant in variants.items()}
        self.rounds(calls, rows)
        self.capture(calls, rows)

    def make(self, name: str, model: DecodeModel, x: Tensor) -> DecodeVariant:
        """Return a compiled variant that has run once."""
        if name == "compute":
            return DecodeVariant(self.inductor(with_reduce(model, lambda partial: partial)), x)
        summing = with_reduce(model, lambda partial: funcol.all_reduce(partial, "sum", self.group))
        if name == BASELINE:
            return DecodeVariant(self.inductor(summing), x)
        if name == "torch":
            from torch.distributed._symmetric_memory import enable_symm_mem_for_group

            enable_symm_mem_for_group(self.group)
            # Inductor draws the names of its persistent buffers from `random`, whose state Dynamo restores after each
            # compilation: graphs of two batches would share names, and torch refuses buffers of other sizes.
            random.seed(str(x.shape))
            return DecodeVariant(torch.compile(summing, fullgraph=True, options={"_collective.auto_select": True}), x)
        options = {**self.args.options[name]} | ({} if self.world.cuda else {"inner": "aot_eager"})
        variant = DecodeVariant(torch.compile(summing, backend="ub_overlap", fullgraph=True, options=options), x)
        mark = HISTORY.mark()
        variant.step()
        counts = Counter(str(d.strategy) for plan in HISTORY.since(mark) for d in plan.decisions)
        variant.sites = ", ".join(f"{count} {strategy}" for strategy, count in sorted(counts.items()))
        return variant

    def inductor(self, model: nn.Module) -> Any:
        return torch.compile(model, backend=self.compiler, fullgraph=True)

    def compare(self, variants: dict[str, DecodeVariant], rows: dict[str, Any]) -> None:
        """Compare results with inductor's. A variant with wrong numbers gets no times."""
        if BASELINE not in variants:
            return
        expected = variants[BASELINE].step().float().clone()
        for name in [n for n in variants if n not in ("compute", BASELINE)]:

            def error(name: str = name) -> dict[str, float]:
                far = (variants[name].step().float() - expected).norm() / expected.norm().clamp_min(1e-30)
                return {"result": self.world.worst([1e9 if far.isnan() else far.item()])[0]}

            with self.deadline(f"compare {name}"):
                errors, why = self.world.agreed(error)
            self.remove_wrong(name, errors, why, GRADIENT[self.dtype], variants, rows)
