// Picks one of the strategies that an op's `strategy` argument carries, then calls the op's kernel with that strategy.
//
//     by rows          core/dispatch_table.h
//     by measurement   The first call runs the first alternative. Then the session times all alternatives on the same inputs,
//                      on all ranks together (runtime/autotune.py). Later calls run the one that the ranks agreed on.
//
// A kernel takes `const Site&` first. `Dispatched` appends (str strategy, str group, str site) to its remaining arguments,
// which gives the op's schema.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/ops/ops.h"
#include "bindings/python.h"
#include "core/dispatch_table.h"
#include "core/registry.h"
#include "core/site_id.h"

namespace ub_overlap {

// While it lives, statistics of this thread's calls say why the call runs its strategy.
struct DispatchReason {
    explicit DispatchReason(const char* reason) : before(dispatched_by()) { dispatched_by() = reason; }
    ~DispatchReason() { dispatched_by() = before; }
    DispatchReason(const DispatchReason&) = delete;
    DispatchReason& operator=(const DispatchReason&) = delete;
    const char* before;
};

// Writes sizes and types of a call's arguments as text.
class ArgumentText {
  public:
    explicit ArgumentText(std::string& text) : text_(text) {}
    void add(const at::Tensor& t) {
        text_ += t.toString() + "[";
        for (int64_t d = 0; d < t.dim(); ++d) text_ += std::to_string(t.size(d)) + (t.stride(d) == 1 ? "." : ",");
        text_ += "] ";
    }
    void add(at::TensorList list) {
        for (const at::Tensor& t : list) add(t);
        text_ += "; ";
    }
    void add(const std::optional<at::Tensor>& t) { t && t->defined() ? add(*t) : add("-"); }
    void add(const c10::List<std::optional<at::Tensor>>& list) {
        for (size_t i = 0; i < list.size(); ++i) add(list.get(i));
    }
    void add(const c10::List<bool>& list) {
        for (size_t i = 0; i < list.size(); ++i) add(list.get(i));
    }
    void add(const std::vector<at::ScalarType>& list) {
        for (const at::ScalarType type : list) add(type);
    }
    void add(int64_t value) { text_ += std::to_string(value) + " "; }
    void add(double value) { text_ += std::to_string(value) + " "; }
    void add(bool value) { add(static_cast<int64_t>(value)); }
    void add(at::ScalarType value) { add(static_cast<int64_t>(value)); }
    void add(const std::string& value) { text_ += value + " "; }
    void add(const char* value) { text_ += value; }

  private:
    std::string& text_;
};

inline at::Device first_device(const at::Tensor& t) {
    return t.device();
}
inline at::Device first_device(at::TensorList list) {
    return list.empty() ? at::Device(at::kCPU) : list[0].device();
}

// The product of all dims of `t` but the last.
inline int64_t leading_rows(const at::Tensor& t) {
    int64_t rows = 1;
    for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
    return rows;
}

// Each functor names an op and counts the rows of a call, as compiler/plan/strategy.py does.
struct GatheredRows {
    static constexpr const char* op = "all_gather_matmul";
    template <typename... Rest>
    int64_t operator()(int ranks, const at::Tensor& shard, at::TensorList, const c10::List<bool>&, const c10::List<bool>&,
                       int64_t, bool shard_dim_is_last, const Rest&...) {
        return leading_rows(shard) * (shard_dim_is_last ? 1 : ranks);
    }
};
struct ScaledGatheredRows {
    static constexpr const char* op = "all_gather_scaled_matmul";
    template <typename... Rest>
    int64_t operator()(int ranks, const at::Tensor& shard, const Rest&...) {
        return leading_rows(shard) * ranks;
    }
};
struct ScatteredRows {
    static constexpr const char* op = "matmul_reduce_scatter";
    template <typename... Rest>
    int64_t operator()(int, at::TensorList lhs, const Rest&...) {
        return lhs.empty() || lhs[0].dim() == 0 ? 0 : lhs[0].size(0);
    }
};
struct ScaledScatteredRows : ScatteredRows {
    static constexpr const char* op = "scaled_matmul_reduce_scatter";
};
struct ReducedRows : ScatteredRows {
    static constexpr const char* op = "matmul_all_reduce";
};
struct BulkRows {
    static constexpr const char* op = "bulk";
    template <typename... Rest>
    int64_t operator()(int ranks, const at::Tensor& input, at::TensorList, at::TensorList, const std::string& collective,
                       const Rest&...) {
        return leading_rows(input) * (collective == "all_gather" ? ranks : 1);
    }
};

struct FusedRows {
    static constexpr const char* op = "fused_collective";
    template <typename... Rest>
    int64_t operator()(int ranks, const at::Tensor& input, const std::string& collective, const Rest&...) {
        return leading_rows(input) * (collective == "all_gather" ? ranks : 1);
    }
};

template <auto kernel, typename Rows>
struct Dispatched;

template <typename Result, typename... Args, Result (*kernel)(const Site&, Args...), typename Rows>
struct Dispatched<kernel, Rows> {
    // The op as torch registers it.
    static Result call(Args... args, std::string strategy, std::string group, std::string site) {
        Site at{std::move(strategy), std::move(group), std::move(site)};
        const DispatchTable* table = nullptr;
        try {
            table = DispatchTable::of(at.strategy);
        } catch (...) {
            throw_as_python();
        }
        if (!table) return kernel(at, std::forward<Args>(args)...);
        return dispatch(*table, std::move(at), args...);
    }

