// One instance of the gated matmul: -DNAME=... -DTM=.. -DTN=.. -DCM=.. -DCN=.. [-DPINGPONG] [-DSTREAM_K]
#include "kernel.cuh"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#ifdef PINGPONG
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
#else
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecializedCooperative;
#endif
#ifdef STREAM_K
using Scheduler = cutlass::gemm::StreamKScheduler;
#else
using Scheduler = cutlass::gemm::PersistentScheduler;
#endif
using Instance = gated::Kernel<TM, TN, CM, CN, Schedule, EpilogueSchedule, Scheduler>;

extern "C" int JOIN(run_, NAME)(const Launch* launch) {
    return Instance::run(*launch);
}
