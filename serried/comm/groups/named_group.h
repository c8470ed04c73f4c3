// Backends by name, and groups under their registered names: c10d's registry, plus what it takes to split a group
// again.
#pragma once

#include "serried/base/fork.h"
#include "serried/comm/groups/group.h"

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace serried::detail {

/// How a group was made.
struct GroupRecord {
  std::string backend;
  BackendOptions options;
  std::chrono::milliseconds timeout{};
  at::Device device = at::kCPU;
  HomeProcess home = {};
};

/// Takes `base` as a name in this process, or "<base>@<rank>" where ranks are threads (`share_process`) or the name is
/// taken.
std::string reserve_name(const std::string& base, int rank, bool share_process);

/// Enters a group under its reserved name, so that c10d::resolve_process_group finds it.
void enter_group(const std::string& name, const Group& group, const GroupRecord& record);

/// Removes a name. Our own groups call it when they go; entries of other groups are swept with the next `reserve_name`.
void forget_group(const std::string& name) noexcept;

/// How `group` was made; nullopt if not by new_group or split_group.
std::optional<GroupRecord> find_record(const c10d::ProcessGroup& group);

/// A ProcessGroup that leaves the registry when its last owner goes, and splits by making a new group of its backend.
class NamedGroup final : public c10d::ProcessGroup {
 public:
  NamedGroup(const FactoryArgs& args, std::string backend_name);
  ~NamedGroup() override;

  const std::string getBackendName() const override { return backend_name_; }
  void setGroupName(const std::string& name) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  /// c10d asks only backends whose type it knows; ours count too.
  void setSequenceNumberForGroup() override { getDefaultBackend()->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return getDefaultBackend()->getSequenceNumberForGroup(); }
  void release_resources() override;

  /// Runs `action` when the last owner goes, in the process that has made the group.
  void at_end(std::function<void()> action);

  Group splitGroup(const std::vector<int>& ranks, const std::optional<std::chrono::milliseconds>& timeout,
                   const std::optional<c10::intrusive_ptr<c10d::Backend::Options>>& options,
                   const std::optional<std::string>& name, const std::optional<std::string>& desc,
                   const std::optional<std::vector<c10::Device>>& devices) override;

 private:
  const HomeProcess home_;
  void run_actions() noexcept;

  const std::string backend_name_;
  std::string name_;
  std::mutex mutex_;
  std::vector<std::function<void()>> actions_;  // under the mutex
};

/// The factory of `name`, built in or added by users; ValueError that lists the known names. `where` is the call that
/// asked.
BackendFactory find_backend(std::string_view where, const std::string& name);

/// Runs the backend's factory and registers what it made under args.name. `args.name` must be reserved.
Group create_group(std::string_view where, const std::string& backend, const FactoryArgs& args);

/// Whether the ranks that meet on `store` can only be threads of this process.
bool is_process_local(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace serried::detail
