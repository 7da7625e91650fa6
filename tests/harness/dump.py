"""Write the graphs of cases to text files.

python -m tests.harness.dump FOLDER tests.models.dtensor_llama name world key=value ...
"""

from __future__ import annotations

import ast
import collections
import importlib
import sys
from pathlib import Path
from typing import Any

from tests.harness.ranks import RankDied, RankError, RankPool, RankTimeout
from tests.harness.traces import capture

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")


def counts(module: Any) -> dict[str, int]:
    """Count the collectives and matmuls of a graph by operator name."""
    names = [str(node.target).split("(")[0] for node in module.graph.nodes if node.op == "call_function"]
    kept = [n for n in names if any(c in n for c in COLLECTIVES) or n.split(".")[-2:-1] in (["mm"], ["addmm"], ["bmm"])]
    return dict(collections.Counter(kept))


def dump(
    rank: int, world: int, module: str, variant: dict[str, Any], stages: tuple[str, ...]
) -> list[tuple[str, str, dict[str, int], str]]:
    """Return (stage, phase, counts, text) of each graph."""
    import torch

    found = []
    for stage in stages:
        torch._dynamo.reset()
        case = importlib.import_module(module).build(rank, world, **variant)
        for trace in capture(case, stage):
            found.append((stage, trace.phase, counts(trace.module), trace.text if rank == 0 else ""))
    return [("expected", "", {}, str(case.expected)), *found]


def write(
    pool: RankPool, folder: str, module: str, name: str, variant: dict[str, Any], stages: tuple[str, ...] = ("aot", "inductor")
) -> None:
    """Write the graphs of rank 0 to FOLDER/<name>.txt, and print one line per graph."""
    lines = [f"# {module} {variant} world {pool.world}"]
    try:
        for stage, phase, count, text in pool.run(dump, module, variant, stages, timeout=120)[0]:
            print(f"{name:28} {stage:9} {phase:9} {count or text}", flush=True)
            lines += [f"\n# ==== {stage} {phase} {count}", text]
    except (RankError, RankDied, RankTimeout) as error:
        print(f"{name:28} FAILED {str(error)[-1500:]}", flush=True)
        lines.append(str(error))
    Path(folder).mkdir(parents=True, exist_ok=True)
    Path(folder, f"{name}.txt").write_text("\n".join(lines))


def main(argv: list[str]) -> None:
    folder, module, name, world, *pairs = argv
    variant = {key: ast.literal_eval(value) for key, _, value in (pair.partition("=") for pair in pairs)}
    with RankPool(int(world)) as pool:
        write(pool, folder, module, name, variant)


if __name__ == "__main__":
    main(sys.argv[1:])
