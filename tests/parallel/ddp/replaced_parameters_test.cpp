// Parameters that nobody would average, because they became others after the module was wrapped, are named.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "serried/mesh/mesh.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/ddp/changing_net.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::Changing;
using testing::changing_batch;
using testing::changing_net;
using testing::changing_options;
using testing::ChangingSgd;
using testing::error_text;
using testing::expect_close;
using testing::expect_same_on_all_ranks;
using testing::expect_trained_alike;
using testing::load_bytes;
using testing::rows_for;
using testing::saved_bytes;
using testing::train_step;

std::string told_by(const Group& group) {
  return c10::str("\n  at:  rank ", group->getRank(), "/", group->getSize());
}

constexpr const char* kNewOptimizer = "\n  fix: wrap the module again, and give its parameters to a new optimizer";

TEST(ChangedParametersOfDdp, AReplacedModuleIsNamedAndCanBeWrappedAgain) {
  run_ranks(2, [](const Group& group) {
    for (const bool find_unused : {false, true}) {
      Changing plain = changing_net(), net = changing_net();
      const auto replace = [](Changing& which) {
        which->fc2 = which->replace_module("fc2", seeded(5, [] { return torch::nn::Linear(7, 3); }));
      };
      {
        DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = find_unused});
        ddp(at::ones({2, 5})).sum().backward();
        replace(net);
        EXPECT_EQ(error_text<c10::ValueError>([&] {
                    ddp(at::ones({2, 5}));
                  }),
                  "[DistributedDataParallel] fc2.weight is another tensor than when the module was wrapped: nobody "
                  "averages its gradient" +
                      std::string(kNewOptimizer) + told_by(group));
        const at::NoGradGuard no_grad;
        EXPECT_EQ(ddp(at::ones({2, 5})).sizes(), at::IntArrayRef({2, 3}));
      }
      replace(plain);
      DistributedDataParallel again(net, {.process_group = group});
      net->zero_grad();
      const at::Tensor batch = changing_batch(2, 0, at::kFloat);
      plain(batch).pow(2).mean().backward();
      again(rows_for(batch, group)).pow(2).mean().backward();
      for (const auto& item : net->named_parameters()) {
        expect_close(item.value().grad(), plain->named_parameters()[item.key()].grad(), item.key());
      }
    }
  });
}

TEST(ChangedParametersOfDdp, AModuleThatIsGoneIsNamed) {
  struct Removing : torch::nn::Module {
    Removing() { register_module("fc", fc); }
    at::Tensor forward(const at::Tensor& x) { return x; }
    void remove() { unregister_module("fc"); }
    torch::nn::Linear fc{2, 2};
  };
  run_ranks(2, [](const Group& group) {
    const auto net = std::make_shared<Removing>();
    DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
    net->remove();
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                ddp(at::ones({2, 2}));
              }),
              "[DistributedDataParallel] fc.weight was in the module when it was wrapped and is gone" +
                  std::string(kNewOptimizer) + told_by(group));
  });
}

TEST(ChangedParametersOfDdp, OneThatIsThawedIsNamed) {
  run_ranks(2, [](const Group& group) {
    for (const bool find_unused : {false, true}) {
      Changing net = changing_net();
      net->fc1->bias.set_requires_grad(false);
      DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = find_unused});
      ddp(at::ones({2, 5})).sum().backward();
      net->fc1->bias.set_requires_grad(true);
      EXPECT_EQ(error_text<c10::ValueError>([&] {
                  ddp(at::ones({2, 5}));
                }),
                "[DistributedDataParallel] fc1.bias requires a gradient that nobody averages: when the module was "
                "wrapped it did not, or was not there\n  fix: set requires_grad before the module is wrapped: wrap it "
                "again" +
                    told_by(group));
    }
  });
}

