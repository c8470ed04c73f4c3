// Every backend moves alike: gathers, scatters and exchanges of every dtype through c10d's own methods.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::expect_equal;
using testing::kAllDtypes;
using testing::sample;
using testing::samples;
using testing::sibling;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class ConformanceMoves : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, ConformanceMoves, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

// What to move: every dtype small, float across stages.
struct Load {
  at::ScalarType dtype;
  int64_t size;
};

// gloo: broadcasts complex numbers, but neither gathers nor exchanges them; carries no i16 at all.
bool refuses(const std::string& backend, const std::string& move, at::ScalarType dtype) {
  if (backend != "gloo") return false;
  return dtype == at::kShort || (at::isComplexType(dtype) && move != "broadcast");
}

std::vector<Load> loads(const std::string& backend, const std::string& move) {
  std::vector<Load> all;
  for (at::ScalarType dtype : kAllDtypes) {
    if (!refuses(backend, move, dtype)) all.push_back({dtype, 17});
  }
  for (int64_t size : {0, 1, 1000, 70001}) all.push_back({at::kFloat, size});
  return all;
}

std::string label(const Load& load) {
  return c10::str(c10::toString(load.dtype), " x ", load.size);
}

Tensors blanks(const Load& load, int count) {
  Tensors all;
  for (int i = 0; i < count; ++i) all.push_back(at::ones({load.size}, load.dtype));
  return all;
}

void expect_all_equal(const Tensors& actual, const Tensors& expected, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str(what, ", piece ", i));
}

TEST_P(ConformanceMoves, BroadcastFromEveryRoot) {
  on_ranks([&](const Group& g) {
    for (const Load& load : loads(GetParam().backend, "broadcast")) {
      for (int root = 0; root < g->getSize(); ++root) {
        Tensors tensors{sample({load.size}, g->getRank(), load.dtype)};
        c10d::BroadcastOptions options;
        options.rootRank = root;
        g->broadcast(tensors, options)->wait();
        expect_equal(tensors[0], sample({load.size}, root, load.dtype), label(load));
      }
    }
  });
}

TEST_P(ConformanceMoves, AllGatherInEveryForm) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    for (const Load& load : loads(GetParam().backend, "all_gather")) {
      const Tensors xs = samples({load.size}, n, load.dtype), ys = samples({load.size}, n, load.dtype, 3);
      Tensors inputs{xs[g->getRank()].clone()};
      TensorLists outputs{blanks(load, n)};
      g->allgather(outputs, inputs)->wait();
      expect_all_equal(outputs[0], xs, label(load));

      at::Tensor flat = at::ones({n * load.size}, load.dtype);
      g->all_gather_single(flat, inputs[0])->wait();
      expect_equal(flat, at::cat(xs), label(load) + ", flat");

      Tensors both{xs[g->getRank()].clone(), ys[g->getRank()].clone()};
      Tensors flats{at::ones({n * load.size}, load.dtype), at::ones({n * load.size}, load.dtype)};
      g->all_gather_single_coalesced(flats, both)->wait();
      expect_all_equal(flats, {at::cat(xs), at::cat(ys)}, label(load) + ", flat coalesced");

      TensorLists lists;
      for (int rank = 0; rank < n; ++rank) lists.push_back(blanks(load, 2));
      g->allgather_coalesced(lists, both)->wait();
      for (int rank = 0; rank < n; ++rank)
        expect_all_equal(lists[rank], {xs[rank], ys[rank]}, label(load) + ", coalesced");
    }
  });
}

TEST_P(ConformanceMoves, GatherAndScatterWithEveryRoot) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    for (const Load& load : loads(GetParam().backend, "gather")) {
      const Tensors xs = samples({load.size}, n, load.dtype);
      for (int root = 0; root < n; ++root) {
        const bool is_root = root == g->getRank();
        Tensors inputs{xs[g->getRank()].clone()};
        TensorLists outputs;
        if (is_root) outputs.push_back(blanks(load, n));
        c10d::GatherOptions gather;
        gather.rootRank = root;
        g->gather(outputs, inputs, gather)->wait();
        if (is_root) expect_all_equal(outputs[0], xs, label(load) + ", gather");

        Tensors received = blanks(load, 1);
        TensorLists sent;
        if (is_root) sent.push_back(xs);
        c10d::ScatterOptions scatter;
        scatter.rootRank = root;
        g->scatter(received, sent, scatter)->wait();
        expect_equal(received[0], xs[g->getRank()], label(load) + ", scatter");
      }
    }
  });
}

TEST_P(ConformanceMoves, AllToAllInEveryForm) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    for (const Load& load : loads(GetParam().backend, "all_to_all")) {
      Tensors inputs, expected;
      for (int peer = 0; peer < n; ++peer) {
        inputs.push_back(sample({load.size}, me, load.dtype, peer));
        expected.push_back(sample({load.size}, peer, load.dtype, me));
      }
      Tensors outputs = blanks(load, n);
      g->alltoall(outputs, inputs)->wait();
      expect_all_equal(outputs, expected, label(load));

      at::Tensor from = at::cat(inputs), to = at::ones_like(from);
      std::vector<int64_t> none_out, none_in;
      g->all_to_all_single(to, from, none_out, none_in)->wait();
      expect_equal(to, at::cat(expected), label(load) + ", flat");
    }
  });
}

