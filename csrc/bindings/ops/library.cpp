// The ops' schemas, and which devices have them.
#include <torch/library.h>

#include "bindings/ops/frame.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/picked.h"

namespace ub_overlap {
namespace {

#ifndef UB_OVERLAP_CUDA
// For devices whose executor this build does not have.
void no_executor(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack*) {
    framed(at::kCPU, [&]() -> int {
        throw NamedError("TransportError",
                         {{"what", "the CUDA executor is not part of this build"},
                          {"where", op.schema().name()},
                          {"got", "CUDA tensors"},
                          {"fix", "rebuild with UB_OVERLAP_BUILD_CUDA=1 on a machine with nvcc and a CUDA torch"}});
    });
}
#endif

}  // namespace

TORCH_LIBRARY(ub_overlap, m) {
    const std::vector<at::Tag> tags{at::Tag::needs_fixed_stride_order, at::Tag::pt2_compliant_tag};
    m.def(
        "all_gather_matmul(Tensor shard, Tensor[] operands, int[] modes, SymInt outer, bool last, bool keep, str strategy, "
        "str group, str site) -> (Tensor gathered, Tensor[] outs)",
        tags);
    m.def(
        "all_gather_scaled_matmul(Tensor shard, Tensor shard_scale, Tensor[] operands, Tensor[] operand_scales, "
        "Tensor?[] biases, SymInt outer, bool keep, ScalarType[] out_dtypes, bool fast_accum, str strategy, str group, "
        "str site) -> (Tensor gathered, Tensor gathered_scale, Tensor[] outs)",
        tags);
    m.def(
        "matmul_reduce_scatter(Tensor[] lhs, Tensor[] rhs, Tensor? addend, SymInt outer, bool last, str reduce_op, "
        "ScalarType out_dtype, bool keep, str strategy, str group, str site, *, str wire=\"plain\") "
        "-> (Tensor out, Tensor partial)",
        tags);
    m.def(
        "scaled_matmul_reduce_scatter(Tensor[] lhs, Tensor[] rhs, Tensor[] lhs_scales, Tensor[] rhs_scales, Tensor? addend, "
        "SymInt outer, str reduce_op, ScalarType product_dtype, ScalarType out_dtype, bool fast_accum, str wire, "
        "str strategy, str group, str site) -> Tensor out",
        tags);
    m.def(
        "matmul_all_reduce(Tensor[] lhs, Tensor[] rhs, Tensor? addend, str reduce_op, ScalarType out_dtype, bool keep, "
        "str strategy, str group, str site) -> (Tensor out, Tensor partial)",
        tags);
    m.def(
        "bulk(Tensor input, Tensor[] lhs, Tensor[] rhs, str collective, str reduce_op, str strategy, str group, str site) "
        "-> (Tensor out, Tensor[] outs)",
        tags);
#ifdef UB_OVERLAP_CUDA
    m.def(
        "fp8_cast(Tensor x, Tensor most, int at, Tensor(a!) noted, ScalarType format, float headroom) "
        "-> (Tensor q, Tensor scale)");
    m.def(
        "fp8_weight_refresh(Tensor weight, ScalarType through, int? axis, Tensor(a!) q, Tensor(b!) scale, Tensor(c!) kept, "
        "Tensor(d!) scratch) -> ()");
    m.def(
        "fp8_weight_keep(Tensor weight, ScalarType through, int? axis, Tensor q, Tensor scale, Tensor kept, Tensor scratch) "
        "-> ()");
    m.def("fp8_weight_forget(int storage) -> ()", &fp8_weight_forget);
#endif
}

static void register_ops(torch::Library& m) {
    m.impl("all_gather_matmul", &Picked<&all_gather_matmul, GatheredRows>::call);
    m.impl("all_gather_scaled_matmul", &Picked<&all_gather_scaled_matmul, ScaledGatheredRows>::call);
    m.impl("matmul_reduce_scatter", &Picked<&matmul_reduce_scatter, ScatteredRows>::call);
    m.impl("scaled_matmul_reduce_scatter", &Picked<&scaled_matmul_reduce_scatter, ScaledScatteredRows>::call);
    m.impl("matmul_all_reduce", &Picked<&matmul_all_reduce, ReducedRows>::call);
    m.impl("bulk", &Picked<&bulk, BulkRows>::call);
}

TORCH_LIBRARY_IMPL(ub_overlap, CPU, m) {
    register_ops(m);
}

TORCH_LIBRARY_IMPL(ub_overlap, CUDA, m) {
#ifdef UB_OVERLAP_CUDA
    register_ops(m);
    m.impl("fp8_cast", &fp8_cast);
    m.impl("fp8_weight_refresh", &fp8_weight_refresh);
    m.impl("fp8_weight_keep", &fp8_weight_keep);
    m.impl("fp8_weight", &fp8_weight);  // its schema is Python's: every device has it
#else
    for (const char* op : {"all_gather_matmul", "all_gather_scaled_matmul", "matmul_reduce_scatter",
                           "scaled_matmul_reduce_scatter", "matmul_all_reduce", "bulk"}) {
        m.impl(op, torch::CppFunction::makeFromBoxedFunction<&no_executor>());
    }
#endif
}

}  // namespace ub_overlap
