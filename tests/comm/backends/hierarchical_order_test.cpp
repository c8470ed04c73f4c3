// Reductions over several hosts: in which order contributions are added up, to the bit, and how many bytes leave a
// host.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <array>
#include <atomic>
#include <cstring>
#include <limits>

#include "serried/comm/collectives/collectives.h"
#include "tests/support/environment.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"
#include "tests/support/wire_around.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using c10d::ReduceOp;
using RedOpType = ReduceOp::RedOpType;
using testing::error_text_of_any_rank;
using ::testing::HasSubstr;
using testing::sibling;
using Tensors = std::vector<at::Tensor>;

using HostRanks = std::vector<std::vector<int>>;  // of each host, in the order of hosts

class HierarchicalOrder : public testing::OnRanks {
 protected:
  /// The same ranks on the same hosts, in this order.
  Group in_order(const Group& g, const std::string& order) const {
    return new_group(GetParam().backend, {.timeout = 60s,
                                          .store = g->getStore(),
                                          .rank = g->getRank(),
                                          .world_size = g->getSize(),
                                          .backend_options = {{"order", order}}});
  }

  HostRanks hosts() const {
    HostRanks all;
    std::vector<int> names;
    for (const testing::HostLayout& layout : testing::kHostLayouts) {
      if (GetParam().backend != layout.backend) continue;
      for (int rank = 0; rank < world_size(); ++rank) {
        const int name = layout.host_of(rank, world_size());
        const size_t host = size_t(std::find(names.begin(), names.end(), name) - names.begin());
        if (host == names.size()) {
          names.push_back(name);
          all.emplace_back();
        }
        all[host].push_back(rank);
      }
    }
    return all;
  }
};

INSTANTIATE_TEST_SUITE_P(On, HierarchicalOrder, ::testing::ValuesIn(testing::settings_on_hosts({2, 4, 5})),
                         testing::name_of);

// Values of which sums depend on the order of addition; some are NaN or infinite.
at::Tensor rough(at::IntArrayRef sizes, int rank, at::ScalarType dtype) {
  at::Generator generator = at::detail::createCPUGenerator(77 + rank);
  if (at::isIntegralType(dtype, /*includeBool=*/true)) {
    const at::Tensor whole = at::randint(-100, 100, sizes, generator, at::kLong);
    return dtype == at::kBool ? whole.gt(0) : whole.to(dtype);
  }
  at::Tensor x = at::randn(sizes, generator, at::kDouble).mul_(1000);
  if (at::isComplexType(dtype)) return at::complex(x, x * 0.3 + rank).to(dtype);
  if (x.numel() > 3) x.view({-1})[rank % 3] = rank == 1 ? std::numeric_limits<double>::quiet_NaN() : 1e300;
  return x.to(dtype);
}

void expect_bits(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.nbytes(), expected.nbytes()) << what;
  if (actual.nbytes() == 0) return;
  EXPECT_EQ(std::memcmp(actual.const_data_ptr(), expected.const_data_ptr(), actual.nbytes()), 0) << what;
}

bool means_something(RedOpType op, at::ScalarType dtype) {
  const bool is_whole = at::isIntegralType(dtype, /*includeBool=*/true);
  if (op == ReduceOp::AVG) return dtype != at::kBool;
  if (op == ReduceOp::MIN || op == ReduceOp::MAX) return !at::isComplexType(dtype);
  return op == ReduceOp::SUM || op == ReduceOp::PRODUCT || is_whole;
}

const RedOpType kReductions[] = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                                 ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BXOR};

void reduce_everywhere(const Group& g, at::Tensor& x, RedOpType op) {
  Tensors tensors{x};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  g->allreduce(tensors, options)->wait();
}

template <class A>
A combine(RedOpType op, A a, A b) {
  return op == ReduceOp::PRODUCT ? A(a * b) : A(a + b);
}

