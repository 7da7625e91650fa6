"""A device profile with round numbers, for which times can be computed by hand."""

from __future__ import annotations

from ub_overlap.compiler.cost.profile import ComputeModel, Profile, Steps

MIB = 1 << 20
# A matmul: launch 1 us, then 2 M N K / 1e9 us at one unit with tiles of one element. A push, copy or reduction: 1 us per MiB.
PLAIN = Profile(
    name="by hand",
    key={"device": "cuda", "gpu": "none"},
    source="made up",
    compute=ComputeModel(
        units=1,
        tiles=((1, 1, 1.0),),
        tflops={"bfloat16": 1000.0},
        wave_us=0.0,
        launch_us=1.0,
        memory_gbs=1e9,
        layouts={"nt": 1.0},
    ),
    matmuls=(),
    push=((MIB, 1.0), (1024 * MIB, 1024.0)),
    copy=((MIB, 1.0), (1024 * MIB, 1024.0)),
    reduce=((MIB, 1.0), (1024 * MIB, 1024.0)),
    collectives={
        "all_gather": {2: ((MIB, 2.0), (1024 * MIB, 2048.0))},
        "reduce_scatter": {2: ((MIB, 2.0), (1024 * MIB, 2048.0))},
        "all_reduce": {2: ((MIB, 2.0), (1024 * MIB, 2048.0))},
    },
    steps=Steps(begin_us=0.0, end_us=0.0, wait_us=0.0, arrive_us=0.0, flag_us=0.0, event_us=0.0, signal_us=0.0, gap_us=0.0),
    matmul_slowdown=0.0,
    push_slowdown=0.0,
)