TEST_P(ConformanceMoves, AllToAllWithSplitSizes) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize(), me = g->getRank();
    for (int64_t scale : {1, 4001}) {
      const auto rows = [&](int from, int to) { return ((from + 2 * to) % 3) * scale; };
      std::vector<int64_t> in_sizes, out_sizes;
      Tensors inputs, expected;
      for (int peer = 0; peer < n; ++peer) {
        in_sizes.push_back(rows(me, peer));
        out_sizes.push_back(rows(peer, me));
        inputs.push_back(sample({rows(me, peer), 3}, me, at::kDouble, peer));
        expected.push_back(sample({rows(peer, me), 3}, peer, at::kDouble, me));
      }
      at::Tensor from = at::cat(inputs), to = at::ones_like(at::cat(expected));
      g->all_to_all_single(to, from, out_sizes, in_sizes)->wait();
      expect_equal(to, at::cat(expected));
    }
  });
}

// The other half of the table, the same for every world size.
class ConformanceMoveRefusals : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, ConformanceMoveRefusals, ::testing::ValuesIn(testing::settings({2})), testing::name_of);

TEST_P(ConformanceMoveRefusals, WhatIsNotCarriedIsRefusedOnEveryRank) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    for (at::ScalarType dtype : kAllDtypes) {
      const at::Tensor x = sample({n}, g->getRank(), dtype);
      const std::map<std::string, std::function<void(const Group&)>> moves = {
          {"broadcast",
           [&](const Group& spent) {
             Tensors tensors{x};
             spent->broadcast(tensors)->wait();
           }},
          {"all_gather",
           [&](const Group& spent) {
             at::Tensor input = x, output = at::zeros({n * n}, dtype);
             spent->all_gather_single(output, input)->wait();
           }},
          {"gather",
           [&](const Group& spent) {
             Tensors inputs{x};
             TensorLists outputs;
             if (g->getRank() == 0) outputs.push_back(blanks({dtype, n}, n));
             spent->gather(outputs, inputs)->wait();
           }},
          {"all_to_all", [&](const Group& spent) {
             at::Tensor input = x, output = at::zeros({n}, dtype);
             std::vector<int64_t> none_out, none_in;
             spent->all_to_all_single(output, input, none_out, none_in)->wait();
           }}};
      for (const auto& [name, move] : moves) {
        if (!refuses(GetParam().backend, name, dtype)) continue;
        // Gloo finds out on its own thread, which ends the group: it gets one to spend.
        EXPECT_ANY_THROW(move(sibling(g, GetParam().backend))) << name << " of " << c10::toString(dtype);
      }
    }
  });
}

// Runs `call` on tensors that are not contiguous; true if it was refused.
bool refused(const std::function<WorkPtr()>& call) {
  try {
    call()->wait();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

// gloo: refuses them; ours write through them. Nobody writes beside them.
TEST_P(ConformanceMoves, NonContiguousTensorsAreHandledOrRefused) {
  on_ranks([&](const Group& g) {
    const bool refuse = is("gloo");
    const auto strided = [](int rank) { return sample({4, 6}, rank).t().slice(0, 0, 6, 2); };
    at::Tensor sum = strided(0).contiguous();
    for (int rank = 1; rank < g->getSize(); ++rank) sum = sum + strided(rank);

    Tensors tensors{strided(g->getRank())};
    EXPECT_EQ(refused([&] { return g->broadcast(tensors); }), refuse);
    if (!refuse) expect_equal(tensors[0].contiguous(), strided(0).contiguous(), "broadcast");

    tensors = {strided(g->getRank())};
    EXPECT_EQ(refused([&] { return g->allreduce(tensors); }), refuse);
    if (!refuse) expect_equal(tensors[0].contiguous(), sum, "all_reduce");
  });
}

TEST_P(ConformanceMoves, NonContiguousPiecesAreGathered) {
  on_ranks([&](const Group& g) {
    const auto strided = [](int rank) { return sample({4, 6}, rank).t().slice(0, 0, 6, 2); };
    const Group spent = sibling(g, GetParam().backend);
    Tensors inputs{strided(g->getRank())};
    TensorLists outputs{Tensors()};
    for (int rank = 0; rank < g->getSize(); ++rank) outputs[0].push_back(at::zeros({4, 3}).t());
    if (refused([&] { return spent->allgather(outputs, inputs); })) {
      EXPECT_TRUE(is("gloo"));
      return;
    }
    for (int rank = 0; rank < g->getSize(); ++rank) {
      expect_equal(outputs[0][rank].contiguous(), strided(rank).contiguous(), "all_gather");
    }
  });
}

}  // namespace
}  // namespace serried
