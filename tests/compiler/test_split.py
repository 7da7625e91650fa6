"""Split collectives in compiled graphs: ZeRO-3 on two ranks, the order of the generated code, and look-alikes."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.compiler.rank_compile import build, plans_of
from tests.fp8.rank_fp8 import both
from tests.harness.fake_ranks import FakeRanks
from tests.harness.generated_code import matching_lines, planned_calls
from tests.harness.ranks import RankPool
from tests.harness.tiers import INNER, full_but, in_full
from tests.harness.traces import as_loss
from tests.models.compare import Values, error, uncached, values
from ub_overlap.compiler import passes
from ub_overlap.compiler.inductor import ordering_options
from ub_overlap.compiler.plan.decision import Decision
from ub_overlap.compiler.plan.reasons import Reason, collective_of
from ub_overlap.compiler.reports.history import HISTORY

ZERO3 = "tests.models.zero3"
SPLIT: dict[str, Any] = {"overrides": [{"strategy": "split"}]}
compare_name = "tests.models.compare:compare"


FORMS = [(False, None, "off"), (True, None, "auto"), (True, 0, "off"), (False, 0, "auto"), (True, 0, "auto")]
FORMS_BY = [(*form, inner) for form in FORMS for inner in ("aot_eager", "inductor")]


@pytest.mark.parametrize(("mixed", "budget", "zero_copy", "inner"), full_but([FORMS_BY[0], FORMS_BY[4], FORMS_BY[8]], FORMS_BY))
def test_zero3(pool2: RankPool, inner: str, mixed: bool, budget: float | None, zero_copy: str) -> None:
    """Outputs and gradients are those of the unfused graph; every collective is split.

    With a budget of 0 the backward gathers the weights again, next to its reductions. Then no gathered weight leaves a graph,
    so all gathers can be zero-copy. Without, backward keeps them.
    """
    options = {**SPLIT, "inner": inner, "memory_budget": budget, "zero_copy": zero_copy}
    for outcome in pool2.run(compare_name, ZERO3, {"mixed": mixed}, options):
        outcome.check(3.0)  # Inductor may not merge a product with the sum behind its weight's release
        assert {d["strategy"] for d in outcome.decisions} == {"split"}
        slots = {d["window"]["slot"] for d in outcome.decisions}
        assert len(outcome.decisions) == (12 if budget is None else 18) and slots <= set(range(8))
        in_place = [d["window"]["releases"] is not None for d in outcome.decisions]
        gathers = [d["kind"] == "all_gather" for d in outcome.decisions]
        assert in_place == (gathers if budget == 0 and zero_copy == "auto" else [False] * len(gathers))


@pytest.mark.tier("full")
@pytest.mark.parametrize("mixed", [False, True])
def test_zero_copy_changes_no_bit(pool2: RankPool, mixed: bool) -> None:
    """Results are those of copied gathers, also with more gathers than slots. A second step runs in the slots of the first."""
    for copied, in_place in pool2.run(both_forms, mixed):
        assert len(copied) == len(in_place) > 20
        assert all(torch.equal(a, b) for a, b in zip(copied, in_place, strict=True))


def both_forms(rank: int, world: int, mixed: bool) -> list[list[Tensor]]:
    """Return outputs and gradients of two steps, with copied and with zero-copy gathers."""
    results = []
    for form in ("off", "auto"):
        case = build(rank, world, ZERO3, {"layers": 6, "mixed": mixed})
        options = {**SPLIT, "inner": "aot_eager", "memory_budget": 0, "zero_copy": form}
        compiled, found, mark = torch.compile(case.module, backend="ub_overlap", options=options), [], HISTORY.mark()
        with uncached():
            for _ in range(2):
                output = compiled(*case.inputs)
                as_loss(output).backward()
                found += [output.detach(), *(p.grad.clone() for p in case.module.parameters() if p.grad is not None)]
        windows = [d.window for p in HISTORY.since(mark) for d in p.decisions]
        assert all(w is not None for w in windows)
        assert any(w is not None and w.releases is not None for w in windows) == (form == "auto")
        results.append(found)
    return results


def test_float8(pool2: RankPool) -> None:
    """Weights are gathered as float8 by split collectives, with the results of plain ones."""
    options = {"fp8": "all", "inner": "aot_eager", **SPLIT}
    for plain, split in pool2.run(both, ZERO3, {"layers": 2, "dtype": torch.bfloat16}, options):
        gathers = [d for d in split.decisions if d.kind.value == "all_gather"]
        assert len(gathers) == 4 and {str(d.strategy) for d in gathers} == {"split"}
        assert {c.recipe for c in split.casts if c.role != "weight gradient"} == {"tensorwise"}
        assert all(torch.equal(plain.values[name], split.values[name]) for name in plain.values)


def float8_by(rank: int, world: int) -> list[tuple[Values, list[Decision], Counter[str]]]:
    """Return outputs and gradients, decisions and generated calls of collectives: in 16 bits, with aot_eager, with Inductor.

    The weights of rank 1 are four times as large: a scale of one rank alone would be far off.
    """
    found = []
    for inner in ("", "aot_eager", "inductor"):
        case = build(rank, world, ZERO3, {"layers": 1, "dtype": torch.bfloat16})
        for p in case.module.parameters():
            p.data.mul_(1 + 3 * rank)
        options = {"fp8": "all", "inner": inner, **SPLIT}
        run = torch.compile(case.module, backend="ub_overlap", options=options) if inner else case.module
        mark = HISTORY.mark()
        with uncached():
            results, written = run_and_get_code(values, case, run)
        pattern = r"torch\.ops\.\w+\.(all_reduce|all_gather|start_collective)\w*\.default\("
        calls = Counter(m[1] for lines in matching_lines(written, pattern) for m in lines)
        found.append((results, [d for p in HISTORY.since(mark) for d in p.decisions], calls))
    return found


@pytest.mark.tier("full")
def test_float8_under_inductor(pool2: RankPool) -> None:
    """Decisions are aot_eager's: float8 gathers are split, and one all_reduce is for the amaxes of all weights."""
    wanted = [
        ("forward", "all_reduce", "none", Reason.SCALES, "float32", None),
        *[("forward", "all_gather", "split", None, "uint8", 32 * 64)] * 2,
        *[("backward", "reduce_scatter", "split", None, "bfloat16", 32 * 64 * 2)] * 2,
    ]
    for (plain, *_), (eager, planned, _), (actual, decisions, calls) in pool2.run(float8_by):
        for each in (planned, decisions):
            assert [(d.phase, d.kind.value, str(d.strategy), d.reason, d.dtype, d.bytes) for d in each] == wanted
        assert calls == {"all_reduce": 1, "start_collective": 4}
        for name, value in actual.items():
            assert error(value, eager[name], name) < 0.08 and error(value, plain[name], name) < 0.2, name


