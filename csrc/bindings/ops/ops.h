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
using ThreeTensors = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using TwoTensorsAndList = std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>>;

// The last three arguments of every op. A kernel gets one strategy; dispatch.h resolves tables of strategies.
struct Site {
    std::string strategy, group;  // "pipelined:chunks=8"; the c10d group's name
    std::string id;               // "<plan digest>/<site id>", schema argument `site`
};

TensorAndList all_gather_matmul(const Site& site, const at::Tensor& shard, at::TensorList operands,
                                const c10::List<bool>& transpose_gathered, const c10::List<bool>& transpose_out, int64_t outer,
                                bool shard_dim_is_last, bool return_gathered, at::TensorList independent_lhs,
                                at::TensorList independent_rhs);

std::tuple<at::Tensor, at::Tensor, std::vector<at::Tensor>> all_gather_scaled_matmul(
    const Site& site, const at::Tensor& shard, const at::Tensor& shard_scale, at::TensorList operands,
    at::TensorList operand_scales, const c10::List<std::optional<at::Tensor>>& biases, int64_t outer, bool return_gathered,
    const std::vector<at::ScalarType>& out_dtypes, bool fast_accum);

TwoTensorsAndList matmul_reduce_scatter(const Site& site, at::TensorList lhs, at::TensorList rhs,
                                        const std::optional<at::Tensor>& addend, int64_t outer, bool shard_dim_is_last,
                                        std::string reduce_op, at::ScalarType out_dtype, bool return_partial, std::string wire,
                                        at::TensorList independent_lhs, at::TensorList independent_rhs);

at::Tensor scaled_matmul_reduce_scatter(const Site& site, at::TensorList lhs, at::TensorList rhs, at::TensorList lhs_scales,
                                        at::TensorList rhs_scales, const std::optional<at::Tensor>& addend, int64_t outer,
                                        std::string reduce_op, at::ScalarType product_dtype, at::ScalarType out_dtype,
                                        bool fast_accum, std::string wire);

TwoTensorsAndList matmul_all_reduce(const Site& site, at::TensorList lhs, at::TensorList rhs,
                                    const std::optional<at::Tensor>& addend, std::string reduce_op, at::ScalarType out_dtype,
                                    bool return_partial, at::TensorList independent_lhs, at::TensorList independent_rhs);

TensorAndList bulk(const Site& site, const at::Tensor& input, at::TensorList lhs, at::TensorList rhs, std::string collective,
                   std::string reduce_op, at::ScalarType out_dtype);

ThreeTensors fused_collective(const Site& site, const at::Tensor& input, std::string collective, std::string reduce_op,
                              const std::optional<at::Tensor>& linear_bias, std::string branch_norm,
                              const std::optional<at::Tensor>& branch_weight, const std::optional<at::Tensor>& branch_bias,
                              double branch_epsilon, bool branch_round_before_weight, double branch_weight_offset,
                              double branch_factor, const std::optional<at::Tensor>& addend,
                              const std::optional<at::Tensor>& residual, std::string norm,
                              const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double epsilon,
                              bool round_sum, bool round_before_weight, double weight_offset,
                              const std::optional<at::Tensor>& scale, double amax_factor, double least_scale,
                              bool divide_by_scale, at::ScalarType normed_dtype);

// Begins a collective and returns a token. Strategies are not dispatched: finish must run what start began.
at::Tensor start_collective(const at::Tensor& input, std::string collective, std::string reduce_op, at::ScalarType out_dtype,
                            int64_t split_slot, bool zero_copy, std::string strategy, std::string group, std::string site);
// Returns the result of the collective that is open in the slot, started with the same arguments.
at::Tensor finish_collective(const at::Tensor& token, const at::Tensor& input, std::string collective, std::string reduce_op,
                             at::ScalarType out_dtype, int64_t split_slot, bool zero_copy, std::string strategy,
                             std::string group, std::string site);
// A coalesced collective, of several tensors. One result for each.
at::Tensor start_coalesced(at::TensorList inputs, std::string collective, std::string reduce_op,
                           const std::vector<at::ScalarType>& out_dtypes, int64_t split_slot, bool zero_copy,
                           std::string strategy, std::string group, std::string site);
std::vector<at::Tensor> finish_coalesced(const at::Tensor& token, at::TensorList inputs, std::string collective,
                                         std::string reduce_op, const std::vector<at::ScalarType>& out_dtypes,
                                         int64_t split_slot, bool zero_copy, std::string strategy, std::string group,
                                         std::string site);
// The result of the open collective, into `out`, whose dtype is the result's. `out` may be the input of an all_reduce: a shard
// of it is written when its owner has received it. The input of an all_gather may be its place in `out`.
void finish_collective_into(const at::Tensor& token, const at::Tensor& input, at::Tensor& out, std::string collective,
                            std::string reduce_op, int64_t split_slot, std::string strategy, std::string group,
                            std::string site);
// Returns the landing memory [numel] that a zero-copy gather in this slot will return, in the dtype and on the device of
// `like`. A gather whose input is this rank's part of it copies nothing on this rank. Collective where the slot grows.
at::Tensor landing_memory(const at::Tensor& like, int64_t numel, int64_t split_slot, std::string group, std::string site);
// Frees the slot whose landing memory a zero-copy gather has returned.
void release_collective(const at::Tensor& gathered, int64_t split_slot, std::string strategy, std::string group,
                        std::string site);
void release_coalesced(at::TensorList gathered, int64_t split_slot, std::string strategy, std::string group, std::string site);

