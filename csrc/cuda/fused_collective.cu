// Fused collectives: a collective of few tokens, and what follows a reduction, in one launch (core/fused_collective.h).
//
//     one-shot   push the slice to all peers | READY to each | residual and weight into registers | wait | rows
//                a small slice as packets: READY and the residual do not wait for the pushes, and rows wait for packets
//     two-shot   push part p of the slice to rank p | READY | wait | push the sum of part `rank` to all | READY2 | wait | rows
//     rows       sum in fp32, in rank order, rounded | branch | add the residual, rounded | norm | amax of the row | cast
//
// A thread has the same vectors of every row, so it reads only what it wrote itself, packets that have landed, or what was
// pushed before a flag that the block has awaited. Rows are summed one after the other. A norm needs one or two sums over the
// threads of the block, and the scale of a row a maximum.
//
// Of few long rows each is dealt out to a cluster of blocks, so that more multiprocessors take part. These reductions
// then go over the cluster, through distributed shared memory. A block that fails takes part with NaN: no block waits for it.
//
// While these blocks wait, the memory of the device is idle. Further blocks read the next matmuls' weights into its L2 cache.
#include <algorithm>
#include <cstdint>

#include "cuda/fused_exchange.h"
#include "cuda/fused_packets.h"
#include "cuda/fused_rows.h"

