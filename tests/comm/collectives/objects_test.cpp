// Values of any type between ranks.
#include "serried/comm/collectives/objects.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_equal;

class Objects : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, Objects, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

/// `value(rank)` of every rank comes everywhere, and of each rank by broadcast.
template <class Value>
void expect_to_travel(const Group& g, const Value& value) {
  using T = std::invoke_result_t<Value, int>;
  std::vector<T> all;
  for (int rank = 0; rank < g->getSize(); ++rank) all.push_back(value(rank));
  EXPECT_EQ(all_gather_object(value(g->getRank()), g), all);
  for (int src = 0; src < g->getSize(); ++src) {
    EXPECT_EQ(broadcast_object(value(g->getRank()), g, {.src = src}), value(src));
  }
}

enum class Colour : uint8_t { red, green, blue, white };

TEST_P(Objects, TextsNumbersAndContainersOfThem) {
  on_ranks([](const Group& g) {
    expect_to_travel(g, [](int r) { return std::string(size_t(r) * 1000, char('a' + r)) + std::string("\0\xff", 2); });
    expect_to_travel(g, [](int r) { return r % 2 == 0; });
    expect_to_travel(g, [](int r) { return std::numeric_limits<uint64_t>::max() - uint64_t(r); });
    expect_to_travel(g, [](int r) { return std::numeric_limits<int64_t>::min() + r; });
    expect_to_travel(g, [](int r) { return 0.1f * float(r); });
    expect_to_travel(g, [](int r) { return std::numeric_limits<double>::denorm_min() * r; });
    expect_to_travel(g, [](int r) { return Colour(r); });
    expect_to_travel(g, [](int r) { return std::vector<int>(size_t(r), -r); });
    expect_to_travel(g, [](int r) { return std::vector<double>{0.1 * r, 1e300}; });
    expect_to_travel(g, [](int r) { return std::vector<bool>{true, r == 1}; });
    expect_to_travel(g, [](int r) { return std::vector<std::string>(size_t(r), "text"); });
    expect_to_travel(g, [](int r) { return std::map<std::string, std::vector<float>>{{"a", {float(r)}}, {"b", {}}}; });
    expect_to_travel(g, [](int r) { return r == 0 ? std::nullopt : std::optional<int>(r); });
    expect_to_travel(g, [](int r) { return std::tuple<int, std::string, double>{r, "x", 0.5 * r}; });
    expect_to_travel(g, [](int r) { return std::pair<int, bool>{r, true}; });
    expect_to_travel(g, [](int r) { return std::array<int, 3>{r, 2, 3}; });
    expect_to_travel(g, [](int r) { return std::set<int>{r, r + 2}; });
    EXPECT_EQ(all_gather_object("literal", g), std::vector<std::string>(size_t(g->getSize()), "literal"));
    EXPECT_EQ(broadcast_object("literal", g), "literal");
  });
}

TEST_P(Objects, TensorsOfAnySizeAndDtype) {
  on_ranks([](const Group& g) {
    for (const at::ScalarType dtype : testing::kAllDtypes) {
      const auto value = [&](int rank) { return testing::sample({rank, 3}, rank, dtype); };
      const std::vector<at::Tensor> all = all_gather_object(value(g->getRank()), g);
      ASSERT_EQ(all.size(), size_t(g->getSize()));
      for (int rank = 0; rank < g->getSize(); ++rank) {
        expect_equal(all[size_t(rank)], value(rank));
        expect_equal(broadcast_object(value(g->getRank()), g, {.src = rank}), value(rank));
      }
    }
    // A parameter comes as its values, a view as itself without its base, and nothing as nothing.
    const at::Tensor leaf = at::ones({2}).requires_grad_();
    EXPECT_FALSE((broadcast_object(leaf * 2, g)).requires_grad());
    expect_equal(broadcast_object(at::arange(6).view({2, 3}).t(), g), at::arange(6).view({2, 3}).t());
    EXPECT_FALSE(broadcast_object(at::Tensor(), g).defined());
  });
}

struct Metrics {
  at::Tensor loss;
  std::string name;
  int count = 0;

  template <class F>
  void visit_tensors(F& fn) {
    fn(loss);
    fn(name);
    fn(count);
  }
};

struct Archived {
  int64_t number = 0;
};

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const Archived& value) {
  archive.write("number", c10::IValue(value.number));
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, Archived& value) {
  c10::IValue number;
  archive.read("number", number);
  value.number = number.toInt();
  return archive;
}