TEST(ChangedParametersOfDdp, OneThatCameLaterIsNamed) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    net->fc1->register_parameter("gain", at::ones({1}));
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                ddp(at::ones({2, 5}));
              }),
              "[DistributedDataParallel] fc1.gain requires a gradient that nobody averages: when the module was "
              "wrapped it did not, or was not there\n  fix: set requires_grad before the module is wrapped: wrap it "
              "again" +
                  told_by(group));
  });
}

TEST(ChangedParametersOfDdp, OneOfOtherSizesIsNamed) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    std::stringstream file;
    torch::save(torch::nn::Linear(7, 4), file);
    torch::load(net->fc2, file);
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                ddp(at::ones({2, 5}));
              }),
              "[DistributedDataParallel] fc2.weight had sizes [3, 7] when the module was wrapped and has [4, 7]\n"
              "  fix: load a file of the same model, or wrap the module again" +
                  told_by(group));
  });
}

TEST(ChangedParametersOfDdp, IgnoredOnesMayChange) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    net->fc1->bias.set_requires_grad(false);
    DistributedDataParallel ddp(net, {.process_group = group, .ignore = {"fc1.bias", "fc1.weight"}});
    ddp(at::ones({2, 5})).sum().backward();
    net->fc1->bias.set_requires_grad(true);
    net->fc1->weight.set_data(net->fc1->weight.detach() * (group->getRank() + 1));
    ddp(at::ones({2, 5})).sum().backward();
    EXPECT_TRUE(net->fc1->bias.grad().defined());
    expect_same_on_all_ranks(net->fc2->bias.grad(), group);
  });
}

TEST(ChangedParametersOfDdp, OneThatIsFrozenIsNamed) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    net->fc1->bias.set_requires_grad(false);
    EXPECT_EQ(
        error_text<c10::ValueError>([&] {
          ddp(at::ones({2, 5})).sum().backward();
        }),
        "[backward] 1 of 4 parameters did not receive a gradient, so the average over ranks is not complete:\n"
        "    fc1.bias [7] of fc1 (torch::nn::LinearImpl): its requires_grad was set to false after the module was "
        "wrapped\n  fix: set requires_grad before the module is wrapped: wrap it again; or pass "
        "find_unused_parameters = true, without static_graph" +
            told_by(group));
  });
}

TEST(ChangedParametersOfDdp, OneThatIsFrozenAndThawedIsTrainedAsInOneProcess) {
  run_ranks(2, [](const Group& group) {
    Changing plain = changing_net(), net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
    ChangingSgd plain_optimizer(plain->parameters(), changing_options()),
        optimizer(ddp.parameters(), changing_options());
    for (int step = 0; step < 9; ++step) {
      for (Changing* which : {&plain, &net}) (*which)->fc1->weight.set_requires_grad(step < 3 || step >= 6);
      const at::Tensor batch = changing_batch(2, step, at::kFloat);
      train_step(plain, plain_optimizer, batch);
      train_step(ddp, optimizer, rows_for(batch, group));
    }
    expect_trained_alike(net, plain, group, "frozen and thawed");
  });
}

TEST(ChangedParametersOfDdp, OneThatIsDistributedLaterIsNamed) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    distribute_parameter(net->fc1->weight, init_device_mesh("cpu", {2}, {"tp"}, {.group = group}), {Shard(1)});
    EXPECT_EQ(
        error_text<c10::ValueError>([&] {
          ddp(at::ones({2, 5}));
        }),
        "[DistributedDataParallel] fc1.weight was a plain tensor when the module was wrapped and is f32[7,5] S1 on "
        "mesh tp=2\n  fix: distribute parameters before the module is wrapped: wrap it again" +
            told_by(group));
  });
}

TEST(ChangedParametersOfDdp, AWrapperWithoutHooksLooksAtNothing) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp.remove_hooks();
    if (group->getRank() == 0) load_bytes(net, saved_bytes(changing_net(3)));
    ddp(at::ones({2, 5})).sum().backward();
    EXPECT_TRUE(net->fc1->weight.grad().defined());
  });
}

}  // namespace
}  // namespace serried
