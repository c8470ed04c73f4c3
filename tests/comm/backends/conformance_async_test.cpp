// Every backend overlaps alike: Works and futures, point to point, many groups at once, splits.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::expect_equal;
using testing::sample;
using testing::samples;
using testing::sibling;
using testing::sum_of;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ConformanceAsync : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, ConformanceAsync, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

// Lets the other ranks run ahead by a random time. Not by a number of yields: on a busy machine each takes
// milliseconds.
void dawdle(std::mt19937& random) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 300);
  while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

TEST_P(ConformanceAsync, WorksAreWaitedForInAnyOrder) {
  on_ranks([&](const Group& g) {
    constexpr int kCount = 40;
    std::vector<Tensors> tensors;
    std::vector<WorkPtr> works;
    const auto size_of = [](int i) { return i % 10 == 0 ? 30011 + i : i; };
    for (int i = 0; i < kCount; ++i) {
      tensors.push_back({sample({size_of(i)}, g->getRank(), at::kFloat, i)});
      works.push_back(i % 3 == 2 ? g->broadcast(tensors.back()) : g->allreduce(tensors.back()));
    }
    for (int i = kCount - 1; i >= 0; --i) {
      EXPECT_TRUE(works[i]->wait());
      EXPECT_TRUE(works[i]->isCompleted());
      EXPECT_TRUE(works[i]->isSuccess());
      const Tensors xs = samples({size_of(i)}, g->getSize(), at::kFloat, i);
      expect_equal(tensors[i][0], i % 3 == 2 ? xs[0] : sum_of(xs), c10::str("work ", i));
    }
  });
}

TEST_P(ConformanceAsync, WorksCompleteWithoutBeingWaitedFor) {
  on_ranks([&](const Group& g) {
    Tensors tensors{sample({70001}, g->getRank())};
    const WorkPtr work = g->allreduce(tensors);
    while (!work->isCompleted()) std::this_thread::yield();
    expect_equal(tensors[0], sum_of(samples({70001}, g->getSize())));
  });
}

TEST_P(ConformanceAsync, WorksMayBeDropped) {
  on_ranks([&](const Group& g) {
    Tensors dropped{sample({1000}, g->getRank())}, waited{sample({5}, g->getRank())};
    g->allreduce(dropped);
    g->allreduce(waited)->wait();
    g->barrier()->wait();
    expect_equal(dropped[0], sum_of(samples({1000}, g->getSize())));
  });
}

TEST_P(ConformanceAsync, FuturesHoldTheResultAndRunCallbacks) {
  on_ranks([&](const Group& g) {
    for (int64_t size : {10, 70001}) {
      Tensors tensors{sample({size}, g->getRank())};
      const WorkPtr work = g->allreduce(tensors);
      const auto doubled = work->getFuture()->then(
          [](c10::ivalue::Future& future) -> c10::IValue {
            const c10::IValue value = future.value();
            const at::Tensor tensor = value.isTensorList() ? value.toTensorList().get(0) : value.toTensorVector().at(0);
            return tensor * 2;
          },
          c10::TensorType::get());
      doubled->wait();
      expect_equal(doubled->value().toTensor(), sum_of(samples({size}, g->getSize())) * 2);
      work->wait();
    }
  });
}

TEST_P(ConformanceAsync, MixedCollectivesInOneOrder) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    std::mt19937 shared(99), mine(1000 + me);
    for (int i = 0; i < 120; ++i) {
      const int64_t size = shared() % 50 == 0 ? 40000 : shared() % 200;
      const int root = int(shared() % n);
      dawdle(mine);
      Tensors tensors{sample({size}, me, at::kFloat, i)};
      const Tensors xs = samples({size}, n, at::kFloat, i);
      switch (shared() % 5) {
        case 0:
          g->allreduce(tensors)->wait();
          expect_equal(tensors[0], sum_of(xs), c10::str("step ", i));
          break;
        case 1: {
          c10d::BroadcastOptions options;
          options.rootRank = root;
          g->broadcast(tensors, options)->wait();
          expect_equal(tensors[0], xs[root], c10::str("step ", i));
          break;
        }
        case 2: {
          at::Tensor flat = at::zeros({n * size});
          g->all_gather_single(flat, tensors[0])->wait();
          expect_equal(flat, at::cat(xs), c10::str("step ", i));
          break;
        }
        case 3: {
          at::Tensor whole = sample({n * size}, me, at::kFloat, i), piece = at::zeros({size});
          g->reduce_scatter_single(piece, whole)->wait();
          expect_equal(piece, sum_of(samples({n * size}, n, at::kFloat, i)).narrow(0, me * size, size),
                       c10::str("step ", i));
          break;
        }
        default: g->barrier()->wait();
      }
    }
  });
}

TEST_P(ConformanceAsync, TagsKeepMessagesApart) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    const std::vector<int> sent_order = {5, 3, 9}, received_order = {9, 5, 3};
    const auto message = [](int from, int to, int tag) {
      return sample({tag == 9 ? 70001 : 4 + tag}, from, at::kFloat, to * 10 + tag);
    };
    std::vector<WorkPtr> sends;
    std::vector<Tensors> kept;
    for (int peer = 0; peer < n; ++peer) {
      for (int tag : sent_order) {
        if (peer == me) continue;
        kept.push_back({message(me, peer, tag)});
        sends.push_back(g->send(kept.back(), peer, tag));
      }
    }
    for (int peer = n - 1; peer >= 0; --peer) {
      for (int tag : received_order) {
        if (peer == me) continue;
        Tensors tensors{at::zeros_like(message(peer, me, tag))};
        g->recv(tensors, peer, tag)->wait();
        expect_equal(tensors[0], message(peer, me, tag), c10::str("tag ", tag, " from rank ", peer));
      }
    }
    for (const WorkPtr& send : sends) send->wait();
  });
}

