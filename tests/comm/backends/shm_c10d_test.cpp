// What PyTorch's own tests ask of a backend by c10d's calls: options, errors at the call, timeouts, texts, events of
// the profiler.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/record_function.h>

#include <chrono>
#include <functional>
#include <thread>

#include "serried/base/interrupt.h"
#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using testing::error_text_of_any_rank;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Tensors = std::vector<at::Tensor>;

const RunRanksOptions kByC10d{.backend = "shm", .timeout = 20s};

c10d::Backend& backend_of(const Group& group) {
  return *group->getBackend(at::kCPU);
}

template <class Options>
Options rooted(int root, int tensor) {
  Options options;
  options.rootRank = root;
  options.rootTensor = tensor;
  return options;
}

TEST(ShmByC10d, OptionsAreOneObjectThatFollowsTheTimeout) {
  run_ranks(
      1,
      [](const Group& g) {
        const auto options = backend_of(g).getBackendOptions();
        EXPECT_EQ(options->timeout, 20s);
        options->global_ranks_in_group = {0};
        backend_of(g).setTimeout(7s);
        EXPECT_EQ(backend_of(g).getBackendOptions(), options);
        EXPECT_EQ(options->timeout, 7s);
        EXPECT_THAT(options->global_ranks_in_group, ElementsAre(0));
      },
      kByC10d);
}

TEST(ShmByC10d, ATimeoutOfZeroIsNotTheGroups) {
  run_ranks(
      2,
      [](const Group& g) {
        if (g->getRank() != 0) {
          while (backend_of(g).getError() == c10d::ErrorType::SUCCESS) std::this_thread::yield();
          return;
        }
        c10d::BarrierOptions options;
        options.timeout = 0ms;
        const auto begin = std::chrono::steady_clock::now();
        EXPECT_THAT(error_text_of_any_rank<c10::DistBackendError>([&] { backend_of(g).barrier(options)->wait(); }),
                    AllOf(StartsWith("[barrier] timed out after "), HasSubstr("rank 1 ")));
        EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
      },
      kByC10d);
}

TEST(ShmByC10d, ARootTensorThatIsNotThereIsRefused) {
  run_ranks(
      2,
      [](const Group& g) {
        Tensors x{at::ones({3})};
        EXPECT_EQ(error_text_of_any_rank<c10::ValueError>(
                      [&] { backend_of(g).broadcast(x, rooted<c10d::BroadcastOptions>(0, 1)); }),
                  "[broadcast] the root tensor is 1, and every rank has one\n  fix: pass rootTensor 0");
        EXPECT_THAT(error_text_of_any_rank<c10::ValueError>(
                        [&] { backend_of(g).reduce(x, rooted<c10d::ReduceOptions>(1, -1)); }),
                    StartsWith("[reduce] the root tensor is -1"));
        all_reduce_(x[0], g);
        EXPECT_EQ(x[0].sum().item<float>(), 6);
      },
      kByC10d);
}

TEST(ShmByC10d, SeveralTensorsPerRankAreRefused) {
  run_ranks(
      2,
      [](const Group& g) {
        Tensors two{at::ones({3}), at::ones({3})};
        Tensors none;
        EXPECT_EQ(error_text_of_any_rank<c10::ValueError>([&] { backend_of(g).allreduce(two, {}); }),
                  "[all_reduce] got 2 tensors, and every rank passes one: there is one device, the CPU\n  fix: make a "
                  "call for each, or a coalesced one");
        EXPECT_EQ(
            error_text_of_any_rank<c10::ValueError>([&] { backend_of(g).allreduce(none, {}); }),
            "[all_reduce] got 0 tensors, and every rank passes one: there is one device, the CPU\n  fix: pass one "
            "tensor");
        EXPECT_THAT(error_text_of_any_rank<c10::ValueError>([&] { backend_of(g).send(two, 1 - g->getRank(), 0); }),
                    StartsWith("[send] got 2 tensors"));
        EXPECT_EQ(error_text_of_any_rank<c10::ValueError>([&] { backend_of(g).allreduce_coalesced(none, {}); }),
                  "[all_reduce_coalesced] got no tensors\n  fix: pass one or more");
      },
      kByC10d);
}