namespace ub_overlap::cuda {
namespace {

constexpr int64_t least_segment = 256;  // vectors of a row that a block of a cluster has, at least

enum class Exchange { gather, scatter, one_shot, two_shot };

// How the exchange of a block ended. Of a failed one, whether the reductions of a cluster were taken part in.
enum class Outcome { good, failed, failed_behind_rows };

// Fills the block's results with NaN.
__device__ void poison(const Parameters& p, const Block& block, int copies) {
    const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
    for (int64_t i = threadIdx.x; i < block.size; i += blockDim.x) {
        for (int k = 0; k < copies; ++k) p.output[k * p.vectors + block.first + i] = ones;
    }
    if (!p.norm.exists()) return;
    auto* words = reinterpret_cast<uint32_t*>(p.normed) + block.first * p.normed_bytes / 4;
    for (int64_t i = threadIdx.x; i < block.size * p.normed_bytes / 4; i += blockDim.x) words[i] = ~0u;
    if (!p.row_scales) return;
    float* scales = p.row_scales + block.first / (p.row_vectors * p.cluster);
    for (int64_t i = threadIdx.x; i < block.size / p.row_vectors; i += blockDim.x) scales[i] = __uint_as_float(~0u);
}

__device__ Outcome gather(const Parameters& p, const Block& block) {
    const Group& g = p.group;
    const bool in_packets = uses_packets<1>(p);
    Packets packets(p, block);
    const uint4* own = p.input + block.first;
    for_vectors(
        block.size, [&](int64_t i) { return own[i]; },
        [&](int64_t i, uint4 value) {
            if (in_packets) {
                packets.store_at_peers(i, value);
            } else {
                store_at_peers(p, block, value, [&](uint4* to) { return to + g.rank * p.block_vectors + i; });
            }
            p.output[g.rank * p.vectors + block.first + i] = value;
        });
    if (!in_packets && !meet(p, block, FlagKind::ready)) return Outcome::failed;
    if (in_packets) packets.exchange_words();
    const uint4* landed = region_at(p, block, g.rank);
    for_peers(g, [&](int source) {
        for_vectors(
            block.size,
            [&](int64_t i) { return in_packets ? packets.load(source, i) : __ldcg(landed + source * p.block_vectors + i); },
            [&](int64_t i, uint4 value) { p.output[source * p.vectors + block.first + i] = value; });
    });
    return in_packets && packets.have_failed() ? Outcome::failed : Outcome::good;
}

// reduce_scatter, and one-shot all_reduce: peers get another slice of the input, or the same.
template <typename T, int per_thread, bool is_scatter>
__device__ Outcome reduce_one_shot(const Parameters& p, const Block& block) {
    const Group& g = p.group;
    const bool in_packets = uses_packets<per_thread>(p);
    Packets packets(p, block);
    const auto store = [&](int peer, int64_t i, uint4 value) {
        if (in_packets) {
            packets.store(peer, i, value);
        } else {
            region_at(p, block, peer)[g.rank * p.block_vectors + i] = value;
        }
    };
    if (is_scatter) {
        for_peers(g, [&](int peer) {
            const uint4* from = p.input + peer * p.vectors + block.first;
            for_vectors(block.size, [&](int64_t i) { return from[i]; }, [&](int64_t i, uint4 value) { store(peer, i, value); });
        });
    } else {
        const uint4* from = p.input + block.first;
        for_vectors(
            block.size, [&](int64_t i) { return from[i]; },
            [&](int64_t i, uint4 value) { for_peers(g, [&](int peer) { store(peer, i, value); }); });
    }
    Rows<T, per_thread> rows(p, block);
    if (!in_packets && !meet(p, block, FlagKind::ready)) return Outcome::failed;
    if (in_packets) packets.exchange_words();
    const uint4* own = p.input + (is_scatter ? g.rank * p.vectors : 0) + block.first;
    const uint4* landed = region_at(p, block, g.rank);
    rows.run([&](int64_t i) {
        return sum_of<T>(p, [&](int rank) {
            if (rank == g.rank) return __ldcg(own + i);
            return in_packets ? packets.load(rank, i) : __ldcg(landed + rank * p.block_vectors + i);
        });
    });
    return in_packets && packets.have_failed() ? Outcome::failed_behind_rows : Outcome::good;
}

template <typename T, int per_thread>
__device__ Outcome reduce_two_shot(const Parameters& p, const Block& block) {
    const Group& g = p.group;
    const auto part_begin = [&](int rank) { return block.size * rank / g.ranks; };
    const int64_t largest = (p.block_vectors + g.ranks - 1) / g.ranks, sums = g.ranks * largest;  // the slice of sums
    const uint4* from = p.input + block.first;
    for_peers(g, [&](int peer) {
        const int64_t begin = part_begin(peer);
        uint4* to = region_at(p, block, peer) + g.rank * largest;
        for_vectors(
            part_begin(peer + 1) - begin, [&](int64_t i) { return from[begin + i]; },
            [&](int64_t i, uint4 value) { to[i] = value; });
    });
    if (!meet(p, block, FlagKind::ready)) return Outcome::failed;
    uint4* landed = region_at(p, block, g.rank);
    const int64_t begin = part_begin(g.rank);
    const auto summed = [&](int64_t i) {
        return sum_of<T>(p, [&](int rank) { return __ldcg(rank == g.rank ? from + begin + i : landed + rank * largest + i); });
    };
    for_vectors<1>(part_begin(g.rank + 1) - begin, summed, [&](int64_t i, uint4 value) {
        store_at_peers(p, block, value, [&](uint4* to) { return to + sums + begin + i; });
        landed[sums + begin + i] = value;
    });
    Rows<T, per_thread> rows(p, block);
    if (!meet(p, block, FlagKind::ready2)) return Outcome::failed;
    rows.run([&](int64_t i) { return __ldcg(landed + sums + i); });
    return Outcome::good;
}

template <Exchange exchange, typename T, int per_thread>
__global__ void __launch_bounds__(fused_threads) fused_kernel(const __grid_constant__ Parameters p) {
    if (static_cast<int>(blockIdx.x) >= p.blocks) {
        const uint32_t threads = (gridDim.x - static_cast<uint32_t>(p.blocks)) * blockDim.x;
        prefetch(p.prefetched, (blockIdx.x - static_cast<uint32_t>(p.blocks)) * blockDim.x + threadIdx.x, threads);
        return;
    }
    __shared__ uint64_t word;
    if (p.cluster > 1) begin_cluster();
    if (threadIdx.x == 0) word = begin(p);
    __syncthreads();
    Block block;
    block.word = word;
    block.slot = fused_slot + static_cast<int>(epoch_half(word) % fused_slots);
    block.first = blockIdx.x * p.block_vectors;
    block.size = p.vectors - block.first < p.block_vectors ? p.vectors - block.first : p.block_vectors;
    Outcome outcome = Outcome::failed;
    if (word != 0) {
        if constexpr (exchange == Exchange::gather) outcome = gather(p, block);
        if constexpr (exchange == Exchange::scatter) outcome = reduce_one_shot<T, per_thread, true>(p, block);
        if constexpr (exchange == Exchange::one_shot) outcome = reduce_one_shot<T, per_thread, false>(p, block);
        if constexpr (exchange == Exchange::two_shot) outcome = reduce_two_shot<T, per_thread>(p, block);
    }
    if (outcome == Outcome::failed) fail_cluster(p);
    if (outcome != Outcome::good) poison(p, block, exchange == Exchange::gather ? p.group.ranks : 1);
    end(p, epoch_half(word), outcome == Outcome::good);
}

using FusedKernel = void (*)(Parameters);

template <typename T, int per_thread>
FusedKernel kernel_for(Exchange exchange) {
    switch (exchange) {
        case Exchange::gather:
            return &fused_kernel<Exchange::gather, float, 1>;
        case Exchange::scatter:
            return &fused_kernel<Exchange::scatter, T, per_thread>;
        case Exchange::one_shot:
            return &fused_kernel<Exchange::one_shot, T, per_thread>;
        default:
            return &fused_kernel<Exchange::two_shot, T, per_thread>;
    }
}

FusedKernel kernel_of(Exchange exchange, DType type, int per_thread) {
    FusedKernel kernel = nullptr;
    if (exchange == Exchange::gather) return kernel_for<float, 1>(exchange);
    with_type(type, [&](auto t) {
        using T = decltype(t);
        kernel = per_thread == 1   ? kernel_for<T, 1>(exchange)
                 : per_thread == 2 ? kernel_for<T, 2>(exchange)
                                   : kernel_for<T, fused_vectors>(exchange);
    });
    return kernel;
}

Exchange exchange_of(const Call& call) {
    if (call.collective == Collective::gather) return Exchange::gather;
    if (call.collective == Collective::scatter) return Exchange::scatter;
    return call.two_shot ? Exchange::two_shot : Exchange::one_shot;
}

// Returns how many blocks share a row: more than one where a row that is normed is long, and each block would have one.
int cluster_of(const FusedGrid& grid, const Epilogue& epilogue) {
    int device = 0, generation = 0;
    check(cudaGetDevice(&device), "get the current device");
    check(cudaDeviceGetAttribute(&generation, cudaDevAttrComputeCapabilityMajor, device), "get the device's generation");
    const bool norms = epilogue.branch_norm.exists() || epilogue.norm.exists();
    if (!norms || generation < 9 || grid.block_vectors != grid.row_vectors) return 1;
    int cluster = most_in_cluster;
    const auto fits = [&] {
        return grid.blocks * cluster <= fused_blocks && grid.row_vectors % cluster == 0 &&
               grid.row_vectors / cluster >= least_segment;
    };
    while (cluster > 1 && !fits()) cluster /= 2;
    return cluster;
}

// Returns `grid` with `cluster` blocks for each of its own.
FusedGrid divide(FusedGrid grid, int cluster) {
    if (cluster == 1) return grid;
    grid.row_vectors /= cluster, grid.block_vectors /= cluster, grid.blocks *= cluster;
    const int64_t needed = (grid.row_vectors + fused_threads - 1) / fused_threads;
    grid.per_thread = needed <= 2 ? static_cast<int>(needed) : fused_vectors;
    grid.threads = static_cast<int>((grid.row_vectors + grid.per_thread * 32 - 1) / (grid.per_thread * 32) * 32);
    return grid;
}

// Returns how many further blocks prefetch: no more than the device can run next to those that exchange, in whole clusters.
int64_t prefetching_blocks(const CachedSpans& spans, const FusedGrid& grid, int cluster, int64_t resident) {
    const int64_t lines_of_block = int64_t{lines_of_thread} * grid.threads;
    const int64_t needed = (lines_of(spans) + lines_of_block - 1) / lines_of_block;
    return std::min((needed + cluster - 1) / cluster, (resident - grid.blocks) / cluster) * cluster;
}

NormParameters parameters_of(const RowNorm& norm) {
    return {norm.kind,
            norm.round_before_weight,
            norm.epsilon,
            norm.weight_offset,
            reinterpret_cast<const uint4*>(norm.weight),
            reinterpret_cast<const uint4*>(norm.bias)};
}

}  // namespace

void preload_fused_collectives() {
    for (const Exchange exchange : {Exchange::gather, Exchange::scatter, Exchange::one_shot, Exchange::two_shot}) {
        for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
            for (const int per_thread : {1, 2, fused_vectors}) load(kernel_of(exchange, type, per_thread), fused_threads);
        }
    }
}

