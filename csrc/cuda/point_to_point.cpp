#include "cuda/point_to_point.h"

#include <algorithm>

#include "core/settings.h"
#include "core/wait_until.h"
#include "cuda/channel_kernels.h"

namespace ub_overlap::cuda {

int64_t channel_words_bytes(const ChannelSizes& sizes) {
    const int64_t words = static_cast<int64_t>(sizes.ranks) * (sizes.slots + 1);
    return (words * static_cast<int64_t>(sizeof(uint64_t)) + 511) / 512 * 512;  // slots begin at a multiple of 512
}

int64_t channel_bytes(const ChannelSizes& sizes) {
    return channel_words_bytes(sizes) + sizes.total_bytes();
}

class CudaPointToPoint::CudaTransfer final : public Transfer {
  public:
    CudaTransfer(const std::shared_ptr<CudaArena>& arena, const Message& message, uint64_t first)
        : arena_(arena),
          tensor_(message.tensor),
          device_(message.device),
          peer_(message.peer),
          sends_(message.sends),
          first_(first) {
        check(cudaEventCreateWithFlags(&done, cudaEventDisableTiming), "create an event");
    }
    ~CudaTransfer() override {
        cudaEventDestroy(done);  // one that is pending is freed when it has ended
    }
    bool is_completed() override {
        if (!is_recorded) return false;
        const DeviceScope scope(device_);
        const RelaxedCapture relaxed;  // another thread may be capturing
        const cudaError_t status = cudaEventQuery(done);
        if (status == cudaErrorNotReady) cudaGetLastError();
        if (status != cudaErrorNotReady) check(status, "query a message");
        return status == cudaSuccess;
    }
    // From here on the stream's later work follows the message, and with it the next use of the tensor's memory.
    void wait(void* stream) override {
        const DeviceScope scope(device_);
        if (const auto arena = arena_.lock()) arena->await_message(sends_, peer_, first_);
        check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), done, 0), "wait for a message");
    }

    cudaEvent_t done = nullptr;
    bool is_recorded = false;  // CUDA takes an event that was not recorded for one that has ended

  private:
    const std::weak_ptr<CudaArena> arena_;  // a program may hold a message longer than the group
    const std::shared_ptr<void> tensor_;
    const int device_, peer_;
    const bool sends_;
    const uint64_t first_;
};

CudaPointToPoint::CudaPointToPoint(std::shared_ptr<CudaArena> arena, std::shared_ptr<ChannelSegment> segment,
                                   const std::vector<uint64_t>& memory)
    : PointToPoint(arena, segment), device_arena_(std::move(arena)), segment_(std::move(segment)) {
    for (const uint64_t pointer : memory) memory_.push_back(reinterpret_cast<char*>(pointer));
    if (static_cast<int>(memory_.size()) != arena_->ranks()) {
        throw NamedError("ArenaError", {{"what", "channels need one pointer per rank"},
                                        {"got", std::to_string(memory_.size())},
                                        {"expected", std::to_string(arena_->ranks())}});
    }
    const DeviceScope scope(device_arena_->device());
    preload_channels();
    device_arena_->set_channels(segment_);
}

// Streams and events that the device may still use are not destroyed by CUDA before it is done with them.
CudaPointToPoint::~CudaPointToPoint() {
    try {
        close();
        const DeviceScope scope(device_arena_->device(), DeviceScope::Restore::if_in_use);
        for (auto& [key, lane] : lanes_) cudaStreamDestroy(lane.stream), cudaEventDestroy(lane.issued);
    } catch (...) {  // the driver is shutting down
    }
}

uint64_t* CudaPointToPoint::ready_word(int source, int destination, int slot) const {
    return reinterpret_cast<uint64_t*>(memory_[destination]) + source * segment_->sizes().slots + slot;
}

uint64_t* CudaPointToPoint::done_word(int source, int destination) const {
    const ChannelSizes& sizes = segment_->sizes();
    return reinterpret_cast<uint64_t*>(memory_[source]) + sizes.ranks * sizes.slots + destination;
}

CudaPointToPoint::Lane& CudaPointToPoint::lane_of(bool sends, int peer) {
    Lane& lane = lanes_[{sends, peer}];
    if (!lane.stream) {
        int least = 0, greatest = 0;
        check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "read the stream priorities");
        if (!lane.issued) check(cudaEventCreateWithFlags(&lane.issued, cudaEventDisableTiming), "create an event");
        check(cudaStreamCreateWithPriority(&lane.stream, cudaStreamNonBlocking, greatest), "create a stream");
    }
    return lane;
}

