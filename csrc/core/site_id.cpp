#include "core/site_id.h"

namespace ub_overlap {

std::string shared_site(const std::string& site) {
    const size_t slash = site.find('/');
    return slash == std::string::npos ? site : shared_digest(site) + site.substr(slash);
}

std::string shared_digest(const std::string& site) {
    const size_t slash = site.find('/');
    if (slash == std::string::npos) return "";
    const std::string digest = site.substr(0, slash);
    return digest.substr(0, digest.find('-'));
}

}  // namespace ub_overlap
