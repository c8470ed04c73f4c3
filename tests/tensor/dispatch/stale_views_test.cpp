// A view that had to be a copy, used after its base was written: right or an error, never the old values.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::full;
using testing::on_mesh;
using testing::place;

at::Tensor base_values() {
  return seeded(11, [] { return at::randn({6, 4}, at::kDouble); });
}

struct Named {
  const char* name;
  std::function<at::Tensor(const at::Tensor&)> run;
};

// All of them gather what is cut in dim 0.
const std::vector<Named>& gathering_views() {
  static const std::vector<Named> all = {
      {"view",
       [](const at::Tensor& x) {
         return x.t().reshape({4, 6}).t().view({2, 3, 4}).select(0, 1);
       }},
      {"select", [](const at::Tensor& x) { return x.select(0, 1); }},
      {"slice", [](const at::Tensor& x) { return x.slice(0, 1, 5); }},
      {"diagonal", [](const at::Tensor& x) { return x.diagonal(); }},
      {"chunk", [](const at::Tensor& x) { return x.chunk(4, 0)[1]; }},
      {"unbind", [](const at::Tensor& x) { return x.unbind(0)[2]; }},
      {"as_strided",
       [](const at::Tensor& x) {
         return x.as_strided({3, 2}, {8, 1}, 1);
       }},
      {"detach of select", [](const at::Tensor& x) { return x.select(0, 1).detach(); }},
      {"data of select", [](const at::Tensor& x) { return x.select(0, 1).data(); }},
      {"of a view",
       [](const at::Tensor& x) {
         return x.t().select(1, 3).view({2, 2});
       }},
      {"of a copied view", [](const at::Tensor& x) { return x.slice(0, 1, 5).t().unsqueeze(0).select(1, 2); }},
      {"of data", [](const at::Tensor& x) { return x.data().select(0, 1); }},
  };
  return all;
}

struct Write {
  const char* name;
  std::function<void(at::Tensor&)> run;
};

template <class Options, class Optimizer>
void step(at::Tensor& x) {
  at::Tensor leaf = x;
  leaf.mutable_grad() = at::ones_like(leaf);
  Optimizer optimizer(std::vector<at::Tensor>{leaf}, Options(0.1));
  optimizer.step();
}

const std::vector<Write>& writes() {
  static const std::vector<Write> all = {
      {"add_", [](at::Tensor& x) { x.add_(1); }},
      {"mul_", [](at::Tensor& x) { x.mul_(x + 2); }},
      {"copy_", [](at::Tensor& x) { x.copy_(x + 1); }},
      {"zero_", [](at::Tensor& x) { x.zero_(); }},
      {"through a transpose", [](at::Tensor& x) { x.t().add_(1); }},
      {"through an older alias", [](at::Tensor& x) { x.alias().narrow(1, 0, 4).exp_(); }},
      {"through data", [](at::Tensor& x) { x.data().add_(1); }},
      {"through data of a view", [](at::Tensor& x) { x.data().t().fill_(3); }},
      {"through detach", [](at::Tensor& x) { x.detach().add_(1); }},
      {"through the part",
       [](at::Tensor& x) {
         at::Tensor part = is_dtensor(x) ? DTensor(x).to_local() : x;
         part.add_(1);
       }},
      {"out=", [](at::Tensor& x) { at::add_out(x, x.detach() + 1, x.detach() + 1); }},
      {"foreach", [](at::Tensor& x) { at::_foreach_add_({x}, 1); }},
      {"fused",
       [](at::Tensor& x) {
         at::_fused_sgd_({x}, {at::ones_like(x)}, {at::zeros_like(x)}, 0, 0.9, 0.1, 0, false, false, true);
       }},
      {"SGD", step<torch::optim::SGDOptions, torch::optim::SGD>},
      {"AdamW", step<torch::optim::AdamWOptions, torch::optim::AdamW>},
      {"masked_fill_", [](at::Tensor& x) { x.masked_fill_(x > 0, 5); }},
      {"index_add_",
       [](at::Tensor& x) {
         const at::Tensor index = at::zeros_like(x.detach().select(1, 0)).to(at::kLong);
         x.index_add_(0, index, at::ones_like(x));
       }},
  };
  return all;
}

