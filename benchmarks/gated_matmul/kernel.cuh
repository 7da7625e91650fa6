// A persistent matmul of CUTLASS (sm_90a) in which the loads of a tile wait until its shard has arrived.
//
// out[shards * rows, n] = a[shards * rows, k] @ b[n, k]^T in bf16, summed in fp32. A shard is a batch of the scheduler, so
// tiles are taken shard by shard, in order of arrival, and the kernel never drains between two shards. The warp that loads
// polls the flag of the next tile's shard (acquire at system scope), for DEADLINE_NS at most; then it counts a late shard and
// goes on, so that no failure of a sender can hang the GPU. The mirror, for results that others own: each stored tile is
// counted, so that a copy engine can take a shard of `out` as soon as all its tiles are there. CUTLASS is used as it is, from
// its headers; what is ours are the classes Gated and Counted.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "gate.cuh"

// Arguments of one launch; the same struct is declared in library.py.
struct Launch {
    const void* a;
    const void* b;
    void* out;
    const uint32_t* flags;  // one a shard, nonzero once it has arrived; null: nothing waits
    uint32_t* late;         // counts shards that had not arrived by the deadline
    uint32_t* done;         // one a shard, counts its tiles that are stored; null: nothing is counted
    void* workspace;
    int64_t workspace_bytes;
    int32_t rows, n, k, shards;  // rows of one shard
    int32_t along_n, swizzle;    // order of the tiles of one shard
    cudaStream_t stream;
};

namespace gated {

// A collective mainloop whose loads wait for their shard.
template <class Base>
struct Gated : Base {
    struct Arguments {
        typename Base::Arguments matmul;
        const uint32_t* flags;
        uint32_t* late;
    };
    struct Params : Base::Params {
        const uint32_t* flags;
        uint32_t* late;
    };

    template <class Shape>
    static Params to_underlying_arguments(const Shape& shape, const Arguments& args, void* workspace) {
        return {Base::to_underlying_arguments(shape, args.matmul, workspace), args.flags, args.late};
    }
    template <class Shape>
    static bool can_implement(const Shape& shape, const Arguments& args) {
        return Base::can_implement(shape, args.matmul);
    }

    // All shards multiply the same right operand: its coordinate of the shard does not move.
    template <class Shape>
    CUTLASS_DEVICE auto load_init(const Shape& shape, const Params& params) const {
        using namespace cute;
        auto both = Base::load_init(shape, params);
        auto b = get<1>(both);
        auto same = make_layout(b.shape(), replace<4>(b.stride(), Int<0>{}));
        return make_tuple(get<0>(both), make_tensor(b.data(), same));
    }

    template <class Inputs, class Coord, class Steps>
    CUTLASS_DEVICE void load(const Params& params, typename Base::MainloopPipeline pipeline, typename Base::PipelineState state,
                             const Inputs& inputs, const Coord& tile, Steps steps, int count, int thread, uint32_t block,
                             typename Base::TensorStorage& storage) {
        const int shard = int(cute::get<3>(tile));
        if (params.flags && shard != passed_) {
            if (thread % 32 == 0) await(params.flags + shard, params.late);
            __syncwarp();
            asm volatile("fence.proxy.async.global;" ::: "memory");
            passed_ = shard;
        }
        Base::load(params, pipeline, state, inputs, tile, steps, count, thread, block, storage);
    }

  private:
    int passed_ = -1;
};

// A collective epilogue that counts the tiles of each shard whose stores have completed.
template <class Base>
struct Counted : Base {
    struct Arguments {
        typename Base::Arguments epilogue;
        uint32_t* done;
    };
    struct Params : Base::Params {
        uint32_t* done;
    };

    CUTLASS_DEVICE Counted(const Params& params, typename Base::TensorStorage& storage)
        : Base(params, storage), done_(params.done) {}

    template <class Shape>
    static Params to_underlying_arguments(const Shape& shape, const Arguments& args, void* workspace) {
        return {Base::to_underlying_arguments(shape, args.epilogue, workspace), args.done};
    }
    template <class Shape>
    static size_t get_workspace_size(const Shape& shape, const Arguments& args) {
        return Base::get_workspace_size(shape, args.epilogue);
    }
    template <class Shape>
    static cutlass::Status initialize_workspace(const Shape& shape, const Arguments& args, void* workspace, cudaStream_t stream,
                                                cutlass::CudaHostAdapter* adapter = nullptr) {
        return Base::initialize_workspace(shape, args.epilogue, workspace, stream, adapter);
    }
    template <class Shape>
    static bool can_implement(const Shape& shape, const Arguments& args) {
        return Base::can_implement(shape, args.epilogue);
    }

