#include "core/call.h"

#include <algorithm>

namespace ub_overlap {
namespace {

constexpr int64_t scale_bytes = sizeof(float);

// Rows [first, last) of every block of a buffer, merged from regions that lie side by side.
struct Range {
    Buf buf;
    int64_t first, last;
};

std::vector<Range> merge(const Call& call, const std::vector<Region>& regions) {
    std::vector<Range> ranges;
    for (const Region& r : regions) {
        const int64_t rows = call.rows(r.shard), base = call.begin[r.shard];
        const Range next{r.buf, base + r.lo.of(rows), base + r.hi.of(rows)};
        if (!ranges.empty() && ranges.back().buf == next.buf && ranges.back().last == next.first) {
            ranges.back().last = next.last;
        } else {
            ranges.push_back(next);
        }
    }
    return ranges;
}

}  // namespace

int64_t Call::max_rows() const {
    int64_t most = 0;
    for (int s = 0; s < ranks; ++s) most = std::max(most, rows(s));
    return most;
}

int64_t Call::landing_bytes() const {
    const int64_t rows =
        collective == Collective::gather ? total_rows() : ranks * (is_one_shot_sum() ? total_rows() : max_rows());
    return whole_lines(outer * rows * inner * size_of(narrow_wire ? wire_float8 : type));
}

int64_t Call::table_bytes() const {
    const int64_t rows = collective == Collective::gather ? total_rows() : ranks * max_rows();
    return whole_lines(outer * rows * scales_a_row * scale_bytes);
}

int64_t Call::landing2_bytes() const {
    return collective == Collective::reduce ? whole_lines(outer * total_rows() * inner * size_of(out_type)) : 0;
}

int64_t Call::output_bytes() const {
    if (is_all_to_all()) return (order ? ordered_rows : received_begin[ranks]) * inner;
    return outer * (collective == Collective::scatter ? rows(rank) : total_rows()) * inner * size_of(out_type);
}

int64_t Call::slot_bytes() const {
    if (is_all_to_all()) return areas() * whole_lines(std::max<int64_t>(area_bytes, 1));
    int64_t bytes = landing_bytes() + table_bytes() + landing2_bytes();
    for (const Call& tensor : coalesced) bytes += tensor.slot_bytes();
    if (!is_fused) return bytes;
    if (device < 0) return fused_slots * bytes;  // the CPU lays the slots out as for other calls
    return std::max(fused_slots * bytes, fused_memory_bytes(fused_region_bytes(grid, ranks, two_shot), ranks));
}

char* Call::landing(int of) const {
    if (arena->slot_bytes(slot()) == 0) return nullptr;  // of a split slot that only empty tensors have used
    return arena->slot(of, slot()) + landing_offset;
}

void Call::add_coalesced(Call tensor) {
    tensor.landing_offset = slot_bytes();
    coalesced.push_back(std::move(tensor));
}

void Call::set_arena(Arena* of) {
    arena = of;
    for (Call& tensor : coalesced) tensor.arena = of;
}

void Call::put_output_in_landing() {
    output = landing(rank);
    for (Call& tensor : coalesced) tensor.output = tensor.landing(rank);
}

void Call::set_outputs(const Call& from) {
    output = from.output;
    order = from.order, ordered_rows = from.ordered_rows, unordered = from.unordered;
    for (size_t i = 0; i < coalesced.size(); ++i) coalesced[i].output = from.coalesced[i].output;
}

// Where a region lies in a buffer that begins at `base`, or in its table: whichever has `row` bytes a row.
Span Call::lay(const Region& r, char* base, int64_t row) const {
    const bool stacked = r.buf == Buf::landing && collective != Collective::gather;
    const bool single = (r.buf == Buf::input && collective == Collective::gather) ||
                        (r.buf == Buf::output && collective == Collective::scatter);
    if (r.buf == Buf::landing && is_one_shot_sum()) {  // every source's whole tensor, of which the index is a shard
        const int64_t count = rows(r.index), lo = r.lo.of(count), hi = r.hi.of(count);
        return {base + (r.shard * total_rows() + begin[r.index] + lo) * row, 1, 0, (hi - lo) * row};
    }
    // The rank whose rows the region holds: single and stacked shards belong to the rank that owns the memory.
    const int owner = stacked || single ? r.rank : r.shard;
    const int64_t count = rows(owner), lo = r.lo.of(count), hi = r.hi.of(count);
    Span span{base, outer, (stacked || single ? count : total_rows()) * row, (hi - lo) * row};
    if (stacked) {
        span.data += r.shard * outer * count * row + lo * row;
    } else {
        span.data += ((single ? 0 : begin[owner]) + lo) * row;
    }
    return span;
}

Span Call::span(const Region& r) const {
    char* base = nullptr;
    switch (r.buf) {
        case Buf::input:
            base = input;
            break;
        case Buf::partial:
            base = partial;
            break;
        case Buf::output:
            base = output;
            break;
        case Buf::landing:
            base = landing(r.rank);
            break;
        case Buf::landing2:
            base = landing(r.rank) + landing_bytes() + table_bytes();
            break;
        default:
            break;
    }
    return lay(r, base, inner * size_of(type_of(r)));
}

// The scales of a region; no data where its buffer has none.
Span Call::table(const Region& r) const {
    char* base = nullptr;
    if (scales_a_row > 0) {
        if (r.buf == Buf::landing) base = landing(r.rank) + landing_bytes();
        if (r.buf == Buf::input) base = reinterpret_cast<char*>(const_cast<float*>(input_scale.data));
        if (r.buf == Buf::output) base = output_scales;
        if (r.buf == Buf::partial) base = wire_scales;
    }
    return base ? lay(r, base, scales_a_row * scale_bytes) : Span{};
}

std::vector<Move> Call::moves(const Step& step, int64_t round) const {
    if (is_all_to_all()) {
        // Rows in another order are read where they have landed, if they stay there: `rows_in_order`.
        if (order && !unordered && step.writes[0].buf == Buf::output) return {};
        return {piece_move(step, round)};
    }
    const Region &src = step.reads[0], &dst = step.writes[0];
    const bool rounded = narrow_wire && src.buf == Buf::partial;
    std::vector<Move> all{{rounded ? lay(src, wire, inner * size_of(wire_float8)) : span(src), span(dst)}};
    const Span from = table(src), to = table(dst);
    if (from.data && to.data) all.push_back({from, to});
    for (const Call& tensor : coalesced) {
        for (const Move& move : tensor.moves(step)) all.push_back(move);
    }
    return all;
}

std::vector<Sum> Call::sums(const Step& step) const {
    std::vector<Sum> all{{sources(step), span(step.writes[0]), out_type}};
    for (const Call& tensor : coalesced) {
        for (Sum& sum : tensor.sums(step)) all.push_back(std::move(sum));
    }
    return all;
}

std::vector<Source> Call::sources(const Step& step) const {
    std::vector<Source> all;
    for (const Region& region : step.reads) {
        const DType held = type_of(region);
        all.push_back({span(region), is_float8(held) ? table(region) : Span{}, held});
    }
    return all;
}

std::vector<Rounding> Call::roundings(const Step& step) const {
    std::vector<Rounding> all;
    if (!narrow_wire || is_independent(step) || step.index + 1 != key.terms) return all;
    for (const Region& region : step.writes) {
        if (region.shard == rank) continue;  // it does not travel
        all.push_back({span(region), lay(region, wire, inner * size_of(wire_float8)), table(region)});
    }
    return all;
}

// Only consumers and independent matmuls write RESULT; the independent ones come last.
bool Call::is_independent(const Step& step) const {
    return step.writes[0].buf == Buf::result && static_cast<size_t>(step.writes[0].index) >= key.contracts.size();
}

std::vector<MatmulTask> Call::matmuls(const Step& step) const {
    std::vector<MatmulTask> tasks;
    if (is_independent(step)) {
        const size_t number = step.index - key.contracts.size();
        MatmulTask task;
        task.out = results[step.index];
        task.a = independent_lhs[number];
        task.b = independent_rhs[number];
        tasks.push_back(task);
    } else if (op == OpKind::all_gather_matmul) {
        gathered_matmuls(step, tasks);
    } else if (key.direct) {
        direct_matmuls(step, tasks);
    } else {
        product_matmuls(step, tasks);
    }
    return tasks;
}

int64_t Call::bytes_at_peers(const Step& step) const {
    int64_t bytes = 0;
    for (const Region& region : step.writes) {
        if (region.rank == rank) continue;
        const Span stored = span(region);
        bytes += stored.blocks * stored.bytes;
    }
    return bytes;
}

// Scales of the rows of INPUT (`own`) or of this rank's LANDING.
Scale Call::scale_of(bool own) const {
    if (own || !input_scale.each) return input_scale;
    return {reinterpret_cast<const float*>(landing(rank) + landing_bytes()), true};
}

// Consumer of a gathered matrix G. A consumer that returns the transpose sees its out transposed. The gathered rows (or, where
// shards lie along the last dim, columns) are either rows of the product or summed over.
void Call::gathered_matmuls(const Step& step, std::vector<MatmulTask>& tasks) const {
    const bool transposed = transpose_gathered[step.index], contracts = key.contracts[step.index];
    const Matrix& whole = contracts ? accumulators[step.index] : results[step.index];
    const Matrix out = transpose_out[step.index] ? whole.transposed() : whole;
    const Matrix& b = rhs[step.index];
    bool add = step.accumulate;
    for (const Range& range : merge(*this, step.reads)) {
        const bool own = range.buf == Buf::input;
        const int64_t width = range.last - range.first, held = own ? rows(rank) : total_rows();
        char* base = own ? input : landing(rank);
        const int64_t skip = own ? range.first - begin[rank] : range.first;
        MatmulTask task;
        if (!rhs_scales.empty()) {
            task.a_scale = scale_of(own).from(skip), task.a_scale_step = held;
            task.b_scale = rhs_scales[step.index], task.fast_sums = fast_sums;
            task.addend = biases[step.index].row_block(range.first, width);
        }
        if (shard_dim_is_last) {  // o = P rows, a block is `width` columns of one row
            const Matrix g{base + skip * size_of(type), outer, width, held, 1, type};
            if (contracts) {
                task.out = out, task.a = g, task.b = b.row_block(range.first, width), task.accumulate = add;
            } else {
                task.out = out.row_block(range.first, width), task.a = g.transposed(), task.b = b,
                task.accumulate = step.accumulate;
            }
            tasks.push_back(task);
            add = true;
            continue;
        }
        if (width == total_rows() && width == held) {  // all of it, in order: one matrix
            const Matrix all{base, outer * width, inner, inner, 1, type};
            task.out = out, task.a = transposed ? all.transposed() : all, task.b = b, task.accumulate = add;
            if (!biases.empty()) task.addend = biases[step.index];
            tasks.push_back(task);
            add = true;
            continue;
        }
        const Matrix g{base + skip * inner * size_of(type), width, inner, inner, 1, type};
        if (!contracts) {
            task.out = out.row_block(range.first, width), task.a = g, task.b = b, task.accumulate = step.accumulate;
            task.batch = outer, task.out_step = total_rows() * out.row_stride, task.a_step = held * inner;
            tasks.push_back(task);
            continue;
        }
        for (int64_t block = 0; block < outer; ++block) {  // a sum over blocks: one after the other into the same place
            Matrix piece = g;
            piece.data += block * held * inner * size_of(type);
            task.out = out, task.a = transposed ? piece.transposed() : piece;
            task.b = b.row_block(block * total_rows() + range.first, width), task.accumulate = add;
            tasks.push_back(task);
            add = true;
        }
    }
    if (contracts && !add) {  // nothing to sum: store zeros, as a product over an empty dim does
        MatmulTask task;
        task.out = out, task.a = Matrix{input, out.rows, 0, 1, 1, type}, task.b = b.row_block(0, 0);
        tasks.push_back(task);
    }
}

// Term `index` of a product that is to be scattered or reduced: some rows of PARTIAL, or some columns where shards lie there.
void Call::product_matmuls(const Step& step, std::vector<MatmulTask>& tasks) const {
    const Matrix &a = lhs[step.index], &b = rhs[step.index];
    const bool first = step.index == 0 && addend.data != nullptr;
    MatmulTask scaled;
    if (!lhs_scales.empty()) {
        scaled.a_scale = lhs_scales[step.index], scaled.b_scale = rhs_scales[step.index], scaled.fast_sums = fast_sums;
    }
    const std::vector<Range> ranges = merge(*this, step.writes);
    // A stripe of equal shards: blocks of rows at equal distances, one batched matmul.
    const auto batch = static_cast<int64_t>(ranges.size());
    bool even = !shard_dim_is_last && outer == 1 && batch > 1;
    for (int64_t i = 1; even && i < batch; ++i) {
        even = ranges[i].first - ranges[i - 1].first == ranges[1].first - ranges[0].first &&
               ranges[i].last - ranges[i].first == ranges[0].last - ranges[0].first;
    }
    if (even) {
        const int64_t step_rows = ranges[1].first - ranges[0].first, rows = ranges[0].last - ranges[0].first;
        const Matrix all{partial, total_rows(), inner, inner, 1, type};
        MatmulTask task = scaled;
        task.a_scale = scaled.a_scale.from(ranges[0].first), task.a_scale_step = step_rows;
        task.out = all.row_block(ranges[0].first, rows), task.a = a.row_block(ranges[0].first, rows), task.b = b;
        task.batch = batch, task.out_step = step_rows * inner, task.a_step = step_rows * a.row_stride;
        task.accumulate = step.accumulate;
        if (first) {
            task.addend = addend.row_block(ranges[0].first, rows);
            task.addend_step = step_rows * addend.row_stride;
        }
        tasks.push_back(task);
        return;
    }
    for (const Range& range : ranges) {
        const int64_t width = range.last - range.first;
        MatmulTask task = scaled;
        task.a_scale = scaled.a_scale.from(range.first), task.a_scale_step = total_rows();
        task.accumulate = step.accumulate;
        if (shard_dim_is_last) {
            const Matrix all{partial, outer, total_rows(), total_rows(), 1, type};
            task.out = all.col_block(range.first, width), task.a = a, task.b = b.col_block(range.first, width);
            if (first) task.addend = addend.col_block(range.first, width);
        } else {
            const Matrix all{partial, outer * total_rows(), inner, inner, 1, type};
            task.out = all.row_block(range.first, width), task.a = a.row_block(range.first, width), task.b = b;
            task.batch = outer, task.out_step = total_rows() * inner, task.a_step = total_rows() * a.row_stride;
            if (first) {
                task.addend = addend.row_block(range.first, width);
                task.addend_step = total_rows() * addend.row_stride;
            }
        }
        tasks.push_back(task);
    }
}

// A product whose shards are stored at their owners, in the order of the step. Equal pieces are one batch.
void Call::direct_matmuls(const Step& step, std::vector<MatmulTask>& tasks) const {
    const Matrix &a = lhs[0], &b = rhs[0];
    bool equal = true;
    for (const Region& region : step.writes) {
        const int64_t shard = rows(region.rank), skip = region.lo.of(shard), count = region.hi.of(shard) - skip;
        const int64_t first = begin[region.rank] + skip;
        const Span landing = span(region);
        MatmulTask task;
        task.out = Matrix{landing.data, count, inner, inner, 1, type};
        task.a = a.row_block(first, count), task.b = b, task.addend = addend.row_block(first, count);
        task.batch = outer, task.out_step = landing.stride / size_of(type), task.a_step = total_rows() * a.row_stride;
        task.addend_step = total_rows() * addend.row_stride;
        tasks.push_back(task);
        equal = equal && count == tasks.front().out.rows;
    }
    if (!equal || tasks.empty()) return;
    MatmulTask batch = tasks.front();
    for (const MatmulTask& task : tasks) {
        for (int64_t block = 0; block < outer; ++block) {
            const MatmulTask one = task.one(block);
            batch.addresses.push_back({one.out.data, one.a.data, one.addend.data});
        }
    }
    tasks.clear();
    batch.batch = static_cast<int64_t>(batch.addresses.size());
    if (batch.batch > 0) tasks.push_back(batch);
}

}  // namespace ub_overlap