/// By plain loops: what the ranks of each host make, and that host after host; of more than eight hosts eight by eight.
template <class T, class A>
at::Tensor by_hosts(const Tensors& xs, const HostRanks& hosts, RedOpType op) {
  std::vector<const T*> values;
  for (const at::Tensor& x : xs) values.push_back(x.const_data_ptr<T>());
  at::Tensor out = at::empty_like(xs[0]);
  T* const results = out.mutable_data_ptr<T>();
  std::vector<A> level(hosts.size());
  for (int64_t i = 0; i < out.numel(); ++i) {
    for (size_t host = 0; host < hosts.size(); ++host) {
      level[host] = A(values[size_t(hosts[host][0])][i]);
      for (size_t k = 1; k < hosts[host].size(); ++k) {
        level[host] = combine<A>(op, level[host], A(values[size_t(hosts[host][k])][i]));
      }
    }
    for (size_t size = hosts.size(), next = 0; size > 1; size = next, next = 0) {
      for (size_t first = 0; first < size; first += 8) {
        A sum = level[first];
        for (size_t k = first + 1; k < std::min(first + 8, size); ++k) sum = combine<A>(op, sum, level[k]);
        level[next++] = sum;
      }
    }
    results[i] = T(op == ReduceOp::AVG ? A(level[0] / A(int(xs.size()))) : level[0]);
  }
  return out;
}

at::Tensor by_hosts(const Tensors& xs, const HostRanks& hosts, RedOpType op) {
  switch (xs[0].scalar_type()) {
    case at::kFloat: return by_hosts<float, float>(xs, hosts, op);
    case at::kDouble: return by_hosts<double, double>(xs, hosts, op);
    case at::kHalf: return by_hosts<at::Half, float>(xs, hosts, op);
    case at::kBFloat16: return by_hosts<at::BFloat16, float>(xs, hosts, op);
    case at::kInt: return by_hosts<int32_t, int64_t>(xs, hosts, op);
    case at::kLong: return by_hosts<int64_t, int64_t>(xs, hosts, op);
    default: throw std::invalid_argument("no oracle");
  }
}

Tensors roughs(at::IntArrayRef sizes, int num_ranks, at::ScalarType dtype) {
  Tensors all;
  for (int rank = 0; rank < num_ranks; ++rank) all.push_back(rough(sizes, rank, dtype));
  return all;
}

TEST_P(HierarchicalOrder, OfRanksHasTheBitsOfOneHost) {
  on_ranks([&](const Group& world) {
    const Group g = in_order(world, "ranks");
    const Group one_host = sibling(g, "shm");
    for (const at::ScalarType dtype : testing::kAllDtypes) {
      for (const RedOpType op : kReductions) {
        if (!means_something(op, dtype)) continue;
        for (const int64_t size : {1, 17, 9001, 40003}) {
          at::Tensor x = rough({size}, g->getRank(), dtype), y = x.clone();
          reduce_everywhere(g, x, op);
          reduce_everywhere(one_host, y, op);
          expect_bits(x, y, c10::str(to_string(op), " of ", c10::toString(dtype), " x ", size));
        }
      }
    }
  });
}

TEST_P(HierarchicalOrder, OfRanksHasTheBitsOfOneHostWhateverTheSize) {
  on_ranks([&](const Group& world) {
    const Group g = in_order(world, "ranks");
    const Group one_host = sibling(g, "shm");
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      for (const RedOpType op : {ReduceOp::SUM, ReduceOp::AVG}) {
        at::Tensor x = rough({3'000'017}, g->getRank(), dtype), y = x.clone();
        reduce_everywhere(g, x, op);
        reduce_everywhere(one_host, y, op);
        expect_bits(x, y, c10::str(to_string(op), " of ", c10::toString(dtype)));
      }
    }
  });
}

TEST_P(HierarchicalOrder, OfRanksHasTheBitsOfOneHostInReductionsToOwners) {
  on_ranks([&](const Group& world) {
    const Group g = in_order(world, "ranks");
    const int n = g->getSize();
    const Group one_host = sibling(g, "shm");
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kInt}) {
      for (const int64_t size : {3, 20'011, 190'001}) {
        const auto pieces = [&](const Group& on) {
          std::vector<Tensors> inputs(1);
          // Rank r gets r times as much as rank 1, rank 0 nothing.
          for (int to = 0; to < n; ++to) inputs[0].push_back(rough({size * to}, g->getRank() * n + to, dtype));
          Tensors outputs{at::zeros({size * g->getRank()}, dtype)};
          c10d::ReduceScatterOptions options;
          options.reduceOp = ReduceOp::AVG;
          on->reduce_scatter(outputs, inputs, options)->wait();
          return outputs[0];
        };
        expect_bits(pieces(g), pieces(one_host), "reduce_scatter");
        const auto reduced = [&](const Group& on, int root) {
          Tensors tensors{rough({size}, g->getRank(), dtype)};
          c10d::ReduceOptions options;
          options.rootRank = root;
          on->reduce(tensors, options)->wait();
          return g->getRank() == root ? tensors[0] : at::Tensor();
        };
        for (const int root : {0, n - 1}) {
          const at::Tensor x = reduced(g, root), y = reduced(one_host, root);
          if (g->getRank() == root) expect_bits(x, y, "reduce");
        }
      }
    }
  });
}

