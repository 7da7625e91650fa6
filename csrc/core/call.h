// One call of an op: its sizes, its buffers, and the work that each step of its schedule means for them.
//
// Legend: R ranks; o outer blocks; rows(s) rows of shard s in every block (equal for gathers and scatters, dealt out as
// floor(P * s / R) for all_reduces); Q elements a row. How a buffer holds shards (flat, row-major):
//
//     whole     [o, rows(0) + .. + rows(R-1), Q]   all shards interleaved as in the user's tensor
//     single    [o, rows(s), Q]                    one shard
//     stacked   [R, o, rows(me), Q]                what each rank sent for the shard of the rank that owns the memory
//
//     kind                  INPUT     PARTIAL   LANDING   LANDING2   OUTPUT
//     gathers               single    -         whole     -          whole
//     scatters              whole     whole     stacked   -          single
//     all_reduces           whole     whole     stacked   whole      whole
//     one-shot all_reduces  whole     -         R wholes  -          whole
//
// A direct call has no PARTIAL: its matmul stores the shard of each rank in that rank's LANDING.
//
// An all_to_all has pieces of its own for each peer. INPUT holds those that are sent, OUTPUT those that are received, in rank
// order. LANDING has an area for each source. A piece that is larger is sent in rounds of an area each. Elements are bytes.
//
// A split along the last dim of [P, R * q] is the same thing with o = P, rows = q, Q = 1.
//
// float8 numbers travel with fp32 scales. Each such buffer has a table of scales, `scales_a_row` scales for every row and laid
// out like the rows themselves; what moves or lands is always a region of the buffer and the same region of its table, under
// one flag. So steps know nothing of scales. Two kinds of calls have them:
//
//     gathers of float8 rows     INPUT, LANDING and OUTPUT have tables, one scale a row; or none, where one scale fits all
//     scatters, float8 wire      a product's last matmul of a piece also rounds it to WIRE, one scale for 128 elements of a
//     row;
//                                copies from PARTIAL to a peer take WIRE's rows. LANDING holds float8 then, with a table; a
//                                rank's own share is summed from PARTIAL as it is
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/fused_collective.h"
#include "core/schedule.h"
#include "core/types.h"

namespace ub_overlap {

enum class OpKind { all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, bulk };
enum class Collective { gather, scatter, reduce, all_to_all };

// `blocks` runs of `bytes` bytes, `stride` bytes apart.
struct Span {
    char* data = nullptr;
    int64_t blocks = 0, stride = 0, bytes = 0;
};

// What one copy step moves: rows, or their scales.
struct Move {
    Span src, dst;
};

// One addend of a reduction. float8: `scales` holds one fp32 for every `scale_block` elements.
struct Source {
    Span data, scales;
    DType type = DType::f32;
};

// One sum of a reduction step: its addends, in order, and where it goes.
struct Sum {
    std::vector<Source> sources;
    Span to;
    DType type = DType::f32;
};

// Numbers that are to be rounded to float8, and where the rounded ones and their scales go.
struct Rounding {
    Span from, to, scales;
};

// Received rows of an all_to_all, numbered in rank order, and which of them a result has. Row r lies `row_bytes` * (r - first)
// bytes behind the data of the last piece whose first row is not behind it.
struct OrderedRows {
    struct Piece {
        int64_t first;
        const char* data;
    };
    std::vector<Piece> pieces;
    int64_t received, row_bytes;
    const int64_t* order;  // the number of each row of the result; one below zero counts from the end
    int64_t rows;          // of the result
    char* result;
};

constexpr int64_t scale_block = 128;  // elements of a row that share a scale on a float8 wire
constexpr DType wire_float8 = DType::e4m3;

constexpr int64_t slot_line = 256;  // parts of a slot, such as areas, are multiples of so many bytes

inline int64_t whole_lines(int64_t bytes) {
    return (bytes + slot_line - 1) / slot_line * slot_line;
}

// What carries out a split call in place of its steps, for the executor that does.
class PlainCollective {
  public:
    virtual ~PlainCollective() = default;
};

struct Call {
    OpKind op = OpKind::bulk;
    Collective collective = Collective::gather;
    std::string op_name, strategy, shape_text;
    std::string site;      // what ranks compare and errors name: without the own part of the plan digest
    std::string own_site;  // the whole id, for this rank's statistics
    uint32_t tag = 0;
    Key key;
    bool shard_dim_is_last = false;  // shards lie along the last dim of 2D matrices
    bool average = false;            // divide the sum by R

