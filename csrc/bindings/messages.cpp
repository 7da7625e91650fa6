#include "bindings/messages.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <sstream>

#include "core/registry.h"
#ifdef UB_OVERLAP_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

namespace ub_overlap {

Message message_of(const at::Tensor& tensor, bool sends, int peer, int64_t tag) {
    Message m;
    m.sends = sends, m.peer = peer;
    std::ostringstream text;
    text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes() << ", tag " << tag;
    m.text = text.str();
    const auto refuse = [&](const char* what, std::string got, const char* expected) {
        throw NamedError("OptionError", {{"what", what},
                                         {"where", std::string("ub_overlap.") + m.op() + ", peer " + std::to_string(peer)},
                                         {"got", std::move(got)},
                                         {"expected", expected}});
    };
    if (tensor.layout() != at::kStrided || tensor.is_quantized()) {
        refuse("this tensor cannot be sent or received", m.text, "a dense tensor");
    }
    if (!sends && !tensor.is_contiguous()) {
        refuse("a tensor to receive into is not contiguous", m.text, "a contiguous tensor");
    }
    if (!sends && (tensor.is_conj() || tensor.is_neg())) {
        refuse("a tensor to receive into is a view whose numbers are conjugated or negated when they are read", m.text,
               "the tensor that it views");
    }
    const auto held = std::make_shared<at::Tensor>(sends ? tensor.resolve_conj().resolve_neg().contiguous() : tensor);
    m.tensor = held;
    m.data = static_cast<char*>(held->data_ptr());
    m.bytes = static_cast<int64_t>(held->nbytes());
    uint32_t hash = 2166136261u;  // FNV-1a
    for (const int64_t value : {static_cast<int64_t>(tensor.scalar_type()), m.bytes, tag}) {
        for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ (static_cast<uint64_t>(value) >> shift & 0xff)) * 16777619u;
    }
    m.hash = hash ? hash : 1;
    if (tensor.is_cuda()) m.device = tensor.get_device();
    m.stream = current_stream(tensor.device());
    return m;
}

void* current_stream(at::Device device) {
#ifdef UB_OVERLAP_CUDA
    if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
    (void)device;
    return nullptr;
}

std::shared_ptr<PointToPoint> find_channels(const std::string& group, const std::string& device) {
    const auto owner = c10d::resolve_process_group(group);
    Registry::get().refuse_inherited(group, owner.get());
    const std::shared_ptr<Session> session = Registry::get().find(group, device, owner.get());
    return session ? session->channels() : nullptr;
}

}  // namespace ub_overlap
