#include "cuda/blas_search.h"

#include <algorithm>

#include "core/failure.h"
#include "cuda/blas_plan.h"
#include "cuda/kernels.h"

namespace ub_overlap::cuda {
namespace {

// A matmul whose addend lies as its result does reads it from the result's own memory.
bool has_own_addend(const Problem& p) {
    return p.c.stride != p.out.stride || p.c.batch_step != p.out.batch_step;
}

std::vector<SearchBuffer> buffers_of(const Problem& p) {
    std::vector<SearchBuffer> buffers;
    const auto add = [&](const char* name, const Operand& x) {
        buffers.push_back({name, x.type, x.extent(p.batch), x.alignment()});
    };
    add("a", p.a), add("b", p.b), add("out", p.out);
    if (has_own_addend(p)) add("c", p.c);
    if (p.by_address) buffers.push_back({"addresses", DType::f32, 4 * p.batch * int64_t{sizeof(uint64_t)}, 256});
    if (p.bias) buffers.push_back({"bias", p.out.type, p.out.rows * size_of(p.out.type), p.out_alignment()});
    if (!p.scaling.scaled) return buffers;
    const int64_t rows = p.scaling.each ? p.out.cols : 1, cols = p.scaling.each ? p.out.rows : 1;
    buffers.push_back({"a_scale", DType::f32, rows * size_of(DType::f32), 256});
    buffers.push_back({"b_scale", DType::f32, cols * size_of(DType::f32), 256});
    return buffers;
}

// Makes a batch by addresses of matrices that lie one behind the other. In use the results of some lie at peers.
void set_addresses(Problem& p, const char* array, cudaStream_t stream) {
    std::vector<uint64_t> words;
    for (Operand* x : {&p.a, &p.b, &p.c, &p.out}) {
        const auto first = reinterpret_cast<uint64_t>(x->data);
        x->data = array + words.size() * sizeof(uint64_t);
        for (int64_t i = 0; i < p.batch; ++i)
            words.push_back(first + static_cast<uint64_t>(i * x->batch_step * size_of(x->type)));
    }
    launch_store_words(words, reinterpret_cast<uint64_t*>(const_cast<char*>(array)), stream);
}

std::string text_of(const Problem& p) {
    const int64_t depth = p.a.row_major ? p.a.rows : p.a.cols;
    std::string text = std::to_string(p.out.cols) + " x " + std::to_string(p.out.rows) + " x " + std::to_string(depth) + " " +
                       name_of(p.a.type);
    if (p.out.type != p.a.type) text += std::string(" to ") + name_of(p.out.type);
    return p.batch > 1 ? text + ", batch of " + std::to_string(p.batch) + (p.by_address ? " by address" : "") : text;
}

}  // namespace

std::vector<SearchProblem> search_problems() {
    std::vector<SearchProblem> all;
    for (const PlannedProblem& planned : planner_of_current_device().problems()) {
        if (!planned.plan.usable) continue;
        all.push_back({planned.key, text_of(planned.problem), planned.uses, planned.plan.has_chosen, planned.problem.by_address,
                       buffers_of(planned.problem)});
    }
    return all;
}

std::vector<std::string> propose_algorithms(const std::string& key, int count) {
    Planner& planner = planner_of_current_device();
    std::vector<std::string> all;
    for (const cublasLtMatmulAlgo_t& algorithm : planner.propose(planner.find(key), count)) all.push_back(bytes_of(algorithm));
    return all;
}

void run_algorithm(const std::string& key, const std::string& algorithm, const std::map<std::string, uint64_t>& buffers,
                   uint64_t workspace, cudaStream_t stream) {
    Planner& planner = planner_of_current_device();
    const PlannedProblem planned = planner.find(key);
    Problem problem = planned.problem;
    Plan plan = planned.plan;
    plan.has_chosen = false;  // no other algorithm takes its place
    const auto need = [&](bool accepted) {
        if (accepted) return;
        throw NamedError("OptionError", {{"what", "cuBLASLt refuses an algorithm for this matmul"},
                                         {"where", text_of(problem)},
                                         {"got", std::to_string(algorithm.size()) + " bytes"},
                                         {"expected", "an algorithm that propose_algorithms returned for it"}});
    };
    need(algorithm_of(algorithm, plan.algo) && planner.accepts(plan, plan.algo));
    const auto address = [&](const char* name) {
        const auto entry = buffers.find(name);
        if (entry != buffers.end() && entry->second != 0) return reinterpret_cast<const char*>(entry->second);
        throw NamedError("OptionError",
                         {{"what", std::string("no buffer '") + name + "' for a matmul"}, {"where", text_of(problem)}});
    };
    problem.a.data = address("a"), problem.b.data = address("b"), problem.out.data = address("out");
    problem.c.data = has_own_addend(problem) ? address("c") : problem.out.data;
    if (problem.bias) problem.bias = address("bias");
    if (problem.scaling.scaled) {
        problem.scaling.a = reinterpret_cast<const float*>(address("a_scale"));
        problem.scaling.b = reinterpret_cast<const float*>(address("b_scale"));
    }
    if (problem.by_address) set_addresses(problem, address("addresses"), stream);
    need(planner.launch(problem, plan, 0.0f, reinterpret_cast<void*>(workspace), stream));
}

int64_t blas_version() {
    return static_cast<int64_t>(cublasLtGetVersion());
}

}  // namespace ub_overlap::cuda
