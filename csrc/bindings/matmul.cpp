#include "bindings/matmul.h"

#include <ATen/ATen.h>

#include <atomic>
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <map>
#include <mutex>

#include "core/failure.h"
#include "cuda/blas.h"
#endif

namespace ub_overlap {
namespace {

// Few blocks are multiplied one by one, by the very kernel that a caller of mm would get; many small ones in one batched call.
constexpr int64_t most_single_blocks = 16;

at::ScalarType scalar_type(DType type) {
    switch (type) {
        case DType::f32:
            return at::kFloat;
        case DType::bf16:
            return at::kBFloat16;
        case DType::f16:
            return at::kHalf;
        case DType::e4m3:
            return at::kFloat8_e4m3fn;
        case DType::e5m2:
            return at::kFloat8_e5m2;
    }
    return at::kFloat;
}

at::Tensor tensor(const Matrix& m, char* data, at::IntArrayRef sizes, at::IntArrayRef strides, at::Device device) {
    const at::TensorOptions options = at::TensorOptions(scalar_type(m.type)).device(device);
    return at::for_blob(data, sizes).strides(strides).options(options).target_device(device).make_tensor();
}

at::Tensor view(const Matrix& m, int64_t block, int64_t step, at::Device device) {
    char* data = m.data ? m.data + block * step * size_of(m.type) : nullptr;
    return tensor(m, data, {m.rows, m.cols}, {m.row_stride, m.col_stride}, device);
}

at::Tensor views(const Matrix& m, int64_t batch, int64_t step, at::Device device) {
    return tensor(m, m.data, {batch, m.rows, m.cols}, {step, m.row_stride, m.col_stride}, device);
}

// out (fp32) = a @ b (+ out) of narrower types, formed in fp32 by cuBLAS itself. False where this ATen cannot.
bool widening_mm(at::Tensor& out, const at::Tensor& a, const at::Tensor& b, bool accumulate) {
    static std::atomic<bool> can_add{true}, can_multiply{true};
    if (a.size(1) == 0) return false;
    if (accumulate && can_add.load(std::memory_order_relaxed)) {
        try {
            at::addmm_out(out, out, a, b, at::kFloat);
            return true;
        } catch (const c10::Error&) {  // refused by its checks, before any work: some versions want an addend of a's type
            can_add.store(false, std::memory_order_relaxed);
        }
    }
    if (!can_multiply.load(std::memory_order_relaxed)) return false;
    try {
        if (accumulate) {
            at::Tensor product = at::empty(out.sizes(), out.options());
            at::mm_out(product, a, b, at::kFloat);
            out.add_(product);
        } else {
            at::mm_out(out, a, b, at::kFloat);
        }
        return true;
    } catch (const c10::OutOfMemoryError&) {
        throw;
    } catch (const c10::Error&) {
        can_multiply.store(false, std::memory_order_relaxed);
        return false;
    }
}

void multiply(const MatmulTask& t, at::Device device) {
    if (t.batch == 0 || t.out.rows == 0 || t.out.cols == 0) return;
    if (!t.addresses.empty()) {
        for (int64_t block = 0; block < t.batch; ++block) multiply(t.one(block), device);
        return;
    }
    // A contraction is formed in fp32, and so is a product of a narrow gathered piece with a wide operand.
    const auto operand = [&](at::Tensor tensor) { return tensor.to(scalar_type(t.out.type)); };
    if (t.batch > most_single_blocks) {
        at::Tensor out = views(t.out, t.batch, t.out_step, device);
        const at::Tensor a = operand(views(t.a, t.batch, t.a_step, device)), b = operand(views(t.b, t.batch, t.b_step, device));
        if (t.accumulate) {
            at::baddbmm_out(out, out, a, b);
        } else if (t.addend.data) {
            at::baddbmm_out(out, views(t.addend, t.batch, t.addend_step, device), a, b);
        } else {
            at::bmm_out(out, a, b);
        }
        return;
    }
    for (int64_t block = 0; block < t.batch; ++block) {
        at::Tensor out = view(t.out, block, t.out_step, device);
        const bool narrow = t.out.type == DType::f32 && t.a.type == t.b.type && t.a.type != DType::f32;
        if (narrow && device.is_cuda() &&
            widening_mm(out, view(t.a, block, t.a_step, device), view(t.b, block, t.b_step, device), t.accumulate)) {
            continue;
        }
        const at::Tensor a = operand(view(t.a, block, t.a_step, device)), b = operand(view(t.b, block, t.b_step, device));
        if (t.accumulate) {
            at::addmm_out(out, out, a, b);
        } else if (t.addend.data) {
            at::addmm_out(out, view(t.addend, block, t.addend_step, device), a, b);
        } else {
            at::mm_out(out, a, b);
        }
    }
}

at::Tensor scales(const Scale& scale, int64_t lines, bool column, at::Device device) {
    const std::vector<int64_t> sizes = !scale.each ? std::vector<int64_t>{1, 1}
                                       : column    ? std::vector<int64_t>{lines, 1}
                                                   : std::vector<int64_t>{1, lines};
    void* data = const_cast<float*>(scale.data);
    return at::for_blob(data, sizes).options(at::TensorOptions(at::kFloat).device(device)).target_device(device).make_tensor();
}

// One float8 product. `form(a, b, scale of a [M, 1] or [1, 1], scale of b [1, N] or [1, 1])` gives it before the addend.
template <typename Form>
void multiply_scaled(const MatmulTask& t, at::Device device, Form form) {
    if (t.out.rows == 0 || t.out.cols == 0) return;
    at::Tensor out = view(t.out, 0, 0, device);
    at::Tensor product;
    if (t.a.cols > 0) {
        product = form(view(t.a, 0, 0, device), view(t.b, 0, 0, device), scales(t.a_scale, t.a.rows, true, device),
                       scales(t.b_scale, t.b.cols, false, device));
    } else {
        product = at::zeros({t.out.rows, t.out.cols}, out.options().dtype(at::kFloat));
    }
    if (t.accumulate) {
        out.copy_(product.to(at::kFloat).add_(out));
    } else if (t.addend.data) {
        out.copy_(product.to(at::kFloat).add_(view(t.addend, 0, 0, device)));
    } else {
        out.copy_(product);
    }
}

}  // namespace

bool matmul_cpu(const MatmulTask& task, void*, void*) {
    if (!task.scaled()) {
        multiply(task, at::kCPU);
        return false;
    }
    // The reference: every product of two float8 numbers is exact in fp32.
    for (int64_t block = 0; block < task.batch; ++block) {
        multiply_scaled(task.one(block), at::kCPU, [](const at::Tensor& a, const at::Tensor& b, auto a_scale, auto b_scale) {
            return at::mm(a.to(at::kFloat), b.to(at::kFloat)).mul_(a_scale).mul_(b_scale);
        });
    }
    return false;
}

#ifdef UB_OVERLAP_CUDA
namespace {

// Scratch of a stream's matmuls, which run one after the other: cuBLASLt's workspace, and room for copies of scales or for the
// addresses of a batch.
constexpr int64_t scratch_parts = 2, scratch_part_bytes = 1 << 20;  // the scales of 262144 rows
constexpr int64_t workspace_bytes = static_cast<int64_t>(cuda::blas_workspace_bytes) + scratch_parts * scratch_part_bytes;
// Streams of a device with permanent workspaces. Programs compute on one or two streams.
constexpr int64_t permanent_workspaces = 8;

struct Workspace {
    char* data = nullptr;
    at::Tensor held;