    template <class Load, class LoadState, class Store, class StoreState, class Shape, class Tile, class Coord, class Sums,
              class Mma>
    CUTLASS_DEVICE auto store(Load load, LoadState load_state, Store store, StoreState store_state, Shape shape, Tile tile,
                              Coord coord, Sums sums, Mma mma, int thread, typename Base::TensorStorage& storage,
                              int part = -1) {
        auto states = Base::store(load, load_state, store, store_state, shape, tile, coord, sums, mma, thread, storage, part);
        if (done_ && thread / 32 == 0) {  // this warp has issued the stores
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            __syncwarp();
            if (thread == 0) {
                asm volatile("fence.proxy.async.global;" ::: "memory");
                __threadfence_system();
                atomicAdd_system(done_ + int(cute::get<3>(coord)), 1);
            }
        }
        return states;
    }

  private:
    uint32_t* done_;
};

template <int tile_m, int tile_n, int cluster_m, int cluster_n, class Schedule, class EpilogueSchedule, class Scheduler>
struct Kernel {
    using Element = cutlass::bfloat16_t;
    using RowMajor = cutlass::layout::RowMajor;
    using ColumnMajor = cutlass::layout::ColumnMajor;
    using Tile = cute::Shape<cute::Int<tile_m>, cute::Int<tile_n>, cute::Int<64>>;
    using Cluster = cute::Shape<cute::Int<cluster_m>, cute::Int<cluster_n>, cute::Int<1>>;
    using Arch = cutlass::arch::Sm90;
    using Tensors = cutlass::arch::OpClassTensorOp;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        Arch, Tensors, Tile, Cluster, cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 8, Element,
        RowMajor, 8, EpilogueSchedule>::CollectiveOp;
    using Stages =
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>;
    using Mainloop =
        typename cutlass::gemm::collective::CollectiveBuilder<Arch, Tensors, Element, RowMajor, 8, Element, ColumnMajor, 8,
                                                              float, Tile, Cluster, Stages, Schedule>::CollectiveOp;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
        cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Gated<Mainloop>, Counted<Epilogue>, Scheduler>>;

    static int run(const Launch& x) {
        using cutlass::make_cute_packed_stride;
        using namespace cute;
        const auto da = make_cute_packed_stride(typename Gemm::GemmKernel::StrideA{}, make_shape(x.rows, x.k, x.shards));
        const auto db = make_cute_packed_stride(typename Gemm::GemmKernel::StrideB{}, make_shape(x.n, x.k, x.shards));
        const auto dd = make_cute_packed_stride(typename Gemm::GemmKernel::StrideD{}, make_shape(x.rows, x.n, x.shards));
        cutlass::KernelHardwareInfo info;
        cudaGetDevice(&info.device_id);
        info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(info.device_id);
        typename Gemm::GemmKernel::TileSchedulerArguments order{};
        using Raster = decltype(order.raster_order);
        order.max_swizzle_size = x.swizzle;
        order.raster_order = x.along_n ? Raster::AlongN : Raster::AlongM;
        const auto* a = static_cast<const Element*>(x.a);
        const auto* b = static_cast<const Element*>(x.b);
        typename Gemm::Arguments args{cutlass::gemm::GemmUniversalMode::kGemm,
                                      {x.rows, x.n, x.k, x.shards},
                                      {{a, da, b, db}, x.flags, x.late},
                                      {{{}, nullptr, dd, static_cast<Element*>(x.out), dd}, x.done},
                                      info,
                                      order};
        args.epilogue.epilogue.thread.alpha = 1.0f;
        args.epilogue.epilogue.thread.beta = 0.0f;
        Gemm gemm;
        if (int64_t(Gemm::get_workspace_size(args)) > x.workspace_bytes) return -1;
        cutlass::Status status = gemm.can_implement(args);
        if (status == cutlass::Status::kSuccess) status = gemm.initialize(args, x.workspace, x.stream);
        if (status == cutlass::Status::kSuccess) status = gemm.run(x.stream);
        return static_cast<int>(status);
    }
};

}  // namespace gated
