// A map of bounded size that evicts the entry used least recently.
#pragma once

#include <cstddef>
#include <list>
#include <unordered_map>
#include <utility>

namespace ub_overlap {

template <typename Key, typename Value, typename Hash = std::hash<Key>>
class RecentMap {
  public:
    // `capacity`: at least 1.
    explicit RecentMap(size_t capacity) : capacity_(capacity) {}
    RecentMap(const RecentMap&) = delete;  // `order_` points at keys of `entries_`
    RecentMap& operator=(const RecentMap&) = delete;

    // Returns the value of `key`, a new one if there is none. A new one may evict another, after `evict(value)`. The reference
    // is valid until the next `use`.
    template <typename Evict>
    Value& use(const Key& key, Evict evict) {
        auto entry = entries_.find(key);
        if (entry != entries_.end()) {
            order_.splice(order_.begin(), order_, entry->second.place);
            return entry->second.value;
        }
        if (entries_.size() >= capacity_) {
            const auto oldest = entries_.find(*order_.back());
            evict(oldest->second.value);
            order_.pop_back();
            entries_.erase(oldest);
        }
        entry = entries_.try_emplace(key).first;
        order_.push_front(&entry->first);
        entry->second.place = order_.begin();
        return entry->second.value;
    }
    template <typename Evict>
    void clear(Evict evict) {
        for (auto& [key, entry] : entries_) evict(entry.value);
        order_.clear(), entries_.clear();
    }

  private:
    struct Entry {
        Value value{};
        typename std::list<const Key*>::iterator place;
    };
    const size_t capacity_;
    std::list<const Key*> order_;  // used most recently first
    std::unordered_map<Key, Entry, Hash> entries_;
};

}  // namespace ub_overlap
