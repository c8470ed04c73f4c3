// Making, naming, splitting and registering groups, and the current one.
#include "serried/comm/groups/group.h"

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <random>
#include <set>
#include <thread>

#include "serried/base/error.h"
#include "serried/base/listen.h"
#include "serried/comm/backends/factories.h"
#include "tests/support/each_rank.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using testing::each_rank;
using testing::error_text;
using testing::ScopedEnv;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::string refused_group(const std::string& backend, const GroupOptions& options) {
  return error_text<c10::ValueError>([&] { new_group(backend, options); });
}

// A backend whose groups have met: every rank waits until the others have come, on the group's own keys.
Group make_meeting_group(const FactoryArgs& args) {
  args.store->set(c10::str("here/", args.rank), std::vector<uint8_t>{1});
  for (int rank = 0; rank < args.world_size; ++rank) args.store->wait({c10::str("here/", rank)});
  FactoryArgs rest = args;
  rest.options.clear();
  return make_fake_group(rest);
}

class MeetingBackend {
 public:
  MeetingBackend() { register_backend("meeting", make_meeting_group); }
  ~MeetingBackend() { unregister_backend("meeting"); }
};

bool is_registered(const std::string& name) {
  try {
    c10d::resolve_process_group(name);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

TEST(NewGroup, UnknownBackendListsTheKnownOnesBeforeAnyNetwork) {
  ScopedEnv env{{"RANK", ""}};
  EXPECT_EQ(refused_group("glo", {}),
            "[new_group] unknown backend \"glo\"; known: auto, fake, gloo, hierarchical, mpi, nccl, shm, threads\n"
            "  fix: pass one of the known names, or register_backend first");
}

TEST(NewGroup, ArgumentsAreCheckedBeforeAnyNetwork) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_EQ(refused_group("fake", {.rank = 0, .world_size = 0}),
            "[new_group] world_size is 0\n  fix: pass the number of ranks, 1 or more");
  EXPECT_EQ(refused_group("fake", {.store = store, .rank = 4, .world_size = 4}),
            "[new_group] rank 4 is not in 0..3\n  fix: pass each rank once, counted from 0");
  EXPECT_EQ(refused_group("fake", {.store = store, .rank = 1}),
            "[new_group] an explicit store needs rank and world_size, not rank 1 and world_size -1\n"
            "  fix: pass {.store = store, .rank = 0, .world_size = 2}");
  EXPECT_EQ(refused_group("fake", {.timeout = 0ms, .store = store, .rank = 0, .world_size = 1}),
            "[new_group] the timeout is 0 ms\n  fix: pass a timeout above 0, as in {.timeout = 30s}");
}

TEST(NewGroup, WhatThisMachineLacksIsNotImplemented) {
  EXPECT_EQ(error_text<c10::NotImplementedError>([] { new_group("mpi", {.rank = 0, .world_size = 1}); }),
            c10::str("[new_group] \"mpi\" does not work here: ", why_backend_unavailable("mpi"),
                     "\n  fix: use \"auto\", \"shm\" or \"gloo\""));
#ifndef USE_C10D_NCCL
  EXPECT_EQ(error_text<c10::NotImplementedError>([] { new_group("nccl", {.rank = 0, .world_size = 1}); }),
            "[new_group] \"nccl\" does not work here: this LibTorch was built without NCCL; the CUDA builds have it\n"
            "  fix: use \"auto\", \"shm\" or \"gloo\"");
#endif
}

TEST(NewGroup, DefaultTimeoutComesFromTheEnvironment) {
  ScopedEnv env{{"SERRIED_TIMEOUT", "12"}};
  EXPECT_EQ(default_timeout(), 12s);
  EXPECT_EQ(GroupOptions{}.timeout, 12s);
  ScopedEnv wrong{{"SERRIED_TIMEOUT", "-1"}};
  EXPECT_EQ(error_text<c10::ValueError>([] { default_timeout(); }),
            "[environment] SERRIED_TIMEOUT is -1\n  fix: set it to seconds above 0");
  ScopedEnv endless{{"SERRIED_TIMEOUT", "9223372036854775807"}};
  EXPECT_EQ(error_text<c10::ValueError>([] { default_timeout(); }),
            "[environment] SERRIED_TIMEOUT is 9223372036854775807\n  fix: set it to at most 1000000000 seconds");
}

TEST(NewGroup, StoreTimeoutBecomesTheGroups) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const Group group = new_group("fake", {.timeout = 1234ms, .store = store, .rank = 0, .world_size = 1});
  EXPECT_EQ(store->getTimeout(), 1234ms);
  EXPECT_EQ(group->getStore()->getTimeout(), 1234ms);
}

