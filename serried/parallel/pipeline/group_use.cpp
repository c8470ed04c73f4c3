// By the group itself as long as it lives: names and addresses may come again.
#include "serried/parallel/pipeline/group_use.h"

#include <map>
#include <mutex>
#include <utility>

namespace serried::detail {
namespace {

struct Use {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group;
  int64_t num_pipelines = 0;
  std::string failed = {};
};

// Guards all that it returns.
std::mutex& uses_mutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

Use& use_of(const Group& group) {
  static auto* const uses = new std::map<const c10d::ProcessGroup*, Use>();
  std::erase_if(*uses, [](const auto& entry) { return entry.second.group.expired(); });
  return uses->try_emplace(group.get(), Use{c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)}).first->second;
}

}  // namespace

int64_t count_pipeline(const Group& group) {
  const std::lock_guard<std::mutex> lock(uses_mutex());
  return ++use_of(group).num_pipelines;
}

void note_failed_step(const Group& group, const std::string& where) {
  const std::lock_guard<std::mutex> lock(uses_mutex());
  use_of(group).failed = where;
}

std::string failed_step_on(const Group& group) {
  const std::lock_guard<std::mutex> lock(uses_mutex());
  return use_of(group).failed;
}

}  // namespace serried::detail
