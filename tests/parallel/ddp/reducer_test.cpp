// The reducer on graphs that are not the simple case: unused, shared, sparse, repeated, failing.
#include "serried/parallel/ddp/reducer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <numeric>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using detail::BucketAssignment;
using ::testing::AllOf;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::OnRanks;

/// Branches that a call may leave out.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x, bool use_a, bool use_b) {
    at::Tensor y = c(x);
    if (use_a) y = y + a(x);
    if (use_b) y = y + b(x);
    return y;
  }
  torch::nn::Linear a{3, 2}, b{3, 2}, c{3, 2};
};
TORCH_MODULE(Branches);

Branches branches() {
  return seeded(3, [] { return Branches(); });
}

class Reducing : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, Reducing, ::testing::ValuesIn(testing::settings({2, 3})), testing::name_of);

TEST_P(Reducing, UnusedParametersAreFoundAndKeepNoGradient) {
  on_ranks([&](const Group& group) {
    for (const bool as_view : {true, false}) {
      Branches net = branches();
      DistributedDataParallel ddp(
          net, {.process_group = group, .find_unused_parameters = true, .gradient_as_bucket_view = as_view});
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        // a: nobody; b: the first rank only
        ddp(at::ones({1, 3}), false, group->getRank() == 0).sum().backward();
        EXPECT_FALSE(net->a->weight.grad().defined());
        expect_close(net->b->weight.grad(), at::full({2, 3}, 1.0 / world_size()));
        expect_close(net->c->weight.grad(), at::ones({2, 3}));
      }
      // What was used before may be left out later: its gradient stays.
      ddp(at::ones({1, 3}), true, false).sum().backward();
      expect_close(net->a->weight.grad(), at::ones({2, 3}));
      expect_close(net->b->weight.grad(), at::full({2, 3}, 1.0 / world_size()));
    }
  });
}

TEST_P(Reducing, AMissingGradientIsAnErrorOfTheSameBackward) {
  on_ranks([&](const Group& group) {
    Branches net = branches();
    DistributedDataParallel ddp(net, {.process_group = group});
    const std::string text = error_text<c10::ValueError>([&] { ddp(at::ones({1, 3}), true, false).sum().backward(); });
    EXPECT_THAT(text, AllOf(HasSubstr("[backward] 2 of 6 parameters did not receive a gradient"),
                            HasSubstr("b.weight [2, 3] of b (torch::nn::LinearImpl): forward did not use it"),
                            HasSubstr("find_unused_parameters = true")));
    const std::string second = "\n    b.bias [2] of b (torch::nn::LinearImpl): forward did not use it\n";
    const std::string count = "\n    and 1 more; rank 0 lists what it misses, SERRIED_LOG=comm lists them here\n";
    EXPECT_THAT(text, HasSubstr(group->getRank() == 0 ? second : count)) << "the list stands once in the job's output";
    EXPECT_FALSE(net->a->weight.grad().defined()) << "half of an average must not stay";
    EXPECT_EQ(ddp.logging_data().to_map().at("has_error").toInt(), 1);
    ddp(at::ones({1, 3}), true, true).sum().backward();
    expect_close(net->b->weight.grad(), at::ones({2, 3}));
  });
}

struct TwoHeadsImpl : torch::nn::Module {
  TwoHeadsImpl() {
    register_module("first", first);
    register_module("second", second);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) { return {first(x), second(x)}; }
  torch::nn::Linear first{3, 2}, second{3, 2};
};
TORCH_MODULE(TwoHeads);

TEST_P(Reducing, AnOutputThatTheLossLeavesOutIsTheCauseGiven) {
  on_ranks([&](const Group& group) {
    TwoHeads net;
    DistributedDataParallel ddp(net, {.process_group = group});
    const auto [first, second] = ddp(at::ones({1, 3}));
    EXPECT_THAT(
        error_text<c10::ValueError>([&, out = first] { out.sum().backward(); }),
        HasSubstr("second.weight [2, 3] of second (torch::nn::LinearImpl): the output that depends on it is not "
                  "part of the loss"));
    const auto [third, fourth] = ddp(at::ones({1, 3}));
    const auto [fifth, sixth] = ddp(at::ones({1, 3}));
    EXPECT_THAT(error_text<c10::ValueError>([&, out = third] { out.sum().backward(); }), HasSubstr("another forward"));
  });
}

