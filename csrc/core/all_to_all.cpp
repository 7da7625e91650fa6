// The pieces of an all_to_all: where they lie, and their rounds.
#include <algorithm>

#include "core/call.h"

namespace ub_overlap {

Call::Piece Call::piece_of(const Step& step) const {
    if (step.kind == StepKind::copy) return {step.reads[0].shard, step.reads[0].buf == Buf::input};
    // The source of a piece signals READY and waits for READY2.
    const bool signals = step.kind == StepKind::signal;
    const FlagId& flag = signals ? step.flag : step.waits[0].flag;
    return {signals ? flag.rank : flag.source, signals == (flag.kind == FlagKind::ready)};
}

int64_t Call::rows_of(const Piece& piece) const {
    const std::vector<int64_t>& begin = piece.is_sent ? sent_begin : received_begin;
    return begin[piece.peer + 1] - begin[piece.peer];
}

int64_t Call::rounds_of(const Piece& piece) const {
    const int64_t bytes = rows_of(piece) * inner;
    return piece.peer == rank || bytes == 0 ? 1 : (bytes + area_bytes - 1) / area_bytes;
}

int64_t Call::rounds() const {
    int64_t most = received_rounds();
    for (int peer = 0; is_all_to_all() && peer < ranks; ++peer) most = std::max(most, rounds_of({peer, true}));
    return most;
}

int64_t Call::received_rounds() const {
    int64_t most = 1;
    for (int peer = 0; is_all_to_all() && peer < ranks; ++peer) most = std::max(most, rounds_of({peer, false}));
    return most;
}

int64_t Call::largest_piece() const {
    int64_t most = 0;
    for (int peer = 0; peer < ranks; ++peer) {
        if (peer != rank) most = std::max({most, rows_of({peer, true}) * inner, rows_of({peer, false}) * inner});
    }
    return most;
}

bool Call::has_round(const Step& step, int64_t round) const {
    return round == 0 || round < rounds_of(piece_of(step));
}

uint32_t Call::word_tag(const FlagId& flag) const {
    if (!is_all_to_all() || flag.kind != FlagKind::ready) return tag;
    const bool is_sent = flag.rank != rank;  // the word is in the memory of the rank that receives the piece
    const auto rows = static_cast<uint64_t>(rows_of({is_sent ? flag.rank : flag.source, is_sent}));
    return tag ^ static_cast<uint32_t>((rows * 0x9e3779b97f4a7c15ull) >> 32);
}

Move Call::piece_move(const Step& step, int64_t round) const {
    const Piece piece = piece_of(step);
    const bool is_own = piece.peer == rank;
    const int64_t size = rows_of(piece) * inner, skip = is_own ? 0 : round * area_bytes;
    const int64_t bytes = is_own ? size : std::min(area_bytes, size - skip);
    const auto at = [&](const Region& region) -> Span {
        char* data = nullptr;
        if (region.buf == Buf::input) data = input + sent_begin[region.shard] * inner + skip;
        if (region.buf == Buf::output) data = (order ? unordered : output) + received_begin[region.shard] * inner + skip;
        if (region.buf == Buf::landing) data = area_of(region.rank, region.shard);
        return {data, 1, 0, bytes};
    };
    return {at(step.reads[0]), at(step.writes[0])};
}

char* Call::area_of(int owner, int source) const {
    return landing(owner) + (one_area ? 0 : source * area_bytes);
}

OrderedRows Call::rows_in_order() const {
    OrderedRows all{{}, received_begin[ranks], inner, order, ordered_rows, output};
    if (unordered) {
        all.pieces.push_back({0, unordered});
        return all;
    }
    for (int source = 0; source < ranks; ++source) {
        if (rows_of({source, false}) == 0) continue;
        const char* data = source == rank ? input + sent_begin[rank] * inner : area_of(rank, source);
        all.pieces.push_back({received_begin[source], data});
    }
    return all;
}

}  // namespace ub_overlap
