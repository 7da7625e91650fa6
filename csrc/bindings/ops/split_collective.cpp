// A collective as two ops, or three, of one tensor or of several (coalesced). Start and finish build the same call: finish
// finds the open one by its slot and compares their tags. Release finds it by slot and site.
#include <algorithm>
#include <memory>

#include "bindings/ops/collective_sizes.h"
#include "bindings/ops/ops.h"
#include "bindings/ops/plain_split.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {
namespace {

// The arguments of a start, which its finish takes again.
struct Arguments {
    at::TensorList inputs;
    const std::string &collective, &reduce_op;
    at::ArrayRef<at::ScalarType> out_dtypes;
    int64_t split_slot;
    bool zero_copy;
    const Site& site;
    bool is_coalesced = false;

    at::Device device() const { return inputs[0].device(); }
};

// A group of one rank has no arena, and a slot may have no bytes for an empty tensor. Their results are copies, also those of
// the tensors that are sent together with an empty one.
bool have_landing_memory(const Call& call, at::TensorList tensors) {
    return call.ranks > 1 && std::all_of(tensors.begin(), tensors.end(), [](const Tensor& t) { return t.numel() > 0; });
}

// Fills in all of the call but its buffers. Returns the sizes of the results.
std::vector<std::vector<int64_t>> describe_call(Builder& b, const Arguments& a) {
    Call& call = b.call;
    const size_t count = a.inputs.size();
    b.check(!call.key.striped && !call.key.direct, "a split collective has neither stripes nor products at their owners",
            call.strategy, "'bulk', 'bulk:chunks=N' or 'none'");
    b.check(!a.zero_copy || a.collective == "all_gather", "only a gather can return its landing memory", a.collective,
            "all_gather");
    b.check(a.out_dtypes.size() == count, "not every tensor has an out_dtype", std::to_string(a.out_dtypes.size()),
            std::to_string(count));
    call.key.kind = "split_" + a.collective;
    call.key.zero_copy = a.zero_copy && have_landing_memory(call, a.inputs);
    b.set_split_slot(a.split_slot);
    std::vector<std::vector<int64_t>> sizes(count);
    std::vector<Call> others(count - 1);
    for (size_t i = count; i-- > 0;) {  // the first tensor's sizes are those of the call itself
        b.check(a.inputs[i].device() == b.device(), "the inputs are on several devices", text_of(a.inputs[i].device()),
                text_of(b.device()));
        sizes[i] = deal_rows(b, a.inputs[i], a.collective, a.reduce_op, a.out_dtypes[i]);
        if (i > 0) others[i - 1] = call;
    }
    for (Call& tensor : others) call.add_coalesced(std::move(tensor));
    for (const Tensor& input : a.inputs) b.describe("input", input);
    b.note("reduce_op", a.reduce_op);
    for (const at::ScalarType dtype : a.out_dtypes) b.note("out_dtype", c10::toString(dtype));
    b.note("split_slot", a.split_slot);
    b.note("zero_copy", a.zero_copy);
    return sizes;
}

// The call of tensor `i`: the first one's is the coalesced collective's own.
Call& call_of(Call& call, size_t i) {
    return i == 0 ? call : call.coalesced[i - 1];
}

// Launches the collectives of all tensors with c10d.
std::vector<PlainTransfer> launch_plain(c10d::ProcessGroup& group, const std::vector<Tensor>& dense, const Arguments& a) {
    std::vector<PlainTransfer> transfers;
    for (size_t i = 0; i < dense.size(); ++i) {
        transfers.push_back(a.collective == "all_gather"
                                ? plain_gather(group, dense[i])
                                : plain_reduction(group, dense[i], a.out_dtypes[i], a.collective == "reduce_scatter"));
    }
    return transfers;
}

// Returns the results of collectives that c10d ran.
std::vector<Tensor> plain_results(Builder& b, const Arguments& a) {
    std::vector<Tensor> results = finish_plain(b);
    if (a.collective == "all_gather") return results;
    for (size_t i = 0; i < results.size(); ++i) {
        if (a.reduce_op == "avg") results[i] = results[i] / b.call.ranks;
        results[i] = results[i].to(a.out_dtypes[i]);
    }
    return results;
}

Tensor start(const Arguments& a) {
    Builder b("split " + a.collective, a.device(), a.site);
    describe_call(b, a);
    auto dense = std::make_shared<std::vector<Tensor>>();
    for (size_t i = 0; i < a.inputs.size(); ++i) {
        dense->push_back(a.inputs[i].contiguous());
        call_of(b.call, i).input = data_of(dense->back());
    }
    const at::TensorOptions options = a.inputs[0].options();
    if (is_plain(b)) {
        const char* kind = a.is_coalesced ? "coalesced" : "collective";
        return start_plain(b, kind, options, [&](c10d::ProcessGroup& group) { return launch_plain(group, *dense, a); });
    }
    const Tensor token = at::empty({1}, options.dtype(at::kByte));
    start_on_transport(b, dense, token);
    return token;
}

// Runs the second part of the collective that is open in the slot, or all of it without a transport. The results go to `outs`,
// which are allocated here unless they are given, or the result stays in landing memory.
std::vector<Tensor> finish(const Arguments& a, std::vector<Tensor> outs = {}) {
    Builder b("split " + a.collective, a.device(), a.site);
    const std::vector<std::vector<int64_t>> sizes = describe_call(b, a);
    const auto options = [&](size_t i) { return a.inputs[i].options().dtype(a.out_dtypes[i]); };
    const bool are_given = !outs.empty();
    for (size_t i = 0; i < outs.size(); ++i) {
        b.check(outs[i].sizes() == at::IntArrayRef(sizes[i]) && outs[i].is_contiguous() && outs[i].device() == a.device(),
                "the output is not a contiguous tensor of the result's sizes", text_of(outs[i].sizes()), text_of(sizes[i]));
    }
    const auto allocate = [&](Call& call) {
        if (call.key.zero_copy) return;
        for (size_t i = 0; i < sizes.size(); ++i) {
            if (!are_given) outs.push_back(at::empty(sizes[i], options(i)));
            call_of(call, i).output = data_of(outs[i]);
        }
    };
    if (is_plain(b)) {
        const std::vector<Tensor> results = plain_results(b, a);
        for (size_t i = 0; i < outs.size(); ++i) outs[i].copy_(results[i]);
        return are_given ? outs : results;
    }
    finish_on_transport(b, allocate);
    if (!outs.empty()) return outs;
    std::vector<Tensor> results;
    for (size_t i = 0; i < sizes.size(); ++i) {
        results.push_back(
            at::for_blob(call_of(b.call, i).output, sizes[i]).options(options(i)).target_device(b.device()).make_tensor());
    }
    watch_results(b, results);
    return results;
}

void check_coalesced(at::TensorList inputs, const std::string& site) {
    expect(site.c_str(), !inputs.empty(), "a coalesced collective has no tensor", "an empty list", "one tensor or more");
}

}  // namespace