TEST_P(Reducing, OutputsOutsideTheLossAreFineWithAStaticGraphAndWithASearch) {
  on_ranks([&](const Group& group) {
    for (const bool is_static : {true, false}) {
      TwoHeads net;
      DistributedDataParallel ddp(
          net, {.process_group = group, .find_unused_parameters = !is_static, .static_graph = is_static});
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        const auto [first, second] = ddp(at::ones({1, 3}) * (group->getRank() + 1));
        first.sum().backward();
        expect_close(net->first->weight.grad(), at::full({2, 3}, (world_size() + 1) / 2.0));
        EXPECT_FALSE(net->second->weight.grad().defined());
      }
    }
  });
}

TEST_P(Reducing, AChangedStaticGraphNamesTheParameter) {
  on_ranks([&](const Group& group) {
    Branches net = branches();
    DistributedDataParallel ddp(net, {.process_group = group, .static_graph = true});
    ddp(at::ones({1, 3}), true, false).sum().backward();
    ddp.zero_grad();
    ddp(at::ones({1, 3}), true, false).sum().backward();
    expect_close(net->a->weight.grad(), at::ones({2, 3}));
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  ddp(at::ones({1, 3}), true, true).sum().backward();
                }),
                AllOf(HasSubstr("the training graph has changed, which static_graph forbids: b."),
                      HasSubstr("in the first iteration 0")));
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  ddp(at::ones({1, 3}), false, false).sum().backward();
                }),
                AllOf(HasSubstr("a.weight"), HasSubstr("the training graph has changed")));
  });
}

/// Recomputes `fn` in backward, inside a backward of its own, as re-entrant checkpointing does.
struct Recompute : torch::autograd::Function<Recompute> {
  using Fn = std::function<at::Tensor(const at::Tensor&)>;
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, std::shared_ptr<Fn> fn) {
    ctx->save_for_backward({x});
    ctx->saved_data["fn"] = reinterpret_cast<int64_t>(new std::shared_ptr<Fn>(fn));
    at::NoGradGuard no_grad;
    return (*fn)(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    std::unique_ptr<std::shared_ptr<Fn>> fn(reinterpret_cast<std::shared_ptr<Fn>*>(ctx->saved_data["fn"].toInt()));
    const at::Tensor x = ctx->get_saved_variables()[0].detach().requires_grad_(true);
    at::Tensor y;
    {
      at::AutoGradMode with_grad(true);
      y = (**fn)(x);
    }
    torch::autograd::backward({y}, {grads[0]});
    return {x.grad(), at::Tensor()};
  }
};

struct CheckpointedImpl : torch::nn::Module {
  explicit CheckpointedImpl(int times_) : times(times_) {
    register_module("fc", fc);
    register_module("head", head);
  }
  at::Tensor forward(at::Tensor x) {
    const auto fn = std::make_shared<Recompute::Fn>([this](const at::Tensor& t) { return torch::tanh(fc(t)); });
    for (int i = 0; i < times; ++i) x = recompute ? Recompute::apply(x, fn) : (*fn)(x);
    return head(x);
  }
  int times;
  bool recompute = true;
  torch::nn::Linear fc{3, 3}, head{3, 2};
};
TORCH_MODULE(Checkpointed);

