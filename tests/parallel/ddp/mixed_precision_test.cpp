// Forward, backward and reduction in low precision, parameters and gradients in full precision outside.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/base/log.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/optimizer_in_backward.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/models.h"
#include "tests/support/on_mesh.h"
#include "tests/support/on_ranks.h"

namespace serried::mixed_precision_test {
namespace {

using ::testing::Each;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;

constexpr auto kBf16 = at::kBFloat16;
const MixedPrecision kReducedInFloat = {.param_dtype = kBf16, .reduce_dtype = at::kFloat};

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    fc1 = register_module("fc1", torch::nn::Linear(5, 7));
    norm = register_module("norm", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(7).affine(false)));
    fixed = register_parameter("fixed", at::full({7}, 1.5), /*requires_grad=*/false);
    fc2 = register_module("fc2", torch::nn::Linear(7, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    dtypes_seen = {x.scalar_type(), fc1->weight.scalar_type(), fixed.scalar_type(), fc2->bias.scalar_type()};
    if (throws_in_forward) throw std::runtime_error("forward fails");
    at::Tensor hidden = torch::gelu(fc1(x)) * fixed;
    if (throws_in_backward) {
      hidden.register_hook([](const at::Tensor&) { throw std::runtime_error("backward fails"); });
    }
    return fc2(hidden);
  }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor fixed;
  std::vector<at::ScalarType> dtypes_seen;
  bool throws_in_forward = false;
  bool throws_in_backward = false;
};
TORCH_MODULE(Net);

Net seeded_net(int seed = 0) {
  return seeded(seed, [] { return Net(); });
}
at::Tensor batch_of(int rank, int step = 0) {
  return seeded(100 * step + rank, [] { return at::randn({3, 5}); });
}
at::Tensor loss_of(const at::Tensor& output) {
  return output.to(at::kFloat).square().mean();
}

/// What `rank` alone gets from a copy of `net` that is bf16 altogether.
std::map<std::string, at::Tensor> gradients_of(const Net& net, int rank, int step = 0) {
  const auto copy = seeded(0, [&] { return std::dynamic_pointer_cast<NetImpl>(net->clone()); });
  copy->to(kBf16);
  loss_of(copy->forward(batch_of(rank, step).to(kBf16))).backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& item : copy->named_parameters()) {
    if (item.value().requires_grad()) gradients[item.key()] = item.value().grad().to(at::kFloat);
  }
  return gradients;
}
std::map<std::string, at::Tensor> average_gradients(const Net& net, int world_size, int step = 0) {
  std::map<std::string, at::Tensor> averages;
  for (int rank = 0; rank < world_size; ++rank) {
    for (auto& [name, gradient] : gradients_of(net, rank, step)) {
      at::Tensor& average = averages[name];
      average = average.defined() ? average + gradient / world_size : gradient / world_size;
    }
  }
  return averages;
}
void expect_gradients(const torch::nn::Module& net, const std::map<std::string, at::Tensor>& expected) {
  const auto parameters = net.named_parameters();
  for (const auto& [name, gradient] : expected) expect_close(parameters[name].grad(), gradient, name);
}

void expect_full_precision(const torch::nn::Module& net) {
  for (const auto& item : net.named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), at::kFloat) << item.key();
    if (item.value().grad().defined()) EXPECT_EQ(item.value().grad().scalar_type(), at::kFloat) << item.key();
  }
}

TEST(MixedPrecision, RunsInParamDtypeAndTrainsInFullPrecision) {
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      for (const bool as_view : {true, false}) {
        Net net = seeded_net();
        DistributedDataParallel ddp(
            net, {.process_group = group, .gradient_as_bucket_view = as_view, .mixed_precision = kReducedInFloat});
        torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 4; ++step) {
          const auto expected = average_gradients(net, world_size, step);
          optimizer.zero_grad();
          const at::Tensor output = ddp(batch_of(group->getRank(), step));
          EXPECT_EQ(output.scalar_type(), kBf16);
          EXPECT_THAT(net->dtypes_seen, Each(kBf16));
          loss_of(output).backward();
          expect_full_precision(*net);
          expect_gradients(*net, expected);
          optimizer.step();
        }
      }
    });
  }
}

