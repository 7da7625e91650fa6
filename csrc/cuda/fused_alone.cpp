#include "cuda/fused_alone.h"

#include <string>
#include <vector>

#include "core/failure.h"

namespace ub_overlap::cuda {
namespace {

template <typename T>
T* zeroed(int64_t bytes) {
    void* memory = nullptr;
    check(cudaMalloc(&memory, static_cast<size_t>(bytes)), "allocate memory of a group of one GPU");
    check(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "clear memory of a group of one GPU");
    return static_cast<T*>(memory);
}

}  // namespace

FusedAlone::FusedAlone(int ranks) {
    if (ranks < 2 || ranks > max_ranks) {
        throw NamedError("OptionError", {{"what", "no group of so many ranks"},
                                         {"where", "FusedAlone"},
                                         {"got", std::to_string(ranks)},
                                         {"expected", "2 to " + std::to_string(max_ranks)}});
    }
    group_.rank = 0, group_.ranks = ranks;
    group_.local = zeroed<LocalState>(sizeof(LocalState));
    void* failure = nullptr;
    check(cudaMallocHost(&failure, sizeof(WaitFailure)), "allocate the failure record");
    group_.failure = new (failure) WaitFailure{};
    memory_ = zeroed<char>(fused_memory_bytes(region, ranks) + region);
    // What rank 0 writes at rank p are the words that it reads of source p.
    const int64_t source = max_pieces * static_cast<int64_t>(sizeof(uint64_t));
    shared_ = zeroed<char>(static_cast<int64_t>(sizeof(SharedState)) + flag_count(ranks) * 8 + ranks * source);
    for (int r = 0; r < ranks; ++r) group_.shared[r] = words_of_source(reinterpret_cast<SharedState*>(shared_), r);
    check(cudaDeviceSynchronize(), "clear memory of a group of one GPU");  // calls may be on streams that wait for no other
}

FusedAlone::~FusedAlone() {
    cudaDeviceSynchronize();
    cudaFree(memory_), cudaFree(shared_), cudaFree(group_.local), cudaFreeHost(group_.failure);
}

void FusedAlone::run(const char* input, char* output, int64_t rows, int64_t row_bytes, const Epilogue& epilogue,
                     cudaStream_t stream) {
    Call call;
    call.op_name = "fused_collective", call.site = call.own_site = "alone", call.tag = 1;
    call.is_fused = true, call.collective = Collective::reduce, call.type = call.out_type = DType::bf16;
    call.ranks = group_.ranks, call.input = const_cast<char*>(input), call.output = output;
    call.epilogue = epilogue;
    call.grid = make_fused_grid(rows, row_bytes, epilogue.norm.exists());
    const bool is_in_vectors = row_bytes % vector_size == 0 && row_bytes <= fused_row_limit;
    if (!is_in_vectors || fused_region_bytes(call.grid, group_.ranks, false) > region) {
        throw NamedError("OptionError", {{"what", "no rows that a fused collective of one GPU can have"},
                                         {"where", "FusedAlone"},
                                         {"got", std::to_string(rows) + " rows of " + std::to_string(row_bytes) + " bytes"},
                                         {"expected", "rows of a multiple of 16 bytes, and 4 MiB of a block for all ranks"},
                                         {"fix", "use fewer ranks or rows"}});
    }
    const int64_t source = bytes_of_source(call);
    std::vector<char*> memory;
    for (int r = 0; r < group_.ranks; ++r) memory.push_back(memory_ + r * source);
    launch_fused_collective(group_, call, memory, region, timeout_ns, stream);
}

}  // namespace ub_overlap::cuda
