// Redistributions that are started only: what they give, when, in any order, and what they refuse.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <thread>

#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::all_placements;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using testing::iota;
using testing::on_mesh;
using testing::place;
using testing::usual_meshes;

std::string arrow(const Placements& from, const Placements& to) {
  return to_string(from) + " -> " + to_string(to);
}

// Moves `whole` between all placements of `mesh` and compares with the value and with the layout of the blocking form.
void expect_all_pairs(const at::Tensor& whole, const DeviceMesh& mesh) {
  const size_t axes = size_t(mesh.ndim());
  for (const Placements& from : all_placements(whole.dim(), axes, true)) {
    const DTensor d = place(whole, mesh, from);
    for (const Placements& to : all_placements(whole.dim(), axes, true)) {
      const DTensor moved(async::redistribute(d, to).wait());
      const DTensor expected = d.redistribute(to);
      EXPECT_EQ(moved.placements(), to) << arrow(from, to);
      EXPECT_EQ(moved.strides(), expected.strides()) << arrow(from, to);
      EXPECT_EQ(moved.to_local().strides(), expected.to_local().strides()) << arrow(from, to);
      expect_close(moved.full_tensor(), whole, arrow(from, to));
    }
  }
}

TEST(AsyncRedistribute, GivesTheValueForEveryPairOfPlacements) {
  for (const Sizes& shape : usual_meshes()) {
    for (const Sizes& sizes : {Sizes{5, 3}, Sizes{4, 8}, Sizes{2, 1}, Sizes{0, 3}}) {
      on_mesh(shape, [&](const DeviceMesh& mesh) { expect_all_pairs(iota(sizes) + 1, mesh); });
    }
  }
}

class AsyncRedistributes : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(On, AsyncRedistributes, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})),
                         testing::name_of);

TEST_P(AsyncRedistributes, GiveTheValueOnEveryBackend) {
  on_ranks([](const Group& group) {
    expect_all_pairs(iota({5, 3}) + 1, init_device_mesh("cpu", {group->getSize()}, {}, {.group = group}));
  });
}

// The scratch of the thread must not be shared between those on their way.
TEST_P(AsyncRedistributes, AreWaitedForInAnyOrderTwiceOrNever) {
  on_ranks([](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {}, {.group = group});
    const at::Tensor whole = iota({24, 36, 60});
    const std::vector<std::pair<Placement, Placement>> moves = {
        {Shard(1), Replicate()}, {Shard(2), Shard(1)}, {Shard(0), Replicate()}, {Shard(1), Shard(2)},
        {Partial(), Shard(1)},   {Shard(1), Shard(0)}, {Partial(), Replicate()}};
    for (size_t round = 0; round < 4; ++round) {
      std::vector<Pending> moving;
      for (size_t i = 0; i < moves.size(); ++i) {
        moving.push_back(async::redistribute(place(whole + double(i), mesh, {moves[i].first}), {moves[i].second}));
      }
      std::vector<std::pair<size_t, DTensor>> arrived;
      for (size_t k = 0; k < moves.size(); ++k) {
        const size_t i = (k * 5 + size_t(group->getRank()) * 3) % moves.size();
        if ((i + round) % 4 == 3) continue;
        arrived.emplace_back(i, DTensor(moving[i].wait()));
        EXPECT_TRUE(moving[i].ready());
        EXPECT_TRUE(moving[i].wait().is_same(arrived.back().second));
      }
      moving.clear();
      std::sort(arrived.begin(), arrived.end(), [](auto& a, auto& b) { return a.first < b.first; });
      for (const auto& [i, moved] : arrived) expect_close(moved.full_tensor(), whole + double(i), c10::str("move ", i));
    }
    barrier(group);
  });
}