    int rank = 0, ranks = 1;
    int64_t outer = 1, inner = 1;
    std::vector<int64_t> begin;  // R + 1: first row of every shard within a block

    DType type = DType::f32;      // of INPUT, PARTIAL and LANDING
    DType out_type = DType::f32;  // of OUTPUT and LANDING2
    char *input = nullptr, *partial = nullptr, *output = nullptr;
    // Operands of consumers (rhs) or terms. Results of consumers, in the orientation of the tensor returned, then those of
    // the independent matmuls, which neither read nor feed the collective.
    std::vector<Matrix> lhs, rhs, results, independent_lhs, independent_rhs;
    // all_gather_matmul: consumer j multiplies G, or G^T where transpose_gathered[j]; it returns the product, or the
    // product's transpose where transpose_out[j].
    std::vector<bool> transpose_gathered, transpose_out;
    std::vector<Matrix> accumulators;  // contracting consumers: fp32, the result itself where that is fp32
    Matrix addend;

    // float8, see above. lhs_scales, rhs_scales, biases: one an operand, or none at all.
    bool narrow_wire = false, fast_sums = false;
    int64_t scales_a_row = 0;
    Scale input_scale;  // of a gather's INPUT: its table, or the one scale of all ranks
    char *output_scales = nullptr, *wire = nullptr, *wire_scales = nullptr;
    std::vector<Scale> lhs_scales, rhs_scales;
    std::vector<Matrix> biases;

    int device = -1;  // CUDA: index of the tensors' device, and the caller's current stream on it
    void* stream = nullptr;

    int split_slot = -1;  // of a split collective, whose start and finish are two ops

    // An all_to_all: R + 1 each, the first row of every piece in INPUT and OUTPUT. `area_bytes`: equal on all ranks.
    // `one_area`: every rank receives rows from one rank at most, so the areas of all sources are one.
    std::vector<int64_t> sent_begin, received_begin;
    int64_t area_bytes = 0;
    bool one_area = false;
    // Of a finish whose OUTPUT has the received rows in another order: the number of each, in the memory of the tensors. They
    // are read where they have landed; where pieces have several rounds, from `unordered`, in rank order.
    const int64_t* order = nullptr;
    int64_t ordered_rows = 0;
    char* unordered = nullptr;

    // The further tensors of a coalesced collective, a split collective of several tensors. Each is a call with sizes and
    // buffers of its own, whose landing memory begins `landing_offset` bytes behind the slot's. A step that copies or sums
    // does so for every tensor. All else is done once.
    std::vector<Call> coalesced;
    int64_t landing_offset = 0;

    // Set where c10d runs a split collective; its finish gets that of its start. Such a call has no steps and no memory here.
    std::shared_ptr<PlainCollective> plain;

    // A fused collective: one kernel on CUDA. The epilogue is part of it there; on the CPU it follows the call.
    bool is_fused = false, two_shot = false;
    FusedGrid grid;
    Epilogue epilogue;

    // Filled in by the session. The calls of a split slot have epochs of their own, and so have fused collectives.
    uint64_t epoch = 0;
    Arena* arena = nullptr;
    std::shared_ptr<const Program> program;

