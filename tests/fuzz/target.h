// What a fuzz target is: a function of any bytes, and what it may throw.
#pragma once

#include <functional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace serried::fuzz {

/// A property that does not hold. Nothing catches it, so that libFuzzer keeps the input.
class Broken : public std::logic_error {
  using std::logic_error::logic_error;
};

/// Throws Broken with `what` unless `holds`.
inline void require(bool holds, const std::string& what) {
  if (!holds) throw Broken(what);
}

/// Runs `call`, which may throw `Allowed` and nothing else; whether it came to its end.
template <class Allowed, class Call>
bool succeeds(Call&& call) {
  try {
    std::forward<Call>(call)();
    return true;
  } catch (const Allowed&) {
    return false;
  }
}

/// Returns for every input, unless there is a bug.
struct Target {
  const char* name;
  void (*run)(std::string_view bytes);
};

void run_checkpoint_index(std::string_view bytes);
void run_environment(std::string_view bytes);
void run_graph_file(std::string_view bytes);
void run_graph_text(std::string_view bytes);
void run_machine(std::string_view bytes);
void run_page(std::string_view bytes);
void run_pipeline_table(std::string_view bytes);
void run_placements(std::string_view bytes);
void run_rule(std::string_view bytes);
void run_safetensors(std::string_view bytes);
void run_store(std::string_view bytes);
void run_trace_file(std::string_view bytes);
void run_url(std::string_view bytes);
void run_wire(std::string_view bytes);

/// All of them, by name; each has a folder of that name in corpus/.
inline constexpr Target kTargets[] = {
    {"checkpoint_index", run_checkpoint_index},
    {"environment", run_environment},
    {"graph_file", run_graph_file},
    {"graph_text", run_graph_text},
    {"machine", run_machine},
    {"page", run_page},
    {"pipeline_table", run_pipeline_table},
    {"placements", run_placements},
    {"rule", run_rule},
    {"safetensors", run_safetensors},
    {"store", run_store},
    {"trace_file", run_trace_file},
    {"url", run_url},
    {"wire", run_wire},
};

/// Null if there is none.
inline const Target* find_target(std::string_view name) {
  for (const Target& target : kTargets) {
    if (name == target.name) return &target;
  }
  return nullptr;
}

}  // namespace serried::fuzz
