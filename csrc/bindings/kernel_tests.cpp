#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "bindings/definitions.h"
#include "core/block_positions.h"
#include "core/failure.h"
#include "core/recent_map.h"
#include "cpu/kernels.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/fused_alone.h"
#include "cuda/kernels.h"
#endif

namespace py = pybind11;

namespace ub_overlap {
namespace {

using Address = uint64_t;

DType dtype_of(const std::string& name) {
    for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
        if (name == name_of(type)) return type;
    }
    throw NamedError("OptionError", {{"what", "no kernel for this dtype"}, {"got", name}});
}

char* pointer(Address address) {
    return reinterpret_cast<char*>(address);
}

// `stream`: none for the CPU's kernels.
void run_copy(Address src, int64_t src_stride, Address dst, int64_t dst_stride, int64_t blocks, int64_t bytes,
              std::optional<uint64_t> stream) {
    const Span from{pointer(src), blocks, src_stride, bytes}, to{pointer(dst), blocks, dst_stride, bytes};
    if (!stream) return copy_spans(from, to);
#ifdef UB_OVERLAP_CUDA
    cuda::launch_copy(from, to, reinterpret_cast<cudaStream_t>(*stream));
#endif
}

void run_sum(const std::vector<std::pair<Address, int64_t>>& sources, const std::string& dtype, Address dst, int64_t dst_stride,
             const std::string& dst_dtype, int64_t blocks, int64_t elements, float divisor, std::optional<uint64_t> stream) {
    const DType type = dtype_of(dtype), dst_type = dtype_of(dst_dtype);
    std::vector<Source> list;
    for (const auto& [address, stride] : sources) {
        list.push_back({Span{pointer(address), blocks, stride, elements * size_of(type)}, {}, type});
    }
    const Span to{pointer(dst), blocks, dst_stride, elements * size_of(dst_type)};
    if (!stream) return reduce_spans(list, to, dst_type, divisor);
#ifdef UB_OVERLAP_CUDA
    cuda::launch_reduce(list, to, dst_type, divisor, reinterpret_cast<cudaStream_t>(*stream));
#endif
}

#ifdef UB_OVERLAP_CUDA
// `residual`, `weight`, `normed`: 0 for a sum alone.
void run_fused_alone(cuda::FusedAlone& group, Address input, Address output, int64_t rows, int64_t row_bytes, Address residual,
                     Address weight, Address normed, uint64_t stream) {
    Epilogue epilogue;
    if (normed != 0) {
        epilogue.norm.kind = Norm::rms, epilogue.norm.epsilon = 1e-5f, epilogue.norm.weight = pointer(weight);
        epilogue.residual = pointer(residual), epilogue.normed = pointer(normed), epilogue.normed_type = DType::bf16;
    }
    group.run(pointer(input), pointer(output), rows, row_bytes, epilogue, reinterpret_cast<cudaStream_t>(stream));
}
#endif

std::vector<std::pair<int64_t, int64_t>> block_positions(int64_t blocks, int64_t per_block,
                                                         const std::vector<int64_t>& numbers) {
    const BlockPositions positions(blocks, per_block);
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const int64_t number : numbers) found.emplace_back(positions.block(number), positions.within(number));
    return found;
}

// Uses the keys of a RecentMap in turn. Returns those that were evicted, and then all that are left, in ascending order.
std::pair<std::vector<int64_t>, std::vector<int64_t>> use_recent_map(size_t capacity, const std::vector<int64_t>& keys) {
    RecentMap<int64_t, int64_t> map(capacity);
    std::vector<int64_t> evicted, left;
    for (const int64_t key : keys) map.use(key, [&](int64_t value) { evicted.push_back(value); }) = key;
    map.clear([&](int64_t value) { left.push_back(value); });
    std::sort(left.begin(), left.end());
    return {evicted, left};
}

}  // namespace

void define_kernel_tests(py::module_& testing) {
    testing.def("run_copy", &run_copy, py::arg("src"), py::arg("src_stride"), py::arg("dst"), py::arg("dst_stride"),
                py::arg("blocks"), py::arg("bytes"), py::arg("stream"), "Copies `blocks` runs of `bytes` bytes.");
    testing.def("run_sum", &run_sum, py::arg("sources"), py::arg("dtype"), py::arg("dst"), py::arg("dst_stride"),
                py::arg("dst_dtype"), py::arg("blocks"), py::arg("elements"), py::arg("divisor"), py::arg("stream"),
                "Adds up sources (address, stride in bytes) of `blocks` runs of `elements` elements, in fp32.");
    testing.def("block_positions", &block_positions, py::arg("blocks"), py::arg("per_block"), py::arg("numbers"));
    testing.def("blocks_at_once", &BlockPositions::blocks_at_once, py::arg("per_block"));
#ifdef UB_OVERLAP_CUDA
    py::class_<cuda::FusedAlone>(testing, "FusedAlone", "Rank 0 of a group on one GPU whose peers are all itself.")
        .def(py::init<int>(), py::arg("ranks"))
        .def("run", &run_fused_alone, py::arg("input"), py::arg("output"), py::arg("rows"), py::arg("row_bytes"),
             py::arg("residual") = 0, py::arg("weight") = 0, py::arg("normed") = 0, py::kw_only(), py::arg("stream"),
             "Enqueues a one-shot all_reduce of bf16 rows, with residual and RMSNorm where `normed` is given.")
        .def("has_failed", &cuda::FusedAlone::has_failed);
#endif
    testing.def("use_recent_map", &use_recent_map, py::arg("capacity"), py::arg("keys"));
}

}  // namespace ub_overlap