std::shared_ptr<Transfer> CudaPointToPoint::begin(Message message, uint64_t first) {
    const auto caller = static_cast<cudaStream_t>(message.stream);
    const auto refuse = [&](const char* what, std::string got, std::string expected, const char* fix) {
        throw NamedError("OptionError", {{"what", what},
                                         {"where", std::string(message.op()) + " at " + message.site(arena_->rank())},
                                         {"got", std::move(got)},
                                         {"expected", std::move(expected)},
                                         {"fix", fix}});
    };
    if (message.device != device_arena_->device()) {
        refuse("the tensor is on another device than the group's memory", "cuda:" + std::to_string(message.device),
               "cuda:" + std::to_string(device_arena_->device()), "use one device per rank and group");
    }
    const DeviceScope scope(message.device);
    if (capture_of(caller) != 0) {
        refuse("messages cannot be captured in a CUDA graph", message.text, "an eager call",
               "capture the stages alone, and send and receive between their replays");
    }
    release_completed();
    Lane& lane = lane_of(message.sends, message.peer);
    check(cudaEventRecord(lane.issued, caller), "record an event");
    check(cudaStreamWaitEvent(lane.stream, lane.issued, 0), "order a message behind its tensor");
    auto transfer = std::make_shared<CudaTransfer>(device_arena_, message, first);
    unfinished_.push_back(transfer);  // its memory first: the tensor must stay while the stream uses it
    bool has_begun = false;
    try {
        issue_pieces(message, first, lane.stream, has_begun);
        check(cudaEventRecord(transfer->done, lane.stream), "record an event");
        transfer->is_recorded = true;
    } catch (const std::exception& failed) {
        if (has_begun) {
            transfer->is_recorded = cudaEventRecord(transfer->done, lane.stream) == cudaSuccess;
            break_channels(message, failed.what());
        } else {
            unfinished_.pop_back();
        }
        throw;
    }
    return transfer;
}

// Issues the steps of this rank's end of the channel for each piece.
void CudaPointToPoint::issue_pieces(const Message& m, uint64_t first, cudaStream_t stream, bool& has_begun) {
    const ChannelSizes& sizes = segment_->sizes();
    const int source = m.sends ? arena_->rank() : m.peer, destination = m.sends ? m.peer : arena_->rank();
    const int64_t slot_bytes = sizes.slot_bytes(source, destination), pieces = pieces_of(m);
    const int64_t timeout_ns = settings().step_timeout_ns.load(std::memory_order_relaxed);
    char* slots = memory_[destination] + channel_words_bytes(sizes) + sizes.offset(source, destination);
    ChannelWait word{};
    word.awaited = device_arena_->awaited_message(m.sends, m.peer);
    word.message = static_cast<uint32_t>(first);
    word.peer = static_cast<uint16_t>(m.peer);
    word.kind = static_cast<uint8_t>(m.sends ? FlagKind::channel_done : FlagKind::channel_ready);
    for (int64_t piece = 0; piece < pieces; ++piece) {
        const uint64_t number = first + static_cast<uint64_t>(piece);
        const int place = static_cast<int>(number % static_cast<uint64_t>(sizes.slots));
        char* slot = slots + place * slot_bytes;
        char* data = m.data + piece * slot_bytes;
        const auto bytes = static_cast<size_t>(std::min(slot_bytes, m.bytes - piece * slot_bytes));
        uint64_t* ready = ready_word(source, destination, place);
        for (const Step& step : (m.sends ? source_steps_ : destination_steps_)->steps) {
            if (step.kind == StepKind::copy) {
                if (bytes == 0) continue;
                check(cudaMemcpyAsync(m.sends ? slot : data, m.sends ? data : slot, bytes, cudaMemcpyDeviceToDevice, stream),
                      m.sends ? "push to a peer" : "copy a message");
            } else if (step.kind == StepKind::signal) {
                if (m.sends) {
                    write_word(ready, flag_value(number, m.hash), stream);
                } else {
                    write_word(done_word(source, destination), flag_value(number, 1), stream);
                }
            } else if (const FlagWait& wait = step.waits[0]; number > static_cast<uint64_t>(wait.back)) {
                const bool is_done = wait.flag.kind == FlagKind::done;
                word.word = is_done ? done_word(source, destination) : ready;
                word.number = static_cast<uint32_t>(number - wait.back);
                word.hash = is_done ? 0 : m.hash;
                launch_channel_wait(device_arena_->group(), word, timeout_ns, stream);
            } else {
                continue;  // no earlier piece has used the slot
            }
            has_begun = true;
        }
    }
    if (!m.sends) launch_channel_end(device_arena_->group(), m.data, m.bytes, word, stream);
}

// Messages of a channel complete in order, those of several do not: each is asked.
void CudaPointToPoint::release_completed() {
    const auto ended = [](const std::shared_ptr<CudaTransfer>& transfer) { return transfer->is_completed(); };
    unfinished_.erase(std::remove_if(unfinished_.begin(), unfinished_.end(), ended), unfinished_.end());
}

void CudaPointToPoint::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    const int64_t deadline = now_ns() + settings().step_timeout_ns.load(std::memory_order_relaxed);
    const auto all_ended = [this] {
        try {
            release_completed();
        } catch (const std::exception&) {  // a device that has failed runs nothing any more
            return true;
        }
        return unfinished_.empty();
    };
    wait_until(all_ended, deadline, [] {});
}

}  // namespace ub_overlap::cuda
