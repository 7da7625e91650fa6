// Which devices have which ops. The schemas of the ops that overlap are in runtime/ops/, one file per op.
#include <torch/library.h>

#include "bindings/ops/dispatch.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {
namespace {

#ifndef UB_OVERLAP_CUDA
// For devices whose executor this build does not have.
void no_executor(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
    run_op(at::kCPU, [&]() -> int {
        throw NamedError("TransportError",
                         {{"what", "the CUDA executor is not part of this build"},
                          {"where", op.schema().name()},
                          {"got", "CUDA tensors"},
                          {"fix", "rebuild with UB_OVERLAP_BUILD_CUDA=1 on a machine with nvcc and a CUDA torch"}});
    });
}
#endif

}  // namespace

TORCH_LIBRARY_FRAGMENT(ub_overlap, m) {
    m.def(
        "finish_collective_into(Tensor token, Tensor input, Tensor(a!) out, str collective, str reduce_op, int split_slot, "
        "str strategy, str group, str site) -> ()");
    m.def("landing_memory(Tensor like, int numel, int split_slot, str group, str site) -> Tensor");
    m.def("fp8_advance_histories(Tensor(a!) current, Tensor(b!) past, Tensor slots, bool is_step) -> (Tensor, Tensor)");
    m.def(
        "fp8_raise_amax(Tensor(a!) current, Tensor slots, int index, Tensor? quantized, Tensor scale, Tensor sample) -> "
        "Tensor");
    m.def(
        "fp8_amax_history_insert(Tensor weight, str keys, int module, Tensor slots, int[] columns, Tensor current, "
        "Tensor past, Tensor agreed_amax, str[] unstepped) -> ()");
    m.def("fp8_amax_history_evict(str state) -> ()", &fp8_amax_history_evict);
    m.def("fp8_first_amax_agreed(Tensor current, str key, str groups) -> ()");
}

#ifdef UB_OVERLAP_CUDA
TORCH_LIBRARY_FRAGMENT(ub_overlap, m) {
    m.def(
        "fp8_cached_weight_refresh(Tensor weight, ScalarType round_to, int? axis, Tensor(a!) q, Tensor(b!) scale, "
        "Tensor(c!) checksum, Tensor(d!) scratch) -> ()");
    m.def(
        "fp8_cached_weight_insert(Tensor weight, ScalarType round_to, int? axis, Tensor q, Tensor scale, Tensor checksum, "
        "Tensor scratch) -> ()");
    m.def("fp8_cached_weight_insert_transposed(Tensor weight, ScalarType round_to, int? axis, Tensor transposed) -> ()");
    m.def("fp8_cached_weight_evict(int storage) -> ()", &fp8_cached_weight_evict);
}
#endif

static void register_ops(torch::Library& m) {
    m.impl("all_gather_matmul", &Dispatched<&all_gather_matmul, GatheredRows>::call);
    m.impl("all_gather_scaled_matmul", &Dispatched<&all_gather_scaled_matmul, ScaledGatheredRows>::call);
    m.impl("matmul_reduce_scatter", &Dispatched<&matmul_reduce_scatter, ScatteredRows>::call);
    m.impl("scaled_matmul_reduce_scatter", &Dispatched<&scaled_matmul_reduce_scatter, ScaledScatteredRows>::call);
    m.impl("matmul_all_reduce", &Dispatched<&matmul_all_reduce, ReducedRows>::call);
    m.impl("bulk", &Dispatched<&bulk, BulkRows>::call);
    m.impl("fused_collective", &Dispatched<&fused_collective, FusedRows>::call);
    m.impl("start_collective", &start_collective);
    m.impl("finish_collective", &finish_collective);
    m.impl("finish_collective_into", &finish_collective_into);
    m.impl("start_coalesced", &start_coalesced);
    m.impl("finish_coalesced", &finish_coalesced);
    m.impl("landing_memory", &landing_memory);
    m.impl("release_collective", &release_collective);
    m.impl("release_coalesced", &release_coalesced);
    m.impl("start_all_to_all", &start_all_to_all);
    m.impl("finish_all_to_all", &finish_all_to_all);
}

TORCH_LIBRARY_IMPL(ub_overlap, CompositeExplicitAutograd, m) {
    m.impl("fp8_advance_histories", &fp8_advance_histories);
    m.impl("fp8_raise_amax", &fp8_raise_amax);
    m.impl("fp8_amax_history_insert", &fp8_amax_history_insert);
    m.impl("fp8_first_amax_agreed", &fp8_first_amax_agreed);
    // Python defines the schemas of these.
    m.impl("fp8_amax_history", &fp8_amax_history);
    m.impl("fp8_record_amax", &fp8_record_amax);
    m.impl("fp8_first_amax", &fp8_first_amax);
    m.impl("packed_weight", &packed_weight);
    m.impl("fp8_packed_casts", &fp8_packed_casts);
}

TORCH_LIBRARY_IMPL(ub_overlap, CPU, m) {
    register_ops(m);
}

TORCH_LIBRARY_IMPL(ub_overlap, CUDA, m) {
#ifdef UB_OVERLAP_CUDA
    register_ops(m);
    m.impl("fp8_cached_weight_refresh", &fp8_cached_weight_refresh);
    m.impl("fp8_cached_weight_insert", &fp8_cached_weight_insert);
    m.impl("fp8_cached_weight_insert_transposed", &fp8_cached_weight_insert_transposed);
    // Python defines the schemas of these: every device has the ops.
    m.impl("fp8_cached_weight", &fp8_cached_weight);
    m.impl("fp8_cached_weight_transposed", &fp8_cached_weight_transposed);
    m.impl("fp8_layout_copy", &fp8_layout_copy);
#else
    for (const char* op :
         {"all_gather_matmul", "all_gather_scaled_matmul", "matmul_reduce_scatter", "scaled_matmul_reduce_scatter",
          "matmul_all_reduce", "bulk", "fused_collective", "start_collective", "finish_collective", "finish_collective_into",
          "start_coalesced", "finish_coalesced", "landing_memory", "release_collective", "release_coalesced",
          "start_all_to_all", "finish_all_to_all"}) {
        m.impl(op, torch::CppFunction::makeFromBoxedFunction<&no_executor>());
    }
#endif
}

}  // namespace ub_overlap