TEST(MixedPrecision, ReducesInReduceDtypeOrElseInParamDtypeOrElseAsItIs) {
  const std::pair<MixedPrecision, at::ScalarType> cases[] = {
      {{}, at::kFloat},
      {{.param_dtype = kBf16}, kBf16},
      {kReducedInFloat, at::kFloat},
      {{.param_dtype = kBf16, .reduce_dtype = at::kHalf}, at::kHalf},
      {{.reduce_dtype = kBf16}, kBf16},
  };
  run_ranks(2, [&](const Group& group) {
    for (const auto& [precision, dtype] : cases) {
      Net net = seeded_net();
      DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = precision});
      std::vector<at::ScalarType> seen;
      ddp.register_comm_hook([&](c10d::GradBucket& bucket) {
        seen.push_back(bucket.getBuffer().scalar_type());
        std::vector<at::Tensor> tensors = {bucket.getBufferRef().div_(2)};
        return group->allreduce(tensors)->getFuture();
      });
      loss_of(ddp(batch_of(group->getRank()))).backward();
      EXPECT_THAT(seen, Each(dtype));
      expect_full_precision(*net);
      for (const auto& [name, expected] : average_gradients(net, 2)) {
        const at::Tensor grad = net->named_parameters()[name].grad();
        EXPECT_TRUE(grad.allclose(expected, 0.02, 0.01)) << name << "\n" << grad << "\n" << expected;
      }
    }
  });
}

TEST(MixedPrecision, WithoutAHookTheAverageIsTakenInReduceDtype) {
  run_ranks(2, [&](const Group& group) {
    for (const bool as_view : {true, false}) {
      Net net = seeded_net();
      DistributedDataParallel ddp(
          net, {.process_group = group, .gradient_as_bucket_view = as_view, .mixed_precision = {.param_dtype = kBf16}});
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        loss_of(ddp(batch_of(group->getRank(), step))).backward();
        expect_full_precision(*net);
        const auto of_first = gradients_of(net, 0, step), of_second = gradients_of(net, 1, step);
        for (const auto& [name, gradient] : of_first) {
          const at::Tensor sum = (gradient + of_second.at(name)).to(kBf16);
          expect_equal(net->named_parameters()[name].grad(), (sum / 2).to(at::kFloat), name);
        }
      }
    }
  });
}

TEST(MixedPrecision, GradientsAddUpInFullPrecision) {
  run_ranks(2, [&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = kReducedInFloat});
    {
      const auto guard = ddp.no_sync();
      loss_of(ddp(batch_of(group->getRank(), 0))).backward();
      expect_full_precision(*net);
      expect_gradients(*net, gradients_of(net, group->getRank(), 0));
      loss_of(ddp(batch_of(group->getRank(), 1))).backward();
      expect_full_precision(*net);
    }
    loss_of(ddp(batch_of(group->getRank(), 2))).backward();
    auto expected = average_gradients(net, 2, 0);
    for (const int step : {1, 2}) {
      for (auto& [name, gradient] : average_gradients(net, 2, step)) expected[name] = expected[name] + gradient;
    }
    expect_gradients(*net, expected);
  });
}