    char* scratch_part(int64_t index) const {
        return data + static_cast<int64_t>(cuda::blas_workspace_bytes) + index * scratch_part_bytes;
    }
};

// A stream's workspace is permanent: torch may be filling a pool for a graph now, in which nothing may stay. Streams beyond the
// first few get theirs from torch, call by call, and their calls are not recorded. The matmuls of a graph of torch's also get
// one from its pool: the graph may run concurrently with whatever its stream does then.
Workspace workspace_of(cudaStream_t owner, c10::DeviceIndex device) {
    const auto allocate = [&] {
        const at::TensorOptions options = at::TensorOptions(at::kByte).device(at::kCUDA, device);
        const at::Tensor held = at::empty({workspace_bytes}, options);
        return Workspace{static_cast<char*>(held.data_ptr()), held};
    };
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return allocate();
    static std::mutex mutex;
    static auto* all = new std::map<int, std::map<cudaStream_t, char*>>;  // never destroyed: CUDA may go first
    const std::lock_guard<std::mutex> lock(mutex);
    std::map<cudaStream_t, char*>& streams = (*all)[device];
    const auto entry = streams.find(owner);
    if (entry != streams.end()) return {entry->second, {}};
    if (static_cast<int64_t>(streams.size()) >= permanent_workspaces) return allocate();
    char* data = static_cast<char*>(cuda::allocate_permanently(static_cast<size_t>(workspace_bytes)));
    if (!data) return allocate();
    streams[owner] = data;
    return {data, {}};
}

// Throws if ATen would be called while a call is recorded: it works on the caller's stream, where it would run at once.
void refuse_while_recording(const void* stream, const void* owner, const char* what) {
    if (stream == owner) return;
    throw NamedError("UbOverlapError", {{"what", std::string(what) + " while a call is being recorded"},
                                        {"expected", "a matmul by cuBLASLt, as in the call's earlier runs"},
                                        {"fix", "report this as a bug"}});
}

}  // namespace

bool matmul_cuda(const MatmulTask& task, void* stream, void* owner) {
    if (!task.addresses.empty()) {
        const Workspace workspace = workspace_of(static_cast<cudaStream_t>(owner), c10::cuda::current_device());
        bool recordable = stream == owner || !workspace.held.defined();
        if (cuda::blas_matmul_by_address(task, workspace.data, workspace.scratch_part(0), scratch_part_bytes,
                                         static_cast<cudaStream_t>(stream))) {
            return recordable;
        }
        for (int64_t block = 0; block < task.batch; ++block) {
            recordable = matmul_cuda(task.one(block), stream, owner) && recordable;
        }
        return recordable;
    }
    const c10::DeviceIndex device = c10::cuda::current_device();
    const Workspace workspace = workspace_of(static_cast<cudaStream_t>(owner), device);
    const auto queue = static_cast<cudaStream_t>(stream);
    // What is freed behind this call must not be named by a graph of ours.
    const bool recordable = stream == owner || !workspace.held.defined();
    if (!task.scaled()) {
        if (cuda::blas_matmul(task, workspace.data, queue)) return recordable;
        refuse_while_recording(stream, owner, "a matmul falls back to ATen");
        multiply(task, at::Device(at::kCUDA, device));
        return false;
    }
    // cuBLASLt refuses scales that are not aligned to 16 bytes. A piece may begin at any row, and one scale may be an element
    // of a larger tensor.
    bool all = recordable;
    at::Tensor copies[scratch_parts];
    const auto align = [&](Scale& scale, int64_t lines, int64_t index) {
        const int64_t bytes = (scale.each ? lines : 1) * static_cast<int64_t>(sizeof(float));
        if (reinterpret_cast<uintptr_t>(scale.data) % 16 == 0) return;
        if (bytes <= scratch_part_bytes) {
            scale.data = cuda::copy_to_scratch(scale.data, bytes, workspace.scratch_part(index), queue);
            return;
        }
        refuse_while_recording(stream, owner, "a copy of many scales is made by ATen");
        copies[index] = scales(scale, lines, true, at::Device(at::kCUDA, device)).clone();
        scale.data = static_cast<const float*>(copies[index].data_ptr());
        all = false;
    };
    for (int64_t block = 0; block < task.batch; ++block) {
        MatmulTask one = task.one(block);
        align(one.a_scale, one.a.rows, 0), align(one.b_scale, one.b.cols, 1);
        if (cuda::blas_matmul(one, workspace.data, queue)) continue;
        all = false;
        refuse_while_recording(stream, owner, "a float8 matmul falls back to ATen");
        multiply_scaled(one, at::Device(at::kCUDA, device),
                        [&](const at::Tensor& a, const at::Tensor& b, const at::Tensor& a_scale, const at::Tensor& b_scale) {
                            return at::_scaled_mm(a, b, a_scale, b_scale, {}, {}, scalar_type(one.out.type), one.fast_sums);
                        });
    }
    return all;
}
#endif

}  // namespace ub_overlap
