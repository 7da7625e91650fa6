#include "cuda/replay.h"

#include "core/matmul_algorithms.h"
#include "core/settings.h"

namespace ub_overlap::cuda {
namespace {

// The graph may be running: CUDA then frees it when it has ended.
void destroy(RecordedCall& call) {
    if (call.graph) cudaGraphExecDestroy(call.graph);
    call.graph = nullptr;
}

void add(Fingerprint& print, const Matrix& m) {
    print.push_back(reinterpret_cast<uint64_t>(m.data));
    for (const int64_t n : {m.rows, m.cols, m.row_stride, m.col_stride}) print.push_back(static_cast<uint64_t>(n));
    print.push_back(static_cast<uint64_t>(m.type));
}

void add(Fingerprint& print, const Scale& scale) {
    print.push_back(reinterpret_cast<uint64_t>(scale.data));
    print.push_back(scale.each);
}

}  // namespace

Fingerprint make_fingerprint(const Call& call, int64_t timeout_ns) {
    Fingerprint print;
    print.reserve(128);
    for (const char* pointer : {call.input, call.partial, call.output}) print.push_back(reinterpret_cast<uint64_t>(pointer));
    print.push_back(reinterpret_cast<uint64_t>(call.stream));
    print.push_back(call.program->id);
    for (const int64_t n : {static_cast<int64_t>(call.slot()), static_cast<int64_t>(call.tag), timeout_ns, call.outer,
                            call.inner, static_cast<int64_t>(call.op), static_cast<int64_t>(call.collective),
                            static_cast<int64_t>(call.type), static_cast<int64_t>(call.out_type)}) {
        print.push_back(static_cast<uint64_t>(n));
    }
    print.push_back(static_cast<uint64_t>(call.shard_dim_is_last) << 1 | static_cast<uint64_t>(call.average));
    print.push_back(call.begin.size());
    print.insert(print.end(), call.begin.begin(), call.begin.end());
    print.push_back(call.transpose_gathered.size());
    for (size_t j = 0; j < call.transpose_gathered.size(); ++j) {
        print.push_back(static_cast<uint64_t>(call.transpose_gathered[j]) << 1 | static_cast<uint64_t>(call.transpose_out[j]));
    }
    for (const std::vector<Matrix>* list :
         {&call.lhs, &call.rhs, &call.results, &call.accumulators, &call.independent_lhs, &call.independent_rhs}) {
        print.push_back(list->size());
        for (const Matrix& m : *list) add(print, m);
    }
    for (const Matrix& m : call.biases) add(print, m);
    add(print, call.addend);
    for (const char* pointer : {call.output_scales, call.wire, call.wire_scales}) {
        print.push_back(reinterpret_cast<uint64_t>(pointer));
    }
    for (const std::vector<Scale>* list : {&call.lhs_scales, &call.rhs_scales}) {
        print.push_back(list->size());
        for (const Scale& scale : *list) add(print, scale);
    }
    add(print, call.input_scale);
    print.push_back(static_cast<uint64_t>(call.scales_a_row) << 2 | static_cast<uint64_t>(call.narrow_wire) << 1 |
                    static_cast<uint64_t>(call.fast_sums));
    return print;
}

size_t RecordedCalls::Hash::operator()(const Fingerprint& print) const {
    uint64_t hash = 14695981039346656037ull;  // FNV-1a, by words
    for (const uint64_t word : print) hash = (hash ^ word) * 1099511628211ull;
    return static_cast<size_t>(hash ^ (hash >> 32));
}

RecordedCall& RecordedCalls::count(const Fingerprint& print) {
    const uint64_t algorithms = MatmulAlgorithms::get().generation();
    if (algorithms != algorithms_) clear();  // their matmuls have other algorithms, so none would be launched again
    algorithms_ = algorithms;
    RecordedCall& call = calls_.use(print, destroy);
    ++call.calls;
    return call;
}

void RecordedCalls::clear() {
    calls_.clear(destroy);
}

}  // namespace ub_overlap::cuda
