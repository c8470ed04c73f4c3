// A backward belongs to the wrapper if it goes through a forward of the wrapper; any other one is this rank's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/optimizer_in_backward.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::OnRanks;

/// `scale` is part of no output; `kept` leaves forward through a member.
struct SideDoorImpl : torch::nn::Module {
  SideDoorImpl() {
    register_module("fc", fc);
    scale = register_parameter("scale", torch::full({2}, 3.0));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = fc(x);
    kept = (y * scale).square().sum();
    return y;
  }
  torch::nn::Linear fc{3, 2};
  at::Tensor scale, kept;
};
TORCH_MODULE(SideDoor);

SideDoor side_door() {
  return seeded(5, [] { return SideDoor(); });
}

at::Tensor rows_of_rank(int rank, int salt = 0) {
  return torch::sin(torch::arange(6, at::kFloat).reshape({2, 3}) + rank * 7 + salt);
}

/// The mean over ranks of what `loss(net, rank)` leaves in the gradients of a plain module.
std::vector<at::Tensor> mean_gradients(int world_size, const std::function<at::Tensor(SideDoor&, int)>& loss) {
  std::vector<at::Tensor> means;
  for (int rank = 0; rank < world_size; ++rank) {
    SideDoor net = side_door();
    loss(net, rank).backward();
    size_t i = 0;
    for (const at::Tensor& parameter : net->parameters()) {
      const at::Tensor grad = parameter.grad().defined() ? parameter.grad() : torch::zeros_like(parameter);
      if (means.size() == i) means.push_back(torch::zeros_like(parameter));
      means[i++] += grad / world_size;
    }
  }
  return means;
}

void expect_gradients(SideDoor& net, const std::vector<at::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const at::Tensor& grad = net->parameters()[i].grad();
    expect_close(grad.defined() ? grad : torch::zeros_like(expected[i]), expected[i], std::to_string(i));
  }
}

std::vector<DistributedDataParallelOptions> ways_to_reduce(const Group& group) {
  std::vector<DistributedDataParallelOptions> ways(6, {.process_group = group});
  ways[1].gradient_as_bucket_view = false;
  ways[2].find_unused_parameters = true;
  ways[3].static_graph = true;
  ways[4].batched_grad_copy = true;
  ways[5].delay_all_reduce = {.parameters = {"scale"}, .trigger = "fc.weight"};
  return ways;
}

class LocalBackward : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, LocalBackward, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

TEST_P(LocalBackward, OfTheModuleItselfAddsUpOnThisRankAlone) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    const auto whole = [](auto& net, SideDoor& module, int of, int salt) {
      return net(rows_of_rank(of, salt)).square().sum() + module->kept;
    };
    for (const DistributedDataParallelOptions& options : ways_to_reduce(group)) {
      SideDoor net = side_door(), alone = side_door();
      DistributedDataParallel ddp(net, options);
      // Before any forward of the wrapper, when gradients are none, and again when they lie in buckets.
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        alone->zero_grad();
        if (rank == 0) {
          whole(net, net, 0, 50).backward();
          whole(alone, alone, 0, 50).backward();
          expect_close(net->fc->weight.grad(), alone->fc->weight.grad());
          expect_close(net->scale.grad(), alone->scale.grad());
        }
        whole(ddp, net, rank, step).backward();
        expect_gradients(net, mean_gradients(world_size(), [&](SideDoor& plain, int of) {
                           at::Tensor loss = whole(plain, plain, of, step);
                           return of == 0 ? loss + whole(plain, plain, 0, 50) : loss;
                         }));
      }
    }
  });
}

TEST_P(LocalBackward, StaysLocalWhileAForwardOfTheWrapperWaitsForItsOwn) {
  on_ranks([&](const Group& group) {
    SideDoor net = side_door();
    DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
    const at::Tensor out = ddp(rows_of_rank(group->getRank()));
    if (group->getRank() == 1) net(rows_of_rank(9)).sum().backward();
    out.sum().backward();
    expect_gradients(net, mean_gradients(world_size(), [&](SideDoor& plain, int of) {
                       at::Tensor loss = plain(rows_of_rank(of)).sum();
                       return of == 1 ? loss + plain(rows_of_rank(9)).sum() : loss;
                     }));
  });
}

TEST_P(LocalBackward, IsNotOneWithLossTermsOnParametersBesideTheOutput) {
  on_ranks([&](const Group& group) {
    const auto loss = [](auto& net, SideDoor& module, int of) {
      const at::Tensor fit = net(rows_of_rank(of)).sum();
      // Made last, so autograd takes it first: the gradient of `scale` comes before any of an output.
      return fit + module->scale.square().sum() * (of + 1) + module->fc->weight.norm();
    };
    for (const DistributedDataParallelOptions& options : ways_to_reduce(group)) {
      SideDoor net = side_door();
      DistributedDataParallel ddp(net, options);
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        loss(ddp, net, group->getRank()).backward();
        expect_gradients(net,
                         mean_gradients(world_size(), [&](SideDoor& plain, int of) { return loss(plain, plain, of); }));
      }
    }
  });
}

TEST_P(LocalBackward, IsNotOneFromWhatForwardKeptInAMember) {
  on_ranks([&](const Group& group) {
    for (const DistributedDataParallelOptions& options : ways_to_reduce(group)) {
      SideDoor net = side_door();
      DistributedDataParallel ddp(net, options);
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        ddp(rows_of_rank(group->getRank()));
        net->kept.backward();
        expect_gradients(net, mean_gradients(world_size(), [&](SideDoor& plain, int of) {
                           plain(rows_of_rank(of));
                           return plain->kept;
                         }));
      }
    }
  });
}

