// What UCX does to a process it does while it is loaded, and only variables keep it from that.
#include "serried/comm/net/load_ucx.h"

#include <unistd.h>

#include <cstdlib>
#include <vector>

namespace serried::net {
namespace {

struct Setting {
  const char* name;
  const char* entry;  // of the environment
};

constexpr Setting kSettings[] = {
    // Each lost peer would be several lines on stderr.
    {"UCX_LOG_LEVEL", "UCX_LOG_LEVEL=fatal"},
    // It would take SIGSEGV and others to print where they came from.
    {"UCX_ERROR_SIGNALS", "UCX_ERROR_SIGNALS="},
    // It would write over the beginning of mmap, munmap and madvise to learn of memory that goes, which is of use to
    // some fabrics, and to GPUs.
    {"UCX_MEM_MMAP_HOOK_MODE", "UCX_MEM_MMAP_HOOK_MODE=none"},
    {"UCX_MEMTYPE_CACHE", "UCX_MEMTYPE_CACHE=n"},
};

// A larger copy of the environment stands in its place for a moment, and is never freed: setenv frees what threads that
// read the environment may still be reading.
class LoadingEnvironment {
 public:
  LoadingEnvironment() : previous_(environ) {
    static auto* const copy = new std::vector<char*>;
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) copy->push_back(*entry);
    for (const Setting& setting : kSettings) {
      if (std::getenv(setting.name) == nullptr) copy->push_back(const_cast<char*>(setting.entry));
    }
    copy->push_back(nullptr);
    environ = copy->data();
  }
  ~LoadingEnvironment() { environ = previous_; }
  LoadingEnvironment(const LoadingEnvironment&) = delete;
  LoadingEnvironment& operator=(const LoadingEnvironment&) = delete;

 private:
  char** const previous_;
};

}  // namespace

const detail::FoundPlugin& load_ucx() {
  static const detail::FoundPlugin found = [] {
    const LoadingEnvironment environment;
    return detail::find_plugin("ucx", "serried_ucx_plugin");
  }();
  return found;
}

}  // namespace serried::net
