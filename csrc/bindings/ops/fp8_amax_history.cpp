// The ops of delayed scaling, as every call runs them: find the histories of a graph's tensors, decide whether the call is a
// step, and let the device do the rest. Python allocates histories, numbers modules, and saves and loads states
// (runtime/fp8/amax_history/history.py); a call that needs any of that goes to Python once.
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <ATen/core/dispatch/Dispatcher.h>

#include <map>
#include <mutex>
#include <set>
#include <string_view>
#include <unordered_map>

#include "bindings/ops/ops.h"
#include "bindings/ops/run_op.h"

namespace ub_overlap {
namespace {

constexpr char separator = ';';  // as in history.py

// What this file knows of the tensors of a key.
struct KeyState {
    int64_t modules = 0;          // modules that share the key
    int64_t first_slot = 0;       // the slot of the first module's tensor
    bool is_recomputing = false;  // a checkpoint recomputes the forward in backward
    // Groups (joined by the separator) on whose first amax the ranks have agreed: the first group of each.
    std::map<std::string, c10::weak_intrusive_ptr<c10d::ProcessGroup>, std::less<>> agreed;
};

// A state's memory on one device; the Python class of this name explains the tensors.
struct AmaxHistory {
    at::Tensor current, past, agreed_amax;
    std::unordered_map<std::string, KeyState> keys;
    std::set<std::pair<std::string, int64_t>> stepped;  // (first key, module) of graphs whose last forward was a step
};

// The tensors of one graph on one device.
struct GraphTensors {
    struct Module {
        c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // of its weight
        int64_t offset = 0;
        at::Tensor slots;
    };
    AmaxHistory* history = nullptr;
    std::vector<std::string> keys;
    std::vector<std::optional<Module>> modules;  // by number

    int64_t find(const at::Tensor& weight) const {
        const c10::StorageImpl* storage = weight.storage().unsafeGetStorageImpl();
        for (size_t number = 0; number < modules.size(); ++number) {
            const std::optional<Module>& module = modules[number];  // a weak reference keeps the address from being reused
            if (module && module->storage._unsafe_get_target() == storage && module->offset == weight.storage_offset()) {
                return static_cast<int64_t>(number);
            }
        }
        return -1;
    }
};

// By state or by the text of a graph's keys, and by device.
template <typename T>
using ByTextAndDevice = std::unordered_map<std::string, std::map<std::pair<at::DeviceType, at::DeviceIndex>, T>>;

struct AmaxStates {
    std::mutex mutex;  // never held while Python runs
    ByTextAndDevice<AmaxHistory> histories;
    ByTextAndDevice<GraphTensors> graphs;
};

AmaxStates& states() {
    static AmaxStates* one = new AmaxStates;  // never freed: CUDA may shut down before the process ends
    return *one;
}

template <typename T>
T* find(ByTextAndDevice<T>& map, const std::string& text, at::Device device) {
    const auto entry = map.find(text);
    if (entry == map.end()) return nullptr;
    const auto found = entry->second.find({device.type(), device.index()});
    return found == entry->second.end() ? nullptr : &found->second;
}

std::string state_of(const std::string& text) {
    return text.substr(0, text.find(separator));
}

// The history that holds the tensor of "<state>;<key>". Fp8StateError unless a graph has read it.
std::pair<AmaxHistory*, KeyState*> history_of(const std::string& text, at::Device device) {
    const std::string state = state_of(text), key = text.substr(std::min(text.size(), state.size() + 1));
    AmaxHistory* history = find(states().histories, state, device);
    const auto entry = history ? history->keys.find(key) : std::unordered_map<std::string, KeyState>::iterator{};
    if (history && entry != history->keys.end()) return {history, &entry->second};
    throw NamedError("Fp8StateError", {{"what", "the history '" + key + "' was never read"},
                                       {"where", "fp8_state('" + state + "')"},
                                       {"got", device.str()},
                                       {"expected", "fp8_amax_history before the history is recorded"},
                                       {"fix", "report this as a bug"}});
}

// Returns whether this call advances the histories, and notes recomputed forwards.
bool advances(GraphTensors& graph, int64_t module, bool step) {
    AmaxHistory& history = *graph.history;
    const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
    const std::pair<std::string, int64_t> call{graph.keys.front(), module};
    if (!step) {  // outside backward a reentrant checkpoint's forward: the forward in backward will be the step
        if (!in_backward) history.stepped.erase(call);
        return false;
    }
    const bool recomputes = in_backward && history.stepped.count(call) != 0;
    for (const std::string& key : graph.keys) history.keys[key].is_recomputing = recomputes;
    if (!in_backward) history.stepped.insert(call);
    return !recomputes;
}

// The module of a call whose weight is not known yet.
int64_t add_module(const at::Tensor& weight, const std::string& keys) {
    static const auto miss = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("ub_overlap::fp8_amax_history_miss", "")
                                 .typed<int64_t(const at::Tensor&, c10::string_view)>();
    return miss.call(weight, keys);
}

std::string_view first_of(const std::string& groups) {
    return std::string_view(groups).substr(0, groups.find(separator));
}

}  // namespace

TwoTensors fp8_amax_history(const at::Tensor& weight, const std::string& keys, bool step) {
    return run_op(weight.device(), [&]() -> TwoTensors {
        at::Tensor current, past, slots;
        bool is_step = false;
        const auto look = [&](int64_t module) {
            const std::lock_guard<std::mutex> lock(states().mutex);
            GraphTensors* graph = find(states().graphs, keys, weight.device());
            if (!graph) return false;
            if (module < 0) module = graph->find(weight);
            if (module < 0) return false;
            is_step = advances(*graph, module, step);
            current = graph->history->current, past = graph->history->past;
            slots = graph->modules.at(static_cast<size_t>(module)).value().slots;
            return true;
        };
        if (!look(-1)) look(add_module(weight, keys));
        return fp8_advance_histories(current, past, slots, is_step);
    });
}

at::Tensor fp8_record_amax(const at::Tensor& scale, const std::optional<at::Tensor>& quantized, const at::Tensor& sample,
                           const at::Tensor& slots, int64_t index, const std::string& key, const std::string& record_in) {
    return run_op(scale.device(), [&]() -> at::Tensor {
        at::Tensor current;
        {
            const std::lock_guard<std::mutex> lock(states().mutex);
            const auto [history, tensor] = history_of(key, scale.device());
            if (!(record_in == "forward" && tensor->is_recomputing)) current = history->current;
        }
        return current.defined() ? fp8_raise_amax(current, slots, index, quantized, scale, sample) : scale.clone();
    });
}

at::Tensor fp8_first_amax(const at::Tensor& current, const at::Tensor& slots, int64_t index, const std::string& key,
                          const std::string& record_in, const std::string& groups) {
    return run_op(current.device(), [&]() -> at::Tensor {
        at::Tensor agreed_amax;
        int64_t sole_slot = -1;
        {
            const std::lock_guard<std::mutex> lock(states().mutex);
            const auto [history, tensor] = history_of(key, current.device());
            const auto agreed = tensor->agreed.find(groups);
            if (agreed != tensor->agreed.end() &&
                agreed->second.lock() == c10d::resolve_process_group(std::string(first_of(groups)))) {
                agreed_amax = history->agreed_amax;
                if (tensor->modules == 1) sole_slot = tensor->first_slot;
            }
        }
        if (sole_slot >= 0) return agreed_amax.select(0, sole_slot).clone();
        if (agreed_amax.defined()) return agreed_amax.index_select(0, slots.slice(0, index, index + 1)).reshape({});
        static const auto miss = c10::Dispatcher::singleton()
                                     .findSchemaOrThrow("ub_overlap::fp8_first_amax_miss", "")
                                     .typed<at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, c10::string_view,
                                                       c10::string_view, c10::string_view)>();
        return miss.call(current, slots, index, key, record_in, groups);
    });
}