// Begins an exchange of pieces of rows, and returns a token. finish_all_to_all returns the rows that this rank receives: all in
// rank order, or those whose numbers `order` has.
at::Tensor start_all_to_all(const at::Tensor& input, at::IntArrayRef output_splits, at::IntArrayRef input_splits,
                            int64_t split_slot, bool one_area, std::string strategy, std::string group, std::string site);
at::Tensor finish_all_to_all(const at::Tensor& token, const at::Tensor& input, at::IntArrayRef output_splits,
                             at::IntArrayRef input_splits, int64_t split_slot, bool one_area, std::string strategy,
                             std::string group, std::string site, const std::optional<at::Tensor>& order);

// Returns weights [N_i, K] as one matrix [sum of N_i, K]: their own memory if they lie next to each other, else a copy, which
// is logged once for each `site`.
at::Tensor packed_weight(at::TensorList weights, const std::string& site);
// The same for float8 casts [N_i, K] of the weight cache and the scales [N_i, 1] of their rows.
TwoTensors fp8_packed_casts(at::TensorList casts, at::TensorList scales, const std::string& site);

// Returns the maxima [N] of the amax histories in `slots` [N], columns of current [C] and past [calls, C], and a copy of
// `slots`. `is_step`: pushes `current` before, where it is above 0, and clears it.
TwoTensors fp8_advance_histories(at::Tensor& current, at::Tensor& past, const at::Tensor& slots, bool is_step);
// Raises current[slots[index]] to `sample` [] and to the amax of `quantized`, float8, times `scale` [].
// Returns a copy of `scale`.
at::Tensor fp8_raise_amax(at::Tensor& current, const at::Tensor& slots, int64_t index,
                          const std::optional<at::Tensor>& quantized, const at::Tensor& scale, const at::Tensor& sample);
// The ops of delayed scaling (runtime/ops/fp8_amax_history.py, fp8_record_amax.py, fp8_first_amax.py).
TwoTensors fp8_amax_history(const at::Tensor& weight, const std::string& keys, bool step);
at::Tensor fp8_record_amax(const at::Tensor& scale, const std::optional<at::Tensor>& quantized, const at::Tensor& sample,
                           const at::Tensor& slots, int64_t index, const std::string& key, const std::string& record_in);
at::Tensor fp8_first_amax(const at::Tensor& current, const at::Tensor& slots, int64_t index, const std::string& key,
                          const std::string& record_in, const std::string& groups);
// Inserts the histories of a graph's tensors, for the module that `weight` belongs to. `columns`: the elements of `slots`.
// `unstepped`: first keys of graphs in which another, freed weight had the number `module`.
void fp8_amax_history_insert(const at::Tensor& weight, const std::string& keys, int64_t module, const at::Tensor& slots,
                             at::IntArrayRef columns, const at::Tensor& current, const at::Tensor& past,
                             const at::Tensor& agreed_amax, const std::vector<std::string>& unstepped);
// Notes that the ranks of `groups` have agreed on the first amax of a key, for all weights that have arrived.
void fp8_first_amax_agreed(const at::Tensor& current, const std::string& key, const std::string& groups);
// Forgets a state.
void fp8_amax_history_evict(const std::string& state);

#ifdef UB_OVERLAP_CUDA
// Copies a view of float8, such as a transposed matrix, to contiguous memory.
at::Tensor fp8_layout_copy(const at::Tensor& view);
// Returns the cached cast of a weight [R, C], up to date: (e4m3, scales). `reuse_forward`: in backward, whose forward has used
// the cast. `siblings`: weights whose casts lie next to each other, with this one; none for a cast by itself. A weight that is
// not cached goes to fp8_cached_weight_miss, which Python has.
TwoTensors fp8_cached_weight(const at::Tensor& weight, at::ScalarType round_to, std::optional<int64_t> axis,
                             const std::optional<at::Tensor>& after, bool reuse_forward, at::TensorList siblings);
// Inserts the memory of such a cast, allocated on the current stream, unless the weight is cached.
void fp8_cached_weight_insert(const at::Tensor& weight, at::ScalarType round_to, std::optional<int64_t> axis,
                              const at::Tensor& q, const at::Tensor& scale, const at::Tensor& checksum,
                              const at::Tensor& scratch);
// Returns the transposed copy [C, R] of a weight's cached cast `q`. It is kept from then on: later casts write it too.
at::Tensor fp8_cached_weight_transposed(const at::Tensor& weight, at::ScalarType round_to, std::optional<int64_t> axis,
                                        const at::Tensor& q);
// Inserts the memory of such a copy and copies the cast, unless there is one.
void fp8_cached_weight_insert_transposed(const at::Tensor& weight, at::ScalarType round_to, std::optional<int64_t> axis,
                                         const at::Tensor& transposed);
// Evicts the casts of freed weights. `storage`: the address of their StorageImpl.
void fp8_cached_weight_evict(int64_t storage);
// Casts a weight to e4m3 `q` if its bits do not have `checksum` [2], of which the first counts. `axis`: none, -1 (a scale per
// row) or -2 (per column). `scratch`: int64, cached_weight_scratch_words(scale.numel()) words, all 0 before and after.
void fp8_cached_weight_refresh(const at::Tensor& weight, at::ScalarType round_to, std::optional<int64_t> axis, at::Tensor& q,
                               at::Tensor& scale, at::Tensor& checksum, at::Tensor& scratch);
#endif

}  // namespace ub_overlap