enum class Mode { plain, no_grad, inference };

// The view after the write, as a number of its elements; the whole program runs in `mode`.
at::Tensor used_after(const Named& view, const Write& write, at::Tensor x, Mode mode) {
  std::optional<at::NoGradGuard> no_grad;
  std::optional<c10::InferenceMode> inference;
  if (mode == Mode::no_grad) no_grad.emplace();
  if (mode == Mode::inference) {
    inference.emplace();
    x = x.clone();
  }
  const at::Tensor v = view.run(x);
  write.run(x);
  return full(v * 1.0);
}

TEST(StaleViews, AreNotUsedWhateverWroteTheBase) {
  for (const Sizes& shape : {Sizes{2}, Sizes{4}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const Named& view : gathering_views()) {
        for (const Write& write : writes()) {
          for (const Mode mode : {Mode::plain, Mode::no_grad, Mode::inference}) {
            const bool is_part = std::string_view(write.name) == "through the part";
            // What plain code does to inference tensors, and to the part of .data(), nobody can see.
            if (is_part && (mode == Mode::inference || std::string_view(view.name) == "of data")) continue;
            const at::Tensor d = place(base_values(), mesh, Placements(shape.size(), Shard(0)));
            const std::string text = error_text<c10::ValueError>([&] { used_after(view, write, d, mode); });
            EXPECT_THAT(text, ::testing::HasSubstr("its data was gathered, and that tensor was written since"))
                << view.name << " after " << write.name << " in mode " << int(mode);
          }
        }
      }
    });
  }
}

// The base is whole on every rank, so no view has to gather.
void expect_views_see_writes(const DeviceMesh& mesh, const Placements& placements) {
  for (const Named& view : gathering_views()) {
    for (const Write& write : writes()) {
      for (const Mode mode : {Mode::plain, Mode::no_grad, Mode::inference}) {
        const std::string what = std::string(view.name) + " after " + write.name + " of " + to_string(placements);
        const at::Tensor expected = used_after(view, write, base_values(), mode);
        const at::Tensor d = place(base_values(), mesh, placements);
        if (std::string_view(view.name) == "view") continue;  // its reshape copies
        expect_close(used_after(view, write, d, mode), expected, what);
      }
    }
  }
}

TEST(StaleViews, WhatAliasesItsBaseSeesEveryWrite) {
  on_mesh({3}, [](const DeviceMesh& mesh) { expect_views_see_writes(mesh, {Replicate()}); });
  on_mesh({1}, [](const DeviceMesh& mesh) { expect_views_see_writes(mesh, {Shard(0)}); });
  on_mesh({1, 2}, [](const DeviceMesh& mesh) { expect_views_see_writes(mesh, {Shard(0), Replicate()}); });
}

TEST(StaleViews, EveryUseRaises) {
  const std::vector<Named> uses = {
      {"add", [](const at::Tensor& v) { return v + 1; }},
      {"sum", [](const at::Tensor& v) { return v.sum(); }},
      {"item", [](const at::Tensor& v) { return at::scalar_tensor(v[0].item()); }},
      {"view",
       [](const at::Tensor& v) {
         return v.view({2, 2});
       }},
      {"detach", [](const at::Tensor& v) { return v.detach(); }},
      {"clone", [](const at::Tensor& v) { return v.clone(); }},
      {"cat",
       [](const at::Tensor& v) {
         return at::cat({at::ones_like(v.detach()), v});
       }},
      {"second argument", [](const at::Tensor& v) { return at::ones_like(v.detach()).add_(v); }},
      {"foreach", [](const at::Tensor& v) { return at::_foreach_add({v}, 1)[0]; }},
      {"equal", [](const at::Tensor& v) { return at::scalar_tensor(v.equal(v)); }},
      {"to_local", [](const at::Tensor& v) { return DTensor(v).to_local(); }},
      {"full_tensor", [](const at::Tensor& v) { return DTensor(v).full_tensor(); }},
      {"redistribute", [](const at::Tensor& v) { return DTensor(v).redistribute({Shard(0)}); }},
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    for (const Named& use : uses) {
      at::Tensor d = place(base_values(), mesh, {Shard(0)});
      const at::Tensor v = d.select(0, 1);
      use.run(v);
      d.add_(1);
      EXPECT_THAT(error_text<c10::ValueError>([&] { use.run(v); }), ::testing::HasSubstr("was written since"))
          << use.name;
    }
  });
}