TEST(NewGroup, TenGroupsShareOneStoreUnderSkew) {
  const MeetingBackend backend;
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  constexpr int kRanks = 3;
  constexpr int kGroups = 10;
  std::vector<std::vector<Group>> groups(kRanks);
  each_rank(kRanks, [&](int rank) {
    std::mt19937 random(unsigned(rank + 1));
    for (int i = 0; i < kGroups; ++i) {
      // Skew is the subject here: late ranks must not read the former group's keys.
      std::this_thread::sleep_for(std::chrono::milliseconds(random() % 20));
      groups[size_t(rank)].push_back(
          new_group("meeting", {.timeout = 20s, .store = store, .rank = rank, .world_size = kRanks}));
    }
  });
  std::set<std::string> names;
  for (int i = 0; i < kGroups; ++i) {
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_TRUE(names.insert(groups[size_t(rank)][size_t(i)]->getGroupName()).second);
      EXPECT_EQ(groups[size_t(rank)][size_t(i)]->getGroupDesc(), groups[0][size_t(i)]->getGroupDesc());
    }
  }
}

TEST(NewGroup, TwoGroupsMeetOverTcp) {
  const MeetingBackend backend;
  const int fd = detail::listen_at("127.0.0.1", 0).fd;
  const std::string url = c10::str("tcp://127.0.0.1:", detail::port_of(fd));
  ::close(fd);
  each_rank(2, [&](int rank) {
    const GroupOptions options{.timeout = 20s, .init_method = url, .rank = rank, .world_size = 2};
    const Group first = new_group("meeting", options);
    const Group second = new_group("meeting", options);
    EXPECT_NE(first->getGroupName(), second->getGroupName());
    EXPECT_EQ(c10d::resolve_process_group(second->getGroupName()), second);
  });
}

TEST(NewGroup, GroupsMeetInAFile) {
  const MeetingBackend backend;
  const std::string path = ::testing::TempDir() + "serried_groups_" + std::to_string(::getpid());
  each_rank(2, [&](int rank) {
    const std::string url = c10::str("file://", path, "?rank=", rank, "&world_size=2");
    for (int i = 0; i < 3; ++i) EXPECT_EQ(new_group("meeting", {.timeout = 20s, .init_method = url})->getRank(), rank);
  });
}

TEST(NewGroup, DifferentBackendsAreNoticed) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const MeetingBackend backend;
  new_group("fake", {.store = store, .rank = 0, .world_size = 2});
  EXPECT_EQ(refused_group("meeting", {.store = store, .rank = 1, .world_size = 2}),
            "[new_group] this rank passes \"meeting\" for group 1, another rank passed \"fake\" for group 1\n"
            "  fix: make the same groups in the same order on every rank");
}

TEST(NewGroup, ARestartedJobDoesNotSeeOldKeys) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const GroupOptions options{.store = store, .rank = 0, .world_size = 1};
  new_group("fake", options);
  new_group("fake", options);
  ScopedEnv env{{"TORCHELASTIC_RESTART_COUNT", "1"}};
  EXPECT_TRUE(new_group("fake", options)->getGroupDesc().ends_with("/1"));
}

TEST(NewGroup, IsResolvableByNameUntilItGoes) {
  Group group = new_group("fake", {.rank = 0, .world_size = 4});
  const std::string name = group->getGroupName();
  EXPECT_EQ(c10d::resolve_process_group(name), group);
  EXPECT_TRUE(name.starts_with("fake/"));
  group.reset();
  EXPECT_FALSE(is_registered(name));
}