TEST_P(Reducing, CheckpointedPartsMayBeUsedOnceOrWithAStaticGraphSeveralTimes) {
  on_ranks([&](const Group& group) {
    for (const int times : {1, 2}) {
      Checkpointed net = seeded(1, [&] { return Checkpointed(times); });
      Checkpointed plain = seeded(1, [&] { return Checkpointed(times); });
      plain->recompute = false;
      DistributedDataParallel ddp(net, {.process_group = group, .static_graph = times > 1});
      const at::Tensor x = at::ones({1, 3}).requires_grad_(true);
      for (int step = 0; step < 3; ++step) {
        ddp.zero_grad();
        plain->zero_grad();
        ddp(x).sum().backward();
        plain(x).sum().backward();
        expect_close(net->fc->weight.grad(), plain->fc->weight.grad());
        expect_close(net->head->weight.grad(), plain->head->weight.grad());
      }
    }
  });
}

/// Its first layer's gradients come last: the bucket waits for them.
struct StemmedImpl : torch::nn::Module {
  StemmedImpl() {
    register_module("stem", stem);
    register_module("rest", rest);
  }
  at::Tensor forward(const at::Tensor& x) { return rest(stem(x)); }
  torch::nn::Linear stem{3, 3};
  Checkpointed rest{2};
};
TORCH_MODULE(Stemmed);

TEST_P(Reducing, AGradientThatComesTwiceIsAddedOrRefusedNeverWrong) {
  on_ranks([&](const Group& group) {
    Stemmed net = seeded(1, [] { return Stemmed(); }), plain = seeded(1, [] { return Stemmed(); });
    plain->rest->recompute = false;
    DistributedDataParallel ddp(net, {.process_group = group});
    const auto train = [&] { ddp(at::ones({1, 3})).sum().backward(); };
    // Gloo does not divide, so gradients are divided on their way into the bucket.
    if (is("gloo")) {
      EXPECT_THAT(error_text<c10::ValueError>(train),
                  AllOf(HasSubstr(" of rest.fc (torch::nn::LinearImpl) received a second gradient in one backward"),
                        HasSubstr("static_graph = true")));
      return;
    }
    train();
    plain(at::ones({1, 3})).sum().backward();
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      expect_close(net->parameters()[i].grad(), plain->parameters()[i].grad());
    }
  });
}

struct TiedImpl : torch::nn::Module {
  TiedImpl() {
    register_module("in", in);
    register_module("out", out);
    register_module("frozen", frozen);
    out->weight = out->register_parameter("weight2", in->weight);
    frozen->weight.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) { return at::linear(torch::tanh(in(x)) + frozen(x), in->weight); }
  torch::nn::Linear in{torch::nn::LinearOptions(3, 3).bias(false)}, out{torch::nn::LinearOptions(3, 3).bias(false)};
  torch::nn::Linear frozen{torch::nn::LinearOptions(3, 3).bias(false)};
};
TORCH_MODULE(Tied);

TEST_P(Reducing, SharedParametersCountOnceAndFrozenOnesNot) {
  on_ranks([&](const Group& group) {
    Tied net = seeded(1, [] { return Tied(); });
    Tied plain = seeded(1, [] { return Tied(); });
    DistributedDataParallel ddp(net, {.process_group = group, .ignore = {"out.weight"}});
    EXPECT_EQ(ddp.data_parallel_parameters().size(), 1u);
    ddp(at::ones({1, 3})).sum().backward();
    plain(at::ones({1, 3})).sum().backward();
    expect_close(net->in->weight.grad(), plain->in->weight.grad());
    EXPECT_FALSE(net->frozen->weight.grad().defined());
  });
}

struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 4).sparse(true)));
    wide = register_parameter("wide", at::arange(4).to(at::kDouble));
    spin = register_parameter("spin", at::complex(at::ones({2}), at::ones({2})));
  }
  at::Tensor forward(const at::Tensor& ids) {
    return (embedding(ids).to(at::kDouble) * wide).sum() + at::abs(spin).sum();
  }
  torch::nn::Embedding embedding{nullptr};
  at::Tensor wide, spin;
};
TORCH_MODULE(Mixed);