void launch_fused_collective(const Group& group, const Call& call, const std::vector<char*>& memory, int64_t region,
                             int64_t timeout_ns, cudaStream_t stream) {
    if (call.grid.blocks == 0) return;
    const Epilogue& epilogue = call.epilogue;
    const int cluster = cluster_of(call.grid, epilogue);
    const FusedGrid grid = divide(call.grid, cluster);
    const FusedKernel kernel = kernel_of(exchange_of(call), call.type, grid.per_thread);
    // Blocks wait for their like at the peers, so all of them must run at once.
    const int64_t resident = resident_blocks(reinterpret_cast<const void*>(kernel), fused_threads);
    if (resident < grid.blocks) {
        throw NamedError("UbOverlapError", {{"what", "the device is too small for a fused collective"},
                                            {"where", call.op_name + " at site '" + call.site + "'"},
                                            {"got", std::to_string(resident) + " blocks that run at once"},
                                            {"expected", std::to_string(grid.blocks) + " or more"},
                                            {"fix", "use another strategy"}});
    }
    Parameters p{};
    p.group = group;
    for (size_t r = 0; r < memory.size(); ++r)
        p.packets[r] = memory[r], p.regions[r] = memory[r] + fused_packet_bytes(call.ranks);
    p.region = region, p.timeout_ns = static_cast<uint64_t>(timeout_ns), p.tag = call.tag;
    p.cluster = cluster;
    p.vectors = grid.vectors, p.row_vectors = grid.row_vectors, p.block_vectors = grid.block_vectors;
    p.divisor = call.average ? static_cast<float>(call.ranks) : 1.0f;
    p.input = reinterpret_cast<const uint4*>(call.input), p.output = reinterpret_cast<uint4*>(call.output);
    p.residual = reinterpret_cast<const uint4*>(epilogue.residual);
    p.linear_bias = reinterpret_cast<const uint4*>(epilogue.linear_bias);
    p.addend = reinterpret_cast<const uint4*>(epilogue.addend);
    p.branch_norm = parameters_of(epilogue.branch_norm), p.norm = parameters_of(epilogue.norm);
    p.branch_factor = epilogue.branch_factor, p.has_branch = epilogue.has_branch();
    p.round_sum = epilogue.round_sum;
    p.is_e5m2 = epilogue.normed_type == DType::e5m2, p.divide_by_scale = epilogue.divide_by_scale;
    p.amax_factor = epilogue.amax_factor, p.least_scale = epilogue.least_scale;
    p.inverse_cols = 1.0f / static_cast<float>(call.grid.row_vectors * vector_size / size_of(call.type));
    p.scale = epilogue.scale, p.row_scales = epilogue.row_scales, p.normed = epilogue.normed;
    p.normed_bytes = static_cast<int32_t>(vector_size / size_of(call.type) * size_of(epilogue.normed_type));
    p.blocks = grid.blocks;
    p.prefetched = cached_spans(call.prefetched);
    const int64_t prefetching = prefetching_blocks(p.prefetched, grid, cluster, resident);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks + prefetching)),
    config.blockDim = dim3(static_cast<unsigned>(grid.threads));
    config.stream = stream, config.attrs = &attribute, config.numAttrs = cluster > 1 ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, p), "launch a fused collective");
}

}  // namespace ub_overlap::cuda
