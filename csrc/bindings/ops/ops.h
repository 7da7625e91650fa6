// The ops' kernels, by family. library.cpp registers them; runtime/ops/ holds their schemas, one file per op.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace ub_overlap {

using TensorAndList = std::tuple<at::Tensor, std::vector<at::Tensor>>;
using TwoTensors = std::tuple<at::Tensor, at::Tensor>;

// The last three arguments of every op. A kernel gets one strategy; dispatch.h resolves tables of strategies.
struct Site {
    std::string strategy, group;  // "pipelined:chunks=8"; the c10d group's name
    std::string id;               // "<plan digest>/<site id>", schema argument `site`
};

TensorAndList all_gather_matmul(const Site& site, const at::Tensor& shard, at::TensorList operands,
                                const c10::List<bool>& transpose_gathered, const c10::List<bool>& transpose_out, int64_t outer,
                                bool shard_dim_is_last, bool return_gathered);

std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> all_gather_scaled_matmul(
    const Site& site, const at::Tensor& shard, const at::Tensor& shard_scale, at::TensorList operands,
    at::TensorList operand_scales, const c10::List<std::optional<at::Tensor>>& biases, int64_t outer, bool return_gathered,
    const std::vector<at::ScalarType>& out_dtypes, bool fast_accum);

TwoTensors matmul_reduce_scatter(const Site& site, at::TensorList lhs, at::TensorList rhs,
                                 const std::optional<at::Tensor>& addend, int64_t outer, bool shard_dim_is_last,
                                 std::string reduce_op, at::ScalarType out_dtype, bool return_partial, std::string wire);

at::Tensor scaled_matmul_reduce_scatter(const Site& site, at::TensorList lhs, at::TensorList rhs, at::TensorList lhs_scales,
                                        at::TensorList rhs_scales, const std::optional<at::Tensor>& addend, int64_t outer,
                                        std::string reduce_op, at::ScalarType product_dtype, at::ScalarType out_dtype,
                                        bool fast_accum, std::string wire);

TwoTensors matmul_all_reduce(const Site& site, at::TensorList lhs, at::TensorList rhs, const std::optional<at::Tensor>& addend,
                             std::string reduce_op, at::ScalarType out_dtype, bool return_partial);

TensorAndList bulk(const Site& site, const at::Tensor& input, at::TensorList lhs, at::TensorList rhs, std::string collective,
                   std::string reduce_op);

#ifdef UB_OVERLAP_CUDA
// x any shape, by most[at] [N]; what it is of magnitude goes into noted [1] -> (float8 of x's shape, its scale []).
TwoTensors fp8_cast(const at::Tensor& x, const at::Tensor& most, int64_t at, at::Tensor& noted, at::ScalarType format,
                    double headroom);
// The cast of a weight [R, C] that is kept -> (e4m3, scales), up to date. `known`: in backward, whose forward has looked. One
// that is not kept goes to fp8_weight_other, which Python has.
TwoTensors fp8_weight(const at::Tensor& weight, at::ScalarType through, std::optional<int64_t> axis,
                      const std::optional<at::Tensor>& after, bool known);
// The memory of such a cast, made on the current stream; nothing where there is one.
void fp8_weight_keep(const at::Tensor& weight, at::ScalarType through, std::optional<int64_t> axis, const at::Tensor& q,
                     const at::Tensor& scale, const at::Tensor& kept, const at::Tensor& scratch);
// `storage`: the address of the StorageImpl of weights that are gone.
void fp8_weight_forget(int64_t storage);
// A weight to e4m3 `q` where it is not what `kept` [1] says; `axis`: none, -1 (a scale a row) or -2 (a column). `scratch`:
// int64, all 0 before and after, of weight_scratch_words(scale.numel()) words.
void fp8_weight_refresh(const at::Tensor& weight, at::ScalarType through, std::optional<int64_t> axis, at::Tensor& q,
                        at::Tensor& scale, at::Tensor& kept, at::Tensor& scratch);
#endif

}  // namespace ub_overlap