TEST_P(Reducing, SparseComplexAndMixedDtypesAreReduced) {
  on_ranks([&](const Group& group) {
    Mixed net = seeded(1, [] { return Mixed(); });
    Mixed plain = seeded(1, [] { return Mixed(); });
    DistributedDataParallel ddp(net, {.process_group = group});
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad();
      plain->zero_grad();
      at::Tensor total = at::zeros({}, at::kDouble);
      for (int rank = 0; rank < world_size(); ++rank) total = total + plain(at::tensor({rank, 5, 5}, at::kLong));
      (total / world_size()).backward();
      ddp(at::tensor({group->getRank(), 5, 5}, at::kLong)).backward();
      EXPECT_TRUE(net->embedding->weight.grad().is_sparse());
      expect_close(net->embedding->weight.grad().to_dense(), plain->embedding->weight.grad().to_dense());
      expect_close(net->wide.grad(), plain->wide.grad());
      expect_close(net->spin.grad(), plain->spin.grad());
    }
  });
}

TEST_P(Reducing, AnExceptionInForwardOrBackwardLeavesAUsableModule) {
  on_ranks([&](const Group& group) {
    Branches net = branches();
    DistributedDataParallel ddp(net, {.process_group = group});
    EXPECT_ANY_THROW(ddp(at::ones({1, 7}), true, true));
    at::Tensor y = ddp(at::ones({1, 3}), true, true);
    net->c->weight.register_hook([](const at::Tensor& grad) -> at::Tensor {
      static thread_local int calls = 0;
      if (++calls == 1) throw std::runtime_error("out of luck");
      return grad;
    });
    EXPECT_ANY_THROW(y.sum().backward());
    EXPECT_THROW(ddp.check_finalized(), c10::ValueError);
    ddp.zero_grad();
    ddp(at::ones({1, 3}), true, true).sum().backward();
    ddp.check_finalized();
    for (const at::Tensor& parameter : {net->a->weight, net->b->weight, net->c->weight}) {
      expect_close(parameter.grad(), at::ones({2, 3}));
    }
  });
}

TEST_P(Reducing, GradientsOfChosenTensorsAreNobodyElsesBusiness) {
  on_ranks([&](const Group& group) {
    Branches net = branches();
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor x = at::ones({1, 3}).requires_grad_(true);
    const auto grads = torch::autograd::grad({ddp(x, true, true).sum()}, {x});
    EXPECT_TRUE(grads[0].defined());
    EXPECT_FALSE(net->a->weight.grad().defined());
    ddp(x, true, true).sum().backward();
    expect_close(net->a->weight.grad(), at::ones({2, 3}));
  });
}

