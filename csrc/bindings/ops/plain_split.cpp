#include "bindings/ops/plain_split.h"

#include <torch/csrc/Exceptions.h>

#include <utility>

#include "bindings/carveout.h"
#include "bindings/messages.h"
#include "bindings/ops/run_op.h"
#include "core/executor.h"
#ifdef UB_OVERLAP_CUDA
#include "cuda/device.h"
#endif

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // torch 2.11 has no other names of three collectives
#endif

namespace ub_overlap {
namespace {

// The collective of one start. `kind`: its ops are start_<kind> and finish_<kind>.
struct PlainSplit final : PlainCollective {
    std::string kind, site, group_name;
    at::Device device = at::kCPU;
    GroupPtr group;  // until the launch: c10d frees a group when nothing holds it
    int rank = 0, spared = 0;
    LaunchTransfers launch;
    std::shared_ptr<SparedMultiprocessors> multiprocessors = std::make_shared<SparedMultiprocessors>();
    std::vector<PlainTransfer> transfers;

    ~PlainSplit() override { multiprocessors->end(); }  // also without a finish
};

PlainSplit& split_of(const Call& call) {
    return static_cast<PlainSplit&>(*call.plain);
}

// Runs what c10d does at an op. Its errors become ours, which name site and ranks.
template <typename Body>
void name_failures(const PlainSplit& split, const char* half, Body body) {
    std::string text;
    try {
        body();
        return;
    } catch (const c10::OutOfMemoryError&) {
        throw;
    } catch (const c10::IndexError&) {
        throw;
    } catch (const c10::TypeError&) {
        throw;
    } catch (const c10::ValueError&) {
        throw;
    } catch (const python_error&) {
        throw;
    } catch (const PythonRaised&) {
        throw;
    } catch (const NamedError&) {
        throw;
    } catch (const c10::Error& error) {
        text = error.what_without_backtrace();
    } catch (const std::exception& error) {
        text = error.what();
    }
    python_hooks().fail_plain(half + split.kind, split.site, split.group_name, c10::DeviceTypeName(split.device.type(), true),
                              text);
}

void wait_on_host(const PlainSplit& split, const c10::intrusive_ptr<c10d::Work>& work) {
    const auto waiting = std::make_shared<HostWork>();
    waiting->wait = [work](int64_t ms) { ms < 0 ? work->wait() : work->wait(std::chrono::milliseconds(ms)); };
    waiting->is_completed = [work] { return work->isCompleted(); };
    python_hooks().wait_on_host(waiting, "finish_" + split.kind, split.site, split.group_name);
}

void wait_for(const PlainSplit& split, const PlainTransfer& transfer) {
    if (!transfer.work) return;
    if (!split.device.is_cuda()) {
        wait_on_host(split, transfer.work);
        return;
    }
    name_failures(split, "finish_", [&] { transfer.work->wait(); });  // the current stream waits
    const c10::impl::VirtualGuardImpl streams(c10::kCUDA);
    const c10::Stream current = streams.getStream(split.device);
    for (const Tensor* tensor : {&transfer.sent, &transfer.result}) tensor->record_stream(current);  // start's may be another
}

class PlainWork final : public OpenWork {
  public:
    PlainWork(std::shared_ptr<PlainCollective> split, uint64_t capture) : split_(std::move(split)), capture_(capture) {}
    uint64_t capture() const override { return capture_; }
    PlainSplit& split() { return static_cast<PlainSplit&>(*split_); }

  private:
    const std::shared_ptr<PlainCollective> split_;
    const uint64_t capture_;
};

class PlainExecutor final : public Executor {
  public:
    std::vector<StepTime> run(const Call&) override { return {}; }
    std::unique_ptr<OpenWork> start(const Call& call) override {
        PlainSplit& split = split_of(call);
        const uint64_t capture = capture_of(call);
        name_failures(split, "start_", [&] { split.transfers = split.launch(*split.group); });
        split.launch = {}, split.group.reset();
        bool is_running = false;
        for (const PlainTransfer& transfer : split.transfers) is_running |= static_cast<bool>(transfer.work);
        split.multiprocessors->begin(is_running ? split.spared : 0);
        return std::make_unique<PlainWork>(call.plain, capture);
    }
    std::vector<StepTime> finish(OpenWork& work) override {
        PlainSplit& split = static_cast<PlainWork&>(work).split();
        split.multiprocessors->end();
        for (PlainTransfer& transfer : split.transfers) {
            wait_for(split, transfer);
            if (transfer.is_shard_of_sent) {
                const int64_t rows = transfer.result.size(0);
                transfer.result.copy_(transfer.sent.narrow(0, split.rank * rows, rows));
            }
        }
        return {};
    }
    std::vector<StepTime> release(OpenWork&) override { return {}; }
    uint64_t capture_of(const Call& call) const override {
#ifdef UB_OVERLAP_CUDA
        if (call.device >= 0) {
            const c10::DeviceGuard device(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(call.device)));
            return cuda::capture_of(static_cast<cudaStream_t>(call.stream));
        }
#endif
        (void)call;
        return 0;
    }
};

PlainExecutor& executor() {
    static PlainExecutor one;
    return one;
}

// A tensor of one byte without content. `multiprocessors` end with it: then no finish can follow.
Tensor make_token(const at::TensorOptions& options, std::shared_ptr<SparedMultiprocessors> multiprocessors) {
    const Tensor memory = at::empty({1}, options.dtype(at::kByte));
    const auto free = [memory, multiprocessors = std::move(multiprocessors)](void*) { multiprocessors->end(); };
    return at::for_blob(memory.data_ptr(), {1})
        .deleter(free)
        .options(memory.options())
        .target_device(memory.device())
        .make_tensor();
}

// [n, ...] as bytes [n, bytes of a row].
Tensor rows_of_bytes(const Tensor& tensor) {
    const int64_t rows = tensor.size(0), width = c10::multiply_integers(tensor.sizes().slice(1));
    return tensor.as_strided({rows, width}, {width, 1}).view(at::kByte);  // dims of one element may have other strides
}

std::vector<int64_t> sizes_with_rows(const Tensor& like, int64_t rows) {
    std::vector<int64_t> sizes = like.sizes().vec();
    sizes[0] = rows;
    return sizes;
}

}  // namespace