// Backward communicates too, and must do so in the same order on all ranks.
TEST_P(AsyncRedistributes, HaveTheirGradientsInWhateverOrderRanksWait) {
  on_ranks([](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {}, {.group = group});
    const at::Tensor first = iota({8, 4}) + 1, second = iota({8, 4}) * 3 - 7;
    for (int round = 0; round < 8; ++round) {
      const DTensor a = distribute_tensor(first.clone().requires_grad_(), mesh, {Shard(0)});
      const DTensor b = distribute_tensor(second.clone().requires_grad_(), mesh, {Shard(0)});
      const Pending whole_a = async::redistribute(a, {Replicate()}), whole_b = async::redistribute(b, {Replicate()});
      if (group->getRank() % 2 == 1) whole_b.wait();
      (whole_a.wait() * whole_b.wait()).sum().backward();
      expect_close(DTensor(a.grad()).full_tensor(), second);
      expect_close(DTensor(b.grad()).full_tensor(), first);
    }
  });
}

TEST_P(AsyncRedistributes, ReturnBeforeOtherRanksCome) {
  for (const auto& [from, to] : std::vector<std::pair<Placement, Placement>>{{Shard(0), Replicate()},
                                                                             {Shard(1), Replicate()},
                                                                             {Partial(), Replicate()},
                                                                             {Partial(), Shard(1)},
                                                                             {Shard(0), Shard(1)}}) {
    std::atomic<bool> first_has_started = false;
    on_ranks([&, from = from, to = to](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {}, {.group = group});
      mesh.get_group();  // made before, with all ranks
      const DTensor d = place(iota({5, 3}), mesh, {from});
      while (group->getRank() > 0 && !first_has_started) std::this_thread::yield();
      const Pending moving = async::redistribute(d, {to});
      if (group->getRank() == 0 && group->getSize() > 1) EXPECT_FALSE(moving.ready()) << arrow({from}, {to});
      first_has_started = true;
      while (!moving.ready()) std::this_thread::yield();
      expect_close(DTensor(moving.wait()).full_tensor(), iota({5, 3}), arrow({from}, {to}));
    });
  }
}

TEST(AsyncRedistribute, PassesItsResultOnToThen) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({5, 3}), mesh, {Shard(0)});
    const Pending doubled = async::redistribute(d, {Replicate()}).then([](at::Tensor y) { return y * 2; });
    expect_equal(DTensor(doubled.wait()).to_local(), iota({5, 3}) * 2);
  });
}

TEST(AsyncRedistribute, TakesStridedCuts) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = iota({13, 3});
    for (const Placements& to : all_placements(2, 2, false)) {
      const DTensor d = distribute_tensor(whole, mesh, {StridedShard(0, 2), Shard(0)});
      expect_equal(DTensor(async::redistribute(d, to).wait()).full_tensor(), whole, to_string(to));
      const DTensor e = distribute_tensor(whole, mesh, to);
      const Placements strided = {StridedShard(0, 2), Shard(0)};
      expect_equal(DTensor(async::redistribute(e, strided).wait()).full_tensor(), whole, to_string(to));
    }
  });
}

TEST(AsyncRedistribute, ReducesByEveryKind) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const double rank = mesh.get_rank();
    const auto whole = [&](const Placements& from, const at::Tensor& part) {
      return DTensor(async::redistribute(DTensor::from_local(part, mesh, from), {Replicate(), Replicate()}).wait())
          .to_local();
    };
    expect_equal(whole({Partial("sum"), Partial("avg")}, iota({5}) + rank), iota({5}) * 2 + 3);
    expect_equal(whole({Partial("max"), Partial("max")}, iota({5}) + rank), iota({5}) + 3);
    expect_equal(whole({Partial("max"), Partial("max")}, at::full({3}, rank == 2)), at::full({3}, true));
    expect_equal(whole({Partial("min"), Replicate()}, at::full({3}, rank >= 2)), at::full({3}, false));
  });
}

