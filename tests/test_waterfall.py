"""The waterfall of captured steps, on traces of the shape that torch.profiler writes for replayed CUDA graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import waterfall
from benchmarks.blocks.table import text as blocks_text
from ub_overlap.tools import exposed, trace_events

OURS = "void ub_overlap::cuda::(anonymous namespace)::"
GEMM = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN"
SUM = f"{OURS}reduce_kernel<__nv_bfloat16, __nv_bfloat16, 8, 2, 2, true>(ub_overlap::cuda::Sources, char*, long)"
NORM = "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_{}"
FLASH = "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<128>>>(Params)"
MARK = "at::cuda::(anonymous namespace)::spin_kernel(long)"
BARRIER = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Trace:
    """Writes events as Kineto does. All work of a replay has the correlation of its launch."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 1.0, "args": {"name": "python"}}
        ]
        self.launch = 0

    def replay(self, at: float) -> None:
        self.launch += 100
        args = {"External id": 7, "cbid": 311, "correlation": self.launch}
        common = {"ph": "X", "cat": "cuda_runtime", "pid": 4242, "tid": 4242}
        self.events.append({**common, "name": "cudaGraphLaunch", "ts": at - 30, "dur": 20.0, "args": args})

    def work(self, name: str, at: float, dur: float, stream: int = 7, kind: str = "kernel", launch: int | None = None) -> None:
        args: dict[str, Any] = {"External id": 7, "stream": stream, "correlation": self.launch if launch is None else launch}
        args |= {"device": 0, "context": 1, "graph id": 3, "graph node id": 12884901888 + len(self.events)}
        if kind == "gpu_memcpy" and "PtoP" in name:
            del args["device"]
            args |= {"fromDevice": 0, "inDevice": 0, "toDevice": 1, "bytes": 33554432}
        row = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": stream, "ts": at, "dur": dur, "args": args}
        self.events.append(row)


def compute_step(trace: Trace, at: float) -> None:
    """Norm 10, matmul 100, attention 40, norm 10, with gaps of 1: 163 us."""
    trace.work(BARRIER, at - 15, 10, launch=trace.launch + 1)  # eager: before the step
    trace.replay(at)
    trace.work(NORM.format(0), at, 10)
    trace.work(GEMM, at + 11, 100)
    trace.work(FLASH, at + 112, 40)
    trace.work(NORM.format(1), at + 153, 10)


def our_step(trace: Trace, at: float, late: float = 0.0) -> None:
    """A gather between the norms: two pushes, of which `late` us outlast the matmul; then a sum, a local copy, and a matmul of
    others inside of no call. 100 us of matmul run in two pieces of 52 and 55."""
    trace.work(BARRIER, at - 15, 10, launch=trace.launch + 1)
    trace.replay(at)
    trace.work(NORM.format(2), at, 10)
    trace.work(f"{OURS}begin_kernel(ub_overlap::cuda::Group, int, unsigned int)", at + 11, 2)
    trace.work("Memcpy PtoP (Device -> Device)", at + 13, 60, 22, "gpu_memcpy")
    trace.work("Memcpy DtoD (Device -> Device)", at + 73, 10, 22, "gpu_memcpy")  # a push too: its stream has no kernels
    trace.work(GEMM, at + 14, 52)
    trace.work(f"{OURS}wait_kernel(ub_overlap::cuda::Group, int)", at + 66, 3 + late)
    trace.work(GEMM, at + 70 + late, 55)
    trace.work(SUM, at + 126 + late, 12)
    trace.work(f"{OURS}flat_copy_kernel(char const*, char*, long)", at + 138 + late, 6)
    trace.work(f"{OURS}end_kernel(ub_overlap::cuda::Group, int, bool)", at + 145 + late, 3)
    trace.work(FLASH, at + 149 + late, 40)
    trace.work("Memset (Device)", at + 189 + late, 1, 7, "gpu_memset")
    trace.work(NORM.format(3), at + 190 + late, 10)
    trace.work("some_library::kernel_of_mine<int>(int*)", at + 200 + late, 4)


def steps_of(build: Any, *arguments: float) -> list[waterfall.StepTimes]:
    trace = Trace()
    for number in range(3):
        build(trace, 1e6 + 1e4 * number, *arguments)
    return waterfall.measure_steps(trace.events)


