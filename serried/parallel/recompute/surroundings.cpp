// Reads and writes the thread's switches.
#include "serried/parallel/recompute/surroundings.h"

#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>

#include "serried/mesh/current_mesh.h"

namespace serried::detail {

Surroundings::Surroundings()
    : caches_casts(at::autocast::is_autocast_cache_enabled()),
      implicit_replication(ImplicitReplication::is_enabled()),
      hidden_communication(ExplicitRedistribution::current()),
      class_gathers_forbidden(detail::class_gathers_forbidden()),
      mesh(current_mesh()),
      group(current_process_group()),
      sequence_scope(detail::sequence_scope()) {
  for (size_t i = 0; i < autocast.size(); ++i) {
    autocast[i] = {at::autocast::is_autocast_enabled(kAutocastDevices[i]),
                   at::autocast::get_autocast_dtype(kAutocastDevices[i])};
  }
}

SurroundingsGuard::SurroundingsGuard(const Surroundings& surroundings)
    : recorded_gradients_(c10::GradMode::is_enabled()),
      implicit_replication_(surroundings.implicit_replication),
      hidden_communication_(surroundings.hidden_communication),
      group_(surroundings.group) {
  put(surroundings);
  at::autocast::set_autocast_cache_enabled(false);
  c10::GradMode::set_enabled(true);
}

SurroundingsGuard::~SurroundingsGuard() {
  put(before_);
  at::autocast::set_autocast_cache_enabled(before_.caches_casts);
  c10::GradMode::set_enabled(recorded_gradients_);
}

void SurroundingsGuard::put(const Surroundings& surroundings) {
  for (size_t i = 0; i < surroundings.autocast.size(); ++i) {
    at::autocast::set_autocast_enabled(Surroundings::kAutocastDevices[i], surroundings.autocast[i].is_enabled);
    at::autocast::set_autocast_dtype(Surroundings::kAutocastDevices[i], surroundings.autocast[i].dtype);
  }
  class_gathers_forbidden() = surroundings.class_gathers_forbidden;
  exchange_current_mesh(surroundings.mesh);
  exchange_sequence_scope(surroundings.sequence_scope);
}

}  // namespace serried::detail
