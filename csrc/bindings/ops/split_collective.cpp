// A collective as two ops, or three. Start and finish build the same call: finish finds the open one by its slot and compares
// their tags. Release finds it by slot and site.
#include <memory>

#include "bindings/fallback.h"
#include "bindings/ops/collective_sizes.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {
namespace {

// A group of one rank has no arena, and a slot may have no bytes for an empty tensor. Their results are copies.
bool has_landing_memory(const Call& call, const Tensor& tensor) {
    return call.ranks > 1 && tensor.numel() > 0;
}

// Fills in all of the call but its buffers. Returns the sizes of the result.
std::vector<int64_t> describe_call(Builder& b, const Tensor& input, const std::string& collective, const std::string& reduce_op,
                                   at::ScalarType out_dtype, int64_t split_slot, bool zero_copy) {
    Call& call = b.call;
    b.check(!call.key.striped && !call.key.direct, "a split collective has neither stripes nor products at their owners",
            call.strategy, "'bulk', 'bulk:chunks=N' or 'none'");
    b.check(!zero_copy || collective == "all_gather", "only a gather can return its landing memory", collective, "all_gather");
    call.key.kind = "split_" + collective;
    call.key.zero_copy = zero_copy && has_landing_memory(call, input);
    b.set_split_slot(split_slot);
    std::vector<int64_t> sizes = deal_rows(b, input, collective, reduce_op, out_dtype);
    b.describe("input", input);
    b.note("reduce_op", reduce_op);
    b.note("out_dtype", c10::toString(out_dtype));
    b.note("split_slot", split_slot);
    b.note("zero_copy", zero_copy);
    return sizes;
}

}  // namespace

Tensor start_collective(const Tensor& input, std::string collective, std::string reduce_op, at::ScalarType out_dtype,
                        int64_t split_slot, bool zero_copy, std::string strategy, std::string group, std::string site) {
    return run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        Builder b("split " + collective, input.device(), at);
        describe_call(b, input, collective, reduce_op, out_dtype, split_slot, zero_copy);
        const Tensor dense = input.contiguous();
        b.call.input = data_of(dense);
        if (start_on_transport(b, std::make_shared<Tensor>(dense))) return at::empty({1}, input.options().dtype(at::kByte));
        WithGil gil;
        return FallbackCall("start_collective")
            .tensor(dense)
            .text(collective)
            .text(reduce_op)
            .dtype(out_dtype)
            .integer(split_slot)
            .flag(zero_copy)
            .run(at)
            .at(0);
    });
}

// Runs the second part of the collective that is open in the slot, or all of it without a transport. The result goes to `out`,
// which is allocated here unless it is given, or stays in landing memory.
static Tensor finish(const Tensor& token, const Tensor& input, Tensor out, const std::string& collective,
                     const std::string& reduce_op, at::ScalarType out_dtype, int64_t split_slot, bool zero_copy,
                     const Site& at) {
    Builder b("split " + collective, input.device(), at);
    const std::vector<int64_t> sizes = describe_call(b, input, collective, reduce_op, out_dtype, split_slot, zero_copy);
    const at::TensorOptions options = input.options().dtype(out_dtype);
    const bool is_given = out.defined();
    if (is_given) {
        b.check(out.sizes() == at::IntArrayRef(sizes) && out.is_contiguous() && out.device() == input.device(),
                "the output is not a contiguous tensor of the result's sizes", text_of(out.sizes()), text_of(sizes));
    }
    const auto allocate = [&](Call& call) {
        if (!is_given && !call.key.zero_copy) out = at::empty(sizes, options);
        call.output = data_of(out);
    };
    if (finish_on_transport(b, allocate)) {
        if (out.defined()) return out;
        return at::for_blob(b.call.output, sizes).options(options).target_device(input.device()).make_tensor();
    }
    WithGil gil;
    const Tensor result = FallbackCall("finish_collective")
                              .tensor(token)
                              .tensor(input)
                              .text(collective)
                              .text(reduce_op)
                              .dtype(out_dtype)
                              .integer(split_slot)
                              .flag(zero_copy)
                              .run(at)
                              .at(0);
    return is_given ? out.copy_(result) : result;
}

Tensor finish_collective(const Tensor& token, const Tensor& input, std::string collective, std::string reduce_op,
                         at::ScalarType out_dtype, int64_t split_slot, bool zero_copy, std::string strategy, std::string group,
                         std::string site) {
    return run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        return finish(token, input, Tensor(), collective, reduce_op, out_dtype, split_slot, zero_copy, at);
    });
}

void finish_collective_into(const Tensor& token, const Tensor& input, Tensor& out, std::string collective,
                            std::string reduce_op, int64_t split_slot, std::string strategy, std::string group,
                            std::string site) {
    run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        return finish(token, input, out, collective, reduce_op, out.scalar_type(), split_slot, false, at);
    });
}

Tensor landing_memory(const Tensor& like, int64_t numel, int64_t split_slot, std::string group, std::string site) {
    return run_op(like.device(), [&]() -> Tensor {
        const Site at{"bulk", group, site};
        Builder b("split all_gather", like.device(), at);
        const at::TensorOptions options = like.options();
        b.check(numel >= 0 && numel % b.call.ranks == 0, "the result of a gather has equal parts", std::to_string(numel),
                "a multiple of " + std::to_string(b.call.ranks));
        const Tensor shard =
            at::for_blob(nullptr, {numel / b.call.ranks}).options(options).target_device(like.device()).make_tensor();
        describe_call(b, shard, "all_gather", "sum", like.scalar_type(), split_slot, true);
        char* memory = has_landing_memory(b.call, shard) ? landing_on_transport(b) : nullptr;
        if (!memory) return at::empty({numel}, options);
        return at::for_blob(memory, {numel}).options(options).target_device(like.device()).make_tensor();
    });
}

void release_collective(const Tensor& gathered, int64_t split_slot, std::string strategy, std::string group, std::string site) {
    run_op(gathered.device(), [&] {
        const Site at{strategy, group, site};
        Builder b("split all_gather", gathered.device(), at);
        b.set_split_slot(split_slot);
        if (has_landing_memory(b.call, gathered)) release_on_transport(b);
        return 0;
    });
}

}  // namespace ub_overlap