def code_of(rank: int, world: int, options: dict[str, Any], mixed: bool = False) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the programs that Inductor generates for forward and backward, and the decisions."""
    case = build(rank, world, ZERO3, {"layers": 4, "mixed": mixed})
    compiled = torch.compile(case.module, backend="ub_overlap", options=options)

    def step() -> None:
        as_loss(compiled(*case.inputs)).backward()

    mark = HISTORY.mark()
    with uncached():
        _, written = run_and_get_code(step)
    own = [text for text in written if "start_collective" in text]
    return own, [d.to_dict() for p in HISTORY.since(mark) for d in p.decisions]


def calls(rank: int, world: int, options: dict[str, Any]) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Return of each generated program its calls of collectives and matmuls in order, and the decisions."""
    written, decisions = code_of(rank, world, options)
    pattern = r"(start|finish|release)_collective\.default\(.*'([\w-]+)/(\w+\.\d+)'|extern_kernels\.(addmm|mm)\("
    return [[m[4] or f"{m[1]} {m[3]}" for m in found] for found in matching_lines(written, pattern)], decisions


@pytest.mark.tier("full")
@pytest.mark.parametrize("mixed", [False, True])
def test_inputs_are_held(pool2: RankPool, mixed: bool) -> None:
    """A finish reads the buffer of its start, and no other value is written to it in between."""
    for programs, _ in pool2.run(code_of, SPLIT, mixed):
        for text in programs:
            lines = text[text.index("def call(") :].splitlines()
            for begin, end, name in spans_of_inputs(lines):
                between = lines[begin + 1 : end]
                assert name and not any(re.search(rf"= {name}; del|\bdel {name}\b|out={name}\b", line) for line in between), (
                    name
                )


