#include "core/point_to_point.h"

#include <algorithm>

namespace ub_overlap {
namespace {

// The proven steps of one end of a channel: rank 0 is the source, rank 1 the destination.
std::shared_ptr<const Program> steps_of(int end, int slots) {
    Key key;
    key.kind = "point_to_point";
    key.ranks = 2;
    key.chunks = slots;
    std::shared_ptr<const Program> program = ProgramCache::get(key, end);
    for (const Step& step : program->steps) {
        if (step.kind == StepKind::copy || step.kind == StepKind::signal || step.kind == StepKind::wait) continue;
        throw NamedError("UbOverlapError", {{"what", "a step of a channel is neither a copy, a signal nor a wait"},
                                            {"fix", "report this as a bug"}});
    }
    return program;
}

}  // namespace

void ChannelBoard::describe(Failure& failure, bool sends, int peer) {
    const int source = sends ? failure.reporter : peer, destination = sends ? peer : failure.reporter;
    set_text(failure.got, text_of(source, destination, !sends, failure.expected));
    set_text(failure.wanted, text_of(source, destination, sends, failure.expected));
}

PointToPoint::PointToPoint(std::shared_ptr<Arena> arena, std::shared_ptr<ChannelBoard> board)
    : arena_(std::move(arena)),
      board_(std::move(board)),
      source_steps_(steps_of(0, board_->sizes().slots)),
      destination_steps_(steps_of(1, board_->sizes().slots)) {
    for (auto& next : next_) next.assign(static_cast<size_t>(arena_->ranks()), 1);
}

int64_t PointToPoint::pieces_of(const Message& message) const {
    const int rank = arena_->rank();
    const int64_t bytes =
        message.sends ? board_->sizes().slot_bytes(rank, message.peer) : board_->sizes().slot_bytes(message.peer, rank);
    return std::max<int64_t>(1, (message.bytes + bytes - 1) / bytes);
}

void PointToPoint::break_channels(const Message& message, const std::string& why) {
    Failure failure;
    failure.code = FailureCode::peer_failed;
    failure.reporter = failure.culprit = arena_->rank();
    set_text(failure.op, message.op());
    set_text(failure.site, message.site(arena_->rank()));
    set_text(failure.got, why);
    arena_->abort(arena_->in_origin(failure));
}

std::shared_ptr<Transfer> PointToPoint::issue(Message message) {
    const int rank = arena_->rank();
    if (message.peer < 0 || message.peer >= arena_->ranks() || message.peer == rank) {
        throw NamedError("OptionError", {{"what", std::string("a rank cannot ") + message.op() + " to or from this rank"},
                                         {"where", std::string(message.op()) + " on rank " + std::to_string(rank)},
                                         {"got", "rank " + std::to_string(message.peer) + " of the group"},
                                         {"expected", "another rank, 0 to " + std::to_string(arena_->ranks() - 1)}});
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) {
        // As after the memory of the channels is freed (ChannelBackend::channels_of): a caller cannot tell which comes first.
        throw NamedError("OptionError", {{"what", "the group was destroyed, or its session closed"},
                                         {"where", std::string(message.op()) + " at " + message.site(rank)},
                                         {"fix", "make a new process group"}});
    }
    arena_->poll();
    if (const Failure* failure = arena_->aborted()) throw CallFailed(*failure);
    uint64_t& next = next_[message.sends][static_cast<size_t>(message.peer)];
    const uint64_t first = next;
    const int source = message.sends ? rank : message.peer, destination = message.sends ? message.peer : rank;
    board_->note(source, destination, message.sends, first, message.text);
    const bool sends = message.sends;
    const auto pieces = static_cast<uint64_t>(pieces_of(message));
    try {
        std::shared_ptr<Transfer> transfer = begin(std::move(message), first);
        next += pieces;
        return transfer;
    } catch (...) {  // a message that was refused has no number, and peers must not read that it was issued
        board_->note(source, destination, sends, first, "");
        throw;
    }
}

}  // namespace ub_overlap