// The group goes on: nobody was told anything.
TEST(ShmByC10d, ThePieceOfARankForItselfIsCheckedAtTheCall) {
  run_ranks(
      2,
      [](const Group& g) {
        const int rank = g->getRank();
        const at::Tensor three = at::ones({3});
        const at::Tensor four = at::ones({4});
        // What this rank has for itself is 3 long, and its place 4; the other rank's fits.
        std::vector<Tensors> outputs{{three, three}};
        outputs[0][size_t(rank)] = four;
        Tensors input{three};
        const char* text =
            "this rank's own piece is f32[3], and its place f32[4]\n  fix: let the sizes of what a rank gives itself "
            "agree";
        const auto refuses = [&](const char* where, const std::function<void()>& call) {
          EXPECT_EQ(error_text_of_any_rank<c10::ValueError>(call), std::string("[") + where + "] " + text);
        };
        refuses("all_gather", [&] { backend_of(g).allgather(outputs, input, {}); });
        std::vector<Tensors> coalesced{{outputs[0][0]}, {outputs[0][1]}};
        refuses("all_gather_coalesced", [&] { backend_of(g).allgather_coalesced(coalesced, input, {}); });
        c10d::GatherOptions gather_options;
        gather_options.rootRank = rank;
        refuses("gather", [&] { backend_of(g).gather(outputs, input, gather_options); });
        refuses("all_to_all", [&] {
          Tensors inputs{three, three};
          backend_of(g).alltoall(outputs[0], inputs, {});
        });
        c10d::ScatterOptions scatter_options;
        scatter_options.rootRank = rank;
        refuses("scatter", [&] {
          Tensors output{four};
          std::vector<Tensors> inputs{{three, three}};
          backend_of(g).scatter(output, inputs, scatter_options);
        });
        at::Tensor x = at::ones({3});
        all_reduce_(x, g);
        EXPECT_EQ(x.sum().item<float>(), 6);
      },
      kByC10d);
}

/// What `monitoredBarrier` of each rank says; ranks of `absent` do not come.
std::vector<std::string> barrier_texts(int num_ranks, const std::vector<int>& absent, bool all) {
  std::vector<std::string> texts(static_cast<size_t>(num_ranks), "absent");
  run_ranks(
      num_ranks,
      [&](const Group& g) {
        const int rank = g->getRank();
        if (std::find(absent.begin(), absent.end(), rank) != absent.end()) {
          // Still a member: it waits for the others to give up.
          while (backend_of(g).getError() == c10d::ErrorType::SUCCESS) std::this_thread::yield();
          return;
        }
        c10d::BarrierOptions options;
        options.timeout = 100ms;
        texts[size_t(rank)] =
            error_text_of_any_rank<c10::DistBackendError>([&] { backend_of(g).monitoredBarrier(options, all); });
      },
      kByC10d);
  return texts;
}

TEST(ShmMonitoredBarrier, NamesTheFirstWhoDoesNotCome) {
  const auto texts = barrier_texts(4, {1, 3}, false);
  EXPECT_THAT(texts[0],
              AllOf(StartsWith("[monitored_barrier] Rank 0 timed out in monitoredBarrier after 100 ms: Rank 1 "
                               "failed to pass monitoredBarrier in 100 ms; "),
                    HasSubstr("\n  fix: find out what the missing ranks are doing")));
  EXPECT_THAT(texts[2],
              StartsWith("[monitored_barrier] Rank 2 successfully reached monitoredBarrier, but received errors "
                         "while waiting for send/recv from rank 0: Rank 1 failed to pass monitoredBarrier in 100 "
                         "ms; "));
}

TEST(ShmMonitoredBarrier, NamesAllWhereAllAreAskedFor) {
  const auto texts = barrier_texts(3, {1, 2}, true);
  EXPECT_THAT(texts[0], HasSubstr("Ranks 1, 2 failed to pass monitoredBarrier in 100 ms"));
  EXPECT_EQ(texts[1], "absent");
}

TEST(ShmMonitoredBarrier, PassesWhereAllCome) {
  EXPECT_THAT(barrier_texts(3, {}, true), ElementsAre("no error", "no error", "no error"));
}

struct ProfiledEvent {
  std::string title;
  std::vector<std::vector<int64_t>> shapes;
  bool is_async;
};