    // The slot of this call, or of the call `back` epochs before.
    int slot(int back = 0) const {
        if (is_fused) return fused_slot + static_cast<int>((epoch - back) % fused_slots);
        return split_slot < 0 ? static_cast<int>((epoch - back) % slots) : slots + split_slot;
    }
    int64_t rows(int shard) const { return begin[shard + 1] - begin[shard]; }
    int64_t total_rows() const { return begin[ranks]; }
    int64_t max_rows() const;
    // Parts of a slot: LANDING, its table, LANDING2; each rounded up to a cache line.
    int64_t landing_bytes() const;
    int64_t table_bytes() const;
    int64_t landing2_bytes() const;
    // Bytes that the memory of this call's slot must have.
    int64_t slot_bytes() const;

    Span span(const Region& region) const;
    DType type_of(const Region& region) const {
        if (region.buf == Buf::output || region.buf == Buf::landing2) return out_type;
        return region.buf == Buf::landing && narrow_wire ? wire_float8 : type;
    }
    bool is_all_to_all() const { return collective == Collective::all_to_all; }
    int areas() const { return one_area ? 1 : ranks; }
    // Rounds of this rank's pieces, at most; 1 for other calls. Whether a step of an all_to_all belongs to a round.
    int64_t rounds() const;
    int64_t received_rounds() const;  // of what it receives
    bool has_round(const Step& step, int64_t round) const;
    // Bytes of the largest piece that this rank sends to a peer, or receives.
    int64_t largest_piece() const;
    // The rows that the finish of an all_to_all with an order puts into OUTPUT, once all have arrived.
    OrderedRows rows_in_order() const;
    // The tag that a word of this call holds. READY of an all_to_all also stands for the rows of the piece.
    uint32_t word_tag(const FlagId& flag) const;
    // The index of a word. All rounds of an all_to_all share a word: the rank that waits for it clears it.
    int word_index(const FlagId& flag) const { return is_all_to_all() ? 0 : flag.index; }
    int64_t output_bytes() const;
    // Whether every rank sums the whole tensors of all ranks.
    bool is_one_shot_sum() const { return is_fused && collective == Collective::reduce && !two_shot; }
    // Adds a tensor to the coalesced collective, behind those that it has.
    void add_coalesced(Call tensor);
    void set_arena(Arena* of);
    // Lets the results of a zero-copy gather be its landing memory.
    void put_output_in_landing();
    // Takes the outputs of another description of this call.
    void set_outputs(const Call& from);
    // What a copy step moves, the sums of a reduction, and the matmuls of a step; in this order.
    std::vector<Move> moves(const Step& step, int64_t round = 0) const;
    std::vector<Sum> sums(const Step& step) const;
    std::vector<MatmulTask> matmuls(const Step& step) const;
    // Bytes of a matmul step's results that are stored at peers.
    int64_t bytes_at_peers(const Step& step) const;
    // What of a matmul step's results is to be rounded for the wire, once they are there.
    std::vector<Rounding> roundings(const Step& step) const;

  private:
    // Of an all_to_all: the rows that this rank sends to a peer, or receives.
    struct Piece {
        int peer;
        bool is_sent;
    };
    Piece piece_of(const Step& step) const;
    int64_t rows_of(const Piece& piece) const;
    int64_t rounds_of(const Piece& piece) const;
    Move piece_move(const Step& step, int64_t round) const;
    // The landing memory of `owner` for the piece from `source`.
    char* area_of(int owner, int source) const;
    char* landing(int rank) const;
    Span lay(const Region& region, char* base, int64_t row_bytes) const;
    Span table(const Region& region) const;
    std::vector<Source> sources(const Step& step) const;
    Scale scale_of(bool own) const;
    bool is_independent(const Step& step) const;
    void gathered_matmuls(const Step& step, std::vector<MatmulTask>& tasks) const;
    void product_matmuls(const Step& step, std::vector<MatmulTask>& tasks) const;
    void direct_matmuls(const Step& step, std::vector<MatmulTask>& tasks) const;
};

}  // namespace ub_overlap
