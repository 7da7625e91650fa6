// A request to time the alternatives of one site on all ranks of its group.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace ub_overlap {

struct Tuning {
    std::string op, site;
    int bucket = 0;
    std::string work;  // op, sizes and types: sites that are equal in it share what was measured, where all ranks can
    std::vector<std::string> strategies;
    std::function<bool(int)> run;  // runs the call with one alternative and drops its results; false: it failed
};

}  // namespace ub_overlap