TEST(NewGroup, GroupsOfForeignClassesAreSweptToo) {
  register_backend("plain", [](const FactoryArgs& args) -> Group {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(args.store, args.rank, args.world_size);
    const Group fake = make_fake_group({args.store, args.rank, args.world_size, args.timeout, args.device, {}, "", ""});
    group->setBackend(at::kCPU, c10d::ProcessGroup::CUSTOM, fake->getDefaultBackend());
    group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
    return group;
  });
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  Group group = new_group("plain", {.store = store, .rank = 0, .world_size = 1});
  const std::string name = group->getGroupName();
  EXPECT_TRUE(is_registered(name));
  group.reset();
  new_group("plain", {.store = store, .rank = 0, .world_size = 1});
  EXPECT_FALSE(is_registered(name));
  unregister_backend("plain");
}

TEST(NewGroup, AFactoryThatMakesNothingIsToldSo) {
  register_backend("nothing", [](const FactoryArgs&) -> Group { return nullptr; });
  EXPECT_EQ(refused_group("nothing", {.store = c10::make_intrusive<c10d::HashStore>(), .rank = 0, .world_size = 1}),
            "[new_group] the factory of \"nothing\" returned no group\n"
            "  fix: end the factory with return make_group(args, backend)");
  unregister_backend("nothing");
}

TEST(BackendRegistry, NamesAreTakenOnceAndCanBeReleased) {
  register_backend("mine", make_meeting_group);
  EXPECT_TRUE(is_backend_available("mine"));
  EXPECT_EQ(error_text<c10::ValueError>([] { register_backend("mine", make_meeting_group); }),
            "[register_backend] the backend \"mine\" is already registered\n"
            "  fix: choose another name, or unregister_backend first");
  EXPECT_EQ(error_text<c10::ValueError>([] { register_backend("gloo", make_meeting_group); }),
            "[register_backend] the backend \"gloo\" is already registered\n"
            "  fix: choose another name, or unregister_backend first");
  unregister_backend("mine");
  EXPECT_FALSE(is_backend_available("mine"));
  EXPECT_EQ(
      error_text<c10::ValueError>([] { unregister_backend("mine"); }),
      "[unregister_backend] unknown backend \"mine\"; known: auto, fake, gloo, hierarchical, mpi, nccl, shm, threads\n"
      "  fix: pass one of the known names, or register_backend first");
  EXPECT_EQ(error_text<c10::ValueError>([] { unregister_backend("shm"); }),
            "[unregister_backend] \"shm\" is built in\n  fix: unregister only what register_backend added");
}

TEST(BackendRegistry, EmptyNamesAndFactoriesAreRefused) {
  EXPECT_EQ(error_text<c10::ValueError>([] { register_backend("", make_meeting_group); }),
            "[register_backend] the name is empty\n  fix: pass a name and a function that makes a group");
  EXPECT_EQ(error_text<c10::ValueError>([] { register_backend("x", nullptr); }),
            "[register_backend] the factory of \"x\" is empty\n  fix: pass a name and a function that makes a group");
}

TEST(BackendRegistry, ListsAllAndSaysWhatWorks) {
  EXPECT_EQ(registered_backends(),
            (std::vector<std::string>{"auto", "fake", "gloo", "hierarchical", "mpi", "nccl", "shm", "threads"}));
  EXPECT_TRUE(is_backend_available("gloo"));
  EXPECT_FALSE(is_backend_available("mpi"));
  EXPECT_FALSE(is_backend_available("no such backend"));
  EXPECT_EQ(why_backend_unavailable("fake"), "");
  // What is missing depends on the machine; here it is mpirun at least. Each text has a test in tests/process/mpi.
  EXPECT_NE(why_backend_unavailable("mpi"), "");
  EXPECT_THROW(why_backend_unavailable("no such backend"), c10::ValueError);
}

// A parent of `world_size` ranks as threads, and what each rank does with it.
void with_parent(int world_size, const std::function<void(const Group&)>& body) {
  const MeetingBackend backend;
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  each_rank(world_size, [&](int rank) {
    body(new_group("meeting", {.timeout = 20s, .store = store, .rank = rank, .world_size = world_size}));
  });
}

