// DTensors made of local parts and taken apart again.
#include "serried/tensor/dtensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/async.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::all_placements;
using testing::error_text;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::iota;
using testing::on_mesh;
using testing::usual_meshes;

TEST(DTensor, FromLocalMultipliesThisRanksSizes) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const DTensor d = DTensor::from_local(at::ones({2, 3}), mesh, {Shard(0), Shard(-1)});
    EXPECT_EQ(d.sizes(), (at::IntArrayRef{4, 6}));
    EXPECT_EQ(d.placements(), (Placements{Shard(0), Shard(1)}));
    EXPECT_EQ(DTensor::from_local(at::ones({2, 3}), mesh, {Shard(0), Shard(0)}).size(0), 8);
    EXPECT_EQ(DTensor::from_local(at::ones({2, 3}), mesh).placements(), (Placements{Replicate(), Replicate()}));
    EXPECT_TRUE(d.device_mesh() == mesh);
  });
}

TEST(DTensor, GlobalSizesMayBeGivenForUnevenParts) {
  on_mesh({4}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = iota({5, 3});
    const Span rows = chunk(5, 4, mesh.get_local_rank());
    const at::Tensor part = whole.narrow(0, rows.begin, rows.size);
    const DTensor d = DTensor::from_local(part, mesh, {Shard(0)}, {.shape = whole.sizes(), .stride = whole.strides()});
    EXPECT_EQ(d.sizes(), whole.sizes());
    expect_equal(d.full_tensor(), whole);
    expect_equal(d.to_local(), part);
  });
}

TEST(DTensor, PartsOfPartialAddUp) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const at::Tensor part = iota({5}) + double(mesh.get_rank());
    expect_equal(DTensor::from_local(part, mesh, {Partial()}).full_tensor(), iota({5}) * 3 + 3);
    expect_equal(DTensor::from_local(part, mesh, {Partial("avg")}).full_tensor(), iota({5}) + 1);
    expect_equal(DTensor::from_local(part, mesh, {Partial("max")}).full_tensor(), iota({5}) + 2);
    expect_equal(DTensor::from_local(part, mesh, {Partial("min")}).full_tensor(), iota({5}));
  });
}

TEST(DTensor, AnyRedistributionKeepsTheValue) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor whole = iota({5, 3});
      for (const Placements& from : all_placements(2, shape.size(), true)) {
        const DTensor d = testing::place(whole, mesh, from);
        for (const Placements& to : all_placements(2, shape.size(), false)) {
          const DTensor moved = d.redistribute(to);
          EXPECT_EQ(moved.placements(), to);
          testing::expect_close(moved.full_tensor(), whole, to_string(from) + " -> " + to_string(to));
        }
      }
    });
  }
}

TEST(DTensor, TheSamePlacementsAreTheSameTensor) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({5, 3}), mesh, {Shard(1)});
    EXPECT_TRUE(d.redistribute({Shard(1)}).is_same(d));
    EXPECT_TRUE(d.redistribute({Shard(-1)}).is_same(d));
    EXPECT_TRUE(d.redistribute(mesh, {Shard(1)}).is_same(d));
  });
}

TEST(DTensor, RedistributionCommunicatesInTheForwardDtype) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({5, 3}) / 7, mesh, {Shard(0)});
    const DTensor half = d.redistribute({Replicate()}, {.forward_dtype = at::kBFloat16});
    EXPECT_EQ(half.scalar_type(), at::kBFloat16);
    expect_equal(half.to_local(), (iota({5, 3}) / 7).to(at::kBFloat16));
    EXPECT_EQ(d.redistribute({Shard(0)}, {.forward_dtype = at::kFloat}).scalar_type(), at::kFloat);
  });
}

TEST(DTensor, PartsCutFromAWholeAreContiguous) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({5, 4}), mesh, {Shard(1)});
    EXPECT_TRUE(d.to_local().is_contiguous());
    EXPECT_TRUE(distribute_tensor(iota({5, 4}).t(), mesh).to_local().is_contiguous());
    EXPECT_TRUE(distribute_tensor(iota({5, 4}), mesh).redistribute({Shard(1)}).to_local().is_contiguous());
  });
}

TEST(DTensor, ChunksSayWhereThePartLies) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto at = *mesh.get_coordinate();
    const DTensor d = distribute_tensor(iota({5, 3}), mesh, {Shard(0), Shard(1)});
    ASSERT_EQ(d.local_chunks().size(), 1u);
    EXPECT_EQ(d.local_chunks()[0].offsets, (Sizes{at[0] * 3, at[1] * 2}));
    EXPECT_EQ(d.local_chunks()[0].sizes, (Sizes{at[0] == 0 ? 3 : 2, at[1] == 0 ? 2 : 1}));
    const DTensor strided = distribute_tensor(iota({8}), mesh, {StridedShard(0, 2), Shard(0)});
    int64_t covered = 0;
    for (const DTensor::Chunk& piece : strided.local_chunks()) covered += piece.sizes[0];
    EXPECT_EQ(covered, strided.to_local().numel());
    const DTensor empty = distribute_tensor(iota({1}), mesh, {Shard(0), Replicate()});
    EXPECT_EQ(empty.local_chunks().size(), at[0] == 0 ? 1u : 0u);
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  DTensor::from_local(iota({2}), mesh, {Partial(), Replicate()}).local_chunks();
                }),
                HasSubstr("[local_chunks] f64[2] P R on mesh"));
  });
}

