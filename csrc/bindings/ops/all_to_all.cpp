// An exchange of pieces of any sizes, as two ops. Ranks compare the tensors' rows and dtype; each pair of ranks compares the
// size of its piece.
#include <numeric>

#include "bindings/ops/ops.h"
#include "bindings/ops/plain_split.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {
namespace {

// Returns the first row of every piece, and behind them the number of all rows.
std::vector<int64_t> sum_up(at::IntArrayRef splits) {
    std::vector<int64_t> begin(splits.size() + 1);
    std::partial_sum(splits.begin(), splits.end(), begin.begin() + 1);
    return begin;
}

void check_splits(const Builder& b, const char* name, at::IntArrayRef splits) {
    b.check(splits.size() == static_cast<size_t>(b.call.ranks), std::string(name) + " has not one number per rank",
            text_of(splits), std::to_string(b.call.ranks) + " numbers");
    for (const int64_t rows : splits)
        b.check(rows >= 0, std::string(name) + " has a negative number", text_of(splits), "0 or more");
}

// Rows of two sources would be written to the same memory.
void check_one_area(const Builder& b, const char* name, at::IntArrayRef splits) {
    int64_t others = 0;
    for (int64_t peer = 0; peer < b.call.ranks; ++peer) others += peer != b.call.rank && splits[peer] > 0;
    b.check(others < 2, std::string(name) + " has rows for several peers, but one_area", text_of(splits),
            "rows for one peer at most, or one_area=False");
}

void check_order(const Builder& b, const Tensor& order) {
    b.check(order.dim() == 1 && order.scalar_type() == at::kLong && order.device() == b.device(),
            "the order of received rows is not a list of their numbers",
            text_of(order.sizes()) + " of " + c10::toString(order.scalar_type()) + " on " + text_of(order.device()),
            "[n] of Long on " + text_of(b.device()));
}

// Returns the first number that none of the `rows` rows has, if the host knows it: on CUDA only where there are no rows.
std::optional<int64_t> wrong_number(const Tensor& numbers, int64_t rows) {
    if (!numbers.is_cpu()) return rows == 0 && numbers.numel() > 0 ? std::optional<int64_t>(0) : std::nullopt;
    for (const int64_t row : at::ArrayRef<int64_t>(numbers.const_data_ptr<int64_t>(), numbers.numel())) {
        if (row < -rows || row >= rows) return row;
    }
    return std::nullopt;
}

// Fills in all of the call but its buffers. Returns the sizes of the result.
std::vector<int64_t> describe_call(Builder& b, const Tensor& input, at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                                   int64_t split_slot, bool one_area) {
    Call& call = b.call;
    b.check(call.strategy == "bulk" || call.strategy == "none", "an all_to_all has no such strategy", call.strategy,
            "'bulk' or 'none'");
    b.check(input.dim() > 0, "a tensor without dims cannot be exchanged", "[]", "at least one dim");
    check_splits(b, "output_splits", output_splits);
    check_splits(b, "input_splits", input_splits);
    if (one_area) check_one_area(b, "output_splits", output_splits), check_one_area(b, "input_splits", input_splits);
    const int64_t sent = sum_up(input_splits).back();
    b.check(sent == input.size(0), "input_splits do not sum up to the rows of the input", text_of(input_splits),
            std::to_string(input.size(0)) + " rows");
    b.set_split_slot(split_slot);
    call.key.kind = "split_all_to_all";
    call.key.chunks = 2;  // the second round is repeated for further ones
    call.op = OpKind::bulk;
    call.collective = Collective::all_to_all;
    call.type = call.out_type = DType::e4m3;  // bytes
    call.inner = input.dtype().itemsize();
    for (int64_t d = 1; d < input.dim(); ++d) call.inner *= input.size(d);
    call.sent_begin = sum_up(input_splits), call.received_begin = sum_up(output_splits);
    call.one_area = one_area;
    b.describe("row", input.sizes().slice(1), input.dtype());
    b.note("split_slot", split_slot);
    b.note("one_area", one_area);
    b.note_own("output_splits=", output_splits);
    b.note_own("input_splits=", input_splits);
    std::vector<int64_t> sizes = input.sizes().vec();
    sizes[0] = sum_up(output_splits).back();
    return sizes;
}

}  // namespace

Tensor start_all_to_all(const Tensor& input, at::IntArrayRef output_splits, at::IntArrayRef input_splits, int64_t split_slot,
                        bool one_area, std::string strategy, std::string group, std::string site) {
    return run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        Builder b("split all_to_all", input.device(), at);
        describe_call(b, input, output_splits, input_splits, split_slot, one_area);
        const Tensor dense = input.contiguous();
        b.call.input = data_of(dense);
        if (is_plain(b)) {
            return start_plain(b, "all_to_all", input.options(), [&](c10d::ProcessGroup& members) {
                return std::vector<PlainTransfer>{plain_exchange(members, dense, output_splits, input_splits)};
            });
        }
        const Tensor token = at::empty({1}, input.options().dtype(at::kByte));
        start_on_transport(b, std::make_shared<Tensor>(dense), token);
        return token;
    });
}

Tensor finish_all_to_all(const Tensor&, const Tensor& input, at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                         int64_t split_slot, bool one_area, std::string strategy, std::string group, std::string site,
                         const std::optional<Tensor>& order) {
    return run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        Builder b("split all_to_all", input.device(), at);
        std::vector<int64_t> sizes = describe_call(b, input, output_splits, input_splits, split_slot, one_area);
        if (order) check_order(b, *order);
        Tensor out, unordered;
        const Tensor numbers = order ? order->contiguous() : Tensor();
        const int64_t received = sizes[0];
        const std::optional<int64_t> wrong = order ? wrong_number(numbers, received) : std::nullopt;
        const auto allocate = [&](Call& call) {
            if (order && !wrong) {
                if (b.session()->received_rounds(split_slot) > 1) unordered = at::empty(sizes, input.options());
                static const int64_t none = 0;  // a tensor without elements has no address
                call.order = numbers.numel() > 0 ? numbers.const_data_ptr<int64_t>() : &none;
                call.ordered_rows = sizes[0] = numbers.size(0);
                call.unordered = data_of(unordered);
            }
            out = at::empty(sizes, input.options());
            call.output = data_of(out);
        };
        if (is_plain(b)) {
            const Tensor rows = finish_plain(b).at(0);
            return order ? rows.index({*order}) : rows;
        }
        finish_on_transport(b, allocate);
        // Raised behind the finish, as by an index that follows it: this rank's peers have finished too.
        TORCH_CHECK_INDEX(!wrong, "index ", *wrong, " is out of bounds for dimension 0 with size ", received);
        return out;
    });
}

}  // namespace ub_overlap
