// How to be recordable: what a layer calls so that a replay of its ops can stand for the layer itself.
//
// capture() writes down every op on plain tensors that its thread runs, those of backward and those on the parts of
// DTensors included. A replay runs these ops again and nothing else: no code of a layer. Whatever a layer does by ops
// alone is recordable as it is. For the rest it says here what no op shows:
//
//   It runs an op on plain tensors, below autograd.                run(op, stack)
//   It moves numbers without an op: memcpy, a kernel of its own.   Make that an op, and run() it while is_recording().
//   It branches on a fact: a mode, a count, an option.             rely_on(fact): replays happen while it stays so.
//   It asks an object that may be gone later: a mesh.              rely_on_life(name, object)
//   It keeps state on the host: a count, a learning rate.          before_replay(action), after_replay(action)
//   Its ranks must begin to replay in the same call.               replay_together(group)
//   It works for itself: checks, what happens only once.           const Pause only_checks;
//   It sleeps until a collective is done.                          Nothing: Work::wait() is recorded where it happens.
//   It puts a hook on a gradient.                                  serried/tape/library_hook.h
//
// All of it does nothing while nobody records. Facts and actions live as long as the graph, and so maybe longer than
// who told them: they hold objects weakly, and answer also when these are gone.
//
//     if (tape::is_recording()) {   // spares making the fact
//       tape::rely_on({.name = "phase of my_hook", .value = [state] { return phase_of(state); }, .subject = this});
//       tape::after_replay([state] { ++state->num_steps; });
//     }
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace serried::tape {

class Recorder;

namespace detail {
extern constinit thread_local Recorder* current;  // constinit: read without a check for its initialisation
}

/// Whether somebody writes down what this thread does. Nearly always false: a test of one word.
inline bool is_recording() {
  return detail::current != nullptr;
}

/// How many recordings this thread has begun: what was made in an earlier one is unknown to this one.
uint64_t num_recordings();

/// Runs `op` on plain tensors, below autograd and below the home key. Every op on the part of a DTensor goes through
/// here.
void run(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// What decides which ops run and is none itself, as a number that changes with it.
struct Fact {
  std::string name;
  std::function<uint64_t()> value;
  const void* subject = nullptr;                  // same name and subject: the same fact, whoever tells it
  std::string (*text)(uint64_t value) = nullptr;  // for readers; the number itself if null
};

/// The running function depends on `fact`.
void rely_on(Fact fact);

/// It was told something that holds as long as `object` is there.
void rely_on_life(const std::string& name, std::weak_ptr<const void> object);

/// Host work that belongs to the running function: done again around each replay, in the order told.
void before_replay(std::function<void()> action);
void after_replay(std::function<void()> action);

/// The ranks of the group `name` run the same function, and a rank that replays does not meet one that records: all of
/// them begin to replay in the same call, with those that share other groups with them.
void replay_together(const std::string& name);

/// A DTensor among the arguments of an op, before the op runs on its part.
void meet(c10::TensorImpl* dtensor);

/// While alive this thread is not recorded: what it does is no part of the function.
class Pause {
 public:
  Pause();
  ~Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;

 private:
  Recorder* paused_;
};

}  // namespace serried::tape