TEST(DTensor, APlainTensorIsNone) {
  EXPECT_EQ(error_text<c10::TypeError>([] {
              DTensor(at::ones({2, 3}));
            }),
            "[DTensor] f32[2,3] is a plain tensor\n"
            "  fix: make one with distribute_tensor(full, mesh, placements) or DTensor::from_local");
  EXPECT_THAT(error_text<c10::TypeError>([] { DTensor(at::Tensor()); }), HasSubstr("the tensor is undefined"));
  EXPECT_THAT(error_text<c10::ValueError>([] { DTensor().to_local(); }),
              HasSubstr("[to_local] the DTensor is undefined"));
}

TEST(DTensor, FromLocalRefusesWhatMakesNoTensor) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = at::ones({2, 3});
    const DTensor d = DTensor::from_local(x, mesh);
    const auto text = [&](const at::Tensor& local, const Placements& placements, FromLocalOptions options = {}) {
      return error_text<c10::ValueError>([&] { DTensor::from_local(local, mesh, placements, options); });
    };
    EXPECT_THAT(text(d, {}), HasSubstr("[from_local] the local tensor is already a DTensor: f32[2,3] R on mesh"));
    EXPECT_THAT(text({}, {}), HasSubstr("[from_local] the local tensor is undefined"));
    EXPECT_THAT(text(x, {}, {.shape = Sizes{2, 3}}), HasSubstr("shape is given without stride"));
    EXPECT_THAT(text(x, {}, {.stride = Sizes{3, 1}}), HasSubstr("stride is given without shape"));
    EXPECT_THAT(text(x, {}, {.shape = Sizes{2, 3}, .stride = Sizes{3}}),
                HasSubstr("shape [2,3] and stride [3] have different lengths"));
    EXPECT_THAT(text(x, {Shard(0)}, {.shape = Sizes{9, 3}, .stride = Sizes{3, 1}}),
                HasSubstr("the local tensor is f32[2,3], but \"S0\" of [9,3] on "));
    EXPECT_THAT(text(x, {Shard(0)}, {.shape = Sizes{9}, .stride = Sizes{1}}), HasSubstr("shape [9] has 1 dims"));
    EXPECT_THAT(text(x, {Shard(0), Shard(0)}), HasSubstr("[from_local]"));
    EXPECT_THAT(text(x.to(at::kLong), {Partial("avg")}),
                HasSubstr("P(avg) of i64 in \"P(avg)\": an average of integers is no integer"));
    EXPECT_THROW(DTensor::from_local(x, mesh, {Shard(2)}), c10::IndexError);
  });
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    EXPECT_THROW(DTensor::from_local(at::ones({2}), mesh, {Partial(), Partial("max")}), c10::ValueError);
    EXPECT_NO_THROW(DTensor::from_local(at::ones({2}), mesh, {Partial(), Partial("avg")}));
  });
}

TEST(DTensor, ARankOutsideTheMeshIsTold) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    if (mesh.contains_this_rank()) return;
    EXPECT_EQ(error_text<c10::ValueError>([&] { DTensor::from_local(at::ones({2}), mesh); }),
              "[from_local] rank 2 is not in mesh dp=2 of ranks [0,1]\n"
              "  fix: call it on the ranks of the mesh only: if (mesh.contains_this_rank()) ...\n"
              "  at:  rank 2/3");
    EXPECT_THAT(error_text<c10::ValueError>([&] { distribute_tensor(at::ones({2}), mesh); }),
                HasSubstr("[distribute_tensor] rank 2 is not in mesh dp=2"));
  });
}

TEST(DTensor, RunCheckFindsTheGlobalSizesOfUnevenParts) {
  for (const Sizes& shape : usual_meshes()) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const at::Tensor whole = iota({5, 3});
      for (const Placements& placements : all_placements(2, shape.size(), false)) {
        const at::Tensor part = distribute_tensor(whole, mesh, placements).to_local();
        const DTensor d = DTensor::from_local(part, mesh, placements, {.run_check = true});
        expect_equal(d.full_tensor(), whole, to_string(placements));
      }
    });
  }
}

TEST(DTensor, RunCheckSpreadsTheFirstRanksReplicas) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor part = at::full({2}, double(mesh.get_rank()), at::kDouble);
    const auto at = *mesh.get_coordinate();
    const DTensor d = DTensor::from_local(part, mesh, {Replicate(), Shard(0)}, {.run_check = true});
    expect_equal(d.to_local(), at::full({2}, double(at[1]), at::kDouble));
    EXPECT_EQ(part[0].item<double>(), double(mesh.get_rank())) << "the caller's tensor is not written to";
  });
}