TEST(MixedPrecision, WithoutABackwardFullPrecisionComesBack) {
  run_ranks(2, [&](const Group& group) {
    Net net = seeded_net();
    const at::Tensor before = net->fc1->weight.detach().clone();
    const void* memory = net->fc1->weight.data_ptr();
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = kReducedInFloat});
    {
      at::NoGradGuard no_grad;
      EXPECT_EQ(ddp(batch_of(0)).scalar_type(), kBf16);
    }
    expect_full_precision(*net);
    ddp(batch_of(0));
    ddp(batch_of(group->getRank()));
    loss_of(ddp(batch_of(group->getRank()))).backward();
    expect_full_precision(*net);
    expect_gradients(*net, average_gradients(net, 2));
    expect_equal(net->fc1->weight.detach(), before);
    EXPECT_EQ(net->fc1->weight.data_ptr(), memory);
  });
}

TEST(MixedPrecision, SeveralForwardsMayGoBackInAnyOrder) {
  run_ranks(2, [&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = kReducedInFloat});
    const at::Tensor first = loss_of(ddp(batch_of(group->getRank(), 0)));
    const at::Tensor second = loss_of(ddp(batch_of(group->getRank(), 1)));
    second.backward({}, /*retain_graph=*/true);
    expect_full_precision(*net);
    expect_gradients(*net, average_gradients(net, 2, 1));
    ddp.zero_grad();
    first.backward();
    expect_full_precision(*net);
    expect_gradients(*net, average_gradients(net, 2, 0));
    ddp.zero_grad();
    second.backward();
    expect_gradients(*net, average_gradients(net, 2, 1));
  });
}

TEST(MixedPrecision, AnExceptionInForwardOrBackwardLeavesFullPrecision) {
  run_ranks(2, [&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = kReducedInFloat});
    net->throws_in_forward = true;
    EXPECT_THROW(ddp(batch_of(0)), std::runtime_error);
    expect_full_precision(*net);
    net->throws_in_forward = false;
    net->throws_in_backward = true;
    EXPECT_THROW(loss_of(ddp(batch_of(0))).backward(), std::runtime_error);
    expect_full_precision(*net);
    net->throws_in_backward = false;
    ddp.zero_grad();
    loss_of(ddp(batch_of(group->getRank()))).backward();
    expect_full_precision(*net);
    expect_gradients(*net, average_gradients(net, 2));
  });
}

TEST(MixedPrecision, AnOptimizerInBackwardSeesFullPrecision) {
  run_ranks(2, [&](const Group& group) {
    Net net = seeded_net(), plain = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = kReducedInFloat});
    optimizer_in_backward(ddp, [](auto parameters) { return std::make_unique<torch::optim::SGD>(parameters, 0.1); });
    for (int step = 0; step < 2; ++step) {
      for (const auto& [name, gradient] : average_gradients(plain, 2, step)) {
        plain->named_parameters()[name].data().sub_(gradient, 0.1);
      }
      loss_of(ddp(batch_of(group->getRank(), step))).backward();
      expect_full_precision(*net);
      expect_close(net->fc1->weight.detach(), plain->fc1->weight.detach());
      expect_close(net->fc2->bias.detach(), plain->fc2->bias.detach());
    }
  });
}

TEST(MixedPrecision, BuffersAreCastOnceAndForGood) {
  run_ranks(2, [&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(
        net,
        {.process_group = group, .ignore = {"norm.running_var"}, .mixed_precision = {.buffer_dtype = at::kDouble}});
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kDouble);
    EXPECT_EQ(net->norm->running_var.scalar_type(), at::kFloat);
    EXPECT_EQ(net->norm->num_batches_tracked.scalar_type(), at::kLong);
    loss_of(ddp(batch_of(group->getRank()))).backward();
    EXPECT_THAT(net->dtypes_seen, Each(at::kFloat));
    EXPECT_EQ(net->norm->running_mean.scalar_type(), at::kDouble);
  });
}

TEST(MixedPrecision, IgnoredParametersAreNotCast) {
  run_ranks(1, [&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .ignore = {"fixed"}, .mixed_precision = kReducedInFloat});
    ddp.module()->fixed.set_data(at::ones({7}));
    EXPECT_THROW(ddp(batch_of(0)), c10::Error) << "the second layer gets float, its weight is bf16";
    EXPECT_EQ(net->dtypes_seen, (std::vector<at::ScalarType>{kBf16, kBf16, at::kFloat, kBf16}));
    expect_full_precision(*net);
  });
}

