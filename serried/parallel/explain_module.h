// How a parallelised net lies on its ranks, and what its modules communicate: one table.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "serried/tensor/debug/comm_debug.h"

namespace serried {

/// What explain() finds out about a net; a value. Numbers are those of this rank.
struct ModuleExplanation {
  struct Parameter {
    std::string name;     // "weight"
    std::string lies_as;  // "f32[64,16] S0 on mesh tp=2"; "f32[64,16]" where it is plain
    int64_t bytes = 0;    // that this rank holds
    std::string block;    // of fully_shard: "2 (3.0 KiB)", its number and what it takes while it is whole; or ""
  };
  struct Module {
    std::string name;  // as CommDebugMode::ModuleCalls::name() says: "blocks.0.up", "after blocks.0.up"
    std::string asks =
        {};  // of what comes in and what goes out, by its style: "R -> S2"; "any" where it takes what comes
    std::vector<Parameter> parameters = {};
    std::map<std::string, CommDebugMode::Tally> forward = {};
    std::map<std::string, CommDebugMode::Tally> backward = {};
  };

  std::string type;             // of the net
  int64_t bytes = 0;            // of parameters on this rank
  int64_t global_bytes = 0;     // of parameters altogether
  bool has_run = false;         // with a step: `forward` and `backward` are known
  std::vector<Module> modules;  // depth first; only those that have parameters or communicate

  /// What modules communicated, each collective by its name.
  std::map<std::string, CommDebugMode::Tally> forward() const;
  std::map<std::string, CommDebugMode::Tally> backward() const;
  /// As a table.
  std::string text() const;
};

/// How parameters lie, what styles ask for, and which block of fully_shard a parameter is in. Runs nothing,
/// communicates nothing.
///     std::cout << explain(*net).text();
ModuleExplanation explain(const torch::nn::Module& net);

/// The same, and what each module communicates while `step` runs, forward and backward apart. All ranks call it.
///     std::cout << explain(*net, [&] { loss(net(x)).backward(); }).text();
ModuleExplanation explain(const torch::nn::Module& net, const std::function<void()>& step);

}  // namespace serried