struct DeepImpl : torch::nn::Module {
  DeepImpl() {
    for (int i = 0; i < 6; ++i) layers.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(40, 40)));
  }
  at::Tensor forward(at::Tensor x) {
    // Not in the order of registration: the rebuilt buckets differ from the first ones.
    for (int i : {1, 0, 3, 2, 5, 4}) x = torch::relu(layers[i](x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Deep);

TEST_P(Reducing, BucketsAndGradientsAreThoseOfC10d) {
  on_ranks([&](const Group& group) {
    Deep ours = seeded(5, [] { return Deep(); }), theirs = seeded(5, [] { return Deep(); });
    constexpr size_t kCap = 8 << 10;
    DistributedDataParallel ddp(ours, {.process_group = group, .bucket_cap_mb = kCap / 1024.0 / 1024});
    const std::vector<at::Tensor> parameters = theirs->parameters();
    BucketAssignment first = {std::vector<size_t>(parameters.size())};
    std::iota(first[0].begin(), first[0].end(), 0);
    const auto reducer = std::make_shared<c10d::Reducer>(
        parameters, first, testing::sibling(group, "gloo"), std::vector<bool>(parameters.size()), int64_t(kCap), false,
        false, std::unordered_map<size_t, std::string>{}, int64_t(kCap), false, false, std::vector<int64_t>{});
    const auto logger = std::make_shared<c10d::Logger>(reducer);
    reducer->set_logger(logger);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = seeded(step * 10 + group->getRank(), [] { return at::randn({2, 40}); });
      ddp.zero_grad();
      theirs->zero_grad();
      ddp(x).pow(2).mean().backward();
      logger->set_runtime_stats_and_log();
      reducer->prepare_for_forward();
      reducer->rebuild_buckets();
      const at::Tensor y = theirs(x);
      reducer->prepare_for_backward(std::vector<at::Tensor>{});
      y.pow(2).mean().backward();
      for (size_t i = 0; i < parameters.size(); ++i) expect_close(ddp.parameters()[i].grad(), parameters[i].grad());
    }
    const auto data = ddp.logging_data().to_map();
    auto expected = logger->get_ddp_logging_data().strs_map;
    EXPECT_EQ(data.at("has_rebuilt_buckets").toInt(), 1);
    EXPECT_GT(ddp.reducer().buckets().size(), 2u);
    for (const char* key :
         {"rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"}) {
      EXPECT_EQ(data.at(key).toStringRef(), expected[key]) << key;
    }
  });
}

TEST_P(Reducing, AHookGetsUndividedGradientsAndIsRegisteredOnce) {
  on_ranks([&](const Group& group) {
    Branches net = branches();
    DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 30.0 / 1024 / 1024});
    std::vector<size_t> seen;
    ddp.register_comm_hook([&](c10d::GradBucket& bucket) -> HookFuture {
      seen.push_back(bucket.getIndex());
      std::vector<at::Tensor> tensors = {bucket.getBufferRef()};
      return group->allreduce(tensors)->getFuture();
    });
    EXPECT_THAT(error_text<c10::ValueError>(
                    [&] { ddp.register_comm_hook([](c10d::GradBucket&) -> HookFuture { return {}; }); }),
                HasSubstr("this module has the hook \"user\" already"));
    for (int step = 0; step < 2; ++step) {
      seen.clear();
      ddp.zero_grad();
      ddp(at::ones({1, 3}), true, true).sum().backward();
      expect_close(net->a->weight.grad(), at::full({2, 3}, float(world_size())));
      for (size_t b = 0; b < seen.size(); ++b) EXPECT_EQ(seen[b], b) << "buckets come in order";
    }
    EXPECT_GT(seen.size(), 1u);
  });
}

TEST_P(Reducing, ANanIsFoundBeforeItIsSentAndItsParameterIsNamed) {
  on_ranks([&](const Group& group) {
    const auto train = [&] {
      Branches net = branches();
      DistributedDataParallel ddp(net, {.process_group = group});
      watch::set_nan_check(group, watch::NanCheck::raise);
      net->b->weight.register_hook([&](const at::Tensor& grad) { return group->getRank() == 0 ? grad / 0 * 0 : grad; });
      ddp(at::ones({1, 3}), true, true).sum().backward();
    };
    // The others find the group aborted, wherever they are by then.
    if (group->getRank() != 0) {
      EXPECT_THROW(train(), c10::Error);
      return;
    }
    EXPECT_THAT(
        error_text<c10::ValueError>(train),
        AllOf(HasSubstr("the gradient of b.weight of b (torch::nn::LinearImpl) is not a number: rank 0 sends 6 NaN"),
              HasSubstr("the first at [0,0]")));
  });
}

TEST_P(Reducing, BuffersAreTheFirstRanksAndTwoForwardsMayComeBeforeOneBackward) {
  on_ranks([&](const Group& group) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor x = seeded(group->getRank(), [] { return at::randn({6, 3}); });
    const at::Tensor first = ddp(x), second = ddp(x * 2);
    (first.pow(2).mean() + second.pow(2).mean()).backward();
    ddp(x).pow(2).mean().backward();
    ddp.eval();
    ddp(x);  // takes the first rank's statistics before it runs
    at::Tensor mean = net->named_buffers()["1.running_mean"].clone();
    broadcast_(mean, group);
    expect_equal(net->named_buffers()["1.running_mean"], mean);
  });
}

}  // namespace
}  // namespace serried
