// Collectives whose sizes other ranks decide, in captured functions: right, or refused on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/tensor/dtensor.h"
#include "tests/comm/backends/gloo_ranks.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"
#include "tests/support/two_hosts.h"

namespace serried {
namespace {

using ::testing::AllOf;
using testing::error_text;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::OnRanks;
using Tensors = std::vector<at::Tensor>;

constexpr const char* kFix =
    "fix: change the shapes that a captured function is called with on all ranks at once: its graph counts on what the "
    "other ranks hold, and a rank sees only its own; or leave such calls (gather, scatter, all_gather, all_to_all) "
    "outside of it";
// The rank that finds it first says how to mend it; those that come later, that the group has failed.
const auto kSaysHow = ::testing::AnyOf(
    HasSubstr(kFix),
    AllOf(HasSubstr("group is unusable since: "), HasSubstr("fix: make a new group; the failure above came first")));

at::Tensor joined(const Tensors& parts) {
  Tensors rows;
  for (const at::Tensor& part : parts) rows.push_back((part * 2).reshape({-1}));
  return at::cat(rows);
}

Tensors list_of_root(const at::Tensor& x, const Group& g) {
  return g->getRank() == 0 ? x.tensor_split(g->getSize()) : Tensors();
}

at::Tensor gradient(const at::Tensor& x, const std::function<at::Tensor(const at::Tensor&)>& fn) {
  const at::Tensor leaf = x.detach().clone().requires_grad_();
  fn(leaf).square().sum().backward();
  return leaf.grad();
}

struct SizedCall {
  const char* name;
  std::function<at::Tensor(const at::Tensor&, const Group&)> run;
};

// Each takes tensors of any number of rows.
std::vector<SizedCall> sized_calls() {
  return {
      {"gather", [](const at::Tensor& x, const Group& g) { return joined(gather(x, g)); }},
      {"scatter", [](const at::Tensor& x, const Group& g) { return scatter(list_of_root(x, g), g) * 2; }},
      {"all_gather", [](const at::Tensor& x, const Group& g) { return all_gather(x, g) * 2; }},
      {"all_to_all", [](const at::Tensor& x, const Group& g) { return all_to_all(x, g) * 2; }},
      {"turned all_to_all",
       [](const at::Tensor& x, const Group& g) { return all_to_all(x, g, {.split_dim = 1, .concat_dim = 0}) * 2; }},
      {"reduce_scatter", [](const at::Tensor& x, const Group& g) { return reduce_scatter(x, g) * 2; }},
      {"async gather", [](const at::Tensor& x, const Group& g) { return joined(async::gather(x, g).wait()); }},
      {"async scatter",
       [](const at::Tensor& x, const Group& g) { return async::scatter(list_of_root(x, g), g).wait() * 2; }},
      {"async all_gather", [](const at::Tensor& x, const Group& g) { return async::all_gather(x, g).wait() * 2; }},
      {"async all_to_all", [](const at::Tensor& x, const Group& g) { return async::all_to_all(x, g).wait() * 2; }},
      {"gradient of gather",
       [](const at::Tensor& x, const Group& g) {
         return gradient(x, [&](const at::Tensor& leaf) { return joined(gather(leaf, g)); });
       }},
      {"gradient of all_gather",
       [](const at::Tensor& x, const Group& g) {
         return gradient(x, [&](const at::Tensor& leaf) { return all_gather(leaf, g); });
       }},
      {"gradient of all_to_all",
       [](const at::Tensor& x, const Group& g) {
         return gradient(x, [&](const at::Tensor& leaf) { return all_to_all(leaf, g); });
       }},
  };
}

at::Tensor rows(int64_t count, const Group& g) {
  return at::arange(double(count * 3)).reshape({count, 3}) + 100 * (g->getRank() + 1);
}

class SizesOfOthers : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, SizesOfOthers, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

TEST_P(SizesOfOthers, AreRightWhereAllRanksChangeThemTogether) {
  for (const SizedCall& call : sized_calls()) {
    on_ranks([&](const Group& g) {
      auto captured = capture([&](const at::Tensor& x) { return call.run(x, g); });
      for (const int64_t size : {4, 4, 4, 4, 7, 7, 7, 7, 4, 7}) {
        const at::Tensor x = rows(size, g);
        expect_equal(captured(x), call.run(x, g), call.name);
      }
      EXPECT_GE(captured.replays(), 4) << call.name;
    });
  }
}

// Every rank has a graph for its own shape, but they were recorded with other shapes of the others.
TEST_P(SizesOfOthers, AreRefusedOnEveryRankWhereGraphsOfDifferentSizesMeet) {
  for (const SizedCall& call : sized_calls()) {
    on_ranks([&](const Group& g) {
      auto captured = capture([&](const at::Tensor& x) { return call.run(x, g); });
      for (const int64_t size : {4, 4, 4, 4, 7, 7, 7, 7}) captured(rows(size, g));
      const int64_t replays = captured.replays();
      const at::Tensor x = rows(g->getRank() == 0 ? 4 : 7, g);
      const std::string text = error_text<c10::DistBackendError>([&] { captured(x); });
      EXPECT_THAT(text, AllOf(HasSubstr("ranks called different collectives: rank 0 "), kSaysHow)) << call.name;
      EXPECT_THAT(text, HasSubstr("; they count on different sizes of all ranks; rank 0 replays a captured function, "
                                  "rank "))
          << call.name;
      EXPECT_EQ(captured.replays(), replays) << call.name;
    });
  }
}

TEST_P(SizesOfOthers, AreRefusedOnEveryRankWhereOneRecordsAndOthersReplay) {
  for (const SizedCall& call : sized_calls()) {
    if (std::string(call.name) == "reduce_scatter") continue;  // of shapes that have to be alike anyway
    on_ranks([&](const Group& g) {
      auto captured = capture([&](const at::Tensor& x) { return call.run(x, g); });
      for (int i = 0; i < 4; ++i) captured(rows(4, g));
      const at::Tensor x = rows(g->getRank() == 0 ? 7 : 4, g);
      const std::string text = error_text<c10::DistBackendError>([&] { captured(x); });
      EXPECT_THAT(text, AllOf(HasSubstr("ranks called different collectives: rank 0 "), kSaysHow)) << call.name;
      EXPECT_THAT(text, HasSubstr("; rank 0 records a captured function, rank ")) << call.name;
      EXPECT_THAT(text, HasSubstr(" replays a captured function")) << call.name;
    });
  }
}

// What is asked for sizes reads as an all_gather of as many numbers.
TEST_P(SizesOfOthers, AreNotTakenForTheQuestionForThem) {
  on_ranks([&](const Group& g) {
    auto captured = capture([&](const at::Tensor& x) { return all_gather(x, g) * 2; });
    const at::Tensor x = at::arange(17);
    for (int i = 0; i < 4; ++i) captured(x);
    const std::string text =
        error_text<c10::DistBackendError>([&] { captured(g->getRank() == 0 ? at::arange(18) : x); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 records a captured function"), kSaysHow));
  });
}

// As many elements in another shape: nothing would go wrong on the way.
TEST_P(SizesOfOthers, AreRefusedWhereOnlyShapesDiffer) {
  for (const SizedCall& call : sized_calls()) {
    if (std::string(call.name).find("gather") == std::string::npos) continue;
    on_ranks([&](const Group& g) {
      auto captured = capture([&](const at::Tensor& x) { return call.run(x, g); });
      const at::Tensor wide = rows(2, g), high = wide.reshape({3, 2}).clone();
      for (int i = 0; i < 4; ++i) captured(wide);
      for (int i = 0; i < 4; ++i) captured(high);
      const std::string text = error_text<c10::DistBackendError>([&] { captured(g->getRank() == 0 ? wide : high); });
      EXPECT_THAT(text, AllOf(HasSubstr("they count on different sizes of all ranks"), kSaysHow)) << call.name;
    });
  }
}

TEST_P(SizesOfOthers, OfDTensorsAreRefusedWhereGraphsOfDifferentSizesMeet) {
  on_ranks([&](const Group& g) {
    const DeviceMesh mesh = init_device_mesh("cpu", {g->getSize()}, {"x"}, {.group = g});
    const at::Tensor small = distribute_tensor(at::ones({5, 4}), mesh, {Shard(0)});
    const at::Tensor large = distribute_tensor(at::ones({7, 4}), mesh, {Shard(0)});
    auto captured = capture([&](const at::Tensor& x) { return DTensor(x).redistribute({Shard(1)}).to_local() * 2; });
    for (int i = 0; i < 4; ++i) captured(small);
    for (int i = 0; i < 4; ++i) captured(large);
    const std::string text = error_text<c10::DistBackendError>([&] { captured(g->getRank() == 0 ? small : large); });
    EXPECT_THAT(text, AllOf(HasSubstr("rank 0 replays a captured function"), kSaysHow));
  });
}

using RankFn = std::function<void(int rank, const Group& group)>;

void expect_quiet_over_hosts(const RankFn& fn) {
  const auto store = c10::make_intrusive<testing::TwoHosts>();
  const std::string name = gloo_test::unique_name();
  const std::vector<std::string> errors = gloo_test::on_threads(2, [&](int rank) {
    fn(rank, gloo_test::make(store, rank, 2, name, std::chrono::seconds(30), {{"interface", "lo"}}));
  });
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(SizesOfOthersOverHosts, AreReplayedWhileTheyStay) {
  for (const SizedCall& call : sized_calls()) {
    expect_quiet_over_hosts([&](int, const Group& g) {
      auto captured = capture([&](const at::Tensor& x) { return call.run(x, g); });
      const at::Tensor x = rows(7, g);
      const at::Tensor expected = call.run(x, g);
      for (int i = 0; i < 4; ++i) expect_equal(captured(x), expected, call.name);
      EXPECT_GE(captured.replays(), 1) << call.name;
    });
  }
}

TEST(SizesOfOthersOverHosts, AreRefusedWhereGraphsOfDifferentSizesMeet) {
  expect_quiet_over_hosts([&](int rank, const Group& g) {
    auto captured = capture([&](const at::Tensor& x) { return all_gather(x, g) * 2; });
    const at::Tensor small = rows(3, g), large = rows(5, g);
    for (int i = 0; i < 4; ++i) captured(small);
    for (int i = 0; i < 4; ++i) captured(large);
    EXPECT_THAT(error_text<c10::DistBackendError>([&] { captured(rank == 0 ? small : large); }), kSaysHow);
  });
}

/// What somebody else may bring: c10d's calls, and no word about more.
class ForeignBackend : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  explicit ForeignBackend(const Group& inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(inner->getBackend(at::kCPU)), group_(inner) {}
  const std::string getBackendName() const override { return "foreign"; }
  Work _allgather_base(at::Tensor& to, at::Tensor& from, const c10d::AllgatherOptions& options) override {
    return inner_->_allgather_base(to, from, options);
  }
  Work allgather(std::vector<Tensors>& to, Tensors& from, const c10d::AllgatherOptions& options) override {
    return inner_->allgather(to, from, options);
  }
  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return inner_->broadcast(tensors, options);
  }
  Work alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
                     const c10d::AllToAllOptions& options) override {
    return inner_->alltoall_base(to, from, to_sizes, from_sizes, options);
  }

 private:
  const c10::intrusive_ptr<c10d::Backend> inner_;
  const Group group_;  // keeps the backend usable
};

// Nobody compares its calls before anything is sent.
TEST(SizesOfOthersOnAForeignBackend, AreRefusedByTheRecordingUnlessTheyAreAlike) {
  gloo_test::expect_quiet(gloo_test::on_ranks(2, [&](int rank, const Group& inner) {
    const Group g = c10::make_intrusive<c10d::ProcessGroup>(inner->getStore(), inner->getRank(), inner->getSize());
    g->setBackend(at::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, c10::make_intrusive<ForeignBackend>(inner));
    g->setGroupName(inner->getGroupName() + "/foreign");
    auto even = capture([&](const at::Tensor& x) { return all_gather(x, g) * 2; });
    for (int i = 0; i < 4; ++i) expect_equal(even(rows(4, g)), all_gather(rows(4, g), g) * 2, "even");
    EXPECT_GE(even.replays(), 1);
    auto uneven = capture([&](const at::Tensor& x) { return all_gather(x, g) * 2; });
    uneven(rows(3 + rank, g));
    const std::string text = error_text<c10::NotImplementedError>([&] { uneven(rows(3 + rank, g)); });
    EXPECT_THAT(text, HasSubstr("[all_gather] the graph of a captured function would count on what other ranks hold, "
                                "and the backend \"foreign\" of group \""));
    EXPECT_THAT(text, HasSubstr("\" does not compare that before it sends\n  fix: call it outside of the captured "
                                "function, or with all_gather_into, all_to_all_into or tensors of one size"));
  }));
}

}  // namespace
}  // namespace serried