  private:
    static Result dispatch(const DispatchTable& table, Site at, const Args&... args) {
        const WithoutGil without_gil;  // a session may be busy on a thread that needs the GIL
        const auto process_group = c10d::resolve_process_group(at.group);
        const size_t bucket = table.at(Rows()(process_group->getSize(), args...));
        const std::vector<std::string>& alternatives = table.bucket(bucket).strategies;
        if (alternatives.size() == 1) {
            const DispatchReason reason(" by size");
            return run_with(alternatives[0], at, args...);
        }
        const at::Device device = first_device(std::get<0>(std::tie(args...)));
        const std::string device_type = c10::DeviceTypeName(device.type(), true);
        const auto find_session = [&] { return Registry::get().find(at.group, device_type, process_group.get()); };
        try {
            if (const auto session = find_session()) {
                const int pick = session->picked(shared_site(at.id), static_cast<int>(bucket));
                const DispatchReason reason(" by measurement");
                if (pick >= 0) return run_with(alternatives[static_cast<size_t>(pick)], at, args...);
            }
        } catch (const NamedError&) {  // a forked child
            throw_as_python();
        }
        const DispatchReason reason(" by prediction");
        Result result = run_with(alternatives[0], at, args...);
        if (const auto session = find_session()) {
            c10::OptionalDeviceGuard guard;  // times are taken on the device's current stream
            if (!device.is_cpu()) guard.reset_device(device);
            time_alternatives(*session, static_cast<int>(bucket), alternatives, at, args...);
        }
        return result;
    }

    static Result run_with(const std::string& strategy, const Site& at, const Args&... args) {
        std::tuple<Args...> own(args...);  // the kernel may consume its arguments; the caller's are needed again
        const Site site{strategy, at.group, at.id};
        return std::apply([&](auto&&... own_args) { return kernel(site, std::forward<Args>(own_args)...); }, std::move(own));
    }

    // Timed calls have a site id of their own, for statistics and peers.
    static void time_alternatives(Session& session, int bucket, const std::vector<std::string>& alternatives, const Site& at,
                                  const Args&... args) {
        std::exception_ptr failed;
        Tuning tuning;
        tuning.site = shared_site(at.id);  // the ranks pick together
        tuning.bucket = bucket;
        tuning.strategies = alternatives;
        tuning.op = Rows::op;
        ArgumentText text(tuning.work);
        text.add(tuning.op);
        (text.add(args), ...);
        const Site timed{"", at.group, at.id + ".tuning"};
        tuning.run = [&](int index) {
            try {
                run_with(alternatives[static_cast<size_t>(index)], timed, args...);
                return true;
            } catch (...) {
                failed = std::current_exception();
                return false;
            }
        };
        try {
            session.tune(tuning);
        } catch (...) {
            if (failed) std::rethrow_exception(failed);
            throw_as_python();
        }
    }
};

}  // namespace ub_overlap