/// Collects what a profiler of this thread would see.
class ProfiledEvents {
 public:
  ProfiledEvents() {
    current = this;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(note).needsInputs(true).scopes({at::RecordScope::USER_SCOPE}));
  }
  ~ProfiledEvents() {
    at::removeCallback(handle_);
    current = nullptr;
  }

  std::vector<std::string> titles() const {
    std::vector<std::string> result;
    for (const ProfiledEvent& each : seen_) result.push_back(each.title);
    return result;
  }
  const std::vector<ProfiledEvent>& seen() const { return seen_; }

 private:
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    ProfiledEvent event{function.name(), {}, function.isAsync()};
    for (const c10::IValue& input : function.inputs()) event.shapes.push_back(input.toTensor().sizes().vec());
    current->seen_.push_back(event);
    return nullptr;
  }

  static thread_local ProfiledEvents* current;
  at::CallbackHandle handle_;
  std::vector<ProfiledEvent> seen_;
};
thread_local ProfiledEvents* ProfiledEvents::current = nullptr;

TEST(ShmProfiler, SeesCallsOfC10dWithTheirInputs) {
  run_ranks(
      2,
      [](const Group& g) {
        Tensors x{at::ones({3, 2})};
        std::vector<Tensors> outputs{{at::ones({3, 2}), at::ones({3, 2})}};
        const ProfiledEvents events;
        backend_of(g).allreduce(x, {})->wait();
        backend_of(g).allgather(outputs, x, {})->wait();
        backend_of(g).barrier({})->wait();
        if (g->getRank() == 0) {
          backend_of(g).send(x, 1, 0)->wait();
        } else {
          backend_of(g).recvAnysource(x, 0)->wait();
        }
        EXPECT_THAT(events.titles(), ElementsAre("shm:all_reduce", "shm:all_gather", "shm:barrier",
                                                 g->getRank() == 0 ? "shm:send" : "shm:recvAnySource"));
        EXPECT_THAT(events.seen()[0].shapes, ElementsAre(std::vector<int64_t>{3, 2}));
        EXPECT_TRUE(events.seen()[0].is_async);
        EXPECT_TRUE(events.seen()[2].shapes.empty());
      },
      kByC10d);
}

TEST(ShmProfiler, SeesCallsOfOurOwn) {
  run_ranks(
      2,
      [](const Group& g) {
        at::Tensor x = at::ones({5});
        const ProfiledEvents events;
        all_reduce_(x, g);
        async::all_reduce(x, g).wait();
        EXPECT_THAT(events.titles(), ElementsAre("shm:all_reduce", "shm:all_reduce"));
        EXPECT_THAT(events.seen()[0].shapes, ElementsAre(std::vector<int64_t>{5}));
      },
      kByC10d);
}

struct Pressed {};
thread_local bool pressed = false;

/// Ctrl-C, for threads that have `pressed` set.
class InterruptCheck {
 public:
  InterruptCheck() {
    interrupt::set_check([] {
      if (pressed) throw Pressed();
    });
  }
  ~InterruptCheck() { interrupt::set_check(nullptr); }
};

/// Rank 0 is interrupted in `wait`; what the group is then, as rank 1 sees it.
std::string text_after_interrupt(const std::function<void(const Group&)>& wait) {
  const InterruptCheck check;
  std::string text;
  run_ranks(
      2,
      [&](const Group& g) {
        if (g->getRank() == 0) {
          pressed = true;
          EXPECT_THROW(wait(g), Pressed);
          pressed = false;
          return;
        }
        while (backend_of(g).getError() == c10d::ErrorType::SUCCESS) std::this_thread::yield();
        Tensors x{at::ones({3})};
        text = error_text_of_any_rank<c10::DistBackendError>([&] { backend_of(g).allreduce(x, {})->wait(); });
      },
      kByC10d);
  return text;
}

TEST(ShmInterrupt, EndsACollectiveAndTellsTheOthers) {
  const std::string text = text_after_interrupt([](const Group& g) { barrier(g); });
  EXPECT_THAT(text, HasSubstr("the group is unusable since: rank 0 was interrupted"));
}

TEST(ShmInterrupt, EndsAWaitForWhatAnotherThreadRuns) {
  const std::string text = text_after_interrupt([](const Group& g) {
    Tensors x{at::ones({100'000})};
    const auto work = backend_of(g).allreduce(x, {});
    work->wait();
  });
  EXPECT_THAT(text, HasSubstr("rank 0 was interrupted"));
}

TEST(ShmInterrupt, EndsAReceive) {
  const std::string text = text_after_interrupt([](const Group& g) {
    Tensors x{at::ones({3})};
    backend_of(g).recv(x, 1, 0)->wait();
  });
  EXPECT_THAT(text, HasSubstr("rank 0 was interrupted"));
}

}  // namespace
}  // namespace serried
