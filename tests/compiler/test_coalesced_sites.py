"""Coalesced collectives in compiled graphs, on ranks: bits of the plain graph, gradients of eager code, generated code."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.compiler.rank_buckets import buckets, run_blocks
from tests.compiler.rank_coalesced_sites import code_of, run_graph, run_model
from tests.harness.ranks import RankPool
from tests.harness.tiers import in_full


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", in_full("all_reduce")])
def test_results_on_ranks(pool2: RankPool, collective: str) -> None:
    """Parts of several sizes and types, with casts in front and scalings behind, give what the plain graph gives."""
    assert pool2.run(run_graph, collective) == [""] * 2


@pytest.mark.tier("full")
def test_four_ranks(pool4: RankPool) -> None:
    assert pool4.run(run_graph, "all_gather") == pool4.run(run_graph, "reduce_scatter") == [""] * 4


@pytest.mark.parametrize(
    "options",
    [
        in_full({"inner": "aot_eager"}),
        in_full({"memory_budget": 0}),
        in_full({"inner": "aot_eager", "verify": True, "memory_budget": 0}),
        {"inner": "aot_eager", "memory_budget": 0, "zero_copy": "auto"},
        in_full({"memory_budget": 0, "zero_copy": "auto"}),
        in_full({"memory_budget": 0, "zero_copy": "auto", "cpp_wrapper": True}),
    ],
    ids=["aot_eager", "inductor", "verify", "zero-copy", "zero-copy inductor", "zero-copy C++ wrapper"],
)
def test_blocks(pool2: RankPool, options: dict[str, Any]) -> None:
    """Weights, biases and norms of a compiled model: two steps with the gradients of eager code."""
    assert pool2.run(run_blocks, options, "cpu", 1024) == [""] * 2


@pytest.mark.tier("full")
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{"inner": "aot_eager"}, {"inner": "inductor"}, {"inner": "aot_eager", "memory_budget": 0}],
    ids=["aot_eager", "inductor", "regather"],
)
def test_sharded_llama(pool2: RankPool, pool3: RankPool, ranks: int, options: dict[str, Any]) -> None:
    """All parameters of a model in one gather, all gradients in one reduction. By 3 ranks shards are uneven, and padded."""
    found = {2: pool2, 3: pool3}[ranks].run(run_model, {"mixed": "memory_budget" not in options}, options)
    for outcome, names in found:
        outcome.check(3.0)
        assert names == found[0][1] and "-" not in names
        assert len(set(names)) == (3 if "memory_budget" in options else 2)


@pytest.mark.tier("full")
def test_hybrid_sharding(pool4: RankPool) -> None:
    """Groups of shards and of replicas have buckets of their own."""
    for outcome, names in pool4.run(run_model, {"mode": "hybrid_shard"}, {"inner": "aot_eager"}):
        outcome.check()
        assert len(set(names) - {"-"}) == 2  # a reduction over shards waits for one over replicas


@pytest.mark.tier("full")
@pytest.mark.parametrize("cpp_wrapper", [False, True])
def test_generated_code(pool2: RankPool, cpp_wrapper: bool) -> None:
    """One start and one finish for each bucket, a finish reads the buffers of its start, and matmuls run in between."""
    hidden: list[bool] = []
    for programs, plans in pool2.run(code_of, cpp_wrapper, timeout=300):
        joined = {name for plan in plans for name in buckets(plan.decisions)}
        assert programs
        for text in [] if cpp_wrapper else programs:
            lines = text[text.index("def call(") :].splitlines()
            starts, finishes = calls(lines, "start"), calls(lines, "finish")
            assert starts.keys() == finishes.keys() and {name.rpartition("/")[2] for name in starts} <= joined
            for site, (begin, inputs) in starts.items():
                end, again = finishes[site]
                assert inputs == again and len(inputs) > 1
                between = lines[begin + 1 : end]
                hidden.append(any("extern_kernels" in line for line in between))
                for name in (n for text in inputs for n in re.findall(r"\b(?:buf|primals_|tangents_|arg)\w+", text)):
                    assert not any(re.search(rf"= {name}; del|\bdel {name}\b|out={name}\b", line) for line in between), name
    assert cpp_wrapper or sum(hidden) >= 2


def calls(lines: list[str], op: str) -> dict[str, tuple[int, list[str]]]:
    """Return by site the line of the call of `op`, and its inputs."""
    found = {}
    for number, line in enumerate(lines):
        if m := re.search(rf"{op}_coalesced\.default\((?:\w+, )?\[(.*?)\], '(?:all|reduce).*'([\w-]+/\w+\.\d+)'", line):
            found[m[2]] = number, re.split(r", (?![^(]*\))", m[1])
    return found