def spans_of_inputs(lines: list[str]) -> list[tuple[int, int, str]]:
    """Return for each site the lines of start and finish and the name of their input; "" where the names differ."""
    starts, spans = {}, []
    for number, line in enumerate(lines):
        if m := re.search(r"start_collective\.default\((.*?), '(?:all|reduce).*/(\w+\.\d+)'", line):
            starts[m[2]] = number, m[1]
        elif m := re.search(r"finish_collective\.default\(\w+, (.*?), '(?:all|reduce).*/(\w+\.\d+)'", line):
            begin, name = starts[m[2]]
            base = re.search(r"\b(buf|primals|tangents|arg)\w+", name)
            spans.append((begin, number, base[0] if base and name == m[1] else ""))
    assert len(spans) == len(starts) > 0
    return spans


ZERO_COPY: dict[str, Any] = {**SPLIT, "memory_budget": 0, "zero_copy": "auto"}


@pytest.mark.tier("test")
@pytest.mark.parametrize("options", [SPLIT, in_full(ZERO_COPY)])
def test_generated_code(fake2: FakeRanks, options: dict[str, Any]) -> None:
    """Inductor keeps the order: starts in front of the matmuls that hide them, finishes in front of the readers, releases."""
    ((programs, decisions),) = fake2.run(calls, options)
    forward, backward = programs
    for program, phase in ((forward, "forward"), (backward, "backward")):
        communication = [call for call in program if " " in call]
        assert communication == planned_calls(d for d in decisions if d["phase"] == phase)
    hidden = [n for program in programs for n in hidden_matmuls(program).values()]
    assert len(hidden) == (16 if options is SPLIT else 24) and sum(n > 0 for n in hidden) >= 12, hidden


@pytest.mark.tier("test")
@pytest.mark.parametrize("mixed", full_but([True], [False, True]))
def test_nothing_reads_or_reuses_released_memory(fake2: FakeRanks, mixed: bool) -> None:
    """In the generated code the result of a zero-copy gather is read, by its matmuls, between finish and release only."""
    for programs, decisions in fake2.run(code_of, ZERO_COPY, mixed):
        spans = [span for text in programs for span in spans_of_results(text)]
        assert len(spans) == sum(d["kind"] == "all_gather" for d in decisions) == 16
        for inside, behind in spans:
            assert any("extern_kernels" in line for line in inside)
            assert not [line for line in behind if not re.fullmatch(r"\s*del \w+|\s*\w+ = \w+; del \w+.*# reuse", line)]
            assert not [line for line in (*inside, *behind) if "# reuse" in line], "landing memory is not Inductor's"


def spans_of_results(text: str) -> list[tuple[list[str], list[str]]]:
    """Return for each release the lines that name its buffer, or a view of it: between finish and release, and behind."""
    lines = text[text.index("def call(") :].splitlines()
    lines = lines[: next(i for i, line in enumerate(lines) if i and line.strip().startswith("return "))]
    spans = []
    for number, line in enumerate(lines):
        if (m := re.search(r"release_collective\.default\((\w+),", line)) is None:
            continue
        names = {m[1]}
        begin = next(i for i in range(number, -1, -1) if re.match(rf"\s*{m[1]} = ", lines[i]))
        while True:  # names of the same tensor
            (source,) = re.findall(r"= (\w+)(?:$|;|\[| #)", lines[begin]) or [""]
            if not source.startswith("buf"):
                break
            names.add(source)
            begin = next(i for i in range(begin - 1, -1, -1) if re.match(rf"\s*{source} = ", lines[i]))
        assert "finish_collective" in lines[begin], lines[begin]
        found = [(i, read) for i, read in enumerate(lines) if any(re.search(rf"\b{name}\b", read) for name in names)]
        inside = [read for i, read in found if begin < i < number]
        spans.append((inside, [read for i, read in found if i > number]))
    return spans


