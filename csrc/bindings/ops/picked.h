// An op that carries several strategies: picks one for every call, then calls the op with that one.
//
//     by rows         core/choice.h
//     by measurement  the first call runs by the first alternative; then the session times all of them on the same inputs, on
//     all
//                     ranks together (runtime/autotune.py), and later calls run by what they agreed on
//
// It wraps any function that has strategy, group and site as neighbouring arguments, at its end or nearly so.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/List.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/python.h"
#include "core/choice.h"
#include "core/registry.h"

namespace ub_overlap {

// Says for the statistics why calls of this thread run by the strategy they do, as long as it lives.
struct PickedBy {
    explicit PickedBy(const char* why) : before(picked_by()) { picked_by() = why; }
    ~PickedBy() { picked_by() = before; }
    PickedBy(const PickedBy&) = delete;
    PickedBy& operator=(const PickedBy&) = delete;
    const char* before;
};

// Sizes and types of the arguments of a call, as text.
class WorkText {
  public:
    explicit WorkText(std::string& to) : to_(to) {}
    void add(const at::Tensor& t) {
        to_ += t.toString() + "[";
        for (int64_t d = 0; d < t.dim(); ++d) to_ += std::to_string(t.size(d)) + (t.stride(d) == 1 ? "." : ",");
        to_ += "] ";
    }
    void add(at::TensorList list) {
        for (const at::Tensor& t : list) add(t);
        to_ += "; ";
    }
    void add(const std::optional<at::Tensor>& t) { t && t->defined() ? add(*t) : add("-"); }
    void add(const c10::List<std::optional<at::Tensor>>& list) {
        for (size_t i = 0; i < list.size(); ++i) add(list.get(i));
    }
    void add(const std::vector<at::ScalarType>& list) {
        for (const at::ScalarType type : list) add(type);
    }
    void add(at::IntArrayRef values) {
        for (const int64_t value : values) add(value);
    }
    void add(int64_t value) { to_ += std::to_string(value) + " "; }
    void add(bool value) { add(static_cast<int64_t>(value)); }
    void add(at::ScalarType value) { add(static_cast<int64_t>(value)); }
    void add(const std::string& value) { to_ += value + " "; }
    void add(const char* value) { to_ += value; }

  private:
    std::string& to_;
};

inline at::Device home_of(const at::Tensor& t) {
    return t.device();
}
inline at::Device home_of(at::TensorList list) {
    return list.empty() ? at::Device(at::kCPU) : list[0].device();
}

// All dims of `t` but the last, as one number.
inline int64_t leading(const at::Tensor& t) {
    int64_t rows = 1;
    for (int64_t d = 0; d + 1 < t.dim(); ++d) rows *= t.size(d);
    return rows;
}

// Of an op: its name, how many arguments lie behind its site, and the rows of a call as compiler/plan/strategy.py counts them.
struct GatheredRows {
    static constexpr const char* op = "all_gather_matmul";
    static constexpr size_t behind = 0;
    template <typename... Rest>
    int64_t operator()(int ranks, const at::Tensor& shard, at::TensorList, at::IntArrayRef, int64_t, bool last,
                       const Rest&...) {
        return leading(shard) * (last ? 1 : ranks);
    }
};
struct ScaledGatheredRows {
    static constexpr const char* op = "all_gather_scaled_matmul";
    static constexpr size_t behind = 0;
    template <typename... Rest>
    int64_t operator()(int ranks, const at::Tensor& shard, const Rest&...) {
        return leading(shard) * ranks;
    }
};
struct ScatteredRows {
    static constexpr const char* op = "matmul_reduce_scatter";
    static constexpr size_t behind = 1;
    template <typename... Rest>
    int64_t operator()(int, at::TensorList lhs, const Rest&...) {
        return lhs.empty() || lhs[0].dim() == 0 ? 0 : lhs[0].size(0);
    }
};
struct ScaledScatteredRows : ScatteredRows {
    static constexpr const char* op = "scaled_matmul_reduce_scatter";
    static constexpr size_t behind = 0;
};
struct ReducedRows : ScatteredRows {
    static constexpr const char* op = "matmul_all_reduce";
    static constexpr size_t behind = 0;
};
struct BulkRows {
    static constexpr const char* op = "bulk";
    static constexpr size_t behind = 0;
    template <typename... Rest>
    int64_t operator()(int ranks, const at::Tensor& input, at::TensorList, at::TensorList, const std::string& collective,
                       const Rest&...) {
        return leading(input) * (collective == "all_gather" ? ranks : 1);
    }
};

template <auto op, typename Rows>
struct Picked;

template <typename Result, typename... Args, Result (*op)(Args...), typename Rows>
struct Picked<op, Rows> {
    static constexpr size_t first = sizeof...(Args) - 3 - Rows::behind;  // strategy, then group and site