Tensor start_collective(const Tensor& input, std::string collective, std::string reduce_op, at::ScalarType out_dtype,
                        int64_t split_slot, bool zero_copy, std::string strategy, std::string group, std::string site) {
    return run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        return start({input, collective, reduce_op, out_dtype, split_slot, zero_copy, at});
    });
}

Tensor finish_collective(const Tensor&, const Tensor& input, std::string collective, std::string reduce_op,
                         at::ScalarType out_dtype, int64_t split_slot, bool zero_copy, std::string strategy, std::string group,
                         std::string site) {
    return run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        return finish({input, collective, reduce_op, out_dtype, split_slot, zero_copy, at}).at(0);
    });
}

Tensor start_coalesced(at::TensorList inputs, std::string collective, std::string reduce_op,
                       const std::vector<at::ScalarType>& out_dtypes, int64_t split_slot, bool zero_copy, std::string strategy,
                       std::string group, std::string site) {
    return run_op(device_of(inputs), [&] {
        check_coalesced(inputs, site);
        const Site at{strategy, group, site};
        return start({inputs, collective, reduce_op, out_dtypes, split_slot, zero_copy, at, true});
    });
}

std::vector<Tensor> finish_coalesced(const Tensor&, at::TensorList inputs, std::string collective, std::string reduce_op,
                                     const std::vector<at::ScalarType>& out_dtypes, int64_t split_slot, bool zero_copy,
                                     std::string strategy, std::string group, std::string site) {
    return run_op(device_of(inputs), [&] {
        check_coalesced(inputs, site);
        const Site at{strategy, group, site};
        return finish({inputs, collective, reduce_op, out_dtypes, split_slot, zero_copy, at, true});
    });
}

void finish_collective_into(const Tensor&, const Tensor& input, Tensor& out, std::string collective, std::string reduce_op,
                            int64_t split_slot, std::string strategy, std::string group, std::string site) {
    run_op(input.device(), [&] {
        const Site at{strategy, group, site};
        const at::ScalarType dtype = out.scalar_type();
        return finish({input, collective, reduce_op, dtype, split_slot, false, at}, {out}).at(0);
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
        const std::string collective = "all_gather", reduce_op = "sum";
        const at::ScalarType dtype = like.scalar_type();
        describe_call(b, {shard, collective, reduce_op, dtype, split_slot, true, at});
        char* memory = have_landing_memory(b.call, shard) && !is_plain(b) ? landing_on_transport(b) : nullptr;
        if (!memory) return at::empty({numel}, options);
        return at::for_blob(memory, {numel}).options(options).target_device(like.device()).make_tensor();
    });
}

void release_collective(const Tensor& gathered, int64_t split_slot, std::string strategy, std::string group, std::string site) {
    release_coalesced(gathered, split_slot, strategy, group, site);
}

void release_coalesced(at::TensorList gathered, int64_t split_slot, std::string strategy, std::string group, std::string site) {
    run_op(device_of(gathered), [&] {
        check_coalesced(gathered, site);
        const Site at{strategy, group, site};
        Builder b("split all_gather", gathered[0].device(), at);
        b.set_split_slot(split_slot);
        if (have_landing_memory(b.call, gathered) && !is_plain(b)) release_on_transport(b);
        return 0;
    });
}

}  // namespace ub_overlap