def test_each_instant_counts_once() -> None:
    """The classes of a step are its time. Hidden pushes cost nothing; the step begins with its first kernel."""
    steps = steps_of(our_step)
    assert len(steps) == 3 and [step.total_us for step in steps] == pytest.approx([204.0] * 3)
    step = steps[0]
    assert step.classes == pytest.approx({
        "Inductor's kernels": 20, waterfall.OWN_MATMULS: 107, waterfall.WAITS: 3, waterfall.FLAGS: 5, "sums": 12,
        "local copies": 6, "attention": 40, "memsets": 1, waterfall.GAPS: 4, waterfall.PUSHES: 2, waterfall.OTHER: 4,
    })  # fmt: skip
    assert sum(step.classes.values()) == pytest.approx(step.total_us)
    assert sum(us for named in step.kernels.values() for us in named.values()) == pytest.approx(step.total_us)
    assert step.busy[waterfall.PUSHES] == pytest.approx(70)
    assert step.kernels["sums"] == pytest.approx({"ub_overlap::cuda::reduce_kernel": 12})
    norm = NORM.format(0).removesuffix("_0")
    assert step.kernels["Inductor's kernels"] == pytest.approx({norm: 20})
    assert step.kernels[waterfall.GAPS]["before begin, end, signals"] == pytest.approx(2)


def test_an_exposed_push_shows_as_wait() -> None:
    """While COMPUTE waits for a shard the time is that of the wait, not of the push that runs meanwhile."""
    early, late = steps_of(our_step)[0], steps_of(our_step, 8.0)[0]
    assert late.total_us - early.total_us == pytest.approx(8)
    assert late.classes[waterfall.WAITS] - early.classes[waterfall.WAITS] == pytest.approx(8)
    assert late.classes[waterfall.PUSHES] == early.classes[waterfall.PUSHES]


def test_the_difference_is_named() -> None:
    """Classes explain the difference of two steps but for kernels of unknown names and what the profiler adds."""
    steps = {"ours": waterfall.middle_step(steps_of(our_step)), "compute": waterfall.middle_step(steps_of(compute_step))}
    found = waterfall.compare(steps, {"ours": 0.200, "compute": 0.160})
    entry = found["variants"]["ours"]
    assert entry["difference"][waterfall.OWN_MATMULS] == pytest.approx(107)
    assert entry["difference"][waterfall.MATMULS] == pytest.approx(-100)
    assert sum(entry["difference"].values()) == pytest.approx(41)  # 204 - 163 profiled
    assert entry["difference_us"] == pytest.approx(40)  # not profiled
    assert entry["named"] == pytest.approx(1 - 3 / 40)  # 37 of 40: 4 us of another library's kernel, 1 us of profiling
    assert "named" not in found["variants"]["compute"]
    assert waterfall.named_share(40, 80) == 0 and waterfall.named_share(0, 5) is None
    profiled = waterfall.compare(steps, {})["variants"]["ours"]
    assert profiled["named"] == pytest.approx(1 - 4 / 41) and "measured_us" not in profiled


def test_what_each_rank_waits() -> None:
    """A rank that waits for a slower one is distinguished from an exchange that all wait for. Compute exposes nothing."""
    fast, slow = ({"ours": steps_of(our_step, late)[0], "compute": steps_of(compute_step)[0]} for late in (8.0, 0.0))
    ranks = waterfall.by_rank([fast, slow])
    assert ranks.keys() == {"ours"} and ranks["ours"]["waits"] == pytest.approx([11, 3])
    assert ranks["ours"]["exposed"] == pytest.approx([36, 28])  # flags 5, sums 12, copies 6, pushes 2
    row = {"waterfall": waterfall.compare(fast, {}) | {"rank": 0, "ranks": ranks}}
    table = waterfall.section(row, "a block", "github")[-1].splitlines()
    assert [cell.strip() for cell in table[-1].split("|")[1:-1]] == ["ours", "36, 28", "11, 3"]


def test_the_table() -> None:
    steps = {"ours": steps_of(our_step)[0], "compute": steps_of(compute_step)[0]}
    stored = json.loads(json.dumps(waterfall.compare(steps, {"ours": 0.200, "compute": 0.160})))
    document = {"rows": [{"size": "8b", "seq": 8192, "layers": 4, "variants": {}, "waterfall": stored}]}
    text = blocks_text(document, "github")
    cells = {
        row.split("|")[1].strip(): [c.strip() for c in row.split("|")[2:-1]] for row in text.splitlines() if row[:1] == "|"
    }
    assert cells["class, us"] == ["ours", "compute", "ours - compute"]
    assert cells["matmuls in our ops"] == ["107", "0", "+107"] and cells["other matmuls"] == ["0", "100", "-100"]
    assert cells["step, not profiled"] == ["200", "160", "+40"]
    assert "92% of the difference is named" in text and "8b 4 blocks" in text
    assert cells["ub_overlap::cuda::reduce_kernel"] == ["sums", "12", "0", "+12"]


