// Being told when the running backward ends, whether it succeeds or throws.
#pragma once

#include <torch/csrc/autograd/engine.h>

#include <functional>
#include <memory>
#include <utility>

namespace serried::detail {

/// Called inside a backward: calls `then` once, with true when it is through, with false when it has been given up
/// because of an exception. The engine runs its callbacks in the first case only, but it drops them in both.
inline void when_backward_ends(std::function<void(bool completed)> then) {
  struct Ending {
    explicit Ending(std::function<void(bool)> fn) : then(std::move(fn)) {}
    Ending(const Ending&) = delete;
    ~Ending() {
      try {
        call(false);
      } catch (...) {  // NOLINT: the exception that ended backward is the one to be seen
      }
    }
    void call(bool completed) {
      if (then) std::exchange(then, nullptr)(completed);
    }
    std::function<void(bool)> then;
  };
  auto ending = std::make_shared<Ending>(std::move(then));
  torch::autograd::Engine::get_default_engine().queue_callback([ending] { ending->call(true); });
}

}  // namespace serried::detail
