// The modes and scopes of a thread that decide what a forward does, taken along to its second run.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <array>
#include <optional>

#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/attention/sequence_scope.h"
#include "serried/tensor/guards.h"

namespace serried::detail {

/// How they are when it is made.
struct Surroundings {
  struct Autocast {
    bool is_enabled;
    at::ScalarType dtype;
  };
  static constexpr std::array kAutocastDevices = {c10::DeviceType::CPU, c10::DeviceType::CUDA};

  Surroundings();

  std::array<Autocast, kAutocastDevices.size()> autocast;
  bool caches_casts;
  bool implicit_replication;
  ExplicitRedistributionOptions hidden_communication;
  bool class_gathers_forbidden;
  std::optional<DeviceMesh> mesh;
  Group group;
  SequenceScopePtr sequence_scope;
};

/// While alive the thread is in them, and records gradients. Casts are not cached: they would be found by a later
/// forward, when the parameters may be others.
class SurroundingsGuard {
 public:
  explicit SurroundingsGuard(const Surroundings& surroundings);
  ~SurroundingsGuard();
  SurroundingsGuard(const SurroundingsGuard&) = delete;
  SurroundingsGuard& operator=(const SurroundingsGuard&) = delete;

 private:
  void put(const Surroundings& surroundings);

  const Surroundings before_;
  const bool recorded_gradients_;
  ImplicitReplication implicit_replication_;
  ExplicitRedistribution hidden_communication_;
  ProcessGroupGuard group_;
};

}  // namespace serried::detail