    static Result call(Args... args) {
        const auto all = std::tie(args...);
        const std::string& strategy = std::get<first>(all);
        const Choice* choice = nullptr;
        try {
            choice = Choice::of(strategy);
        } catch (...) {
            throw_as_python();
        }
        if (!choice) return op(std::forward<Args>(args)...);
        const WithoutGil without_gil;  // a session may be busy on a thread that needs it

        const std::string &group = std::get<first + 1>(all), &site = std::get<first + 2>(all);
        const auto members = c10d::resolve_process_group(group);
        const size_t number = choice->at(Rows()(members->getSize(), args...));
        const std::vector<std::string>& open = choice->bucket(number).strategies;
        if (open.size() == 1) {
            const PickedBy by(" by size");
            return with(open[0], site, args...);
        }
        const std::string device = c10::DeviceTypeName(home_of(std::get<0>(all)).type(), true);
        const auto find = [&] { return Registry::get().find(group, device, members.get()); };
        try {
            if (const auto session = find()) {
                const int pick = session->picked(site, static_cast<int>(number));
                const PickedBy by(" by measurement");
                if (pick >= 0) return with(open[static_cast<size_t>(pick)], site, args...);
            }
        } catch (const NamedError&) {  // a forked child
            throw_as_python();
        }
        const PickedBy by(" by prediction");
        Result result = with(open[0], site, args...);
        if (const auto session = find()) {
            const at::Device home = home_of(std::get<0>(all));
            c10::OptionalDeviceGuard here;  // times are taken on its current stream
            if (!home.is_cpu()) here.reset_device(home);
            time(*session, static_cast<int>(number), open, site, args...);
        }
        return result;
    }

  private:
    // One call by one strategy, under a name of its own for statistics and peers.
    static Result with(const std::string& strategy, const std::string& site, const Args&... args) {
        std::tuple<Args...> own(args...);
        std::get<first>(own) = strategy;
        std::get<first + 2>(own) = site;
        return std::apply(op, std::move(own));
    }

    static void time(Session& session, int number, const std::vector<std::string>& open, const std::string& site,
                     const Args&... args) {
        std::exception_ptr failed;
        Tuning tuning;
        tuning.site = site;
        tuning.bucket = number;
        tuning.strategies = open;
        tuning.op = Rows::op;
        WorkText work(tuning.work);
        work.add(tuning.op);
        describe(work, std::tie(args...), std::index_sequence_for<Args...>());
        tuning.run = [&](int which) {
            try {
                with(open[static_cast<size_t>(which)], site + ".tuning", args...);
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

    template <typename All, size_t... at>
    static void describe(WorkText& work, const All& all, std::index_sequence<at...>) {
        const auto add = [&](auto number) {
            constexpr size_t i = decltype(number)::value;
            if constexpr (i < first || i > first + 2) work.add(std::get<i>(all));
        };
        (add(std::integral_constant<size_t, at>()), ...);
    }
};

}  // namespace ub_overlap
