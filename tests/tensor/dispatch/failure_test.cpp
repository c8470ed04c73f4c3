// A rank whose op fails does not leave the others hanging, and a wrong call leaves everything usable.
#include "serried/serried.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

TEST(Failure, ARankWhoseOpFailsEndsTheOthersAndIsNamed) {
  const std::string text = error_text<c10::Error>([] {
    on_mesh({4}, [](const DeviceMesh& mesh) {
      const DTensor x = place(at::ones({8, 4}), mesh, {Shard(0)});
      if (mesh.get_rank() == 2) TORCH_CHECK_VALUE(false, "no data for me");
      x.full_tensor();
    });
  });
  EXPECT_THAT(text, HasSubstr("rank 2: no data for me"));
}

TEST(Failure, APlainTensorBesideADTensorIsNamedWithTheFix) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = place(at::ones({3, 4}), mesh, {Shard(0)});
    const std::string text = error_text<c10::TypeError>([&] { at::add(x, at::ones({3, 4})); });
    EXPECT_THAT(text, HasSubstr("[aten::add.Tensor] argument 1 \"other\" is a plain tensor of sizes [3,4] beside a "
                                "DTensor f32[3,4] S0 on mesh 2"));
    EXPECT_THAT(text, HasSubstr("fix: wrap it: distribute_tensor(other, mesh, {Replicate(), ...})"));
    const ImplicitReplication guard;
    expect_equal(full(at::add(x, at::ones({3, 4}))), at::full({3, 4}, 2.0));
  });
}

TEST(Failure, DTensorsOfTwoMeshesAreRefusedWithTheFix) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const DeviceMesh line = init_device_mesh("cpu", {4}, {}, {.group = mesh.root_group()});
    const DTensor x = place(at::ones({4}), mesh, {Shard(0), Replicate()});
    const DTensor y = place(at::ones({4}), line, {Shard(0)});
    const std::string text = error_text<c10::ValueError>([&] { at::mul(x, y); });
    EXPECT_THAT(text, HasSubstr("[aten::mul.Tensor] argument 1 \"other\" is on mesh 4 and another on mesh 2x2"));
    EXPECT_THAT(text, HasSubstr("fix: bring both to one mesh: x.redistribute(mesh, placements)"));
  });
}

TEST(Failure, ADTensorIsNotWrittenIntoAPlainTensor) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = place(at::ones({1}), mesh, {Replicate()});
    at::Tensor plain = at::zeros({1});
    EXPECT_THAT(error_text<c10::TypeError>([&] { plain.add_(x); }),
                HasSubstr("[aten::add_.Tensor] a DTensor would be written into the plain tensor \"self\""));
    EXPECT_THAT(error_text<c10::TypeError>([&] { at::add_out(plain, x, x); }), HasSubstr("the out= tensor"));
    expect_equal(plain, at::zeros({1}));
  });
}

TEST(Failure, WritingThroughAViewAcrossACutDimIsRefusedAndNothingIsLost) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = place(at::zeros({4, 3}), mesh, {Shard(0)});
    const at::Tensor row = x.select(0, 1);
    EXPECT_THAT(error_text<c10::ValueError>([&] { row.fill_(1); }), HasSubstr("is a view across a cut dim"));
    expect_equal(full(x), at::zeros({4, 3}));
  });
}

TEST(Failure, HiddenCommunicationCanBeForbidden) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = place(at::ones({4, 4}), mesh, {Shard(1)});
    const ExplicitRedistribution guard;
    const std::string text = error_text<c10::ValueError>([&] { at::cumprod(x, 1); });
    EXPECT_THAT(text,
                HasSubstr("[aten::cumprod] argument 0 \"self\" f32[4,4] S1 on mesh 2 would be redistributed to R"));
    EXPECT_THAT(text, HasSubstr("fix: call redistribute(parse_placements(\"R\")) before the op"));
    expect_equal(full(at::cumprod(x, 0)), at::cumprod(at::ones({4, 4}), 0));
  });
}

}  // namespace
}  // namespace serried::testing
