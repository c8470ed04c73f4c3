// The table of living groups, and the ProcessGroup that takes itself out of it.
#include "serried/comm/groups/named_group.h"

#include <map>
#include <mutex>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::detail {
namespace {

struct Entry {
  std::optional<c10::weak_intrusive_ptr<c10d::ProcessGroup>> group;  // none: reserved, being made
  GroupRecord record;
};

struct GroupTable {
  std::mutex mutex;
  std::map<std::string, Entry> entries;
};

GroupTable& table() {
  static auto* all = new GroupTable();  // never destroyed: groups may live in static variables
  return *all;
}

// Groups of users' own classes do not report their end. Called with the lock held.
void sweep(std::map<std::string, Entry>& entries) {
  for (auto entry = entries.begin(); entry != entries.end();) {
    if (!entry->second.group || !entry->second.group->expired()) {
      ++entry;
      continue;
    }
    c10d::unregister_process_group(entry->first);
    entry = entries.erase(entry);
  }
}

}  // namespace

std::string reserve_name(const std::string& base, int rank, bool share_process) {
  std::lock_guard<std::mutex> lock(table().mutex);
  sweep(table().entries);
  if (!share_process && table().entries.try_emplace(base).second) return base;
  std::string name = c10::str(base, "@", rank);
  // Only parents that plain c10d code left without a name can meet here again.
  for (int copy = 2; !table().entries.try_emplace(name).second; ++copy) name = c10::str(base, "@", rank, "+", copy);
  return name;
}

void enter_group(const std::string& name, const Group& group, const GroupRecord& record) {
  c10d::register_process_group(name, group);
  std::lock_guard<std::mutex> lock(table().mutex);
  table().entries[name] = {c10::weak_intrusive_ptr<c10d::ProcessGroup>(group), record};
}

void forget_group(const std::string& name) noexcept {
  try {
    c10d::unregister_process_group(name);
    std::lock_guard<std::mutex> lock(table().mutex);
    table().entries.erase(name);
  } catch (...) {  // a name that stays does no harm: names are never used twice
  }
}

std::optional<GroupRecord> find_record(const c10d::ProcessGroup& group) {
  std::lock_guard<std::mutex> lock(table().mutex);
  const auto found = table().entries.find(group.getGroupName());
  if (found == table().entries.end() || !found->second.group) return std::nullopt;
  if (found->second.group->lock().get() != &group) return std::nullopt;
  return found->second.record;
}

NamedGroup::NamedGroup(const FactoryArgs& args, std::string backend_name)
    : c10d::ProcessGroup(args.store, args.rank, args.world_size), backend_name_(std::move(backend_name)) {}

NamedGroup::~NamedGroup() {
  run_actions();
  if (home_.is_here() && !name_.empty()) forget_group(name_);
}

void NamedGroup::at_end(std::function<void()> action) {
  const std::lock_guard<std::mutex> lock(mutex_);
  actions_.push_back(std::move(action));
}

void NamedGroup::run_actions() noexcept {
  if (!home_.is_here()) return;
  try {
    for (const auto& action : std::exchange(actions_, {})) action();
  } catch (...) {  // what an action would have let go of stays
  }
}

void NamedGroup::setGroupName(const std::string& name) {
  c10d::ProcessGroup::setGroupName(name);
  name_ = name;
}

void NamedGroup::setTimeout(std::chrono::milliseconds timeout) {
  c10d::ProcessGroup::setTimeout(timeout);
  std::lock_guard<std::mutex> lock(table().mutex);
  const auto found = table().entries.find(name_);
  if (found != table().entries.end()) found->second.record.timeout = timeout;
}

// c10 calls this, not the destructor, when the last owner goes while a registry still holds a weak pointer.
void NamedGroup::release_resources() {
  run_actions();
  // The name stays the parent's: a forked child may have got the locks of the registry in any state.
  if (home_.is_here() && !name_.empty()) forget_group(std::exchange(name_, ""));
  c10d::ProcessGroup::release_resources();
}

Group create_group(std::string_view where, const std::string& backend, const FactoryArgs& args) {
  try {
    Group group = find_backend(where, backend)(args);
    if (!group || !group->hasBackends()) {
      raise<c10::ValueError>(
          {where,
           c10::str("the factory of \"", backend, "\" returned ", group ? "a group without a backend" : "no group"),
           "end the factory with return make_group(args, backend)"});
    }
    group->setGroupName(args.name);
    group->setGroupDesc(args.desc);
    enter_group(args.name, group, {backend, args.options, args.timeout, args.device, {}});
    log::line(log::Topic::comm, "made group ", args.name, " (", group->getBackendName(), "), rank ", args.rank, " of ",
              args.world_size);
    return group;
  } catch (const c10::DistError&) {
    // Rank 0's store need not wait at exit for ranks that did not come.
    abandon(args.store);
    forget_group(args.name);
    throw;
  } catch (...) {
    forget_group(args.name);
    throw;
  }
}

bool is_process_local(const c10::intrusive_ptr<c10d::Store>& store) {
  return dynamic_cast<c10d::HashStore*>(innermost_store(store).get()) != nullptr;
}

}  // namespace serried::detail
