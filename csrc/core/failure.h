// What can go wrong in a call, as plain data: it is written into peers' shared memory when a rank gives up, so that all ranks
// raise the same error. Bindings turn it into a Python exception.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <map>
#include <optional>
#include <string>

namespace ub_overlap {

enum class FailureCode : int32_t {
    none = 0,
    peer_timeout = 1,        // `culprit` did not come before the deadline
    peer_died = 2,           // the process of `culprit` is gone
    shape_mismatch = 3,      // `culprit` called the same site with other sizes
    site_mismatch = 4,       // `culprit` is at another site
    peer_failed = 5,         // `reporter` raised something of its own
    group_lock_timeout = 6,  // on the device of `culprit` a call holds the group lock and makes no progress
    group_aborted = 7,       // this rank aborted the group; its peers see peer_failed
};

// Fixed size and free of pointers. `reporter` is the rank that noticed. Both ranks are of `group`, which the user named.
struct Failure {
    FailureCode code = FailureCode::none;
    int32_t reporter = -1, culprit = -1, chunk = -1;
    uint32_t expected = 0, observed = 0;
    double waited_s = 0, silent_s = -1;  // silent_s: since the culprit last showed a sign of life, -1 if not known
    char op[32] = {}, phase[16] = {}, site[224] = {}, group[96] = {};
    char got[640] = {}, wanted[640] = {};  // mismatches: the call of the culprit, and of the reporter
};

template <size_t n>
void set_text(char (&to)[n], const std::string& from) {
    std::snprintf(to, n, "%s", from.c_str());
}

// A call failed because of a peer.
struct CallFailed : std::exception {
    explicit CallFailed(const Failure& failure) : failure(failure) {}
    const char* what() const noexcept override { return "ub_overlap: a peer failed"; }
    Failure failure;
};

// A callback of the session failed. `failure`: of a peer, where that is why; else this rank has failed by itself.
struct CallbackFailed : std::exception {
    std::optional<Failure> failure;
};

// Anything else that becomes a class of runtime/errors.py: its name and its fields.
struct NamedError : std::exception {
    NamedError(std::string name, std::map<std::string, std::string> fields) : name(std::move(name)), fields(std::move(fields)) {
        text = this->name + ": " + this->fields["what"];
    }
    const char* what() const noexcept override { return text.c_str(); }
    std::string name, text;
    std::map<std::string, std::string> fields;
};

}  // namespace ub_overlap