template <class Model>
void expect_as_in_bf16(const DistributedDataParallelOptions& options) {
  run_ranks(2, [&](const Group& group) {
    const auto fresh = [] {
      auto model = std::make_shared<Model>();
      testing::models::fill_parameters(*model);
      return model;
    };
    auto net = fresh();
    DistributedDataParallelOptions used = options;
    used.process_group = group;
    used.mixed_precision = kReducedInFloat;
    DistributedDataParallel ddp(net, used);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      Model::loss(ddp, group->getRank()).backward();
      expect_full_precision(*net);
    }
    std::vector<at::Tensor> expected;
    for (int rank = 0; rank < 2; ++rank) {
      auto plain = fresh();
      plain->to(kBf16);
      auto run = [&](at::Tensor x) { return plain->forward(x.is_floating_point() ? x.to(kBf16) : x); };
      Model::loss(run, rank).backward();
      const auto parameters = plain->parameters();
      expected.resize(parameters.size());
      for (size_t i = 0; i < parameters.size(); ++i) {
        const at::Tensor gradient = parameters[i].grad().to(at::kFloat) / 2;
        expected[i] = expected[i].defined() ? expected[i] + gradient : gradient;
      }
    }
    const auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor grad = parameters[i].grad().is_sparse() ? parameters[i].grad().to_dense() : parameters[i].grad();
      expect_close(grad, expected[i].is_sparse() ? expected[i].to_dense() : expected[i], std::to_string(i));
    }
  });
}

TEST(MixedPrecision, HoldsForParametersUsedSeveralTimes) {
  expect_as_in_bf16<testing::models::Reused>({});
}
TEST(MixedPrecision, HoldsForTiedParameters) {
  expect_as_in_bf16<testing::models::Tied>({});
}
TEST(MixedPrecision, HoldsForSparseGradients) {
  expect_as_in_bf16<testing::models::SparseLookup>({});
}
TEST(MixedPrecision, HoldsForAStaticGraph) {
  expect_as_in_bf16<testing::models::Mlp>({.static_graph = true});
}
TEST(MixedPrecision, HoldsWhileUnusedParametersAreSought) {
  expect_as_in_bf16<testing::models::Mlp>({.find_unused_parameters = true});
}

TEST(MixedPrecision, HoldsForParametersThatAreDTensors) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    const int dp_rank = int(mesh.get_local_rank("dp"));
    torch::nn::Linear plain = seeded(0, [] { return torch::nn::Linear(5, 3); });
    torch::nn::Linear net = seeded(0, [] { return torch::nn::Linear(5, 3); });
    distribute_parameter(net->weight, mesh["tp"], {Shard(0)});
    distribute_parameter(net->bias, mesh["tp"], {Shard(0)});
    DistributedDataParallel ddp(net, {.mesh = mesh["dp"], .mixed_precision = kReducedInFloat});
    const at::Tensor output = ddp(DTensor::from_local(batch_of(dp_rank), mesh["tp"], {Replicate()}));
    EXPECT_EQ(output.scalar_type(), kBf16);
    loss_of(testing::full(output)).backward();
    expect_full_precision(*net);
    plain->to(kBf16);
    for (const int rank : {0, 1}) (loss_of(plain(batch_of(rank).to(kBf16))) / 2).backward();
    const at::Tensor expected = plain->weight.grad().to(at::kFloat), grad = testing::full(net->weight.grad());
    EXPECT_TRUE(grad.allclose(expected, 0.02, 0.01)) << grad << expected;
    EXPECT_EQ(DTensor(net->weight.grad()).placements(), Placements{Shard(0)});
  });
}