TEST_P(HierarchicalOrder, OfHostsAddsHostByHost) {
  on_ranks([&](const Group& world) {
    const Group g = in_order(world, "hosts");
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong}) {
      for (const RedOpType op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT}) {
        for (const int64_t size : {1, 17, 9001, 40003}) {
          const Tensors xs = roughs({size}, g->getSize(), dtype);
          at::Tensor x = xs[size_t(g->getRank())].clone();
          reduce_everywhere(g, x, op);
          expect_bits(x, by_hosts(xs, hosts(), op), c10::str(to_string(op), " of ", c10::toString(dtype), " x ", size));
        }
      }
    }
  });
}

TEST_P(HierarchicalOrder, OfHostsIsThatOfRanksWhereOrderMeansNothing) {
  on_ranks([&](const Group& world) {
    const Group g = in_order(world, "hosts"), one_host = sibling(world, "shm");
    for (const at::ScalarType dtype : testing::kAllDtypes) {
      if (at::isComplexType(dtype) || at::isFloatingType(dtype)) continue;
      for (const RedOpType op : kReductions) {
        if (!means_something(op, dtype)) continue;
        for (const int64_t size : {0, 3, 70'001}) {
          at::Tensor x = rough({size}, g->getRank(), dtype), y = x.clone();
          reduce_everywhere(g, x, op);
          reduce_everywhere(one_host, y, op);
          expect_bits(x, y, c10::str(to_string(op), " of ", c10::toString(dtype), " x ", size));
        }
      }
    }
  });
}

TEST_P(HierarchicalOrder, OfHostsHoldsWhateverTheSizeAndThePlace) {
  on_ranks([&](const Group& world) {
    const Group g = in_order(world, "hosts");
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const Tensors xs = roughs({1'200'017}, g->getSize(), dtype);
      const at::Tensor expected = by_hosts(xs, hosts(), ReduceOp::AVG);
      const at::Tensor& mine = xs[size_t(g->getRank())];
      at::Tensor whole = mine.clone();
      reduce_everywhere(g, whole, ReduceOp::AVG);
      expect_bits(whole, expected, "whole");
      int64_t begin = 5;
      for (const int64_t length : {11, 300, 50'000, 500'001}) {  // as buckets might cut it
        at::Tensor part = mine.slice(0, begin, begin + length).clone();
        reduce_everywhere(g, part, ReduceOp::AVG);
        expect_bits(part, expected.slice(0, begin, begin + length).contiguous(), c10::str("from ", begin));
        begin += length;
      }
    }
  });
}

TEST_P(HierarchicalOrder, OfHostsHoldsInReductionsToOwners) {
  on_ranks([&](const Group& world) {
    const Group g = in_order(world, "hosts");
    const int n = g->getSize(), me = g->getRank();
    for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kInt}) {
      for (const int64_t size : {3, 20'011, 190'001}) {
        std::vector<Tensors> inputs(1);
        // Rank r gets r times as much as rank 1, rank 0 nothing.
        for (int to = 0; to < n; ++to) inputs[0].push_back(rough({size * to}, me * n + to, dtype));
        Tensors outputs{at::zeros({size * me}, dtype)};
        c10d::ReduceScatterOptions scatter;
        scatter.reduceOp = ReduceOp::AVG;
        g->reduce_scatter(outputs, inputs, scatter)->wait();
        Tensors of_all;
        for (int from = 0; from < n; ++from) of_all.push_back(rough({size * me}, from * n + me, dtype));
        expect_bits(outputs[0], by_hosts(of_all, hosts(), ReduceOp::AVG), c10::str("reduce_scatter ", size));

        const Tensors xs = roughs({size}, n, dtype);
        for (const int root : {0, n - 1}) {
          Tensors tensors{xs[size_t(me)].clone()};
          c10d::ReduceOptions reduce;
          reduce.rootRank = root;
          g->reduce(tensors, reduce)->wait();
          if (me == root) expect_bits(tensors[0], by_hosts(xs, hosts(), ReduceOp::SUM), c10::str("reduce ", size));
        }
      }
    }
  });
}