TEST(StaleViews, TheErrorNamesBoth) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    at::Tensor d = place(base_values(), mesh, {Shard(0)});
    const at::Tensor flat = d.t().reshape({-1}).view({24});
    const at::Tensor v = d.slice(0, 1, 4);
    d.mul_(2);
    const std::string at = c10::str("\n  at:  rank ", mesh.get_rank(), "/2");
    EXPECT_EQ(error_text<c10::ValueError>([&] { v.sum(); }),
              "[aten::sum] \"self\" f64[3,4] R on mesh 2 is a view across a cut dim of f64[6,4] S0 on mesh 2: its data "
              "was gathered, and that tensor was written since\n  fix: take the view again after the write, or "
              "redistribute the tensor so that the viewed dim is whole" +
                  at);
    EXPECT_EQ(error_text<c10::ValueError>([&] { DTensor(v).to_local(); }),
              "[to_local] f64[3,4] R on mesh 2 is a view across a cut dim of f64[6,4] S0 on mesh 2: its data was "
              "gathered, and that tensor was written since\n  fix: take the view again after the write, or "
              "redistribute the tensor so that the viewed dim is whole" +
                  at);
  });
}

TEST(StaleViews, KeptOverStepsOfTrainingRaiseAndTakenAnewAreRight) {
  const auto train = [](at::Tensor w, bool keep) {
    torch::optim::SGD optimizer(std::vector<at::Tensor>{w}, torch::optim::SGDOptions(0.1).momentum(0.9));
    at::Tensor flat = w.view({-1});
    for (int i = 0; i < 3; ++i) {
      if (!keep) flat = w.view({-1});
      optimizer.zero_grad();
      (flat * flat).sum().backward();
      optimizer.step();
    }
    return full(w.detach());
  };
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const at::Tensor expected = train(base_values().requires_grad_(), false);
    const auto make = [&] { return place(base_values(), mesh, {Shard(1)}).requires_grad_(); };
    expect_close(train(make(), false), expected);
    EXPECT_THAT(error_text<c10::ValueError>([&] { train(make(), true); }), ::testing::HasSubstr("written since"));
  });
}

TEST(StaleViews, WritesToOtherTensorsDoNotCount) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = place(base_values(), mesh, {Shard(0)});
    at::Tensor other = place(base_values(), mesh, {Shard(0)});
    const at::Tensor v = d.select(0, 1);
    other.add_(1);
    other.data().mul_(2);
    (d + 1).zero_();
    expect_close(full(v + 0), base_values().select(0, 1));
  });
}

// As a plain view, which goes on showing the memory that the base had.
TEST(StaleViews, NewDataOfTheBaseIsNoWrite) {
  const auto run = [](at::Tensor base, const at::Tensor& other) {
    const at::Tensor v = base.select(0, 1);
    base.set_data(other);
    return full(v * 1.0);
  };
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const auto placed = [&](double factor) { return place(base_values() * factor, mesh, {Shard(0)}); };
    expect_close(run(placed(1), placed(2)), run(base_values(), base_values() * 2));
  });
}

TEST(StaleViews, OutliveTheirBase) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    at::Tensor d = place(base_values(), mesh, {Shard(0)}) * 1;
    at::Tensor v = d.select(0, 1).detach();
    const at::Tensor alias = v.view({2, 2});
    d = at::Tensor();
    v.add_(1);  // nobody can see that the base has not changed
    v.mul_(2);
    expect_close(full(v), (base_values().select(0, 1) + 1) * 2);
    expect_close(full(alias), full(v).view({2, 2}));
  });
}

