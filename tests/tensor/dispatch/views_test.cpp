// Views of DTensors and writing through them: the right gradient or an error, never a wrong value.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>

#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::all_placements;
using testing::error_text;
using testing::expect_close;
using testing::full;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::place;
using testing::usual_meshes;

at::Tensor sample() {
  return seeded(3, [] { return at::randn({6, 4}, at::kDouble); });
}

// Says which case it was that an error came from.
template <class Fn>
void in_case(const std::string& what, const Fn& fn) {
  try {
    fn();
  } catch (const std::exception& error) {
    throw std::runtime_error(what + ": " + error.what());
  }
}

constexpr int64_t kNever = 0;  // a cut dim that the view selects from or mixes with others
constexpr int64_t kAlways = -1;

// Each rank's part of a view lies in its part of the base if the dim that is cut stays a dim of the view, or its
// leading dim if it is split or merged; ranks have to divide the latter, or parts would end in the middle of what it is
// made of.
struct View {
  std::string name;
  std::function<at::Tensor(const at::Tensor&)> take;
  std::array<int64_t, 2> cut;  // for each dim of the base kNever, kAlways, or what ranks have to divide
};

const std::vector<View>& views() {
  using T = at::Tensor;
  static const std::vector<View> all = {
      {"view", [](const T& x) { return x.view({24}); }, {6, kNever}},
      {"view of three",
       [](const T& x) {
         return x.view({2, 3, 4});
       },
       {2, kAlways}},
      {"transpose", [](const T& x) { return x.t(); }, {kAlways, kAlways}},
      {"select 0", [](const T& x) { return x.select(0, 1); }, {kNever, kAlways}},
      {"select 1", [](const T& x) { return x.select(1, -1); }, {kAlways, kNever}},
      {"slice 0", [](const T& x) { return x.slice(0, 1, 5); }, {kNever, kAlways}},
      {"slice 1", [](const T& x) { return x.slice(1, 0, 4, 2); }, {kAlways, kNever}},
      {"unsqueeze", [](const T& x) { return x.unsqueeze(1); }, {kAlways, kAlways}},
      {"expand",
       [](const T& x) {
         return x.unsqueeze(0).expand({1, 6, 4});
       },
       {kAlways, kAlways}},
      {"narrow", [](const T& x) { return x.narrow(1, 1, 2); }, {kAlways, kNever}},
      {"diagonal", [](const T& x) { return x.diagonal(); }, {kNever, kNever}},
      {"of a view",
       [](const T& x) {
         return x.t().view({2, 2, 6}).select(2, 3);
       },
       {kNever, 2}},
      {"detach of alias",
       [](const T& x) {
         return x.alias().permute({1, 0});
       },
       {kAlways, kAlways}},
  };
  return all;
}

// One with an axis that cuts nothing beside one that does.
std::vector<Sizes> meshes() {
  std::vector<Sizes> shapes = usual_meshes();
  shapes.push_back({1, 2});
  return shapes;
}

// Whether writing through it must work: nothing has to be moved for the view.
bool lies_in_parts(const View& view, const Placements& placements, const Sizes& mesh) {
  std::array<int64_t, 2> ranks = {1, 1};
  for (size_t axis = 0; axis < mesh.size(); ++axis) {
    if (placements[axis].is_shard()) ranks.at(size_t(placements[axis].dim())) *= mesh[axis];
  }
  for (size_t dim = 0; dim < ranks.size(); ++dim) {
    if (ranks[dim] == 1 || view.cut[dim] == kAlways) continue;
    if (view.cut[dim] == kNever || view.cut[dim] % ranks[dim] != 0) return false;
  }
  return true;
}

TEST(Views, HaveTheValuesOfPlainViews) {
  for (const Sizes& shape : meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const View& view : views()) {
        const at::Tensor expected = view.take(sample());
        for (const Placements& placements : all_placements(2, shape.size(), true)) {
          const std::string what = view.name + " of " + to_string(placements);
          in_case(what, [&] {
            const at::Tensor v = view.take(place(sample(), mesh, placements));
            EXPECT_EQ(v.sizes(), expected.sizes());
            expect_close(full(v), expected, what);
          });
        }
      }
    });
  }
}