TEST(SplitGroup, PartsKeepTheListedOrder) {
  with_parent(4, [](const Group& parent) {
    const Group part = split_group(parent, {{2, 0}, {3, 1}});
    EXPECT_EQ(part->getSize(), 2);
    EXPECT_EQ(part->getRank(), parent->getRank() >= 2 ? 0 : 1);
    EXPECT_EQ(part->getGroupDesc(), parent->getGroupDesc() + ":split:1");
    EXPECT_EQ(c10d::resolve_process_group(part->getGroupName()), part);
  });
}

TEST(SplitGroup, RanksInNoPartGetNull) {
  with_parent(3, [](const Group& parent) {
    const Group part = split_group(parent, {{0, 2}});
    EXPECT_EQ(part == nullptr, parent->getRank() == 1);
    const Group again = split_group(parent, {{1}, {2, 0}});
    EXPECT_EQ(again->getGroupDesc(), parent->getGroupDesc() + ":split:2");
  });
}

TEST(SplitGroup, PartsCanBeSplitAgain) {
  with_parent(4, [](const Group& parent) {
    const Group half = split_group(parent, {{0, 1}, {2, 3}});
    const Group single = split_group(half, {{0}, {1}});
    EXPECT_EQ(single->getSize(), 1);
    EXPECT_EQ(single->getGroupDesc(), parent->getGroupDesc() + ":split:1:split:1");
    EXPECT_EQ(c10d::resolve_process_group(single->getGroupName()), single);
  });
}

TEST(SplitGroup, KeepsBackendOptionsTimeoutAndDevice) {
  BackendOptions seen;
  std::chrono::milliseconds timeout{};
  register_backend("spy", [&](const FactoryArgs& args) {
    seen = args.options;
    timeout = args.timeout;
    return make_fake_group(
        {args.store, args.rank, args.world_size, args.timeout, args.device, {}, args.name, args.desc});
  });
  const Group parent = new_group("spy", {.timeout = 77s,
                                         .store = c10::make_intrusive<c10d::HashStore>(),
                                         .rank = 0,
                                         .world_size = 2,
                                         .backend_options = {{"lanes", 3}}});
  seen.clear();
  split_group(parent, {{0}, {1}});
  EXPECT_EQ(seen.at("lanes").toInt(), 3);
  EXPECT_EQ(timeout, 77s);
  parent->setTimeout(5s);
  split_group(parent, {{0}, {1}});
  EXPECT_EQ(timeout, 5s);
  unregister_backend("spy");
}

TEST(SplitGroup, PlainC10dGroupsCanBeSplit) {
  const Group fake = new_group("fake", {.rank = 1, .world_size = 4});
  auto plain = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 1, 4);
  plain->setBackend(at::kCPU, c10d::ProcessGroup::CUSTOM, fake->getDefaultBackend());
  plain->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  const Group part = split_group(plain, {{1, 2}});
  EXPECT_EQ(part->getRank(), 0);
  EXPECT_EQ(part->getBackendName(), "fake");
}

TEST(SplitGroup, C10dsOwnSplitWorksOnOurGroups) {
  with_parent(3, [](const Group& parent) {
    const Group part = parent->splitGroup({2, 0}, 9s, std::nullopt, std::nullopt, std::string("pair"));
    ASSERT_EQ(part == nullptr, parent->getRank() == 1);
    if (!part) return;
    EXPECT_EQ(part->getRank(), parent->getRank() == 0 ? 0 : 1);  // c10d sorts the ranks
    EXPECT_EQ(part->getGroupDesc(), "pair");
  });
}

TEST(SplitGroup, WrongListsAreRefused) {
  const Group parent = new_group("fake", {.rank = 0, .world_size = 4});
  const auto text = [&](const std::vector<std::vector<int>>& parts) {
    return error_text<c10::ValueError>([&] { split_group(parent, parts); });
  };
  EXPECT_EQ(text({{0, 1}, {1, 2}}), "[split_group] rank 1 is listed twice\n  fix: list each rank in one part, once");
  EXPECT_EQ(text({{0}, {4}}),
            "[split_group] rank 4 in part 1 is not in 0..3\n  fix: list ranks of the parent group, not of the world");
  EXPECT_EQ(text({{0}, {}}), "[split_group] part 1 is empty\n  fix: leave the empty part out");
  EXPECT_EQ(error_text<c10::ValueError>([] { split_group(nullptr, {{0}}); }),
            "[split_group] the parent is null\n  fix: pass a group that new_group or split_group made");
}

