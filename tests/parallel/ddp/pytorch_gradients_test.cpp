// Gradients beside those recorded from PyTorch's DistributedDataParallel, on every backend of one host.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"
#include "tests/support/models.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

namespace models = testing::models;

struct RecordedGradient {
  std::string model;
  int world_size;
  std::string parameter;
  std::vector<float> values;  // none: the parameter has no gradient
};

const std::vector<RecordedGradient>& recorded_gradients() {
  static const std::vector<RecordedGradient> all = {
#include "tests/data/ddp_gradients.inc"
  };
  return all;
}

void expect_recorded_gradient(const at::Tensor& gradient, const RecordedGradient& recorded, const std::string& what) {
  if (recorded.values.empty()) {
    EXPECT_FALSE(gradient.defined()) << what << " has a gradient";
    return;
  }
  ASSERT_TRUE(gradient.defined()) << what << " has no gradient";
  const at::Tensor actual = gradient.is_sparse() ? gradient.to_dense() : gradient;
  const at::Tensor expected = at::tensor(recorded.values).view_as(actual);
  // Small gradients count as much as large ones.
  const at::Tensor scale = expected.abs().max();
  testing::expect_close(actual / scale, expected / scale, what);
}

void expect_recorded(const torch::nn::Module& module, const std::string& model, int world_size,
                     const std::string& when) {
  int found = 0;
  const auto parameters = module.named_parameters();
  for (const RecordedGradient& recorded : recorded_gradients()) {
    if (recorded.model != model || recorded.world_size != world_size) continue;
    expect_recorded_gradient(parameters[recorded.parameter].grad(), recorded,
                             model + "." + recorded.parameter + " " + when);
    ++found;
  }
  EXPECT_GT(found, 0) << "nothing is recorded for " << model;
}

class PyTorchGradients : public testing::OnRanks {
 protected:
  template <class Model>
  void expect_gradients_of(const std::string& name, bool find_unused_parameters = false) {
    for (bool views : {true, false}) {
      on_ranks([&](const Group& group) {
        const auto net = std::make_shared<Model>();
        // The others start with what comes from rank 0.
        if (group->getRank() == 0) models::fill_parameters(*net);
        DistributedDataParallel ddp(net, {.process_group = group,
                                          .find_unused_parameters = find_unused_parameters,
                                          .gradient_as_bucket_view = views});
        // Once in the buckets of the start, then in those rebuilt in order of arrival.
        for (const char* when : {"in the first step", "in the second step", "in the third step"}) {
          net->zero_grad();
          Model::loss(ddp, group->getRank()).backward();
          expect_recorded(*net, name, group->getSize(), std::string(when) + (views ? ", in buckets" : ""));
        }
      });
    }
  }
};

INSTANTIATE_TEST_SUITE_P(On, PyTorchGradients, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

TEST_P(PyTorchGradients, OfAnMlpAreTheSame) {
  expect_gradients_of<models::Mlp>("Mlp");
}

TEST_P(PyTorchGradients, OfConvolutionsAndBatchNormAreTheSame) {
  expect_gradients_of<models::ConvNorm>("ConvNorm");
}

TEST_P(PyTorchGradients, OfAnLstmAreTheSame) {
  expect_gradients_of<models::Recurrent>("Recurrent");
}

TEST_P(PyTorchGradients, OfAnEmbeddingAreTheSame) {
  expect_gradients_of<models::Lookup>("Lookup");
}

TEST_P(PyTorchGradients, OfASparseEmbeddingAreTheSame) {
  expect_gradients_of<models::SparseLookup>("SparseLookup");
}

TEST_P(PyTorchGradients, OfTiedWeightsAreTheSame) {
  expect_gradients_of<models::Tied>("Tied");
}

TEST_P(PyTorchGradients, OfBranchesThatSomeRanksSkipAreTheSame) {
  expect_gradients_of<models::Branches>("Branches", true);
}

TEST_P(PyTorchGradients, OfAModelWithFrozenParametersAreTheSame) {
  expect_gradients_of<models::Frozen>("Frozen");
}

TEST_P(PyTorchGradients, OfSeveralOutputsAreTheSame) {
  expect_gradients_of<models::TwoHeads>("TwoHeads");
}

TEST_P(PyTorchGradients, OfALayerThatIsUsedThreeTimesAreTheSame) {
  expect_gradients_of<models::Reused>("Reused");
}

}  // namespace
}  // namespace serried