TEST(AsyncRedistribute, MovesInTheForwardDtype) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({5, 3}) / 7, mesh, {Shard(0)});
    const at::Tensor half = async::redistribute(d, {Replicate()}, {.forward_dtype = at::kBFloat16}).wait();
    expect_equal(DTensor(half).to_local(), (iota({5, 3}) / 7).to(at::kBFloat16));
    const at::Tensor cast = async::redistribute(d, {Shard(0)}, {.forward_dtype = at::kFloat}).wait();
    EXPECT_EQ(cast.scalar_type(), at::kFloat);
  });
}

TEST(AsyncRedistribute, TheSamePlacementsAreTheSameTensor) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({5, 3}), mesh, {Shard(1)});
    const Pending same = async::redistribute(d, {Shard(-1)});
    EXPECT_TRUE(same.ready());
    EXPECT_TRUE(same.wait().is_same(d));
    EXPECT_TRUE(async::redistribute(d, mesh, {Shard(1)}).wait().is_same(d));
    EXPECT_TRUE(async::redistribute(distribute_tensor(iota({5, 3}), mesh), {Shard(1)}).ready()) << "a cut";
  });
}

TEST(AsyncRedistribute, HasTheGradientOfTheBlockingForm) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor weight = iota({5, 3}) / 8;
      for (const Placements& from : all_placements(2, shape.size(), false)) {
        for (const Placements& to : all_placements(2, shape.size(), false)) {
          const DTensor x = distribute_tensor(iota({5, 3}).requires_grad_(), mesh, from);
          const Pending moving = async::redistribute(x, to);
          const at::Tensor meanwhile = x * 3;
          (moving.wait() * moving.wait() * distribute_tensor(weight, mesh) + meanwhile).sum().backward();
          expect_close(DTensor(x.grad()).full_tensor(), iota({5, 3}) * weight * 2 + 3, arrow(from, to));
        }
      }
    });
  }
}

TEST(AsyncRedistribute, IsTwiceDifferentiableInADtypePerDirection) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(iota({5, 3}).requires_grad_(), mesh, {Shard(0)});
    const at::Tensor moved = async::redistribute(x, {Shard(1)}, {.backward_dtype = at::kFloat}).wait();
    const at::Tensor first = torch::autograd::grad({moved.pow(3).sum()}, {x}, {}, true, true)[0];
    expect_equal(DTensor(first).full_tensor(), iota({5, 3}).pow(2) * 3);
    first.sum().backward();
    expect_equal(DTensor(x.grad()).full_tensor(), iota({5, 3}) * 6);
  });
}

TEST(AsyncRedistribute, KeepsTheModesOfItsStart) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(iota({5, 3}).requires_grad_(), mesh, {Shard(0)});
    const Pending recorded = async::redistribute(x, {Shard(1)});
    const Pending unrecorded = [&] {
      const at::NoGradGuard no_grad;
      return async::redistribute(x, {Replicate()});
    }();
    at::Tensor result;
    std::thread([&] {
      const c10::InferenceMode inference;
      result = recorded.wait();
    }).join();
    EXPECT_FALSE(unrecorded.wait().requires_grad());
    result.sum().backward();
    expect_equal(DTensor(x.grad()).full_tensor(), at::ones({5, 3}, at::kDouble));
  });
}

TEST(AsyncRedistribute, MovesToAnotherMesh) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh line = init_device_mesh("cpu", {4}, {"all"}, {.group = group});
    const DeviceMesh grid = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    for (const Placements& from : all_placements(2, 1, true)) {
      for (const Placements& to : all_placements(2, 2, true)) {
        const DTensor d = place(iota({5, 6}), line, from);
        const DTensor moved(async::redistribute(d, grid, to).wait());
        EXPECT_TRUE(moved.device_mesh() == grid);
        EXPECT_EQ(moved.placements(), to);
        expect_close(moved.full_tensor(), iota({5, 6}), arrow(from, to));
      }
    }
    const DTensor x = distribute_tensor(iota({5, 6}).requires_grad_(), line, {Shard(0)});
    async::redistribute(x, grid, {Shard(1), Shard(0)}).wait().pow(2).sum().backward();
    expect_equal(DTensor(x.grad()).full_tensor(), iota({5, 6}) * 2);
  });
}