TEST(StaleViews, AWriteBeforeTheBaseWentStillCounts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    at::Tensor d = place(base_values(), mesh, {Shard(0)}) * 1;
    const at::Tensor v = d.select(0, 1);
    d.add_(1);
    d = at::Tensor();
    EXPECT_THAT(error_text<c10::ValueError>([&] { v.sum(); }), ::testing::HasSubstr("written since"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { v.add_(1); }), ::testing::HasSubstr("written since"));
  });
}

TEST(StaleViews, GradientsFormedByViewsAddUp) {
  const auto gradient = [](const at::Tensor& leaf) {
    for (int i = 0; i < 3; ++i) {
      (leaf.view({-1}).pow(2).sum() + leaf.select(0, 1).sum() + leaf.t().diagonal().exp().sum()).backward();
    }
    return full(leaf.grad());
  };
  for (const Sizes& shape : {Sizes{2}, Sizes{4}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor expected = gradient(base_values().requires_grad_());
      for (const Placements& placements : testing::all_placements(2, shape.size(), false)) {
        expect_close(gradient(place(base_values(), mesh, placements).requires_grad_()), expected,
                     to_string(placements));
      }
    });
  }
}

TEST(StaleViews, CopiedViewsAreNoPlaceForResults) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = place(base_values(), mesh, {Shard(0)});
    at::Tensor v = d.slice(0, 0, 2);
    const at::Tensor other = at::ones_like(v);
    EXPECT_THAT(error_text<c10::ValueError>([&] { at::add_out(v, other, other); }),
                ::testing::HasSubstr("writing to it would not reach the tensor it is a view of"));
    expect_close(full(d), base_values());
  });
}

TEST(StaleViews, NothingIsWatchedOnceTheyAreGone) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    at::Tensor d = place(base_values(), mesh, {Shard(0)}).requires_grad_();
    d.select(0, 1).pow(2).sum().backward();
  });
  EXPECT_EQ(detail::num_watched, 0);
}

// Its sizes change, its memory stays: views that were there before see what is written afterwards.
TEST(StaleViews, SqueezeInPlaceKeepsTheMemoryAlongAxesOfOneRank) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(4, at::kDouble).view({1, 4});
    at::Tensor x = place(plain, mesh, {Shard(0)});
    const at::Tensor row = x.select(0, 0);
    x.squeeze_(0);
    x.add_(1);
    expect_close(full(x), plain.squeeze(0) + 1);
    expect_close(full(row), plain.squeeze(0) + 1);
  });
}

// The dim has to be whole before it can go: the tensor moves, and what shares its memory would not.
TEST(StaleViews, SqueezeInPlaceOfACutDimMovesOnlyWhatNobodyShares) {
  const at::Tensor plain = at::arange(4, at::kDouble).view({1, 4});
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    at::Tensor alone = place(plain, mesh, {Shard(0)});
    alone.squeeze_(0);
    alone.add_(1);
    expect_close(full(alone), plain.squeeze(0) + 1);

    for (const Named& copied : std::vector<Named>{
             {"squeeze", [](const at::Tensor& x) { return x.squeeze(0); }},
             {"view",
              [](const at::Tensor& x) {
                return x.view({2, 2});
              }},
         }) {
      at::Tensor x = place(plain, mesh, {Shard(0)});
      const at::Tensor view = copied.run(x);
      x.squeeze_(0);
      x.add_(1);
      EXPECT_THROW(full(view), c10::ValueError) << copied.name;
    }

    const std::vector<Named> sharers = {
        {"data", [](const at::Tensor& x) { return x.data(); }},
        {"part", [](const at::Tensor& x) { return DTensor(x).to_local(); }},
        {"unsqueeze", [](const at::Tensor& x) { return x.unsqueeze(0); }},
        {"detach", [](const at::Tensor& x) { return x.detach(); }},
    };
    for (const Named& sharer : sharers) {
      at::Tensor x = place(plain, mesh, {Shard(0)});
      const at::Tensor shares = sharer.run(x);
      EXPECT_THAT(error_text<c10::ValueError>([&] { x.squeeze_(0); }),
                  ::testing::HasSubstr("would get new memory, and views of it or its to_local() keep the old one"))
          << sharer.name;
      x.add_(1);
      expect_close(full(x), plain + 1);
    }
  });
}

}  // namespace
}  // namespace serried