TEST(Views, HaveTheGradientsOfPlainViews) {
  for (const Sizes& shape : {Sizes{1}, Sizes{3}, Sizes{2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const View& view : views()) {
        const at::Tensor plain = sample().requires_grad_();
        view.take(plain).pow(2).sum().backward();
        for (const Placements& placements : all_placements(2, shape.size(), false)) {
          const std::string what = view.name + " of " + to_string(placements);
          in_case(what, [&] {
            const at::Tensor d = place(sample(), mesh, placements).requires_grad_();
            view.take(d).pow(2).sum().backward();
            expect_close(full(d.grad()), plain.grad(), what);
          });
        }
      }
    });
  }
}

struct Written {
  at::Tensor value;
  at::Tensor grad;
};

// Writes through a view of an intermediate result, then uses both.
Written write_through(const View& view, const at::Tensor& leaf) {
  const at::Tensor base = leaf * 1.5;
  at::Tensor v = view.take(base);
  v.mul_(2).add_(v.detach());
  const at::Tensor loss = base.pow(2).sum() + v.sum();
  return {full(base.detach()), full(torch::autograd::grad({loss}, {leaf})[0])};
}

TEST(Views, WritingThroughThemIsRightWhereNothingMovesAndElseRightOrRaises) {
  for (const Sizes& shape : meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const View& view : views()) {
        if (view.name == "expand") continue;
        Written expected;
        in_case(view.name + " of a plain tensor", [&] { expected = write_through(view, sample().requires_grad_()); });
        for (const Placements& placements : all_placements(2, shape.size(), false)) {
          const std::string what = view.name + " of " + to_string(placements);
          const at::Tensor d = place(sample(), mesh, placements).requires_grad_();
          try {
            const Written actual = write_through(view, d);
            expect_close(actual.value, expected.value, what);
            expect_close(actual.grad, expected.grad, what);
          } catch (const c10::Error& error) {
            EXPECT_FALSE(lies_in_parts(view, placements, shape)) << what << ": " << error.what();
            EXPECT_THAT(error.what(), HasSubstr("fix:")) << what;
          }
        }
      }
    });
  }
}

TEST(Views, WritingWithoutGradientsIsRightWhereNothingMovesAndElseRightOrRaises) {
  for (const Sizes& shape : meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      for (const View& view : views()) {
        if (view.name == "expand") continue;
        at::Tensor expected = sample();
        view.take(expected).fill_(7);
        for (const Placements& placements : all_placements(2, shape.size(), false)) {
          const std::string what = view.name + " of " + to_string(placements);
          const at::Tensor d = place(sample(), mesh, placements);
          try {
            view.take(d).fill_(7);
            expect_close(full(d), expected, what);
          } catch (const c10::Error& error) {
            EXPECT_FALSE(lies_in_parts(view, placements, shape)) << what << ": " << error.what();
            expect_close(full(d), sample(), "nothing was written");
          }
        }
      }
    });
  }
}

TEST(Views, WritingAcrossACutDimSaysSo) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = place(sample(), mesh, {Shard(0)});
    at::Tensor row = d.select(0, 1);
    const std::string text = error_text<c10::Error>([&] { row.fill_(7); });
    EXPECT_THAT(text, HasSubstr("fix:"));
    expect_close(full(d), sample());
  });
}

TEST(Views, ShareTheVersionOfTheirBase) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = place(sample(), mesh, {Shard(0)});
    at::Tensor v = d.t();
    EXPECT_TRUE(v.is_view());
    const int64_t before = d._version();
    v.add_(1);
    EXPECT_EQ(d._version(), before + 1);
    expect_close(full(d), sample() + 1);
  });
}

}  // namespace
}  // namespace serried
