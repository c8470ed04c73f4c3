// The thread's current group, in c10d's own variable and in what autograd carries to its threads.
#include "serried/comm/groups/group.h"

#include "serried/base/error.h"

namespace serried {
namespace {

constexpr std::string_view kSlotName = "serried::current_process_group";
constexpr c10::DebugInfoKind kSlot(&kSlotName);

// at::ThreadLocalState takes this along: a backward that runs on another thread sees the group of its caller.
struct CarriedGroup final : c10::DebugInfoBase {
  explicit CarriedGroup(Group group) : group(std::move(group)) {}
  Group group;
};

}  // namespace

Group current_process_group() {
  if (const Group& group = c10d::currentProcessGroup()) return group;
  const auto* carried = static_cast<const CarriedGroup*>(c10::ThreadLocalDebugInfo::get(kSlot));
  return carried == nullptr ? nullptr : carried->group;
}

Group require_current_process_group() {
  if (Group group = current_process_group()) return group;
  raise<c10::ValueError>({"require_current_process_group", "this thread has no current group",
                          "keep a ProcessGroupGuard guard(group) alive around the call, or pass the group"});
}

ProcessGroupGuard::ProcessGroupGuard(Group group)
    : previous_(c10d::currentProcessGroup()), carried_(kSlot, std::make_shared<CarriedGroup>(group)) {
  c10d::setProcessGroup(std::move(group));
}

ProcessGroupGuard::~ProcessGroupGuard() {
  c10d::setProcessGroup(std::move(previous_));
}

}  // namespace serried
