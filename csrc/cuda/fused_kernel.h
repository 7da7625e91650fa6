// The kernel of fused collectives: a collective of few tokens, and what follows a reduction (core/fused_collective.h).
//
//     one-shot   residual and weight into registers | push the slice to all peers | READY to each | wait | rows
//                a small slice as packets: READY does not wait for the pushes, and rows wait for packets
//     two-shot   push part p of the slice to rank p | READY | wait | push the sum of part `rank` to all | READY2 | wait | rows
//     rows       sum in fp32, in rank order, rounded | branch | add the residual, rounded | norm | amax of the row | cast
//
// A thread has the same vectors of every row. So it reads what it wrote itself, packets that have landed, or what was pushed
// before a flag that the block has awaited. Rows are summed one after the other. A norm needs one or two sums over the threads
// of the block, and the scale of a row a maximum.
//
// Of few long rows each is dealt out to a cluster of blocks, so that more multiprocessors take part. These reductions then go
// over the cluster, through distributed shared memory. A block that fails in front of its rows takes part with NaN, and one
// that fails behind them has taken part: no block waits for it.
#pragma once

#include "cuda/fused_exchange.h"
#include "cuda/fused_packets.h"
#include "cuda/fused_rows.h"

namespace ub_overlap::cuda {
namespace {

// How the exchange of a block ended. failed: in front of its rows, in all of its threads. failed_behind_rows: in some threads
// at least, after the reductions of a cluster.
enum class Outcome { good, failed, failed_behind_rows };

// Fills the block's results with NaN.
__device__ void poison(const Parameters& p, const Block& block, int copies) {
    const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
    for (int64_t i = threadIdx.x; i < block.size; i += blockDim.x) {
        for (int k = 0; k < copies; ++k) p.output[k * p.vectors + block.first + i] = ones;
    }
    if (!p.norm.exists()) return;
    auto* words = reinterpret_cast<uint32_t*>(p.normed) + block.first * p.normed_bytes / 4;
    for (int64_t i = threadIdx.x; i < int64_t{block.size} * p.normed_bytes / 4; i += blockDim.x) words[i] = ~0u;
    if (!p.row_scales) return;
    float* scales = p.row_scales + block.first / (p.row_vectors * p.cluster);
    for (int64_t i = threadIdx.x; i < block.size / p.row_vectors; i += blockDim.x) scales[i] = __uint_as_float(~0u);
}

__device__ Outcome gather(const Parameters& p, const Block& block) {
    const Group& g = p.group;
    Packets packets(p, block);
    const uint4* own = p.input + block.first;
    uint4* output = p.output + block.first;
    for_vectors(
        block.size, [&](int32_t i) { return own[i]; },
        [&](int32_t i, uint4 value) {
            if (p.in_packets) {
                packets.store_at_peers(i, value);
            } else {
                store_at_peers(p, block, value, [&](uint4* to) { return to + int64_t{g.rank} * p.block_vectors + i; });
            }
            output[g.rank * p.vectors + i] = value;
        });
    if (p.in_packets) packets.send_words();
    if (!p.in_packets && !meet(p, block, FlagKind::ready)) return Outcome::failed;
    const uint4* landed = region_at(p, block, g.rank);
    for_peers(g, [&](int source) {
        for_vectors(
            block.size,
            [&](int32_t i) {
                if (!p.in_packets) return __ldcg(landed + int64_t{source} * p.block_vectors + i);
                Vector<float> vector[1];
                packets.load(source < g.rank ? source : source - 1, i, vector);
                return vector[0].line;
            },
            [&](int32_t i, uint4 value) { output[source * p.vectors + i] = value; });
    });
    return !p.in_packets || packets.have_met() ? Outcome::good : Outcome::failed_behind_rows;
}

// Whether rows are loaded in front of the block's lock. What else a call has, or more vectors of a thread, would not fit the
// registers while others are pushed.
template <int per_thread, EpilogueKind kind>
constexpr bool loads_early = per_thread <= 2 && kind == EpilogueKind::plain;

// This rank's addend: the first row of the block, read before the exchange begins where it takes few registers.
template <typename T, int per_thread, EpilogueKind kind>
class OwnRow {
  public:
    // `from`: the block's slice.
    __device__ explicit OwnRow(const uint4* from) : from_(from) {}
    __device__ void load(const Rows<T, per_thread, kind>& rows, const Block& block) {
        if constexpr (is_held) {
            rows.for_own([&](int v, int32_t at) {
                if (at < block.size) held_[v] = from_[at];
            });
        }
    }
    // Vector row + at of the slice, which is vector v of this thread.
    __device__ uint4 get(int v, int32_t row, int32_t at) const {
        if constexpr (is_held) {
            if (row == 0) return held_[v];
        }
        return __ldcg(from_ + row + at);
    }
    static constexpr bool is_held = loads_early<per_thread, kind>;

