// The thread's switches behind the guards.
#include "serried/tensor/guards.h"

#include <utility>

namespace serried {
namespace {

thread_local bool implicit_replication = false;
thread_local bool no_class_gathers = false;
thread_local ExplicitRedistributionOptions hidden_communication = {.mode = HiddenCommunication::allow};

}  // namespace

ImplicitReplication::ImplicitReplication(bool enabled) : previous_(std::exchange(implicit_replication, enabled)) {}

ImplicitReplication::~ImplicitReplication() {
  implicit_replication = previous_;
}

bool ImplicitReplication::is_enabled() {
  return implicit_replication;
}

ExplicitRedistribution::ExplicitRedistribution(ExplicitRedistributionOptions options)
    : previous_(std::exchange(hidden_communication, options)) {}

ExplicitRedistribution::~ExplicitRedistribution() {
  hidden_communication = previous_;
}

ExplicitRedistributionOptions ExplicitRedistribution::current() {
  return hidden_communication;
}

bool& detail::class_gathers_forbidden() {
  return no_class_gathers;
}

}  // namespace serried
