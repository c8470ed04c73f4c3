// What makes a tensor ours: keys, sizes, no memory.
#include "serried/tensor/meta.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/dtensor.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::error_text;
using testing::on_mesh;

constexpr const char* kNoMemory =
    "[data_ptr] a DTensor has no memory of its own\n"
    "  fix: use to_local() for this rank's part, or full_tensor() for the whole, also for torch::save; to print it: "
    "std::cout << serried::DTensor(x)";

at::Tensor sample(const DeviceMesh& mesh) {
  return wrap(at::ones({2, 3}), intern_spec(mesh, {Shard(0)}, {4, 3}, {3, 1}, at::kFloat));
}

TEST(Meta, WrappedTensorsHaveGlobalSizesAndNoDenseKey) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = sample(mesh);
    EXPECT_EQ(d.sizes(), (at::IntArrayRef{4, 3}));
    EXPECT_EQ(d.strides(), (at::IntArrayRef{3, 1}));
    EXPECT_EQ(d.scalar_type(), at::kFloat);
    EXPECT_EQ(d.device(), at::Device(at::kCPU));
    EXPECT_EQ(d.layout(), at::kStrided);
    EXPECT_FALSE(d.requires_grad());
    EXPECT_TRUE(d.key_set().has(kHomeKey));
    EXPECT_TRUE(d.key_set().has(c10::DispatchKey::AutogradCPU));
    EXPECT_TRUE(d.key_set().has(c10::DispatchKey::ADInplaceOrView));
    EXPECT_FALSE(d.key_set().has(c10::DispatchKey::Dense));
    EXPECT_TRUE(is_dtensor(d));
    EXPECT_FALSE(is_dtensor(at::ones({2})));
    EXPECT_FALSE(is_dtensor(at::Tensor()));
  });
}

TEST(Meta, MemoryOfADTensorIsAClearError) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = sample(mesh);
    EXPECT_EQ(error_text<c10::Error>([&] { d.data_ptr(); }), kNoMemory);
    EXPECT_EQ(error_text<c10::Error>([&] { d.data_ptr<float>(); }), kNoMemory);
    EXPECT_EQ(error_text<c10::Error>([&] { d.const_data_ptr<float>(); }), kNoMemory);
    EXPECT_EQ(error_text<c10::Error>([&] { d.mutable_data_ptr<float>(); }), kNoMemory);
    EXPECT_EQ(error_text<c10::Error>([&] { d.storage().data(); }), kNoMemory);
    EXPECT_EQ(d.storage().nbytes(), 0u);
  });
}

TEST(Meta, UnderInferenceModeTensorsAreInferenceTensors) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor normal = sample(mesh);
    const c10::InferenceMode inference;
    const at::Tensor made = sample(mesh);
    EXPECT_TRUE(made.is_inference());
    EXPECT_FALSE(made.key_set().has(c10::DispatchKey::ADInplaceOrView));
    const SpecPtr spec = dtensor_meta(normal)->spec;
    EXPECT_FALSE(wrap_view(dtensor_meta(normal)->local, spec, normal).is_inference());
    EXPECT_TRUE(wrap_view(dtensor_meta(made)->local, spec, made).is_inference());
  });
}

TEST(Meta, ConvertingInPlaceIsSeenByEveryHandle) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = at::ones({4, 3}).requires_grad_();
    const at::Tensor handle = plain;
    convert_in_place(plain, at::ones({2, 3}), dtensor_meta(sample(mesh))->spec);
    EXPECT_TRUE(is_dtensor(handle));
    EXPECT_TRUE(handle.requires_grad());
    EXPECT_TRUE(handle.is_leaf());
    EXPECT_EQ(handle.sizes(), (at::IntArrayRef{4, 3}));
    EXPECT_EQ(dtensor_meta(handle)->local.size(0), 2);
    EXPECT_EQ(error_text<c10::Error>([&] { handle.data_ptr(); }), kNoMemory);
  });
}

TEST(Meta, SetMetaChangesSizesAndDtype) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor d = sample(mesh);
    set_meta(d, at::ones({5}, at::kDouble), intern_spec(mesh, {Replicate()}, {5}, {1}, at::kDouble));
    EXPECT_EQ(d.sizes(), (at::IntArrayRef{5}));
    EXPECT_EQ(d.scalar_type(), at::kDouble);
  });
}

TEST(Meta, CopiesThatAutogradMakesShareTheMeta) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor d = sample(mesh);
    EXPECT_EQ(dtensor_meta(d.variable_data()), dtensor_meta(d));
    EXPECT_EQ(dtensor_meta(d.tensor_data()), dtensor_meta(d));
  });
}

// A plain tensor may: module->clone() works so.
TEST(Meta, ADTensorDoesNotTakeTheDataOfAPlainTensor) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    at::Tensor d = sample(mesh);
    EXPECT_THROW(d.set_data(at::ones({4, 3})), c10::Error);
    EXPECT_TRUE(is_dtensor(d));
    at::Tensor other_size = at::ones({2, 3});
    EXPECT_THROW(other_size.set_data(d), c10::Error);
    at::Tensor plain = at::ones({4, 3});
    plain.set_data(d);
    EXPECT_EQ(dtensor_meta(plain), dtensor_meta(d));
  });
}

TEST(Meta, ResultsKeepTheMemoryOrderOfTheirParts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor local = at::ones({2, 3, 4, 5}).to(at::MemoryFormat::ChannelsLast);
    const SpecPtr spec = spec_of_result(local, mesh, {Shard(0)}, {4, -1, -1, -1});
    EXPECT_EQ(spec->sizes, (c10::DimVector{4, 3, 4, 5}));
    EXPECT_EQ(spec->strides, (c10::DimVector{60, 1, 15, 3}));
    EXPECT_EQ(spec_of_result(at::ones({2, 3}), mesh, {Shard(0)}, {4, 3})->strides, (c10::DimVector{3, 1}));
  });
}

}  // namespace
}  // namespace serried
