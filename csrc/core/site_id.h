// The parts of a site's id, "<plan digest>/<name>". A plan digest is "<shared>-<own>": ranks agree on the shared part, and the
// own part also identifies what a rank may have for itself, as the columns of its weights.
#pragma once

#include <string>

namespace ub_overlap {

// What ranks compare and errors name: "9f2c-71ab/backward.3" -> "9f2c/backward.3". Other text is returned as it is.
std::string shared_site(const std::string& site);

// The shared part of the plan digest: "9f2c-71ab/backward.3" -> "9f2c". Empty without a slash: there is no plan to verify.
std::string shared_digest(const std::string& site);

}  // namespace ub_overlap