TEST(DTensor, RunCheckNamesTheRanksThatDiffer) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const bool is_last = mesh.get_rank() == 2;
    const auto text = [&](const at::Tensor& local) {
      return error_text<c10::ValueError>([&] { DTensor::from_local(local, mesh, {Shard(0)}, {.run_check = true}); });
    };
    EXPECT_THAT(text(at::ones({2}, is_last ? at::kInt : at::kFloat)),
                HasSubstr("the parts differ: rank 0 has f32[2], rank 2 has i32[2]"));
    EXPECT_THAT(text(is_last ? at::ones({2, 1}) : at::ones({2})), HasSubstr("rank 0 has f32[2], rank 2 has f32[2,1]"));
    EXPECT_THAT(text(at::ones({2}).requires_grad_(is_last)),
                HasSubstr("requires_grad differs: false on rank 0, true on rank 2"));
    EXPECT_THAT(text(at::ones({2, is_last ? 4 : 3})), HasSubstr("rank 2 has [2,4] where [2,3] is due"));
    EXPECT_THAT(text(at::ones({is_last ? 4 : 1})), HasSubstr("the parts do not make \"S0\" of [6] on mesh"));
  });
}

TEST(DTensor, MovesToAnotherMesh) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh line = init_device_mesh("cpu", {4}, {"all"}, {.group = group});
    const DeviceMesh grid = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    const at::Tensor whole = iota({5, 6});
    const DTensor d = distribute_tensor(whole, line, {Shard(0)});
    const DTensor moved = d.redistribute(grid, {Shard(1), Shard(0)});
    EXPECT_TRUE(moved.device_mesh() == grid);
    expect_equal(moved.full_tensor(), whole);
    expect_equal(moved.redistribute(line, {Shard(1)}).full_tensor(), whole);
  });
}

TEST(DTensor, WritingToThePartIsSeenByTheWhole) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(iota({4}), mesh, {Shard(0)});
    const int64_t before = d._version();
    d.to_local().fill_(7);
    expect_equal(d.full_tensor(), at::full({4}, 7, at::kDouble));
    EXPECT_GT(d._version(), before);
    const at::Tensor part = at::zeros({2});
    const DTensor e = DTensor::from_local(part, mesh, {Shard(0)});
    const int64_t version = e._version();
    part.fill_(3);
    EXPECT_EQ(e._version(), version + 1);
    expect_equal(e.to_local(), at::full({2}, 3.0));
  });
}

TEST(DTensor, AllDtypesTravel) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    for (at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kChar, at::kByte, at::kShort,
                                 at::kInt, at::kLong, at::kBool, at::kComplexFloat, at::kComplexDouble}) {
      const at::Tensor whole = iota({5, 2}, dtype);
      for (const Placement& placement : {Shard(0), Shard(1), Replicate()}) {
        const DTensor d = distribute_tensor(whole, mesh, {placement});
        EXPECT_EQ(d.scalar_type(), dtype);
        expect_equal(d.full_tensor(), whole, c10::toString(dtype));
      }
    }
  });
}

TEST(DTensor, LazyConjugatesAreResolved) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor z = at::complex(iota({4}), iota({4}) + 1);
    expect_equal(distribute_tensor(z.conj(), mesh, {Shard(0)}).full_tensor(), z.conj().resolve_conj());
    EXPECT_FALSE(DTensor::from_local(z.conj(), mesh).to_local().is_conj());
  });
}

// Their results differ by rank, which no placement says.
// What they give differs from rank to rank, which no placement of a whole tensor says.
TEST(DTensor, CollectivesThatDifferByRankAskForTheLocalPart) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const Group g = mesh.get_group();
    const DTensor d = distribute_tensor(iota({4, 3}), mesh, {Shard(0)});
    const std::string tail =
        " f64[4,3] is distributed over ranks\n  fix: pass the part of this rank, x.to_local(), or x.full_tensor()\n"
        "  at:  rank " +
        std::to_string(g->getRank()) + "/2";
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { reduce(d, g); }), "[reduce]" + tail);
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { gather(d, g); }), "[gather]" + tail);
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { reduce_scatter(d, g); }), "[reduce_scatter]" + tail);
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { async::reduce_scatter(d, g); }), "[reduce_scatter]" + tail);
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { all_to_all(d, g); }), "[all_to_all]" + tail);
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { send(d, g, {.peer = 1 - g->getRank()}); }), "[send]" + tail);
    const std::vector<at::Tensor> list(g->getRank() == 0 ? 2 : 0, d);
    EXPECT_THAT(error_text<c10::ValueError>([&] { scatter(list, g); }),
                HasSubstr("[scatter] tensor 0 of rank 0's list is sparse, quantized or distributed"));
    const std::vector<at::Tensor> parts = gather(d.to_local(), g);
    expect_equal(at::cat(parts), g->getRank() == 0 ? iota({4, 3}) : at::zeros({4, 3}, at::kDouble));
  });
}

}  // namespace
}  // namespace serried
