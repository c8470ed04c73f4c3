// The end of a group may come at any time and on any thread: while others wait for it, in its own callbacks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sys/wait.h>
#include <unistd.h>

#include <future>
#include <latch>
#include <thread>

#include "serried/comm/collectives/collectives.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::sample;
using testing::samples;
using testing::sum_of;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class GroupEnds : public testing::OnRanks {
 protected:
  /// A group of all ranks of `g` that the caller alone owns.
  Group another(const Group& g) const {
    return new_group(GetParam().backend, {.timeout = 20s,
                                          .store = g->getStore(),
                                          .rank = g->getRank(),
                                          .world_size = g->getSize(),
                                          .backend_options = {}});
  }
};

INSTANTIATE_TEST_SUITE_P(On, GroupEnds, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

/// What `wait` of the work raises, on a thread that holds nothing but the work.
std::future<std::string> waited_for(WorkPtr work, std::latch& begun) {
  return std::async(std::launch::async, [work = std::move(work), &begun] {
    begun.count_down();
    return testing::error_text<c10::DistBackendError>([&] { work->wait(); });
  });
}

TEST_P(GroupEnds, AReceiveThatIsWaitedForRaises) {
  on_ranks([&](const Group& g) {
    for (int round = 0; round < 5; ++round) {
      Group group = another(g);
      barrier(group);
      if (g->getRank() == 0) {
        Tensors one{at::zeros({3})}, any{at::zeros({3})};
        std::latch begun(2);
        auto first = waited_for(group->recv(one, 1, 0), begun);
        auto second = waited_for(group->recvAnysource(any, 1), begun);
        begun.wait();
        group.reset();
        const std::string text = is("gloo") || is("mpi") ? "the group was dropped while this rank waited in recv f32[3]"
                                                         : "rank 0 closed the group";
        EXPECT_THAT(first.get(), HasSubstr(text));
        EXPECT_THAT(second.get(), HasSubstr(text));
      }
      barrier(g);  // the others keep the group until then
    }
  });
}

TEST_P(GroupEnds, ARankThatIsOneCallBehindIsTold) {
  on_ranks([&](const Group& g) {
    Group group = another(g);
    const int last = g->getSize() - 1;
    const at::Tensor x = at::ones({4}), y = at::ones({7});
    all_reduce_(x, group);
    const std::string text =
        testing::error_text<c10::DistBackendError>([&] { all_reduce_(g->getRank() == last ? x : y, group); });
    EXPECT_THAT(text, ::testing::ContainsRegex(c10::str("all_reduce f32\\[7\\] sum, rank ", last,
                                                        " #2 all_reduce f32\\[4\\] sum; rank ", last,
                                                        " repeats #1: it may be one call behind since #2")));
    barrier(g);
  });
}

TEST_P(GroupEnds, ASendThatIsWaitedForRaises) {
  if (is("gloo")) return;  // gloo's sends end when the kernel has taken the bytes
  on_ranks([&](const Group& g) {
    Group group = another(g);
    barrier(group);
    if (g->getRank() == 0) {
      Tensors long_message{at::zeros({1'000'000})};
      std::latch begun(1);
      auto sent = waited_for(group->send(long_message, 1, 0), begun);
      begun.wait();
      group.reset();
      EXPECT_THAT(sent.get(), HasSubstr(is("mpi") ? "the group was dropped while this rank waited in send f32[1000000]"
                                                  : "rank 0 closed the group"));
    }
    barrier(g);
  });
}

TEST_P(GroupEnds, ACollectiveThatIsWaitedForRaises) {
  on_ranks([&](const Group& g) {
    Group group = another(g);
    barrier(group);
    group->setTimeout(300ms);
    if (g->getRank() == 0) {
      Tensors tensors{at::zeros({70'001})};
      std::latch begun(1);
      auto reduced = waited_for(group->allreduce(tensors), begun);
      begun.wait();
      group.reset();
      EXPECT_THAT(reduced.get(), ::testing::AnyOf(HasSubstr("rank 0 closed the group while collectives were open"),
                                                  HasSubstr("timed out after")));
    }
    barrier(g);
  });
}

/// Calls back with the last owner of `group`, which lets go of it there; true when that has happened.
std::future<bool> dropped_in_callback(Group group, const WorkPtr& work) {
  auto owner = std::make_shared<Group>(std::move(group));
  auto dropped = std::make_shared<std::promise<bool>>();
  std::future<bool> result = dropped->get_future();
  work->getFuture()->addCallback([owner, dropped](c10::ivalue::Future&) {
    owner->reset();
    dropped->set_value(true);
  });
  return result;
}

TEST_P(GroupEnds, TheCallbackOfAReceiveMayBeTheLastOwner) {
  if (is("gloo")) return;  // receives have no future there
  on_ranks([&](const Group& g) {
    for (const int64_t size : {3, 100'000}) {
      Group group = another(g);
      Tensors tensors{at::zeros({size})};
      std::future<bool> dropped;
      if (g->getRank() == 0) {
        WorkPtr work = group->recvAnysource(tensors, 5);
        dropped = dropped_in_callback(std::move(group), work);
      }
      barrier(g);
      if (g->getRank() == 1) send(at::ones({size}), group, {.peer = 0, .tag = 5});
      if (g->getRank() == 0) {
        EXPECT_TRUE(dropped.get());
        expect_equal(tensors[0], at::ones({size}));
      }
      barrier(g);
    }
  });
}

TEST_P(GroupEnds, TheCallbackOfASendMayBeTheLastOwner) {
  if (is("gloo")) return;
  on_ranks([&](const Group& g) {
    Group group = another(g);
    Tensors tensors{at::ones({1'000'000})};
    std::future<bool> dropped;
    if (g->getRank() == 0) {
      WorkPtr work = group->send(tensors, 1, 5);
      dropped = dropped_in_callback(std::move(group), work);
    }
    if (g->getRank() == 1) {
      at::Tensor got = at::zeros({1'000'000});
      recv(got, group, {.peer = 0, .tag = 5});
      expect_equal(got, tensors[0]);
    }
    if (g->getRank() == 0) EXPECT_TRUE(dropped.get());
    barrier(g);
  });
}

TEST_P(GroupEnds, TheCallbackOfACollectiveMayBeTheLastOwner) {
  on_ranks([&](const Group& g) {
    for (const int64_t size : {5, 300'001}) {
      Group group = another(g);
      Tensors first{sample({size}, g->getRank())}, second{sample({size}, g->getRank(), at::kFloat, 1)};
      WorkPtr work = group->allreduce(first);
      WorkPtr behind = group->allreduce(second);
      auto dropped = dropped_in_callback(std::move(group), work);
      work.reset();
      EXPECT_TRUE(dropped.get());
      behind->wait();  // still comes to its end
      expect_equal(first[0], sum_of(samples({size}, g->getSize())));
      expect_equal(second[0], sum_of(samples({size}, g->getSize(), at::kFloat, 1)));
      barrier(g);
    }
  });
}

TEST_P(GroupEnds, AWorkMayBeTheLastThatIsLeft) {
  on_ranks([&](const Group& g) {
    Group group = another(g);
    Tensors tensors{sample({70'001}, g->getRank())};
    WorkPtr work = group->allreduce(tensors);
    group.reset();
    work->wait();
    expect_equal(tensors[0], sum_of(samples({70'001}, g->getSize())));
    barrier(g);
  });
}

TEST_P(GroupEnds, AForkedChildLeavesTheGroupToItsParent) {
  on_ranks([&](const Group& g) {
    Group group = another(g);
    const at::Tensor x = sample({70'001}, g->getRank());
    Tensors received{at::zeros({3})};
    const WorkPtr open = group->recv(received, (g->getRank() + 1) % g->getSize(), 1);
    barrier(group);
    const pid_t child = fork();
    if (child == 0) {
      const std::string text = testing::error_text<c10::DistBackendError>([&] { barrier(group); });
      const std::string expected =
          c10::str("[barrier] process ", getpid(), " is a fork of process ", getppid(),
                   ", to which the group belongs\n  fix: call it in the process that made the group; a child needs a "
                   "group of its own\n  at:  rank ",
                   g->getRank(), "/", g->getSize());
      group.reset();
      _exit(text == expected ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 7);
    expect_equal(all_reduce(x, group), sum_of(samples({70'001}, g->getSize())));
    Tensors sent{at::ones({3})};
    group->send(sent, (g->getRank() + g->getSize() - 1) % g->getSize(), 1)->wait();
    open->wait();
    expect_equal(received[0], at::ones({3}));
    barrier(g);
  });
}

TEST_P(GroupEnds, AClosedGroupTakesNoCalls) {
  if (is("gloo")) return;  // its shutdown only waits for what is under way
  on_ranks([&](const Group& g) {
    Group group = another(g);
    barrier(group);
    group->shutdown();
    EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { barrier(group); }),
                HasSubstr("[barrier] the group is closed\n  fix: make a new group"));
    Tensors tensors{at::ones({3})};
    EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { group->allreduce(tensors)->wait(); }),
                HasSubstr("[all_reduce] the group is closed\n  fix: make a new group"));
    EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { group->send(tensors, 0, 0); }),
                HasSubstr(c10::str(is("mpi") ? "[send]" : "[point to point]",
                                   " the group is closed\n  fix: make a new group")));
    barrier(g);
  });
}

class AnySource : public GroupEnds {};

INSTANTIATE_TEST_SUITE_P(On, AnySource, ::testing::ValuesIn(testing::settings({2, 3, 4})), testing::name_of);

TEST_P(AnySource, RaisesWhenEveryPeerHasLeft) {
  on_ranks([&](const Group& g) {
    Group group = another(g);
    barrier(group);
    const int n = g->getSize();
    if (g->getRank() > 0) {
      if (g->getRank() == 1) group->shutdown();
      group.reset();
      return barrier(g);
    }
    Tensors tensors{at::zeros({3})};
    const std::string text =
        testing::error_text<c10::DistBackendError>([&] { group->recvAnysource(tensors, 4)->wait(); });
    const bool by_status = is("gloo") || is("mpi");
    const std::string others = n == 2 ? "rank 1" : n == 3 ? "ranks 1, 2" : by_status ? "ranks 1, 2, 3" : "ranks 1-3";
    if (by_status) {
      EXPECT_THAT(text, HasSubstr(c10::str("[recv] recv f32[3] from any rank failed: nobody is left to send; ", others,
                                           n == 2 ? " has" : " have",
                                           " left the group\n  fix: make a new group of the "
                                           "ranks that are left")));
    } else {
      EXPECT_THAT(text, HasSubstr(c10::str(others, n == 2 ? " is gone (it" : " are gone (they",
                                           " died or left the group) while rank 0 was in recv f32[3] from any rank, "
                                           "tag 4")));
    }
    barrier(g);
  });
}

TEST_P(AnySource, GoesOnWaitingForThoseThatAreLeft) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), last = n - 1;
    Group group = another(g);
    barrier(group);
    if (g->getRank() > 0 && g->getRank() < last) group.reset();
    Tensors tensors{at::zeros({3})};
    WorkPtr work;
    if (g->getRank() == 0) work = group->recvAnysource(tensors, 4);
    barrier(g);  // all but the last have left
    if (g->getRank() == last) send(at::ones({3}), group, {.peer = 0, .tag = 4});
    if (g->getRank() == 0) {
      work->wait();
      EXPECT_EQ(work->sourceRank(), last);
      expect_equal(tensors[0], at::ones({3}));
    }
    barrier(g);
  });
}

TEST_P(AnySource, TakesWhatWasSentBeforeTheSendersLeft) {
  on_ranks([&](const Group& g) {
    Group group = another(g);
    if (g->getRank() > 0) {
      Tensors tensors{at::full({3}, float(g->getRank()))};
      const WorkPtr work = group->send(tensors, 0, 4);
      if (!is("gloo")) {  // a short message needs no receiver
        work->wait();
        group.reset();
      }
      barrier(g);
      if (is("gloo")) work->wait();
      return barrier(g);
    }
    barrier(g);
    for (int i = 1; i < g->getSize(); ++i) {
      Tensors tensors{at::zeros({3})};
      const WorkPtr work = group->recvAnysource(tensors, 4);
      work->wait();
      expect_equal(tensors[0], at::full({3}, float(work->sourceRank())));
    }
    barrier(g);
  });
}

TEST_P(AnySource, EndsAtTheTimeoutWhileAPeerLives) {
  on_ranks([&](const Group& g) {
    Group group = another(g);
    barrier(group);
    group->setTimeout(200ms);
    Tensors tensors{at::zeros({3})};
    if (g->getRank() == 0) {
      EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { group->recvAnysource(tensors, 4)->wait(); }),
                  HasSubstr("timed out after"));
    }
    barrier(g);
  });
}

}  // namespace
}  // namespace serried
