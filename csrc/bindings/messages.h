// Tensors as messages, and the channels of a group.
#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <string>

#include "core/point_to_point.h"

namespace ub_overlap {

// Describes a tensor to send, or to receive. Sends a contiguous copy of another tensor; throws OptionError for a tensor that
// cannot be received into.
Message message_of(const at::Tensor& tensor, bool sends, int peer, int64_t tag);

// Returns the current stream of a CUDA device, null for the CPU.
void* current_stream(at::Device device);

// Returns the channels of a group, null before they are set up. Throws ForkError for a group of this process's parent.
std::shared_ptr<PointToPoint> find_channels(const std::string& group, const std::string& device);

}  // namespace ub_overlap
