// Several weights, or their float8 casts, as one matrix: their own memory where they lie next to each other, else a copy.
#include <mutex>
#include <set>

#include "bindings/ops/ops.h"
#include "bindings/python.h"

namespace ub_overlap {
namespace {

// Logs the first copy of a site: each step pays for it, and only the program can end that.
void warn_of_copy(const std::string& count, const std::string& site, const std::string& what, const std::string& fix) {
    static std::mutex mutex;
    static auto* warned = new std::set<std::string>;  // never destroyed: threads may still run ops
    bool is_first = false;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        is_first = warned->insert(site).second;
    }
    if (!is_first) return;
    warn(what + ": every step copies them into one matrix. Where: " + site + ". Got: " + count +
         " apart. Expected: one block of memory. Fix: " + fix);
}

// Returns the memory of matrices [N_i, K] that lie next to each other as one matrix; an undefined tensor if they do not.
at::Tensor joined(at::TensorList matrices) {
    const at::Tensor& first = matrices[0];
    const auto* end = static_cast<const char*>(first.const_data_ptr());
    int64_t rows = 0;
    for (const at::Tensor& matrix : matrices) {
        const bool fits = matrix.dim() == 2 && matrix.size(1) == first.size(1) && matrix.is_contiguous() &&
                          matrix.scalar_type() == first.scalar_type() && matrix.device() == first.device();
        if (!fits || matrix.const_data_ptr() != end) return {};
        end += matrix.nbytes();
        rows += matrix.size(0);
    }
    // The result keeps the matrices' memory alive, and is no view of them: it has no history and no version of theirs.
    return at::for_blob(const_cast<void*>(first.const_data_ptr()), {rows, first.size(1)})
        .deleter([held = matrices.vec()](void*) {})
        .options(first.options())
        .target_device(first.device())
        .make_tensor();
}

}  // namespace

at::Tensor packed_weight(at::TensorList weights, const std::string& site) {
    TORCH_CHECK(!weights.empty(), "packed_weight: expected one weight or more");
    const at::Tensor whole = joined(weights);
    if (whole.defined()) return whole;
    warn_of_copy(std::to_string(weights.size()) + " weights", site,
                 "weights that ub_overlap.pack has put next to each other have moved", "call ub_overlap.pack(model) again");
    return at::cat(weights);
}

TwoTensors fp8_packed_casts(at::TensorList casts, at::TensorList scales, const std::string& site) {
    TORCH_CHECK(!casts.empty() && casts.size() == scales.size(), "fp8_packed_casts: expected one scale for each cast");
    const at::Tensor q = joined(casts), scale = joined(scales);
    if (q.defined() && scale.defined()) return {q, scale};
    warn_of_copy(std::to_string(casts.size()) + " casts", site,
                 "float8 casts of weights, which the weight cache keeps next to each other, lie apart",
                 "let the first call of the model be one of the graph that packs them, before a CUDA graph is captured");
    std::vector<at::Tensor> bytes;  // some devices have no cat of float8
    for (const at::Tensor& cast : casts) bytes.push_back(cast.view(at::kByte));
    return {at::cat(bytes).view(casts[0].scalar_type()), at::cat(scales)};
}

}  // namespace ub_overlap