def hidden_matmuls(program: list[str]) -> dict[str, int]:
    """Return the number of matmuls between start and finish of each site."""
    sites = [call.partition(" ")[2] for call in program if call.startswith("start ")]
    spans = {site: program[program.index(f"start {site}") : program.index(f"finish {site}")] for site in sites}
    return {site: sum(" " not in call for call in span) for site, span in spans.items()}


@pytest.mark.tier("full")
def test_the_options_of_inductor_are_restored(pool2: RankPool) -> None:
    """The next graph, without split sites, is reordered as Inductor's options say."""
    for before, after in pool2.run(reordering):
        assert before == after and True in before.values() and before["_post_fusion_custom_pass"] is None


def reordering(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    before = ordering_options()
    calls(rank, world, SPLIT)
    return before, ordering_options()


@pytest.mark.parametrize("zero_copy", [False, True])
def test_verify_and_explain(pool2: RankPool, zero_copy: bool) -> None:
    """Results equal the plain collectives', and the report names slot and places."""
    for worst, text in pool2.run(verified, ZERO_COPY if zero_copy else SPLIT):
        assert worst < 1e-6
        assert "split" in text and "in slot 0" in text and ("and released as number" in text) == zero_copy


def verified(rank: int, world: int, options: dict[str, Any]) -> tuple[float, str]:
    import ub_overlap

    case = build(rank, world, ZERO3, {"layers": 2})
    report = ub_overlap.explain(case.module, {**options, "inner": "aot_eager", "verify": True})(*case.inputs)
    found = report.decisions
    errors = [site.error for site in found if site.error is not None]
    assert len(errors) == len(found) == (12 if "memory_budget" in options else 8)
    return max(errors), str(report) + "\n".join(site.detail for site in found)


@pytest.mark.tier("test")
def test_saved_plan(fake2: FakeRanks) -> None:
    """A saved plan with split sites is used again, with the same digest."""
    for first, second in fake2.run(saved):
        assert first == second


def saved(rank: int, world: int) -> tuple[list[str], list[str]]:
    def digests(options: dict[str, Any]) -> list[Any]:
        case = build(rank, world, ZERO3, {"layers": 2})
        return plans_of(case.module, case.inputs, {**options, "inner": "aot_eager"})

    first = digests(SPLIT)
    second = digests({"overrides": first})
    return [p.shared_digest for p in first], [p.shared_digest for p in second]


@pytest.mark.parametrize("inner", INNER)
def test_inputs_that_the_graph_writes(pool2: RankPool, inner: str) -> None:
    """Look-alikes: shards that are written behind or in front of their collectives have the values of their time."""
    for errors in pool2.run(written, inner):
        assert all(error < 1e-5 for error in errors), errors


def written(rank: int, world: int, inner: str) -> list[float]:
    def step(x: Tensor, shard: Tensor, partial: Tensor) -> tuple[Tensor, ...]:
        first = funcol.wait_tensor(funcol.all_gather_tensor(shard, 0, dist.group.WORLD))
        reduced = funcol.wait_tensor(funcol.reduce_scatter_tensor(partial, "sum", 0, dist.group.WORLD))
        shard.mul_(3.0)
        partial.add_(1.0)
        second = funcol.all_gather_tensor(shard, 0, dist.group.WORLD)
        y = torch.tanh(x @ first.t())
        return y @ second.t(), reduced

    def inputs() -> tuple[Tensor, ...]:
        torch.manual_seed(rank)
        return torch.randn(16, 64), torch.randn(32, 64), torch.randn(32, 64)

    compiled = torch.compile(step, backend="ub_overlap", options={**SPLIT, "inner": inner})
    given, expected = inputs(), inputs()
    mark = HISTORY.mark()
    with torch.no_grad(), uncached():
        outputs, truth = (*compiled(*given), *given), (*step(*expected), *expected)
    assert [str(d.strategy) for p in HISTORY.since(mark) for d in p.decisions] == ["split"] * 3
    return [float((a - b).abs().max()) for a, b in zip(outputs, truth, strict=True)]


@pytest.mark.tier("full")
def test_the_order_is_held_by_the_options(pool2: RankPool) -> None:
    """With Inductor's reordering on, starts move to their finishes: the test of the generated code can fail."""
    for hidden in pool2.run(moved):
        assert hidden == 0


def moved(rank: int, world: int) -> int:
    """Return the number of matmuls between starts and finishes of the backward, if nothing holds the order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "keep_order", lambda: None)
        (_, backward), _ = calls(rank, world, SPLIT)
    return sum(hidden_matmuls(backward).values())


@pytest.mark.tier("full")
def test_gradients_that_compiled_autograd_accumulates(pool2: RankPool) -> None:
    """Its backward copies the first microbatch's gradients and adds the next ones; all reductions finish behind matmuls."""
    for errors, plans in pool2.run(accumulated):
        assert all(error < 1e-5 for error in errors), errors
        assert len(plans) == 2 and all(starts[:2] == [0, 1] and len(starts) == 4 for starts, _ in plans), plans


def accumulated(rank: int, world: int) -> tuple[list[float], list[tuple[list[int], list[int]]]]:
    """Return errors of the gradients of two microbatches, and starts and finishes in the backward of each."""

    def step(module: torch.nn.Module, x: Tensor) -> None:
        module(x).square().sum().backward()

    eager, case = (build(rank, world, ZERO3, {"layers": 2}) for _ in range(2))
    plans = []
    with uncached(), torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(step, backend="ub_overlap", options={**SPLIT, "inner": "aot_eager"})
        for scale in (1.0, 2.0):
            mark = HISTORY.mark()
            compiled(case.module, scale * case.inputs[0].detach())
            windows = [d.window for p in HISTORY.since(mark) for d in p.decisions if d.phase == "backward" and d.window]
            plans.append((sorted(w.starts for w in windows), sorted(w.finishes for w in windows)))
    for scale in (1.0, 2.0):
        step(eager.module, scale * eager.inputs[0].detach())
    pairs = zip(case.module.parameters(), eager.module.parameters(), strict=True)
    return [float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None], plans


@pytest.mark.tier("full")
def test_auto_takes_parameters_only(fake2: FakeRanks) -> None:
    """Gathers of parameters are split in forward and backward; look-alike: the same gathers of plain inputs."""
    for found, others in fake2.run(automatic):
        assert found["forward all_gather split"] > 0 and found["backward reduce_scatter split"] > 0, found
        assert not any("all_gather split" in kind for kind in others), others


def automatic(rank: int, world: int) -> tuple[Counter[str], Counter[str]]:
    """Return the number of sites by phase, collective and strategy, of weights as parameters and as inputs."""
    options = {"profile": "h200", "inner": "aot_eager"}
    case = build(rank, world, ZERO3, {"layers": 2, "width": 2048, "mixed": True})
    found = []
    for call, inputs in ((case.module, case.inputs), (lambda w, x: torch.func.functional_call(case.module, w, (x,)), None)):
        weights = {n: p.detach().clone().requires_grad_() for n, p in case.module.named_parameters()}
        plans = plans_of(call, inputs or (weights, *case.inputs), options)
        decisions = [d for plan in plans for d in plan.decisions]
        found.append(Counter(f"{d.phase} {collective_of(d.kind.value)} {d.strategy.mode.value}" for d in decisions))
    return found[0], found[1]