Tensor start_plain(Builder& b, const char* kind, const at::TensorOptions& options, LaunchTransfers launch) {
    const auto session = b.session();
    const auto split = std::make_shared<PlainSplit>();
    split->kind = kind, split->site = b.call.site, split->group_name = session->group();
    split->device = b.device(), split->group = b.group(), split->rank = b.call.rank;
    split->spared = session->spared_multiprocessors();
    split->launch = std::move(launch);
    const Tensor token = make_token(options, split->multiprocessors);
    b.call.plain = split;
    b.call.key.zero_copy = false;
    set_stream(b);
    session->start(b.call, {nullptr, is_freed(token)}, executor());
    return token;
}

std::vector<Tensor> finish_plain(Builder& b) {
    announce_plain(b);
    b.call.key.zero_copy = false;
    set_stream(b);
    b.session()->finish(b.call);
    std::vector<Tensor> results;
    for (const PlainTransfer& transfer : split_of(b.call).transfers) results.push_back(transfer.result);
    return results;
}

PlainTransfer plain_gather(c10d::ProcessGroup& group, const Tensor& shard) {
    const bool narrow = at::isFloat8Type(shard.scalar_type());
    PlainTransfer transfer;
    transfer.sent = narrow ? shard.view(at::kByte) : shard;  // gloo has no such type
    transfer.result = at::empty(sizes_with_rows(shard, shard.size(0) * group.getSize()), transfer.sent.options());
    if (transfer.result.numel() > 0) transfer.work = group._allgather_base(transfer.result, transfer.sent);
    if (narrow) transfer.result = transfer.result.view(shard.scalar_type());
    return transfer;
}

PlainTransfer plain_exchange(c10d::ProcessGroup& group, const Tensor& input, at::IntArrayRef output_splits,
                             at::IntArrayRef input_splits) {
    int64_t rows = 0;
    for (const int64_t split : output_splits) rows += split;
    PlainTransfer transfer;
    transfer.sent = input;
    transfer.result = at::empty(sizes_with_rows(input, rows), input.options());
    // Without columns no rank has anything to send. A rank without rows takes part.
    if (c10::multiply_integers(input.sizes().slice(1)) == 0) return transfer;
    Tensor into = rows_of_bytes(transfer.result), of = rows_of_bytes(input);
    std::vector<int64_t> out = output_splits.vec(), in = input_splits.vec();
    transfer.work = group.alltoall_base(into, of, out, in);
    return transfer;
}

PlainTransfer plain_reduction(c10d::ProcessGroup& group, const Tensor& input, at::ScalarType out_dtype, bool scatters) {
    PlainTransfer transfer;
    transfer.sent = input.to(c10::promoteTypes(input.scalar_type(), out_dtype));
    const bool in_place = !scatters || !input.is_cuda();  // gloo's handle of a reduce_scatter waits without a timeout
    if (in_place && transfer.sent.is_same(input)) transfer.sent = input.clone();
    transfer.result = transfer.sent;
    if (scatters) {
        const auto sizes = sizes_with_rows(input, input.size(0) / group.getSize());
        transfer.result = at::empty(sizes, transfer.sent.options());
        transfer.is_shard_of_sent = in_place;
    }
    if (transfer.result.numel() == 0) return transfer;
    if (in_place) {
        std::vector<Tensor> tensors = {transfer.sent};
        transfer.work = group.allreduce(tensors);
    } else {
        transfer.work = group._reduce_scatter_base(transfer.result, transfer.sent);
    }
    return transfer;
}

}  // namespace ub_overlap