TEST(SplitGroup, DifferentListsAreNoticed) {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const Group zero = new_group("fake", {.store = store, .rank = 0, .world_size = 2});
  const Group one = new_group("fake", {.store = store, .rank = 1, .world_size = 2});
  split_group(zero, {{0, 1}});
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              split_group(one, {{0}, {1}});
            }),
            "[split_group] this rank passes {0}, {1}, another rank passed {0, 1}\n"
            "  fix: make the same groups in the same order on every rank");
}

TEST(CurrentGroup, IsNullUntilSetAndRestoredOnExit) {
  const Group a = new_group("fake", {.rank = 0, .world_size = 1});
  const Group b = new_group("fake", {.rank = 0, .world_size = 1});
  EXPECT_EQ(current_process_group(), nullptr);
  {
    ProcessGroupGuard outer(a);
    EXPECT_EQ(current_process_group(), a);
    EXPECT_EQ(c10d::currentProcessGroup(), a);
    {
      ProcessGroupGuard inner(b);
      EXPECT_EQ(require_current_process_group(), b);
      ProcessGroupGuard none(nullptr);
      EXPECT_EQ(current_process_group(), nullptr);
    }
    EXPECT_EQ(current_process_group(), a);
  }
  EXPECT_EQ(current_process_group(), nullptr);
}

TEST(CurrentGroup, IsRestoredWhenTheBodyThrows) {
  const Group a = new_group("fake", {.rank = 0, .world_size = 1});
  EXPECT_THROW(
      {
        ProcessGroupGuard guard(a);
        throw std::runtime_error("body");
      },
      std::runtime_error);
  EXPECT_EQ(current_process_group(), nullptr);
}

TEST(CurrentGroup, BelongsToTheThread) {
  const Group a = new_group("fake", {.rank = 0, .world_size = 1});
  ProcessGroupGuard guard(a);
  Group seen = a;
  std::thread([&] { seen = current_process_group(); }).join();
  EXPECT_EQ(seen, nullptr);
}

TEST(CurrentGroup, HoldsInsideBackward) {
  const Group a = new_group("fake", {.rank = 0, .world_size = 1});
  const at::Tensor x = torch::ones({2}, torch::requires_grad());
  Group seen;
  x.register_hook([&](const at::Tensor& grad) {
    seen = current_process_group();
    return grad;
  });
  ProcessGroupGuard guard(a);
  (x * 2).sum().backward();
  EXPECT_EQ(seen, a);
}

TEST(CurrentGroup, TravelsWithAutogradsThreadState) {
  const Group a = new_group("fake", {.rank = 0, .world_size = 1});
  ProcessGroupGuard guard(a);
  const at::ThreadLocalState state;  // what the engine takes along to its worker threads
  Group seen;
  std::thread([&] {
    const at::ThreadLocalStateGuard restored(state);
    seen = current_process_group();
  }).join();
  EXPECT_EQ(seen, a);
}

TEST(CurrentGroup, RequiringOneSaysHowToSetIt) {
  EXPECT_EQ(error_text<c10::ValueError>([] { require_current_process_group(); }),
            "[require_current_process_group] this thread has no current group\n"
            "  fix: keep a ProcessGroupGuard guard(group) alive around the call, or pass the group");
}

TEST(MakeGroup, ServesItsDeviceAndTheCpu) {
  const Group group = new_group("fake", {.device = at::Device(at::kMeta), .rank = 0, .world_size = 1});
  EXPECT_TRUE(group->hasBackendForDeviceType(at::kMeta));
  EXPECT_TRUE(group->hasBackendForDeviceType(at::kCPU));
  EXPECT_EQ(group->getBackendType(), c10d::ProcessGroup::CUSTOM);
}

}  // namespace
}  // namespace serried
