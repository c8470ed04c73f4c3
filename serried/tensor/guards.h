// Scopes that change how DTensors behave on this thread; each restores what was before.
#pragma once

#include <cstdint>

namespace serried {

/// While alive a plain tensor beside a DTensor counts as replicated. Nests.
class ImplicitReplication {
 public:
  explicit ImplicitReplication(bool enabled = true);
  ~ImplicitReplication();
  ImplicitReplication(const ImplicitReplication&) = delete;
  ImplicitReplication& operator=(const ImplicitReplication&) = delete;
  static bool is_enabled();

 private:
  bool previous_;
};

/// What happens when an op would redistribute an input by itself.
enum class HiddenCommunication : uint8_t { allow, log, warn, forbid };

struct ExplicitRedistributionOptions {
  HiddenCommunication mode = HiddenCommunication::forbid;
  bool strict = false;  // also where no bytes move (a local cut)
};

/// While alive hidden redistributions are errors, warnings or log lines. Nests.
class ExplicitRedistribution {
 public:
  explicit ExplicitRedistribution(ExplicitRedistributionOptions options = {});
  ~ExplicitRedistribution();
  ExplicitRedistribution(const ExplicitRedistribution&) = delete;
  ExplicitRedistribution& operator=(const ExplicitRedistribution&) = delete;
  static ExplicitRedistributionOptions current();

 private:
  ExplicitRedistributionOptions previous_;
};

namespace detail {

/// This thread's switch behind LossParallel: whether an op may gather the classes it works along.
bool& class_gathers_forbidden();

}  // namespace detail

}  // namespace serried
