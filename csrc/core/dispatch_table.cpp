#include "core/dispatch_table.h"

#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>

#include "core/failure.h"

namespace ub_overlap {
namespace {

std::vector<std::string> split(std::string_view text, char at) {
    std::vector<std::string> parts;
    while (true) {
        const size_t end = text.find(at);
        parts.emplace_back(text.substr(0, end));
        if (end == std::string_view::npos) return parts;
        text.remove_prefix(end + 1);
    }
}

[[noreturn]] void refuse(const std::string& text, const std::string& part) {
    throw NamedError("OptionError", {{"what", "this table of strategies is not understood"},
                                     {"got", "'" + part + "' in '" + text + "'"},
                                     {"expected", "rows=strategy;...;*=strategy by rising rows, or strategy|strategy"}});
}

}  // namespace

DispatchTable::DispatchTable(const std::string& text) {
    const std::vector<std::string> parts = split(text, ';');
    for (const std::string& part : parts) {
        Bucket bucket;
        std::string names = part;
        const bool last = buckets_.size() + 1 == parts.size();
        if (parts.size() > 1) {
            const size_t equals = part.find('=');
            if (equals == std::string::npos) refuse(text, part);
            const std::string limit = part.substr(0, equals);
            names = part.substr(equals + 1);
            const bool number =
                !limit.empty() && limit.size() < 19 && limit.find_first_not_of("0123456789") == std::string::npos;
            if (last ? limit != "*" : !number) refuse(text, part);
            if (!last) bucket.limit = std::stoll(limit);
            if (!last && !buckets_.empty() && bucket.limit <= buckets_.back().limit) refuse(text, part);
        }
        bucket.strategies = split(names, '|');
        for (const std::string& name : bucket.strategies) {
            if (name.empty()) refuse(text, part);
        }
        buckets_.push_back(std::move(bucket));
    }
}

const DispatchTable* DispatchTable::of(const std::string& text) {
    if (text.find_first_of(";|") == std::string::npos) return nullptr;
    static std::mutex mutex;
    static auto* all = new std::unordered_map<std::string, std::unique_ptr<const DispatchTable>>;  // as long as the process
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = all->find(text);
    if (found == all->end()) found = all->emplace(text, std::unique_ptr<const DispatchTable>(new DispatchTable(text))).first;
    return found->second.get();
}

size_t DispatchTable::at(int64_t rows) const {
    size_t number = 0;
    while (buckets_[number].limit >= 0 && rows > buckets_[number].limit) ++number;
    return number;
}

const char*& dispatched_by() {
    thread_local const char* why = "";
    return why;
}

}  // namespace ub_overlap