struct NoVisitor {
  at::Tensor x;
};
struct WithVisitor {
  at::Tensor x;
  template <class F>
  void visit_tensors(F& fn) {
    fn(x);
  }
};
struct ManyInputsImpl : torch::nn::Module {
  ManyInputsImpl() { weight = register_parameter("weight", at::ones({3})); }
  at::Tensor forward(const at::Tensor& x, const std::vector<at::Tensor>& list,
                     const std::map<std::string, std::tuple<at::Tensor, int>>& map, std::optional<at::Tensor> maybe,
                     const NoVisitor& hidden, WithVisitor visited, at::Tensor& changed, std::unique_ptr<int> moved,
                     at::IntArrayRef sizes, const char* text) {
    seen = {x.scalar_type(),      list.at(0).scalar_type(), std::get<0>(map.at("a")).scalar_type(),
            maybe->scalar_type(), hidden.x.scalar_type(),   visited.x.scalar_type(),
            changed.scalar_type()};
    index_dtype = list.at(1).scalar_type();
    EXPECT_EQ(*moved + sizes[0] + text[0], 1 + 2 + 'c');
    return x * weight;
  }
  at::Tensor weight;
  std::vector<at::ScalarType> seen;
  at::ScalarType index_dtype = at::kFloat;
};
TORCH_MODULE(ManyInputs);

TEST(MixedPrecision, FloatingInputsAreCastWhereverTheyAreVisible) {
  run_ranks(1, [&](const Group& group) {
    ManyInputs net;
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = kReducedInFloat});
    const at::Tensor one = at::ones({3}), index = at::zeros({3}, at::kLong);
    at::Tensor x = at::ones({3}).requires_grad_(), changed = one;
    const std::vector<at::Tensor> list = {one, index};
    const std::map<std::string, std::tuple<at::Tensor, int>> map = {{"a", {one, 1}}};
    const std::vector<int64_t> sizes = {2};
    ddp(x, list, map, std::optional<at::Tensor>(one), NoVisitor{one}, WithVisitor{one}, changed,
        std::make_unique<int>(1), at::IntArrayRef(sizes), "c")
        .sum()
        .backward();
    EXPECT_EQ(net->seen, (std::vector<at::ScalarType>{kBf16, kBf16, kBf16, kBf16, at::kFloat, kBf16, kBf16}));
    EXPECT_EQ(net->index_dtype, at::kLong);
    EXPECT_EQ(list[0].scalar_type(), at::kFloat) << "the caller's own stay as they are";
    expect_equal(x.grad(), at::ones({3}));
  });
}

TEST(DdpInputs, AreMovedToTheDeviceGiven) {
  run_ranks(1, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .device = at::Device(at::kCPU)});
    expect_equal(ddp(batch_of(0)).detach(), net(batch_of(0)).detach());
    const std::string text = error_text<c10::ValueError>(
        [&] { DistributedDataParallel other(net, {.process_group = group, .device = at::Device(at::kCUDA, 1)}); });
    EXPECT_EQ(text.substr(0, text.find("\n  at:")),
              "[DistributedDataParallel] device is cuda:1, but the module is on cpu\n"
              "  fix: leave out .device, or move the module there before wrapping it");
  });
}

TEST(MixedPrecision, TheLogSaysWhatRunsInWhichDtype) {
  ::testing::internal::CaptureStderr();
  log::set_topics("comm");
  run_ranks(1, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(
        net, {.process_group = group, .mixed_precision = {.param_dtype = kBf16, .buffer_dtype = at::kHalf}});
  });
  log::set_topics("none");
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("mixed precision: forward and backward run with 5 parameters in BFloat16\n"));
  EXPECT_THAT(text, HasSubstr("mixed precision: gradients are reduced in BFloat16\n"));
  EXPECT_THAT(text, HasSubstr("mixed precision: buffers are in Half\n"));
}

}  // namespace
}  // namespace serried::mixed_precision_test
