// How a DTensor reads, and what stays unreadable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "serried/tensor/dtensor.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using ::testing::HasSubstr;
using testing::on_mesh;

TEST(Print, ShowsShapeMeshPlacementsAndThePart) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    std::ostringstream out;
    out << distribute_tensor(at::arange(4).to(at::kFloat).reshape({4, 1}), mesh, {Shard(0)});
    EXPECT_THAT(out.str(), HasSubstr("DTensor f32[4,1] S0 on mesh dp=2, local [2,1] =\n"));
    EXPECT_THAT(out.str(), HasSubstr(group->getRank() == 0 ? " 0\n 1\n" : " 2\n 3\n"));
    std::ostringstream undefined;
    undefined << DTensor();
    EXPECT_EQ(undefined.str(), "DTensor (undefined)");
  });
}

// at::print reads memory, which a DTensor has not; nothing below it can tell printing from computing.
TEST(Print, AsAPlainTensorItSaysWhatToDo) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = distribute_tensor(at::arange(4).to(at::kDouble), mesh, {Shard(0)});
    std::ostringstream out;
    try {
      out << d;
      FAIL() << "no error, but: " << out.str();
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("fix: use to_local() for this rank's part, or full_tensor() for the whole"));
    }
  });
}

TEST(Save, ADTensorSaysWhatToDoAndItsFullTensorIsSaved) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor d = distribute_tensor(at::arange(5).to(at::kDouble), mesh, {Shard(0)});
    std::ostringstream refused;
    try {
      torch::save(at::Tensor(d), refused);
      FAIL() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("full_tensor() for the whole, also for torch::save"));
    }
    std::stringstream saved;
    torch::save(d.full_tensor(), saved);
    at::Tensor back;
    torch::load(back, saved);
    testing::expect_equal(back, at::arange(5).to(at::kDouble));
  });
}

}  // namespace
}  // namespace serried
