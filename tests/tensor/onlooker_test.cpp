// Who only looks on is told what ops read and make, and sees those that write.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/meta.h"
#include "tests/support/ignoring_recorder.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

class Onlooker final : public IgnoringRecorder, private tape::Notes {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    seen.push_back(op.schema().name());
    tape::run_unrecorded(op, stack);
  }
  tape::Notes* notes() override { return this; }
  bool replays() const override { return false; }

  std::vector<std::string> seen;
  std::vector<const c10::TensorImpl*> reads;
  std::vector<uint32_t> versions;
  int num_made = 0;

 private:
  void read(const c10::TensorImpl& plain, const c10::VariableVersion& counter) override {
    reads.push_back(&plain);
    versions.push_back(counter.current_version());
  }
  void made(const at::Tensor&) override { ++num_made; }
};

using Reads = std::vector<const c10::TensorImpl*>;
using Names = std::vector<std::string>;

TEST(Onlookers, AreToldOfPlainOpsThatMakeAndSeeThoseThatWrite) {
  const at::Tensor a = torch::ones({2, 2}), b = torch::ones({2, 2});
  Onlooker onlooker;
  {
    const tape::OnlookerScope scope(onlooker);
    a.mm(b);
    a.t();
    a.add_(1);
    a.conj().mul(b);
  }
  EXPECT_EQ(onlooker.reads, (Reads{a.unsafeGetTensorImpl(), b.unsafeGetTensorImpl(), a.unsafeGetTensorImpl(),
                                   b.unsafeGetTensorImpl()}));
  EXPECT_EQ(onlooker.num_made, 2);
  EXPECT_EQ(onlooker.seen, Names{"aten::add_"});
}

TEST(Onlookers, DoNotChangeWhatComesOfConjugates) {
  const at::Tensor a = torch::ones({2, 2}, at::kComplexFloat), b = torch::ones({2, 2}, at::kComplexFloat);
  Onlooker onlooker;
  at::Tensor product;
  {
    const tape::OnlookerScope scope(onlooker);
    product = a.mul(c10::complex<float>(0, 1)).conj().mul(b);
  }
  EXPECT_TRUE(at::equal(product, torch::full({2, 2}, c10::complex<float>(0, -1))));
}

TEST(Onlookers, PassedByOfPlainOpsStillSeeDTensors) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const at::Tensor x = place(torch::ones({2, 2}), mesh, {Replicate()}), y = torch::ones({2, 2});
    x.add_(1);
    x.mm(x);  // makes the plan
    Onlooker onlooker;
    {
      const tape::OnlookerScope scope(onlooker, /*sees_plain=*/false);
      y.mm(y);
      x.mm(x);
      x.add_(1);
    }
    const c10::TensorImpl* part = dtensor_meta(x)->local.unsafeGetTensorImpl();
    EXPECT_EQ(onlooker.reads, (Reads{part, part}));
    EXPECT_EQ(onlooker.versions, (std::vector<uint32_t>{1, 1})) << "writes are counted by the DTensor";
    EXPECT_EQ(onlooker.num_made, 1);
    EXPECT_EQ(onlooker.seen, Names{"aten::add_"});
  });
}

}  // namespace
}  // namespace serried::testing