TEST_P(LocalBackward, IsNotOneThroughAGraphThatWasKept) {
  on_ranks([&](const Group& group) {
    SideDoor net = side_door();
    DistributedDataParallel ddp(net, {.process_group = group});
    const auto loss_of = [](const at::Tensor& out, SideDoor& module, int of) {
      return out.sum() + module->scale.square().sum() * (of + 1);
    };
    const at::Tensor out = ddp(rows_of_rank(group->getRank()));
    for (int time = 0; time < 2; ++time) {
      ddp.zero_grad();
      loss_of(out, net, group->getRank()).backward({}, /*retain_graph=*/true);
      expect_gradients(net, mean_gradients(world_size(), [&](SideDoor& plain, int of) {
                         return loss_of(plain(rows_of_rank(of)), plain, of);
                       }));
    }
  });
}

TEST_P(LocalBackward, OfAForwardInsideNoSyncStaysLocalOutside) {
  on_ranks([&](const Group& group) {
    SideDoor net = side_door(), alone = side_door();
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp(rows_of_rank(0)).sum();  // synchronised, and never used
    at::Tensor out;
    {
      const auto guard = ddp.no_sync();
      out = ddp(rows_of_rank(group->getRank()));
    }
    (out.sum() + net->scale.sum()).backward();
    (alone(rows_of_rank(group->getRank())).sum() + alone->scale.sum()).backward();
    expect_close(net->fc->weight.grad(), alone->fc->weight.grad());
  });
}

TEST(LocalBackwardOptions, AnOptimizerInBackwardTakesNoStep) {
  run_ranks(2, [](const Group& group) {
    SideDoor net = side_door(), before = side_door();
    DistributedDataParallel ddp(net, {.process_group = group});
    optimizer_in_backward(
        ddp, [](std::vector<at::Tensor> parameters) { return std::make_unique<torch::optim::SGD>(parameters, 0.1); });
    if (group->getRank() == 0) {
      net(rows_of_rank(0)).sum().backward();
      expect_close(net->fc->weight, before->fc->weight);
      EXPECT_TRUE(net->fc->weight.grad().defined());
    }
    ddp.zero_grad();
    (ddp(rows_of_rank(group->getRank())).sum() + net->kept).backward();
    EXPECT_FALSE(net->fc->weight.grad().defined());
    EXPECT_FALSE(torch::equal(net->fc->weight, before->fc->weight));
  });
}

TEST(LocalBackwardOptions, InMixedPrecisionItRunsInFullPrecision) {
  run_ranks(2, [](const Group& group) {
    SideDoor net = side_door(), alone = side_door();
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = {.param_dtype = at::kBFloat16}});
    if (group->getRank() == 0) {
      net(rows_of_rank(0)).sum().backward();
      alone(rows_of_rank(0)).sum().backward();
      expect_close(net->fc->weight.grad(), alone->fc->weight.grad());
    }
    ddp.zero_grad();
    (ddp(rows_of_rank(0)).sum() + net->kept).backward();
    EXPECT_EQ(net->fc->weight.grad().scalar_type(), at::kFloat);
  });
}

TEST(LocalBackwardOptions, RanksWithoutInputAreNotToldOfIt) {
  run_ranks(2, [](const Group& group) {
    SideDoor net = side_door();
    DistributedDataParallel ddp(net, {.process_group = group});
    join({&ddp}, [&] {
      for (int step = 0; step < 1 + 2 * group->getRank(); ++step) {
        ddp.zero_grad();
        (ddp(rows_of_rank(group->getRank())).sum() + net->kept).backward();
        if (group->getRank() == 1) (net(rows_of_rank(3)).sum() + net->kept).backward();
      }
    });
    EXPECT_TRUE(net->fc->weight.grad().defined());
  });
}

// Ranks that all went through the wrapper are not sent to look for it.
TEST(LocalBackwardErrors, BucketsThatDifferSayNothingOfTheWrapper) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net = seeded(1, [] { return torch::nn::Linear(3, 2); });
    DistributedDataParallel ddp(net, {.process_group = group, .init_sync = false});
    torch::nn::Linear other(3, 4);
    DistributedDataParallel second(other, {.process_group = group, .init_sync = false});
    const std::string text = error_text<c10::DistBackendError>(
        [&] { (group->getRank() == 0 ? ddp : second)(rows_of_rank(0)).sum().backward(); });
    EXPECT_THAT(text, ::testing::StartsWith("[all_reduce] ranks called different collectives: rank 0 DDP bucket 0: "));
    EXPECT_THAT(text, ::testing::EndsWith("\n  in:  a backward of DistributedDataParallel"));
  });
}

TEST(LocalBackwardErrors, ARankThatLeavesTheWrapperOutIsHintedAtByTheOthers) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net = seeded(1, [] { return torch::nn::Linear(3, 2); });
    DistributedDataParallel ddp(net, {.process_group = group});
    if (group->getRank() == 0) {
      EXPECT_EQ(error_text<c10::DistBackendError>([&] { ddp(rows_of_rank(0)).sum().backward(); }),
                "[all_reduce] ranks called different collectives: rank 0 DDP bucket 0: #4 all_reduce f32[8] avg, "
                "rank 1 #4 barrier\n"
                "  fix: make every rank call the same collectives in the same order\n"
                "  at:  rank 0/2\n"
                "  in:  a backward of DistributedDataParallel; a rank that calls the module without its wrapper takes "
                "no part in it");
    } else {
      net(rows_of_rank(1)).sum().backward();
      EXPECT_THROW(barrier(group), c10::DistBackendError);
    }
  });
}

}  // namespace
}  // namespace serried
