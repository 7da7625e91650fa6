// Launches of fused collectives: the kernel, the grid and the parameters of a call (cuda/fused_kernel.h).
#include <cstdint>

#include "cuda/fused_call.h"
#include "cuda/fused_reductions.h"
#include "cuda/fused_variants.h"

namespace ub_overlap::cuda {
namespace {

constexpr int64_t least_segment = 64;  // vectors of a row that a block of a cluster has, at least

const void* kernel_of(Exchange exchange, DType type, int per_thread, EpilogueKind kind) {
    if (exchange == Exchange::gather || type == DType::f32) return fused_kernel_f32(exchange, per_thread, kind);
    return type == DType::bf16 ? fused_kernel_bf16(exchange, per_thread, kind) : fused_kernel_f16(exchange, per_thread, kind);
}

EpilogueKind epilogue_kind(const Call& call) {
    const Epilogue& e = call.epilogue;
    const bool casts = e.scale || e.row_scales;
    const bool norms_plainly = e.norm.kind != Norm::layer && !e.norm.bias && e.norm.weight_offset == 0;
    return !call.average && !e.has_branch() && e.round_sum && !casts && norms_plainly ? EpilogueKind::plain
                                                                                      : EpilogueKind::full;
}

// Whether slices are sent as packets: they are small, with rows of one vector for each thread.
bool uses_packets(const Call& call, const FusedGrid& grid) {
    static_assert(packet_vectors <= fused_threads);
    return !(call.collective == Collective::reduce && call.two_shot) && grid.per_thread == 1 &&
           grid.block_vectors <= packet_vectors && grid.vectors * (call.ranks - 1) <= packet_sent_vectors;
}

Exchange exchange_of(const Call& call) {
    if (call.collective == Collective::gather) return Exchange::gather;
    if (call.collective == Collective::scatter) return Exchange::scatter;
    return call.two_shot ? Exchange::two_shot : Exchange::one_shot;
}

// Returns `grid` with `cluster` blocks for each of its own.
FusedGrid divide(FusedGrid grid, int cluster) {
    if (cluster == 1) return grid;
    grid.row_vectors /= cluster, grid.block_vectors /= cluster, grid.blocks *= cluster;
    spread_rows(grid);
    return grid;
}

// Whether `cluster` blocks can share a row: a row that is normed is long, and each block would have one.
bool can_share_rows(const Call& call, int cluster) {
    const FusedGrid& grid = call.grid;
    const bool norms = call.epilogue.branch_norm.exists() || call.epilogue.norm.exists();
    return norms && grid.block_vectors == grid.row_vectors && grid.blocks * cluster <= fused_blocks &&
           grid.row_vectors % cluster == 0 && grid.row_vectors / cluster >= least_segment;
}

// How a call is launched. Equal on ranks whose GPUs are alike; form_of tells the peers.
struct FusedLaunch {
    int cluster = most_in_cluster;
    FusedGrid grid;
    const void* kernel = nullptr;
    bool in_packets = false;

    explicit FusedLaunch(const Call& call) {
        for (;; cluster /= 2) {
            if (cluster > 1 && !can_share_rows(call, cluster)) continue;
            grid = divide(call.grid, cluster);
            kernel = kernel_of(exchange_of(call), call.type, grid.per_thread, epilogue_kind(call));
            // Blocks wait for their like at the peers, so all of them must run at once. Asked for the most threads, as
            // preloaded: the answer depends on the kernel and the device alone, and no capture waits for it.
            if (cluster == 1 || resident_clusters(kernel, fused_threads, cluster) * cluster >= grid.blocks) break;
        }
        in_packets = uses_packets(call, grid);
    }
};

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
            for (const int per_thread : {1, 2, fused_vectors}) {
                for (const EpilogueKind kind : {EpilogueKind::plain, EpilogueKind::full}) {
                    const void* kernel = kernel_of(exchange, type, per_thread, kind);
                    resident_blocks(kernel, fused_threads);  // loads it
                    if (exchange == Exchange::gather) continue;
                    for (int cluster = 2; cluster <= most_in_cluster; cluster *= 2) {
                        resident_clusters(kernel, fused_threads, cluster);
                    }
                }
            }
        }
    }
}

FusedForm form_of(const Call& call) {
    const FusedLaunch launch(call);
    return {launch.cluster, launch.in_packets};
}

int64_t bytes_of_source(const Call& call) {
    const FusedLaunch launch(call);
    if (launch.in_packets) return packet_vectors * packet_size;
    const int64_t parts = exchange_of(call) == Exchange::two_shot ? call.ranks : 1;
    return (launch.grid.block_vectors + parts - 1) / parts * vector_size;
}

void launch_fused_collective(const Group& group, const Call& call, const std::vector<char*>& memory, int64_t region,
                             int64_t timeout_ns, cudaStream_t stream) {
    if (call.grid.blocks == 0) return;
    const Epilogue& epilogue = call.epilogue;
    const FusedLaunch launch(call);
    const FusedGrid& grid = launch.grid;
    const int64_t resident = resident_blocks(launch.kernel, fused_threads);
    if (resident < grid.blocks) {
        throw NamedError("UbOverlapError", {{"what", "the device is too small for a fused collective"},
                                            {"where", call.op_name + " at site '" + call.site + "'"},
                                            {"got", std::to_string(resident) + " blocks that run at once"},
                                            {"expected", std::to_string(grid.blocks) + " or more"},
                                            {"fix", "use another strategy"}});
    }
    Parameters p{};
    p.group = group;
    for (size_t r = 0; r < memory.size(); ++r) p.memory[r] = memory[r];
    p.packets = fused_packet_bytes(call.ranks), p.region = region;
    p.timeout_ns = static_cast<uint64_t>(timeout_ns), p.tag = call.tag;
    p.cluster = launch.cluster, p.in_packets = launch.in_packets;
    p.vectors = grid.vectors;
    p.row_vectors = static_cast<int32_t>(grid.row_vectors), p.block_vectors = static_cast<int32_t>(grid.block_vectors);
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
    cudaLaunchAttribute attribute = cluster_attribute(launch.cluster);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid.blocks)), config.blockDim = dim3(static_cast<unsigned>(grid.threads));
    config.stream = stream, config.attrs = &attribute, config.numAttrs = launch.cluster > 1 ? 1 : 0;
    void* arguments[] = {&p};
    check(cudaLaunchKernelExC(&config, launch.kernel, arguments), "launch a fused collective");
}

}  // namespace ub_overlap::cuda
