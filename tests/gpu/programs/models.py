"""The catalogue of tests/models through torch.compile: numbers against float64 and against the unfused graph, and the sites
that the models' structure (and so the CPU) has.

    torchrun --nproc-per-node 4 tests/gpu/programs/models.py [--quick] [--budget 300] [--only TEXT] [--device cpu]

Rows are ordered by what they tell; those that do not fit into the budget are marked "not run", never dropped.
"""

# ruff: noqa: E402   the path comes first

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[3])

from tests.gpu.frame import Frame, Result, Skip  # isort: skip

import torch

from tests.models.catalogue import DTENSOR, EXTERNAL, FSDP, MEGATRON, MESH, ODD, SINGLE, Named, unfit
from tests.models.compare import compare
from ub_overlap.runtime.session import session

EAGER, INDUCTOR = {"overlap": "force", "inner": "aot_eager"}, {"overlap": "force"}
FIRST = (
    "llama_b2",
    "mlp_dim0",
    "mlp_gated_bias",
    "mlp_reduce_gated",
    "fsdp_2d",
    "gather_k",
    "mm_scatter_n",
    "gather_other_user",
)
INNER = ("llama_b2", "mlp_gated_bias", "fsdp_mixed_2d", "mlp_reduce_gated", "llama_dynamic")
LOW = ("llama_b2", "mlp_gated_bias", "mlp_dim1", "mlp_reduce_gated", "gather_k", "mm_scatter_n")


def run(frame: Frame, entry: tuple[str, dict[str, Any]], options: dict[str, Any], group: str) -> str:
    module, variant = entry
    torch._dynamo.reset()
    outcome = compare(frame.rank, frame.ranks, module, dict(variant), dict(options), device=frame.device)
    frame.sync()
    session.check()
    outcome.check()
    outcome.check_sites()
    counts = Counter(d["kind"] for d in outcome.decisions if d["strategy"].partition(":")[0] in ("pipelined", "bulk"))
    sites = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())) or "no sites"
    worst = max((pair[1] for pair in outcome.errors.values()), default=0.0)
    eager = max((pair[0] for pair in outcome.errors.values()), default=0.0)
    return f"{sites}; error {worst:.2g}, eager {eager:.2g}"


def work(frame: Frame) -> list[tuple[str, tuple[str, dict[str, Any]], dict[str, Any]]]:
    """(row, case, options), the most telling first."""
    quick = frame.options.quick
    every: Named = {**DTENSOR, **MEGATRON, **FSDP, **SINGLE}
    if frame.ranks not in (2, 4, 8):
        return [(f"{name} aot_eager", every[name], EAGER) for name in ODD]
    found = [(f"{name} aot_eager", every[name], EAGER) for name in FIRST]
    found += [(f"{name} inductor", every[name], INDUCTOR) for name in (INNER[:2] if quick else INNER)]
    for dtype in (torch.bfloat16,) if quick else (torch.bfloat16, torch.float16):
        for name in LOW[:2] if quick else LOW:
            module, variant = every[name]
            found.append((f"{name} {str(dtype)[6:]} aot_eager", (module, {**variant, "dtype": dtype}), EAGER))
    if frame.ranks == 4:
        found += [(f"{name} aot_eager", entry, EAGER) for name, entry in MESH.items()]
    if not quick:
        module, variant = every["llama_b2"]
        for chunks in (1, 2, 2 * frame.ranks):
            found.append((f"llama_b2 chunks={chunks}", (module, variant), {**EAGER, "chunks": chunks}))
        found += [(f"{name} aot_eager", entry, EAGER) for name, entry in every.items() if name not in FIRST]
    return found


def package_of(name: str) -> str:
    """Why a foreign package's model cannot run here; "" where it can."""
    package = "transformers" if name.startswith("hf") else "torchtitan"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return f"torch {torch.__version__} is too old for torchtitan" if package == "torchtitan" and version < (2, 12) else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--budget", type=float, default=0, help="seconds; default 600, 120 with --quick")
    with Frame("models", parser, step_timeout_s=40) as frame:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        end = time.monotonic() + (frame.options.budget or (120 if frame.options.quick else 600))

        def row(name: str, entry: tuple[str, dict[str, Any]], options: dict[str, Any], why: str) -> None:
            over = any(frame.gather(time.monotonic() > end))  # all ranks alike

            def body(group: str) -> Any:
                if why:
                    raise Skip(why)
                return Result("not run", "over the budget") if over else run(frame, entry, options, group)

            frame.row(name, body, 120)

        for name, entry, options in work(frame):
            row(name, entry, options, unfit(name.split()[0]))
        if not frame.options.quick and frame.ranks in (2, 4):
            # torchtitan after transformers in one process breaks the partitioner: its own rows come first, in another run.
            for name, entry in EXTERNAL.items():
                if name.startswith("hf"):
                    row(f"{name} aot_eager", entry, EAGER, package_of(name))
    return frame.code


if __name__ == "__main__":
    sys.exit(main())