def test_classes_of_kernels() -> None:
    """Names as CUPTI reports them on H200s, by class. A matmul belongs to our op only within a call."""
    names = {
        "nvjet_hsh_192x192_64x4_1x2_h_bz_coopB_NTN": waterfall.MATMULS,
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>(cublasLt::cublasSplitKParams)": waterfall.MATMULS,
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": waterfall.MATMULS,
        "triton_poi_fused_mul_silu_3": "Inductor's kernels",
        "triton_tem_fused_mm_5": "Inductor's kernels",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>(pytorch_flash::Flash_fwd_params)": "attention",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7": "attention",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>(int)": "ATen's kernels",
        f"{OURS}signal_kernel(ub_overlap::cuda::Group)": waterfall.FLAGS,
        f"{OURS}copy_kernel(char const*, long, char*)": "local copies",
        f"{OURS}order_kernel<uint4>(Pieces, long, long, long const*, char*)": "local copies",
        f"{OURS}reduce_scaled_kernel<__nv_bfloat16>(Sources)": "sums",
        f"{OURS}checksum_kernel<__nv_bfloat16>(Weight)": "casts",
        f"{OURS}round_kernel<__nv_bfloat16>(char const*)": "casts",
        f"{OURS}new_kernel(int)": "other kernels of ours",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage)": waterfall.NCCL,
        "unknown": waterfall.OTHER,
    }
    for name, expected in names.items():
        event = {"ph": "X", "cat": "kernel", "name": name, "ts": 5.0, "dur": 1.0, "args": {"stream": 7}}
        assert waterfall.class_of(event, {7}, []) == expected, name
        assert expected in waterfall.CLASSES
        inside = waterfall.class_of(event, {7}, [(4.0, 9.0)])
        assert inside == (waterfall.OWN_MATMULS if expected == waterfall.MATMULS else expected), name
    copy = {
        "ph": "X",
        "cat": "gpu_memcpy",
        "name": "Memcpy DtoD (Device -> Device)",
        "ts": 5.0,
        "dur": 1.0,
        "args": {"stream": 7},
    }
    assert waterfall.class_of(copy, {7}, []) == waterfall.COPIES and waterfall.class_of(copy, {8}, []) == waterfall.PUSHES


def test_an_eager_step_is_refused() -> None:
    trace = Trace()
    trace.work(GEMM, 10, 5)
    with pytest.raises(ValueError, match="no captured step in the trace: .* got 1 device events, 0 launches of graphs"):
        waterfall.measure_steps(trace.events)


def test_an_eager_step_lies_between_two_marks() -> None:
    """The wait of the device for the host is a gap; what lies between two steps counts in none."""
    trace = Trace()
    for at in (1000.0, 2000.0, 3000.0):
        trace.work(BARRIER, at - 40, 10)
        trace.work(MARK, at - 20, 10)
        trace.work(GEMM, at, 100)
        trace.work(BARRIER, at + 100, 30)  # a collective of the step
        trace.work(MARK, at + 130, 10)
    steps = waterfall.measure_marked_steps(trace.events)
    assert [step.total_us for step in steps] == pytest.approx([140.0] * 3)
    assert steps[1].classes == pytest.approx({waterfall.GAPS: 10, waterfall.MATMULS: 100, waterfall.NCCL: 30})


def test_an_odd_mark_is_refused() -> None:
    trace = Trace()
    trace.work(GEMM, 10, 5)
    with pytest.raises(ValueError, match="got 0 of 1 events"):
        waterfall.measure_marked_steps(trace.events)
    trace.work(MARK, 20, 5)
    with pytest.raises(ValueError, match="got 1 of 2 events"):
        waterfall.measure_marked_steps(trace.events)


def test_the_same_trace_shows_exposed_communication(tmp_path: Path) -> None:
    """`ub_overlap exposed` reads the same file by the same reader."""
    trace = Trace()
    our_step(trace, 1e6)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": trace.events}))
    assert waterfall.measure_steps(trace_events.read_events(path))[0].total_us == pytest.approx(204)
    (times,) = exposed.read_trace(path)
    assert times.parts["copies to peers"] == pytest.approx(70)
