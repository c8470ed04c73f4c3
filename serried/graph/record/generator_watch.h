// Notices that a function seeds a generator or draws from one without an op, which a replay would not do again.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

namespace serried::graph {

/// Where a CPU generator stands in its sequence.
struct GeneratorPlace {
  uint64_t seed = 0;
  int left = 0;
  uint32_t next = 0;
  uint32_t word = 0;  // the first of the state, another one every 624 draws
  std::optional<float> kept_float;
  std::optional<double> kept_double;

  bool is_seeded() const { return left == 1 && next == 0; }  // and nothing drawn since
  bool operator==(const GeneratorPlace&) const = default;
};

/// One recording's view of the generators it meets. Of torch's default generator only seeding is noticed, because other
/// threads may draw from it too; with ranks as threads, which share it, nothing is.
class GeneratorWatch {
 public:
  GeneratorWatch();
  /// What happened to `generator` since the last `note`, or since the call began: "" for nothing.
  std::string change_of(const at::Generator& generator) const;
  /// As `change_of`, for the first of all generators with one.
  std::string any_change() const;
  /// An op has drawn from it.
  void note(const at::Generator& generator);

 private:
  struct Known {
    at::Generator generator;
    GeneratorPlace place;
  };
  std::unordered_map<const c10::GeneratorImpl*, Known> known_;
};

}  // namespace serried::graph
