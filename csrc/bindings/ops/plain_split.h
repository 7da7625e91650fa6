// Split collectives that c10d runs: start launches the collective asynchronously, finish waits for it.
//
// NCCL runs it on a stream of its own, gloo on threads of its own, so it is concurrent with what runs in between. Groups across
// hosts run this way, and sites whose strategy is "none". The session keeps it from start to finish, as it keeps those of our
// transport: one is open in a slot, and an abandoned one is ended at the next start. A CUDA graph captures both halves: the
// tensors are in its memory pool, the collective is one of its nodes.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <functional>
#include <vector>

#include "bindings/builder.h"

namespace ub_overlap {

// One tensor of a collective in flight.
struct PlainTransfer {
    c10::intrusive_ptr<c10d::Work> work;  // null where nothing is moved
    at::Tensor sent, result;              // `sent` is still read
    bool is_shard_of_sent = false;        // the result is this rank's shard of `sent`, which is reduced in place
};

using LaunchTransfers = std::function<std::vector<PlainTransfer>(c10d::ProcessGroup&)>;

// Launches the collective and returns its token [1]. `kind`: the op is start_<kind>. `b` is sealed.
Tensor start_plain(Builder& b, const char* kind, const at::TensorOptions& options, LaunchTransfers launch);
// Waits for the collective that the call of `b` has started, and returns what its transfers have received.
std::vector<Tensor> finish_plain(Builder& b);

// Transfers of one tensor, which is contiguous. Bytes are moved, except for what is reduced: backends lack some dtypes.
PlainTransfer plain_gather(c10d::ProcessGroup& group, const Tensor& shard);
PlainTransfer plain_exchange(c10d::ProcessGroup& group, const Tensor& input, at::IntArrayRef output_splits,
                             at::IntArrayRef input_splits);
// Sums are taken in the wider of both dtypes, as the graph before the rewrite took them.
PlainTransfer plain_reduction(c10d::ProcessGroup& group, const Tensor& input, at::ScalarType out_dtype, bool scatters);

}  // namespace ub_overlap
