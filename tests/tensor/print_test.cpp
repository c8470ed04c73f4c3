// How a DTensor reads, and what stays unreadable.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>

#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

extern "C" void serried_print(const at::Tensor* t);

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

// What a stream shows of `t`.
template <class T>
std::string shown(const T& t) {
  std::ostringstream out;
  out << t;
  return out.str();
}

TEST(Print, AResultOfAnOpReadsAsTheDTensorItIsWithoutCommunication) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    const DTensor d = distribute_tensor(at::arange(3).to(at::kFloat), mesh, {Shard(0)});
    const at::Tensor doubled = d * 2;
    // A single rank would wait for ever if it took two.
    if (group->getRank() == 1) {
      EXPECT_EQ(shown(doubled),
                "DTensor f32[3] S0 on mesh dp=2, local [1] =\n" + shown(at::full({1}, 4.f)) +
                    "\n[ part of rank 1; the whole: serried::DTensor(x).full_tensor(), called on every rank ]");
      EXPECT_EQ(shown(DTensor(doubled)), shown(doubled));
    }
    const at::Tensor loss = doubled.sum();  // pending, and without dims
    EXPECT_EQ(shown(loss), "DTensor f32[] P on mesh dp=2, local [] =\n" +
                               shown(at::scalar_tensor(group->getRank() == 0 ? 2.f : 4.f)) +
                               c10::str("\n[ part of rank ", group->getRank(),
                                        "; the whole: serried::DTensor(x).full_tensor(), called on every rank ]"));
  });
}

TEST(Print, WhatEveryRankHasWholeReadsAsSuch) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = at::arange(6).to(at::kLong).reshape({2, 3});
    const at::Tensor d = distribute_tensor(plain, mesh);
    EXPECT_THAT(shown(d), ::testing::EndsWith("local [2,3] =\n" + shown(plain)));
  });
}

TEST(Print, EmptyPartsParametersAndDoublesAreShown) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 2).bias(false));
    distribute_parameter(net->weight, mesh, {Shard(0)});
    EXPECT_THAT(shown(net->weight), HasSubstr("DTensor f32[2,3] S0 on mesh "));
    const at::Tensor doubles = distribute_tensor(at::arange(2).to(at::kDouble), mesh, {Shard(0)});
    EXPECT_THAT(shown(doubles), HasSubstr("DTensor f64[2] S0 on mesh "));
  });
}

TEST(Print, PlainTensorsReadAsLibTorchPrintsThem) {
  EXPECT_EQ(shown(at::Tensor()), "[ Tensor (undefined) ]");
  EXPECT_EQ(shown(at::arange(3)), " 0\n 1\n 2\n[ CPULongType{3} ]");
}

TEST(Print, AFailedExpectationShowsIt) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = distribute_tensor(at::arange(4).to(at::kFloat), mesh, {Shard(0)});
    EXPECT_THAT(::testing::PrintToString(d), HasSubstr("DTensor f32[4] S0 on mesh "));
    EXPECT_THAT(::testing::PrintToString(DTensor(d)), HasSubstr("DTensor f32[4] S0 on mesh "));
    EXPECT_THAT(::testing::PrintToString(std::vector<DTensor>{DTensor(d)}), HasSubstr("DTensor f32[4] S0 on mesh "));
  });
}

TEST(Print, ADebuggerCallsItByAPlainName) {
  ::testing::internal::CaptureStdout();
  const at::Tensor plain = at::arange(3);
  serried_print(&plain);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), shown(plain) + "\n");
}

TEST(Print, DataOfADTensorSaysWhatToDo) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = distribute_tensor(at::arange(4).to(at::kDouble), mesh, {Shard(0)});
    try {
      d.const_data_ptr<double>();
      FAIL() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("[data_ptr] a DTensor has no memory of its own\n"
                                          "  fix: use to_local() for this rank's part, or full_tensor() for the whole, "
                                          "also for torch::save; to print it: std::cout << serried::DTensor(x)"));
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