TEST_P(Objects, StructsWithAVisitorOrAnArchive) {
  on_ranks([](const Group& g) {
    const int me = g->getRank();
    const auto all = all_gather_object(Metrics{at::full({2}, me), "rank " + std::to_string(me), me}, g);
    const auto archived = all_gather_object(std::vector<Archived>{{me}, {-me}}, g);
    for (int rank = 0; rank < g->getSize(); ++rank) {
      expect_equal(all[size_t(rank)].loss, at::full({2}, rank));
      EXPECT_EQ(all[size_t(rank)].name, "rank " + std::to_string(rank));
      EXPECT_EQ(all[size_t(rank)].count, rank);
      EXPECT_EQ(archived[size_t(rank)][0].number, rank);
      EXPECT_EQ(archived[size_t(rank)][1].number, -rank);
    }
  });
}

struct Defaults {
  std::vector<std::string> names = {"a"};
  std::map<std::string, double> rates = {{"lr", 0.1}};
  std::optional<int> limit = 3;

  template <class F>
  void visit_tensors(F& fn) {
    fn(names);
    fn(rates);
    fn(limit);
  }
};

TEST_P(Objects, NothingIsLeftOfWhatATypeHoldsByDefault) {
  on_ranks([](const Group& g) {
    const Defaults heard = broadcast_object(Defaults{{"b"}, {{"lr", 0.5}}, std::nullopt}, g);
    EXPECT_EQ(heard.names, std::vector<std::string>{"b"});
    EXPECT_EQ(heard.rates, (std::map<std::string, double>{{"lr", 0.5}}));
    EXPECT_EQ(heard.limit, std::nullopt);
  });
}

struct Unsendable {};

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive, const Unsendable&) {
  throw std::runtime_error("cannot be sent");
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive, Unsendable&) {
  return archive;
}

TEST_P(Objects, AnotherTypeOnAnotherRankIsRefused) {
  if (world_size() == 1) return on_ranks([](const Group& g) { EXPECT_EQ(broadcast_object(7, g), 7); });
  on_ranks([](const Group& g) {
    if (g->getRank() == 0) {
      // The others pass what cannot even be sent: it is not read.
      EXPECT_EQ(broadcast_object(7, g), 7);
      EXPECT_EQ(broadcast_object(std::vector<int32_t>{1, 2, 3}, g).size(), 3u);
      EXPECT_EQ(broadcast_object(std::vector<int64_t>{1}, g).size(), 1u);
      return;
    }
    EXPECT_ANY_THROW(broadcast_object(Unsendable(), g));
    EXPECT_THAT(error_text<c10::ValueError>([&] { broadcast_object(std::vector<int64_t>(), g); }),
                ::testing::StartsWith("[broadcast_object] rank 0 passes std::vector<int, "));
    EXPECT_THAT(error_text<c10::ValueError>([&] { broadcast_object(std::string(), g); }),
                ::testing::HasSubstr(">\n  fix: pass values of one type on all ranks"));
  });
}

// Numbers would be cut to fit.
TEST_P(Objects, AnotherTypeOfNumberOnAnotherRankIsRefused) {
  if (world_size() == 1) return on_ranks([](const Group& g) { EXPECT_EQ(broadcast_object(1L << 40, g), 1L << 40); });
  on_ranks([](const Group& g) {
    const std::string fix = "\n  fix: pass values of one type on all ranks";
    if (g->getRank() == 0) {
      EXPECT_EQ(broadcast_object(1L << 40, g), 1L << 40);
      EXPECT_EQ(broadcast_object(1e300, g), 1e300);
      EXPECT_THAT(error_text<c10::ValueError>([&] { all_gather_object(7L, g); }),
                  ::testing::StartsWith("[all_gather_object] rank 1 passes double, this rank long" + fix));
      return;
    }
    EXPECT_THAT(error_text<c10::ValueError>([&] { broadcast_object(1, g); }),
                ::testing::StartsWith("[broadcast_object] rank 0 passes long, this rank int" + fix));
    EXPECT_THAT(error_text<c10::ValueError>([&] { broadcast_object(7.0F, g); }),
                ::testing::StartsWith("[broadcast_object] rank 0 passes double, this rank float" + fix));
    EXPECT_THAT(error_text<c10::ValueError>([&] { all_gather_object(7.0, g); }),
                ::testing::StartsWith("[all_gather_object] rank 0 passes long, this rank double" + fix));
  });
}

TEST_P(Objects, WrongArgumentsAreNamed) {
  on_ranks([](const Group& g) {
    EXPECT_THAT(error_text<c10::ValueError>([&] { broadcast_object(1, g, {.src = 7}); }),
                ::testing::StartsWith("[broadcast_object] "));
    EXPECT_THAT(error_text<c10::ValueError>([] { all_gather_object(1, Group()); }),
                ::testing::StartsWith("[all_gather_object] "));
  });
}

}  // namespace
}  // namespace serried