TEST_P(ConformanceAsync, MessagesOfOneTagKeepTheirOrder) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    if (n == 1) return;
    constexpr int kCount = 20;
    const int next = (me + 1) % n, previous = (me + n - 1) % n;
    std::vector<WorkPtr> works;
    std::vector<Tensors> sent, received;
    for (int i = 0; i < kCount; ++i) {
      received.push_back({at::zeros({7})});
      works.push_back(g->recv(received.back(), previous, 1));
    }
    for (int i = 0; i < kCount; ++i) {
      sent.push_back({sample({7}, me, at::kFloat, i)});
      works.push_back(g->send(sent.back(), next, 1));
    }
    for (const WorkPtr& work : works) work->wait();
    for (int i = 0; i < kCount; ++i)
      expect_equal(received[i][0], sample({7}, previous, at::kFloat, i), c10::str("message ", i));
  });
}

TEST_P(ConformanceAsync, ReceiveFromAnyoneNamesTheSender) {
  on_ranks([&](const Group& g) {
    if (g->getRank() > 0) {
      Tensors tensors{at::full({3}, float(g->getRank()))};
      g->send(tensors, 0, 4)->wait();
      return;
    }
    std::vector<bool> seen(g->getSize());
    for (int i = 1; i < g->getSize(); ++i) {
      Tensors tensors{at::zeros({3})};
      const WorkPtr work = g->recvAnysource(tensors, 4);
      work->wait();
      const int from = work->sourceRank();
      ASSERT_TRUE(from > 0 && from < g->getSize()) << from;
      EXPECT_FALSE(seen[from]);
      seen[from] = true;
      expect_equal(tensors[0], at::full({3}, float(from)));
    }
  });
}

TEST_P(ConformanceAsync, BarriersHoldEveryRankBack) {
  std::atomic<int> arrived = 0;
  on_ranks([&](const Group& g) {
    std::mt19937 mine(g->getRank());
    for (int round = 1; round <= 10; ++round) {
      dawdle(mine);
      ++arrived;
      g->barrier()->wait();
      EXPECT_GE(arrived, round * g->getSize());
      g->monitoredBarrier({}, round % 2 == 0);
    }
  });
}

TEST_P(ConformanceAsync, TenGroupsWorkAtOnceInAnyOrder) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    std::vector<int> everyone(n);
    std::iota(everyone.begin(), everyone.end(), 0);
    std::vector<Group> groups;
    for (int i = 0; i < 10; ++i) {
      groups.push_back(i % 2 == 0 ? sibling(g, GetParam().backend) : split_group(g, {everyone}));
    }
    std::mt19937 mine(17 + me);
    std::vector<int> order(groups.size());
    std::iota(order.begin(), order.end(), 0);
    for (int round = 0; round < 8; ++round) {
      std::vector<Tensors> tensors(groups.size());
      std::vector<WorkPtr> works(groups.size());
      std::shuffle(order.begin(), order.end(), mine);
      for (int i : order) {
        dawdle(mine);
        tensors[i] = {sample({i * 300}, me, at::kFloat, round + i)};
        works[i] = groups[i]->allreduce(tensors[i]);
      }
      std::shuffle(order.begin(), order.end(), mine);
      for (int i : order) {
        works[i]->wait();
        expect_equal(tensors[i][0], sum_of(samples({i * 300}, n, at::kFloat, round + i)), c10::str("group ", i));
      }
    }
  });
}

// Cuts a group in halves until each rank is alone, and adds up in every part.
void split_down(const Group& group, const std::vector<int>& members, int depth) {
  Tensors tensors{at::full({3}, float(members[group->getRank()]))};
  group->allreduce(tensors)->wait();
  expect_equal(tensors[0], at::full({3}, float(std::accumulate(members.begin(), members.end(), 0))),
               c10::str("depth ", depth));
  const int size = group->getSize();
  if (size == 1) return;
  std::vector<std::vector<int>> parts(2);
  for (int rank = 0; rank < size; ++rank) parts[rank % 2].push_back(rank);
  const Group part = split_group(group, parts);
  ASSERT_TRUE(part);
  std::vector<int> inner;
  for (int rank : parts[group->getRank() % 2]) inner.push_back(members[rank]);
  EXPECT_EQ(part->getSize(), int(inner.size()));
  split_down(part, inner, depth + 1);
  group->barrier()->wait();
}

TEST_P(ConformanceAsync, SplitsNest) {
  on_ranks([&](const Group& g) {
    std::vector<int> everyone(g->getSize());
    std::iota(everyone.begin(), everyone.end(), 0);
    split_down(g, everyone, 0);
    const Group first = split_group(g, {{0}});
    EXPECT_EQ(bool(first), g->getRank() == 0);
  });
}

}  // namespace
}  // namespace serried