TEST(AsyncRedistribute, MovesToRanksOutsideOfItsMesh) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh all = init_device_mesh("cpu", {3}, {}, {.group = group});
    const DeviceMesh two = DeviceMesh("cpu", at::tensor({0, 2}, at::kLong), {}, {.group = group});
    const DTensor d = distribute_tensor(iota({5, 3}), all, {Shard(0)});
    const DTensor moved(async::redistribute(d, two, {Shard(1)}).wait());
    if (group->getRank() != 1) expect_equal(moved.full_tensor(), iota({5, 3}));
  });
}

TEST(AsyncRedistribute, IsCountedWhereItStarts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({4, 3}), mesh, {Shard(0)});
    std::optional<Pending> moving;
    {
      const CommDebugMode mode;
      moving = async::redistribute(d, {Replicate()});
      EXPECT_EQ(mode.count(), 1);
      ASSERT_EQ(mode.redistributions().size(), 1u);
      EXPECT_EQ(mode.redistributions()[0].to, (Placements{Replicate()}));
    }
    moving->wait();
  });
}

TEST_P(AsyncRedistributes, RefuseATensorThatWasWrittenOnItsWay) {
  on_ranks([](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {}, {.group = group});
    const std::string text = c10::str("[redistribute] f64[4,3] was written while it was on its way to other ranks\n",
                                      "  fix: write to it after wait(), or pass x.clone()\n",  //
                                      "  at:  rank ", group->getRank(), "/", group->getSize());
    for (const auto& write : std::vector<std::function<void(const DTensor&)>>{
             [](const DTensor& d) { d.add_(1); }, [](const DTensor& d) { d.to_local().add_(1); },
             [](const DTensor& d) { d.select(1, 0).add_(1); }}) {
      const DTensor d = distribute_tensor(iota({4, 3}), mesh, {Shard(0)});
      const Pending moving = async::redistribute(d, {Replicate()});
      write(d);
      EXPECT_EQ(error_text<c10::ValueError>([&] { moving.wait(); }), text);
      EXPECT_EQ(error_text<c10::ValueError>([&] { moving.wait(); }), text) << "asked again";
    }
    if (group->getSize() == 1) return;  // the same memory, as of the blocking form
    const DTensor d = distribute_tensor(iota({4, 3}), mesh, {Shard(0)});
    const Pending moving = async::redistribute(d, {Replicate()});
    moving.wait();
    d.add_(1);
    expect_equal(DTensor(moving.wait()).to_local(), iota({4, 3}), "written afterwards");
    barrier(group);
  });
}

TEST(AsyncRedistribute, ChecksAsTheBlockingFormDoes) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({4, 3}), mesh, {Shard(0)});
    EXPECT_EQ(error_text<c10::IndexError>([&] { async::redistribute(d, {Shard(2)}); }),
              error_text<c10::IndexError>([&] { d.redistribute({Shard(2)}); }));
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                async::redistribute(d, {Shard(0), Shard(1)});
              }),
              error_text<c10::ValueError>([&] {
                d.redistribute({Shard(0), Shard(1)});
              }));
    EXPECT_EQ(error_text<c10::ValueError>([&] { async::redistribute(DTensor(), {Shard(0)}); }),
              error_text<c10::ValueError>([&] { DTensor().redistribute({Shard(0)}); }));
    const DTensor sum = DTensor::from_local(iota({4}), mesh, {Partial()});
    EXPECT_EQ(error_text<c10::ValueError>([&] { async::redistribute(sum, {Partial("max")}); }),
              error_text<c10::ValueError>([&] { sum.redistribute({Partial("max")}); }));
  });
}

}  // namespace
}  // namespace serried