void fp8_amax_history_insert(const at::Tensor& weight, const std::string& keys, int64_t module, const at::Tensor& slots,
                             at::IntArrayRef columns, const at::Tensor& current, const at::Tensor& past,
                             const at::Tensor& agreed_amax, const std::vector<std::string>& unstepped) {
    run_op(weight.device(), [&]() {
        const std::pair<at::DeviceType, at::DeviceIndex> device{weight.device().type(), weight.device().index()};
        const std::lock_guard<std::mutex> lock(states().mutex);
        AmaxHistory& history = states().histories[state_of(keys)][device];
        history.current = current, history.past = past, history.agreed_amax = agreed_amax;
        for (const std::string& first : unstepped) history.stepped.erase({first, module});
        GraphTensors& graph = states().graphs[keys][device];
        if (!graph.history) {
            graph.history = &history;
            for (size_t at = keys.find(separator); at != std::string::npos;) {
                const size_t end = keys.find(separator, at + 1);
                graph.keys.push_back(keys.substr(at + 1, end == std::string::npos ? end : end - at - 1));
                at = end;
            }
        }
        for (size_t i = 0; i < graph.keys.size(); ++i) {
            KeyState& key = history.keys[graph.keys[i]];
            key.agreed.clear();  // the ranks agree again for each weight
            key.modules = std::max(key.modules, module + 1);
            if (module == 0) key.first_slot = columns[i];
        }
        const size_t place = static_cast<size_t>(module);
        if (graph.modules.size() <= place) graph.modules.resize(place + 1);
        graph.modules[place] = GraphTensors::Module{weight.storage().getWeakStorageImpl(), weight.storage_offset(), slots};
    });
}

void fp8_first_amax_agreed(const at::Tensor& current, const std::string& key, const std::string& groups) {
    run_op(current.device(), [&]() {
        const std::lock_guard<std::mutex> lock(states().mutex);
        history_of(key, current.device())
            .second->agreed.insert_or_assign(groups, c10::weak_intrusive_ptr<c10d::ProcessGroup>(
                                                         c10d::resolve_process_group(std::string(first_of(groups)))));
    });
}

void fp8_amax_history_evict(const std::string& state) {
    run_op(at::kCPU, [&]() {
        const std::lock_guard<std::mutex> lock(states().mutex);
        for (auto entry = states().graphs.begin(); entry != states().graphs.end();) {
            entry = state_of(entry->first) == state ? states().graphs.erase(entry) : std::next(entry);
        }
        states().histories.erase(state);
    });
}

}  // namespace ub_overlap