TEST_P(HierarchicalOrder, IsThatOfRanksOnTwoHostsAndOfHostsOnMore) {
  on_ranks([&](const Group& g) {
    const Tensors xs = roughs({9001}, g->getSize(), at::kFloat);
    at::Tensor mine = xs[size_t(g->getRank())].clone();
    reduce_everywhere(g, mine, ReduceOp::SUM);
    HostRanks one_host(1);
    for (int rank = 0; rank < g->getSize(); ++rank) one_host[0].push_back(rank);
    expect_bits(mine, by_hosts(xs, hosts().size() > 2 ? hosts() : one_host, ReduceOp::SUM), "");
  });
}

TEST(HierarchicalOrders, OfManyHostsIsOneTree) {
  const testing::HostLayoutBackends layouts;
  constexpr int kRanks = 11;
  HostRanks hosts, one_host(1);
  for (int rank = 0; rank < kRanks; ++rank) {
    hosts.push_back({rank});
    one_host[0].push_back(rank);
  }
  run_ranks(kRanks, [&](const Group& world) {
    for (const std::string order : {"hosts", "ranks"}) {
      const Group g = new_group("hierarchical_alone", {.timeout = 60s,
                                                       .store = world->getStore(),
                                                       .rank = world->getRank(),
                                                       .world_size = kRanks,
                                                       .backend_options = {{"order", order}}});
      for (const int64_t size : {300, 100'003}) {
        const Tensors xs = roughs({size}, kRanks, at::kFloat);
        const at::Tensor tree = by_hosts(xs, hosts, ReduceOp::SUM), row = by_hosts(xs, one_host, ReduceOp::SUM);
        EXPECT_FALSE(tree.slice(0, 3).equal(row.slice(0, 3)));  // or the test shows nothing
        at::Tensor x = xs[size_t(g->getRank())].clone();
        reduce_everywhere(g, x, ReduceOp::SUM);
        expect_bits(x, order == "hosts" ? tree : row, c10::str(order, " ", size));
      }
    }
  });
}

using MakeWire = std::function<std::unique_ptr<net::Wire>(const shm::ConnectArgs&)>;

Group group_on_hosts(const Group& g, const std::vector<int>& host_of, const std::string& order,
                     const MakeWire& make_wire = testing::connected_thread_wire) {
  const FactoryArgs args{.store = c10::make_intrusive<c10d::PrefixStore>("order", g->getStore()),
                         .rank = g->getRank(),
                         .world_size = g->getSize(),
                         .timeout = 20s,
                         .device = at::kCPU,
                         .options = {{"host", std::to_string(host_of[size_t(g->getRank())])}, {"order", order}},
                         .name = c10::str("order@", g->getRank()),
                         .desc = "order"};
  return hierarchical::make_group_over(args, {.make_wire = make_wire});
}

TEST(HierarchicalOrders, MustBeTheSameOnAllRanks) {
  std::array<std::string, 4> texts;
  run_ranks(4, [&](const Group& g) {
    const int rank = g->getRank();
    texts[size_t(rank)] = error_text_of_any_rank<c10::ValueError>([&] {
      group_on_hosts(g, {0, 0, 1, 1}, rank == 2 ? "hosts" : "");
    });
  });
  for (const std::string& text : texts) {
    EXPECT_EQ(text,
              "[hierarchical] rank 0 adds in the order of ranks, rank 2 in that of hosts\n"
              "  fix: pass the same \"order\" to new_group on all ranks, or set SERRIED_ORDER alike for all");
  }
}

TEST(HierarchicalOrders, OtherWordsAreRefused) {
  run_ranks(2, [&](const Group& g) {
    EXPECT_EQ(error_text_of_any_rank<c10::ValueError>([&] {
                group_on_hosts(g, {0, 1}, "size");
              }),
              "[hierarchical] there is no order \"size\"\n"
              "  fix: let the option \"order\", or SERRIED_ORDER, be \"ranks\" or \"hosts\", or leave it out");
  });
}

TEST(HierarchicalOrders, TheEnvironmentNamesOne) {
  const testing::ScopedEnv env{{"SERRIED_ORDER", "hosts"}};
  const testing::HostLayoutBackends layouts;
  run_ranks(4, [&](const Group& world) {
    const Group g = sibling(world, "hierarchical_pairs");
    const Tensors xs = roughs({9001}, 4, at::kFloat);
    at::Tensor mine = xs[size_t(g->getRank())].clone();
    reduce_everywhere(g, mine, ReduceOp::SUM);
    expect_bits(mine, by_hosts(xs, {{0, 1}, {2, 3}}, ReduceOp::SUM), "");
  });
}

TEST(HierarchicalOrders, PiecesCutInDifferentWaysAreNamed) {
  run_ranks(4, [&](const Group& world) {
    const Group g = group_on_hosts(world, {0, 0, 1, 1}, "hosts");
    std::vector<Tensors> inputs(1);
    for (int to = 0; to < 4; ++to) inputs[0].push_back(at::ones({50'000}));
    if (g->getRank() == 3) {  // as much in all
      inputs[0][0] = at::ones({49'999});
      inputs[0][1] = at::ones({50'001});
    }
    Tensors outputs{at::zeros({50'000})};
    EXPECT_THAT(error_text_of_any_rank<c10::DistBackendError>([&] { g->reduce_scatter(outputs, inputs)->wait(); }),
                ::testing::AnyOf(HasSubstr("rank 0 gives 200000 bytes for rank 0 where rank 3 gives 199996"),
                                 HasSubstr("rank 3 gives 199996 bytes where rank 0 expects 200000"),
                                 HasSubstr("rank 3 gives 200004 bytes where rank 1 expects 200000")));
  });
}

/// Of six hosts what one lane passes on for all of them is several messages.
void expect_bits_of_one_host_on_six(const std::string& wire) {
  const std::vector<int> host_of{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5};
  run_ranks(int(host_of.size()), [&](const Group& world) {
    const Group g = group_on_hosts(world, host_of, "ranks",
                                   [&](const shm::ConnectArgs& args) { return testing::connected_wire(args, wire); });
    const Group one_host = sibling(world, "shm");
    const auto pieces = [&](const Group& on) {
      std::vector<Tensors> inputs(1);
      for (int to = 0; to < 12; ++to) inputs[0].push_back(rough({100'000}, g->getRank() * 12 + to, at::kFloat));
      Tensors outputs{at::zeros({100'000})};
      on->reduce_scatter(outputs, inputs)->wait();
      return outputs[0];
    };
    expect_bits(pieces(g), pieces(one_host), wire);
    barrier(g);
  });
}

TEST(HierarchicalOrders, OfRanksOnSixHostsHasTheBitsOfOneHost) {
  expect_bits_of_one_host_on_six("threads");
}

TEST(HierarchicalOrders, OfRanksOnSixHostsHasTheBitsOfOneHostOverGloo) {
  expect_bits_of_one_host_on_six("gloo");
}

#ifdef SERRIED_WITH_UCX
TEST(HierarchicalOrders, OfRanksOnSixHostsHasTheBitsOfOneHostOverUcx) {
  expect_bits_of_one_host_on_six("ucx");
}
#endif

/// Counts the bytes that leave its host.
class CountingWire final : public testing::WireAround {
 public:
  CountingWire(std::unique_ptr<net::Wire> wire, std::atomic<int64_t>& bytes)
      : WireAround(std::move(wire)), bytes_(bytes) {}

  void send(net::Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) override {
    bytes_ += int64_t(bytes);
    WireAround::send(transfer, peer, tag, data, bytes);
  }

 private:
  std::atomic<int64_t>& bytes_;
};

/// The most that leaves a host in `call`, of its bytes, rounded to quarters: envelopes are small beside them.
double most_out_of_a_host(const std::vector<int>& host_of, const std::string& order, int64_t bytes,
                          const std::function<void(const Group&)>& call) {
  std::array<std::atomic<int64_t>, 8> sent{};
  run_ranks(int(host_of.size()), [&](const Group& world) {
    std::atomic<int64_t>& mine = sent[size_t(host_of[size_t(world->getRank())])];
    const Group g = group_on_hosts(world, host_of, order, [&](const shm::ConnectArgs& args) {
      return std::make_unique<CountingWire>(testing::connected_thread_wire(args), mine);
    });
    call(g);
    barrier(g);
  });
  int64_t most = 0;
  for (const auto& each : sent) most = std::max(most, each.load());
  return std::round(double(most) / double(bytes) * 100) / 100;
}

TEST(HierarchicalOrders, AsFewBytesAsCanBeLeaveAHost) {
  constexpr int64_t kElements = 6 * 100'000, kBytes = kElements * 4;
  const auto all = [](const Group& g) { all_reduce_(at::ones({kElements}), g); };
  const auto scatter = [](const Group& g) { reduce_scatter(at::ones({kElements}), g); };
  const auto to_root = [](const Group& g) {
    Tensors tensors{at::ones({kElements})};
    g->reduce(tensors)->wait();
  };
  const auto to_last = [](const Group& g) {
    Tensors tensors{at::ones({kElements})};
    c10d::ReduceOptions options;
    options.rootRank = g->getSize() - 1;
    g->reduce(tensors, options)->wait();
  };
  const auto most = [&](const std::vector<int>& host_of, const auto& call) {
    return most_out_of_a_host(host_of, "hosts", kBytes, call);
  };
  const double kSlack = 0.02;
  const std::vector<int> two_by_two{0, 0, 1, 1}, uneven{0, 0, 0, 1}, mixed{0, 1, 0, 1}, three{0, 0, 1, 1, 2, 2};
  for (const std::vector<int>& host_of : {two_by_two, uneven, mixed}) {
    EXPECT_NEAR(most(host_of, all), 1.0, kSlack);
    EXPECT_NEAR(most(host_of, to_root), 1.0, kSlack);
  }
  EXPECT_NEAR(most(three, all), 2 * 2.0 / 3, kSlack);
  EXPECT_NEAR(most(two_by_two, scatter), 1.0 / 2, kSlack);
  EXPECT_NEAR(most(mixed, scatter), 1.0 / 2, kSlack);
  EXPECT_NEAR(most(uneven, scatter), 3.0 / 4, kSlack);  // the host of one rank sends what the other three get
  EXPECT_NEAR(most(three, scatter), 2.0 / 3, kSlack);
  const std::vector<int> two_by_three{0, 0, 0, 1, 1, 1};
  for (const auto& call : std::vector<std::function<void(const Group&)>>{all, scatter, to_root, to_last}) {
    EXPECT_NEAR(most_out_of_a_host(two_by_three, "ranks", kBytes, call), 1.0, kSlack);
    EXPECT_LT(most_out_of_a_host(three, "ranks", kBytes, call), 2.0 + kSlack);
  }
}

TEST(HierarchicalOrders, ABroadcastLeavesEveryHostOnceAtMost) {
  constexpr int64_t kElements = 500'000;
  for (const int root : {0, 3}) {
    EXPECT_NEAR(most_out_of_a_host({0, 0, 1, 1, 2, 2, 3}, "ranks", kElements * 4,
                                   [&](const Group& g) {
                                     at::Tensor x = at::full({kElements}, double(g->getRank()));
                                     broadcast_(x, g, {.src = root});
                                     EXPECT_TRUE(x.eq(root).all().item<bool>());
                                   }),
                1.0, 0.02);
  }
}

TEST(HierarchicalOrders, OfAPartIsItsOwn) {
  const testing::HostLayoutBackends layouts;
  run_ranks(5, [&](const Group& world) {
    for (const std::string order : {"", "hosts"}) {
      const Group g = new_group("hierarchical_pairs", {.timeout = 60s,
                                                       .store = world->getStore(),
                                                       .rank = world->getRank(),
                                                       .world_size = 5,
                                                       .backend_options = {{"order", order}}});
      const Group part = split_group(g, {{0, 1, 2, 3}, {4}});
      if (world->getRank() == 4) continue;
      const Tensors xs = roughs({9001}, 4, at::kFloat);
      at::Tensor mine = xs[size_t(world->getRank())].clone();
      reduce_everywhere(part, mine, ReduceOp::SUM);
      const HostRanks hosts = order.empty() ? HostRanks{{0, 1, 2, 3}} : HostRanks{{0, 1}, {2, 3}};
      expect_bits(mine, by_hosts(xs, hosts, ReduceOp::SUM), order);
    }
  });
}

}  // namespace
}  // namespace serried
