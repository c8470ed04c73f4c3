// Sees the communication of a scope: counts and bytes by collective and region, redistributions, replicate defaults.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "serried/mesh/layout.h"

namespace torch::nn {
class Module;
}

namespace serried {

struct CommDebugOptions {
  bool ops = false;  // also count every op, which costs about a microsecond each
};

/// Watches this thread's communication while alive, backward included. Nests: each scope sees everything inside it.
///     CommDebugMode comm;
///     model->forward(x).sum().backward();
///     comm.count("all_reduce");  comm.bytes();  std::cout << comm.report();
class CommDebugMode {
 public:
  explicit CommDebugMode(CommDebugOptions options = {});
  /// The same, and follows the modules of `net`, which outlives it: by_module(). Costs about 0.3 us per op.
  ///     CommDebugMode comm(*net);
  explicit CommDebugMode(const torch::nn::Module& net, CommDebugOptions options = {});
  ~CommDebugMode();
  CommDebugMode(const CommDebugMode&) = delete;
  CommDebugMode& operator=(const CommDebugMode&) = delete;

  /// Calls of this rank. ValueError for a name that is no collective's; names: all_reduce all_gather reduce_scatter
  /// all_to_all broadcast reduce gather scatter send recv barrier.
  int64_t count(std::string_view name) const;
  int64_t count() const;
  /// Only those that were called.
  std::map<std::string, int64_t> counts() const;
  /// Of this rank's inputs.
  int64_t bytes(std::string_view name) const;
  int64_t bytes() const;

  struct Tally {
    int64_t count = 0;
    int64_t bytes = 0;
    bool operator==(const Tally&) const = default;
  };
  /// What one region did in one direction.
  struct Region {
    std::string path;  // "" outside of any Scope
    bool backward = false;
    std::map<std::string, Tally> calls;
  };
  /// In order of first appearance.
  const std::vector<Region>& regions() const;

  /// What one module of the net communicated: for ops that take its parameters, for their backward, for gradients.
  struct ModuleCalls {
    std::string path = {};    // "" is the net itself, and what several modules share: their innermost module
    bool is_after = false;    // for ops without parameters, between this module's and the next one's
    bool is_unknown = false;  // for none of its modules: before the first, after backward, in a replay
    std::map<std::string, Tally> forward = {};
    std::map<std::string, Tally> backward = {};

    /// "(net)", "blocks.0.up", "after blocks.0.up", "(no module)"
    std::string name() const;
  };
  /// Those that communicated, depth first. A parameter that modules share belongs to the first of them. ValueError for
  /// a mode that was made without a net.
  std::vector<ModuleCalls> by_module() const;

  struct Redistribution {
    std::string op;      // that needed it; "redistribute" where it was asked for
    std::string tensor;  // "f32[8,4]"
    Placements from, to;
    int64_t bytes = 0;  // that this rank sends
    bool implicit = false;
    bool backward = false;
    std::string path;
    std::string module;  // as ModuleCalls::name() says; "" without a net
  };
  const std::vector<Redistribution>& redistributions() const;

  /// Calls that took the replicate default for want of a rule, by op.
  const std::map<std::string, int64_t>& defaults() const;

  struct OpCount {
    int64_t distributed = 0;  // with a DTensor among the arguments
    int64_t plain = 0;        // those on local parts among them
  };
  /// Empty without {.ops = true}.
  const std::map<std::string, OpCount>& ops() const;

  /// All of it for people; as JSON for programs.
  std::string report() const;
  std::string json() const;

  struct State;  // of comm_debug.cpp

  /// Names what happens while alive: collectives there, and those of the backward of ops called there. Nests with
  /// dots. Costs next to nothing without a mode.
  ///     CommDebugMode::Scope scope("layers.0");
  class Scope {
   public:
    explicit Scope(std::string name);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    uint64_t first_node_;
  };

 private:
  std::unique_ptr<State> state_;
};

/// Runs `fn` and lists the ops in it that took the replicate default, sorted; all ranks of the mesh call it.
///     ops_without_rule([&] { model->forward(x).sum().backward(); })  ->  {"aten::histc"}
std::vector<std::string> ops_without_rule(const std::function<void()>& fn);

}  // namespace serried