  private:
    const uint4* from_;
    uint4 held_[is_held ? per_thread : 1];
};

// reduce_scatter, and one-shot all_reduce: peers get another slice of the input, or the same.
template <typename T, int per_thread, EpilogueKind kind, bool is_scatter>
__device__ Outcome reduce_one_shot(const Parameters& p, const Block& block, Rows<T, per_thread, kind>& rows,
                                   const OwnRow<T, per_thread, kind>& own) {
    const Group& g = p.group;
    const bool in_packets = per_thread == 1 && p.in_packets;
    Packets packets(p, block);
    const auto store = [&](int peer, int32_t i, uint4 value) {
        if (in_packets) {
            packets.store(peer, i, value);
        } else {
            region_at(p, block, peer)[int64_t{g.rank} * p.block_vectors + i] = value;
        }
    };
    if constexpr (is_scatter) {
        for_peers(g, [&](int peer) {
            const uint4* from = p.input + peer * p.vectors + block.first;
            for_vectors(block.size, [&](int32_t i) { return from[i]; }, [&](int32_t i, uint4 value) { store(peer, i, value); });
        });
    } else if (OwnRow<T, per_thread, kind>::is_held && block.size <= p.row_vectors) {
        rows.for_own([&](int v, int32_t at) {
            if (at < block.size) for_peers(g, [&](int peer) { store(peer, at, own.get(v, 0, at)); });
        });
    } else {
        const uint4* from = p.input + block.first;
        for_vectors(
            block.size, [&](int32_t i) { return from[i]; },
            [&](int32_t i, uint4 value) { for_peers(g, [&](int peer) { store(peer, i, value); }); });
    }
    if (in_packets) packets.send_words();
    if constexpr (!loads_early<per_thread, kind>) rows.load();
    if (!in_packets && !meet(p, block, FlagKind::ready)) return Outcome::failed;
    const uint4* landed = region_at(p, block, g.rank);
    rows.run([&](int v, int32_t row, int32_t at) {
        return sum_of<T, peers_at_once<per_thread>, kind>(p, own.get(v, row, at), [&](int first, auto& loaded) {
            if (in_packets) {
                packets.load(first, row + at, loaded);
            } else {
                load_at_peers<(per_thread > 1)>(p, first, loaded,
                                                [&](int rank) { return landed + int64_t{rank} * p.block_vectors + row + at; });
            }
        });
    });
    return !in_packets || packets.have_met() ? Outcome::good : Outcome::failed_behind_rows;
}

template <typename T, int per_thread, EpilogueKind kind>
__device__ Outcome reduce_two_shot(const Parameters& p, const Block& block, Rows<T, per_thread, kind>& rows) {
    const Group& g = p.group;
    const auto part_begin = [&](int rank) { return static_cast<int32_t>(int64_t{block.size} * rank / g.ranks); };
    const int32_t largest = (p.block_vectors + g.ranks - 1) / g.ranks;
    const int64_t sums = int64_t{g.ranks} * largest;  // the slice of sums
    const uint4* from = p.input + block.first;
    for_peers(g, [&](int peer) {
        const int32_t begin = part_begin(peer);
        uint4* to = region_at(p, block, peer) + int64_t{g.rank} * largest;
        for_vectors(
            part_begin(peer + 1) - begin, [&](int32_t i) { return from[begin + i]; },
            [&](int32_t i, uint4 value) { to[i] = value; });
    });
    if (!meet(p, block, FlagKind::ready)) return Outcome::failed;
    uint4* landed = region_at(p, block, g.rank);
    const int32_t begin = part_begin(g.rank);
    const auto summed = [&](int32_t i) {
        return sum_of<T, peers_at_once<per_thread>, kind>(p, __ldcg(from + begin + i), [&](int first, auto& loaded) {
            load_at_peers<(per_thread > 1)>(p, first, loaded, [&](int rank) { return landed + int64_t{rank} * largest + i; });
        });
    };
    for_vectors<1>(part_begin(g.rank + 1) - begin, summed, [&](int32_t i, uint4 value) {
        store_at_peers(p, block, value, [&](uint4* to) { return to + sums + begin + i; });
        landed[sums + begin + i] = value;
    });
    rows.load();
    if (!meet(p, block, FlagKind::ready2)) return Outcome::failed;
    rows.run([&](int, int32_t row, int32_t at) { return __ldcg(landed + sums + row + at); });
    return Outcome::good;
}

// Takes the block's lock. All threads get the call's word, 0 where the group has failed.
__device__ uint64_t begin_block(const Parameters& p) {
    __shared__ uint64_t word;
    if (threadIdx.x == 0) given_up() = 0, word = begin(p);
    __syncthreads();
    return word;
}

template <Exchange exchange, typename T, int per_thread, EpilogueKind kind>
__device__ Outcome run_exchange(const Parameters& p, Block& block) {
    if constexpr (exchange == Exchange::gather) {
        block.begin(begin_block(p));
        return block.word == 0 ? Outcome::failed : gather(p, block);
    } else {
        static_assert(exchange != Exchange::scatter || kind == EpilogueKind::full, "else nothing loads its rows");
        Rows<T, per_thread, kind> rows(p, block);
        OwnRow<T, per_thread, kind> own(p.input + (exchange == Exchange::scatter ? p.group.rank * p.vectors : 0) + block.first);
        // These loads take as long as the lock.
        if constexpr (loads_early<per_thread, kind> && exchange == Exchange::one_shot) rows.load(), own.load(rows, block);
        block.begin(begin_block(p));
        if (block.word == 0) return Outcome::failed;
        if constexpr (exchange == Exchange::two_shot) return reduce_two_shot(p, block, rows);
        if constexpr (exchange == Exchange::scatter) return reduce_one_shot<T, per_thread, kind, true>(p, block, rows, own);
        return reduce_one_shot<T, per_thread, kind, false>(p, block, rows, own);
    }
}

template <Exchange exchange, typename T, int per_thread, EpilogueKind kind>
__global__ void __launch_bounds__(fused_threads) fused_kernel(const __grid_constant__ Parameters p) {
    if (p.cluster > 1) begin_cluster();
    Block block = slice_of(p);
    const Outcome outcome = run_exchange<exchange, T, per_thread, kind>(p, block);
    if (outcome == Outcome::failed) fail_cluster(p);
    if (__syncthreads_or(outcome != Outcome::good)) {
        poison(p, block, exchange == Exchange::gather ? p.group.ranks : 1);
    } else if (threadIdx.x == 0) {
        end(p, block.word);
    }
}

template <Exchange exchange, typename T, int per_thread, EpilogueKind kind>
const void* address_of_kernel() {
    return reinterpret_cast<const void*>(&fused_kernel<exchange, T, per_thread, kind>);
}

template <typename T, int per_thread>
const void* kernel_for(Exchange exchange, EpilogueKind kind) {
    // reduce_scatters and fp32 are rare in decode steps, which plain kernels are for.
    if constexpr (sizeof(T) == 2) {
        if (kind == EpilogueKind::plain && exchange == Exchange::one_shot) {
            return address_of_kernel<Exchange::one_shot, T, per_thread, EpilogueKind::plain>();
        }
        if (kind == EpilogueKind::plain && exchange == Exchange::two_shot) {
            return address_of_kernel<Exchange::two_shot, T, per_thread, EpilogueKind::plain>();
        }
    }
    if constexpr (sizeof(T) == 4) {
        if (exchange == Exchange::gather) return address_of_kernel<Exchange::gather, T, 1, EpilogueKind::full>();
    }
    if (exchange == Exchange::scatter) return address_of_kernel<Exchange::scatter, T, per_thread, EpilogueKind::full>();
    if (exchange == Exchange::one_shot) return address_of_kernel<Exchange::one_shot, T, per_thread, EpilogueKind::full>();
    return address_of_kernel<Exchange::two_shot, T, per_thread, EpilogueKind::full>();
}

template <typename T>
const void* variant_of(Exchange exchange, int per_thread, EpilogueKind kind) {
    return per_thread == 1   ? kernel_for<T, 1>(exchange, kind)
           : per_thread == 2 ? kernel_for<T, 2>(exchange, kind)
                             : kernel_for<T, fused_vectors>(exchange, kind);
}

}  // namespace
}  // namespace ub_overlap::cuda
