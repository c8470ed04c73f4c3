// Every step knows its result beforehand.
#include "tests/process/ranks/fault_steps.h"

#include <cstdlib>
#include <map>
#include <numeric>

#include "serried/serried.h"

namespace serried::testing {
namespace {

constexpr int64_t kSize = 3 << 16;

void expect(const at::Tensor& actual, double expected, const char* what) {
  if (actual.sub(expected).abs().max().item<double>() > 1e-5 * (1 + std::abs(expected))) {
    throw WrongResult(c10::str(what, ": expected ", expected, " everywhere, got ", actual.min().item<double>(), " to ",
                               actual.max().item<double>()));
  }
}

/// What rank r has at step s is r + 1 + s.
at::Tensor values_at(const Group& g, int step, int64_t size = kSize) {
  return torch::full({size}, double(g->getRank() + 1 + step));
}
double sum_at(const Group& g, int step) {
  const int n = g->getSize();
  return n * (n + 1) / 2.0 + double(n) * step;
}

FaultStep all_reduce_step(const Group& g) {
  return [g](int step) { expect(all_reduce(values_at(g, step), g), sum_at(g, step), "all_reduce"); };
}
FaultStep all_gather_step(const Group& g) {
  return [g](int step) {
    const at::Tensor all = all_gather(values_at(g, step), g);
    for (int r = 0; r < g->getSize(); ++r) expect(all.narrow(0, r * kSize, kSize), r + 1 + step, "all_gather");
  };
}
FaultStep reduce_scatter_step(const Group& g) {
  return [g](int step) {
    const at::Tensor x = values_at(g, step, kSize * g->getSize());
    expect(reduce_scatter(x, g), sum_at(g, step), "reduce_scatter");
  };
}
FaultStep all_to_all_step(const Group& g) {
  return [g](int step) {
    const at::Tensor all = all_to_all(values_at(g, step, kSize * g->getSize()), g);
    for (int r = 0; r < g->getSize(); ++r) expect(all.narrow(0, r * kSize, kSize), r + 1 + step, "all_to_all");
  };
}
FaultStep broadcast_step(const Group& g) {
  return [g](int step) {
    const int source = step % g->getSize();
    expect(broadcast(values_at(g, step), g, {.src = source}), source + 1 + step, "broadcast");
  };
}
FaultStep reduce_step(const Group& g) {
  return [g](int step) {
    std::vector<at::Tensor> tensors = {values_at(g, step)};
    c10d::ReduceOptions options;
    options.rootRank = step % g->getSize();
    g->reduce(tensors, options)->wait();
    const bool is_root = g->getRank() == options.rootRank;
    if (is_root) expect(tensors[0], sum_at(g, step), "reduce");
    const at::Tensor sum = reduce(values_at(g, step), g, {.dst = int(options.rootRank)});
    expect(sum, is_root ? sum_at(g, step) : 0, "functional reduce");
  };
}
FaultStep gather_step(const Group& g) {
  return [g](int step) {
    std::vector<at::Tensor> inputs = {values_at(g, step)};
    std::vector<std::vector<at::Tensor>> outputs;
    c10d::GatherOptions options;
    options.rootRank = step % g->getSize();
    const bool is_root = g->getRank() == options.rootRank;
    if (is_root) outputs.resize(1);
    for (int r = 0; is_root && r < g->getSize(); ++r) outputs[0].push_back(torch::empty({kSize}));
    g->gather(outputs, inputs, options)->wait();
    for (int r = 0; is_root && r < g->getSize(); ++r) expect(outputs[0][size_t(r)], r + 1 + step, "gather");
    const std::vector<at::Tensor> parts = gather(values_at(g, step), g, {.dst = int(options.rootRank)});
    for (int r = 0; r < g->getSize(); ++r) expect(parts[size_t(r)], is_root ? r + 1 + step : 0, "functional gather");
  };
}
FaultStep scatter_step(const Group& g) {
  return [g](int step) {
    std::vector<at::Tensor> outputs = {torch::empty({kSize})};
    std::vector<std::vector<at::Tensor>> inputs;
    c10d::ScatterOptions options;
    options.rootRank = step % g->getSize();
    if (g->getRank() == options.rootRank) inputs.emplace_back(size_t(g->getSize()), values_at(g, step));
    g->scatter(outputs, inputs, options)->wait();
    expect(outputs[0], options.rootRank + 1 + step, "scatter");
    const std::vector<at::Tensor> list = inputs.empty() ? std::vector<at::Tensor>() : inputs[0];
    const at::Tensor mine = scatter(list, g, {.src = int(options.rootRank)});
    expect(mine, options.rootRank + 1 + step, "functional scatter");
  };
}
FaultStep barrier_step(const Group& g) {
  return [g](int) { barrier(g); };
}
FaultStep send_recv_step(const Group& g) {
  return [g](int step) {
    const int n = g->getSize(), from = (g->getRank() + n - 1) % n;
    std::vector<at::Tensor> sent = {values_at(g, step)}, got = {torch::empty({kSize})};
    const auto sending = g->send(sent, (g->getRank() + 1) % n, 0);
    g->recv(got, from, 0)->wait();
    sending->wait();
    expect(got[0], from + 1 + step, "recv");
  };
}

FaultStep rendezvous_step(const Group& g) {
  const auto timeout =
      g->getBackend(at::kCPU)->getBackendOptions()
          ? std::chrono::duration_cast<std::chrono::milliseconds>(g->getBackend(at::kCPU)->getBackendOptions()->timeout)
          : default_timeout();
  return [timeout, backend = g->getBackendName()](int step) {
    const Group group = new_group(backend, {.timeout = timeout});
    expect(all_reduce(values_at(group, step, 3), group), sum_at(group, step), "rendezvous");
  };
}
FaultStep split_step(const Group& g) {
  std::vector<int> all(size_t(g->getSize()));
  std::iota(all.begin(), all.end(), 0);
  return [g, all](int step) {
    const Group part = split_group(g, {all});
    expect(all_reduce(values_at(part, step, 3), part), sum_at(part, step), "split");
  };
}
FaultStep mesh_step(const Group& g) {
  return [g](int step) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1, g->getSize()}, {"a", "b"}, {.group = g});
    const Group line = mesh["b"].get_group();
    expect(all_reduce(values_at(line, step, 3), line), sum_at(line, step), "mesh");
  };
}
FaultStep redistribute_step(const Group& g) {
  const DeviceMesh mesh = init_device_mesh("cpu", {g->getSize()}, {"x"}, {.group = g});
  return [mesh](int step) {
    const at::Tensor whole = torch::full({1000, 250}, double(step + 1));
    const DTensor rows = distribute_tensor(whole, mesh, {Shard(0)});
    expect(rows.redistribute({Shard(1)}).redistribute({Replicate()}).to_local(), step + 1, "redistribute");
  };
}

torch::nn::Linear plain_layer() {
  torch::nn::Linear layer(300, 200);
  torch::NoGradGuard no_grad;
  layer->weight.fill_(0.5);
  layer->bias.zero_();
  return layer;
}
at::Tensor rows_at(const Group& g, int step) {
  return values_at(g, step, 2 * 300).reshape({2, 300});
}

FaultStep ddp_making_step(const Group& g) {
  return [g](int) {
    torch::nn::Linear layer = plain_layer();
    if (g->getRank() != 0) layer->weight.data().zero_();
    const DistributedDataParallel ddp(layer, {.process_group = g});
    expect(layer->weight.detach(), 0.5, "ddp_making");
  };
}
FaultStep ddp_forward_step(const Group& g) {
  torch::nn::Sequential net(plain_layer(), torch::nn::BatchNorm1d(200));
  const auto ddp = std::make_shared<DistributedDataParallel<torch::nn::Sequential>>(
      net, DistributedDataParallelOptions{.process_group = g});
  return [g, net, ddp](int step) mutable {
    torch::NoGradGuard no_grad;
    net->named_buffers()["1.running_mean"].fill_(double(g->getRank() + step));
    net->eval();
    {
      torch::AutoGradMode grad(true);
      (*ddp)(rows_at(g, step));
    }
    expect(net->named_buffers()["1.running_mean"], step, "ddp_forward");
  };
}
FaultStep ddp_backward_step(const Group& g) {
  const auto ddp = std::make_shared<DistributedDataParallel<torch::nn::Linear>>(
      plain_layer(), DistributedDataParallelOptions{.process_group = g, .bucket_cap_mb = 0.1});
  return [g, ddp](int step) {
    ddp->zero_grad();
    (*ddp)(rows_at(g, step)).sum().backward();
    expect(ddp->module()->weight.grad(), 2 * sum_at(g, step) / g->getSize(), "ddp_backward");
  };
}

/// Two blocks, so that the one before is let go of while the next is gathered.
struct ShardedLayers {
  explicit ShardedLayers(const Group& g) {
    const DeviceMesh mesh = DeviceMesh::from_group(g);
    fully_shard(*first, {.mesh = mesh});
    fully_shard(*second, {.mesh = mesh});
  }
  at::Tensor forward(const Group& g, int step) { return first(rows_at(g, step)) + second(rows_at(g, step)); }
  torch::nn::Linear first = plain_layer(), second = plain_layer();
};
/// Times its one weight, which is 1 and stays so.
struct FactorImpl : torch::nn::Module {
  FactorImpl() { factor = register_parameter("factor", torch::ones({1})); }
  at::Tensor forward(const at::Tensor& x) { return x * factor; }
  at::Tensor factor;
};
TORCH_MODULE(Factor);

FaultStep pipeline_step(const Group& g) {
  Factor stage;
  const auto pipe = std::make_shared<Pipeline>(
      stage, PipelineOptions{.group = g, .microbatches = 2, .loss = [](const at::Tensor& y, const at::Tensor&) {
                               return y.mean();
                             }});
  return [stage, pipe](int step) mutable {
    stage->zero_grad();
    const at::Tensor batch = torch::full({2, kSize / 2}, double(step + 1));
    for (const at::Tensor& loss : pipe->step(batch, batch)) expect(loss, step + 1, "pipeline_step");
    expect(stage->factor.grad(), step + 1, "pipeline_step");
  };
}

FaultStep fsdp_gather_step(const Group& g) {
  const auto layers = std::make_shared<ShardedLayers>(g);
  return [g, layers](int step) {
    const torch::NoGradGuard no_grad;
    expect(layers->forward(g, step), 300.0 * (g->getRank() + 1 + step), "fsdp_gather");
  };
}
/// What an aborted backward left to do, and with it the parameters, autograd keeps until the thread's next one.
void backward_or_nothing_left(const at::Tensor& loss) {
  try {
    loss.backward();
  } catch (...) {
    torch::ones({}, at::requires_grad()).backward();
    throw;
  }
}
FaultStep fsdp_backward_step(const Group& g) {
  const auto layers = std::make_shared<ShardedLayers>(g);
  return [g, layers](int step) {
    backward_or_nothing_left(layers->forward(g, step).sum());
    for (const torch::nn::Linear& layer : {layers->first, layers->second}) {
      const at::Tensor part = DTensor(layer->weight.grad()).to_local();
      expect(part, 2 * sum_at(g, step) / g->getSize(), "fsdp_backward");
      layer->weight.mutable_grad().reset();
    }
  };
}
/// Expert e is rank e's and doubles what it gets; each token goes to all of them, by equal weights.
at::Tensor doubled_by_experts(const Group& g, const at::Tensor& x) {
  return moe(x, torch::zeros({x.size(0), g->getSize()}), [](const DispatchedTokens& sent) { return sent.tokens * 2; },
             {.mesh = DeviceMesh::from_group(g), .top_k = g->getSize()});
}
at::Tensor tokens_at(const Group& g, int step) {
  return values_at(g, step, 200 * 300).reshape({200, 300});
}
FaultStep moe_forward_step(const Group& g) {
  return [g](int step) {
    const torch::NoGradGuard no_grad;
    expect(doubled_by_experts(g, tokens_at(g, step)), 2.0 * (g->getRank() + 1 + step), "moe_forward");
  };
}
FaultStep moe_backward_step(const Group& g) {
  return [g](int step) {
    const at::Tensor x = tokens_at(g, step).requires_grad_();
    backward_or_nothing_left(doubled_by_experts(g, x).sum());
    expect(x.grad(), 2, "moe_backward");
  };
}
/// Equal keys weigh all values alike, so each position gets the mean over the ranks; and each key's gradient is
/// nothing.
FaultStep attention_step(const Group& g, AttentionWay way) {
  const DeviceMesh mesh = DeviceMesh::from_group(g);
  return [g, mesh, way](int step) {
    const ContextParallel scope(mesh, {.rotate = way, .length = 64 * g->getSize()});
    const at::Tensor keys = torch::ones({1, 12, 64, 64}, at::requires_grad());
    const at::Tensor values = torch::full({1, 12, 64, 64}, double(g->getRank() + 1 + step), at::requires_grad());
    const at::Tensor y = at::scaled_dot_product_attention(keys, keys, values);
    const double mean = sum_at(g, step) / g->getSize();
    expect(y.detach(), mean, "attention");
    backward_or_nothing_left(y.sum());
    expect(values.grad(), 1, "gradient of values");
    expect(keys.grad(), 8 * (g->getRank() + 1 + step - mean), "gradient of keys");
  };
}
FaultStep attention_gather_step(const Group& g) {
  return attention_step(g, AttentionWay::gather);
}
FaultStep attention_heads_step(const Group& g) {
  return attention_step(g, AttentionWay::heads);
}
FaultStep attention_ring_step(const Group& g) {
  return attention_step(g, AttentionWay::ring);
}
/// Columns, which are brought to rows to be written, over those of the step before; read as rows.
FaultStep checkpoint_step(const Group& g, bool is_async) {
  const DeviceMesh mesh = DeviceMesh::from_group(g);
  const std::string path = std::string(std::getenv("FAULT_FOLDER")) + "/saved";
  return [g, mesh, path, is_async](int step) {
    const DTensor columns = distribute_tensor(torch::full({1000, 250}, double(step + 1)), mesh, {Shard(1)});
    const checkpoint::Contents contents = {{"x", columns}, {"step", step}};
    if (is_async) {
      checkpoint::async_save(path, contents, {.process_group = g}).wait();
    } else {
      checkpoint::save(path, contents, {.process_group = g});
    }
    const DTensor rows = distribute_tensor(torch::zeros({1000, 250}), mesh, {Shard(0)});
    int64_t found = -1;
    checkpoint::load(path, {{"x", rows}, {"step", &found}}, {.process_group = g});
    expect(rows.to_local(), step + 1, "checkpoint");
    expect(torch::full({1}, double(found)), step, "step of a checkpoint");
  };
}
FaultStep checkpoint_save_step(const Group& g) {
  return checkpoint_step(g, false);
}
FaultStep checkpoint_async_step(const Group& g) {
  return checkpoint_step(g, true);
}
FaultStep zero_step(const Group& g) {
  auto layer = plain_layer();
  const auto zero = std::make_shared<ZeroRedundancyOptimizer<torch::optim::SGD>>(
      layer->parameters(), torch::optim::SGDOptions(0.25), ZeroOptions{.process_group = g});
  return [layer, zero](int step) {
    for (const at::Tensor& parameter : layer->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
    zero->step();
    expect(layer->weight.detach(), 0.5 - 0.25 * (step + 1), "zero_step");
  };
}
FaultStep norm_step(const Group& g) {
  SyncBatchNorm norm(torch::nn::BatchNormOptions(500), g);
  return [g, norm](int step) mutable {
    // The mean over all ranks is taken off, so the results of all ranks are those of a whole batch of ranks.
    const at::Tensor x = values_at(g, step, 2 * 500).reshape({2, 500}).requires_grad_();
    const at::Tensor y = norm(x);
    const double mean = sum_at(g, step) / g->getSize();
    const double variance = (double(g->getSize()) * g->getSize() - 1) / 12;
    expect(y.detach(), (g->getRank() + 1 + step - mean) / std::sqrt(variance + 1e-5), "norm");
    y.sum().backward();
    expect(x.grad(), 0, "gradient of norm");
  };
}
FaultStep joining_step(const Group& g) {
  const auto ddp = std::make_shared<DistributedDataParallel<torch::nn::Linear>>(
      plain_layer(), DistributedDataParallelOptions{.process_group = g});
  return [g, ddp](int step) {
    ddp->zero_grad();
    double last = 0;
    join({ddp.get()}, [&] {
      for (int i = 0; i <= g->getRank(); ++i) {
        ddp->zero_grad();
        (*ddp)(rows_at(g, step)).sum().backward();
        last = ddp->module()->weight.grad().max().item<double>();
      }
    });
    // In a rank's last backward the ranks from it on have input.
    double expected = 0;
    for (int r = g->getRank(); r < g->getSize(); ++r) expected += 2.0 * (r + 1 + step) / g->getSize();
    expect(torch::full({1}, last), expected, "joining");
  };
}
FaultStep capture_step(const Group& g) {
  const auto ddp = std::make_shared<DistributedDataParallel<torch::nn::Linear>>(
      plain_layer(), DistributedDataParallelOptions{.process_group = g});
  const auto run = [ddp](const at::Tensor& x) {
    ddp->zero_grad();
    (*ddp)(x).sum().backward();
    return ddp->module()->weight.grad() * 1;
  };
  const auto captured = std::make_shared<decltype(capture(run))>(capture(run));
  return
      [g, captured](int step) { expect((*captured)(rows_at(g, step)), 2 * sum_at(g, step) / g->getSize(), "capture"); };
}

}  // namespace

FaultStep make_fault_step(const std::string& call, const Group& group) {
  static const std::map<std::string, FaultStep (*)(const Group&)> kMakers = {
      {"all_gather", all_gather_step},
      {"all_reduce", all_reduce_step},
      {"all_to_all", all_to_all_step},
      {"attention_gather", attention_gather_step},
      {"attention_heads", attention_heads_step},
      {"attention_ring", attention_ring_step},
      {"barrier", barrier_step},
      {"broadcast", broadcast_step},
      {"capture", capture_step},
      {"checkpoint_async", checkpoint_async_step},
      {"checkpoint_save", checkpoint_save_step},
      {"ddp_backward", ddp_backward_step},
      {"ddp_forward", ddp_forward_step},
      {"ddp_making", ddp_making_step},
      {"fsdp_backward", fsdp_backward_step},
      {"fsdp_gather", fsdp_gather_step},
      {"gather", gather_step},
      {"joining", joining_step},
      {"mesh", mesh_step},
      {"moe_backward", moe_backward_step},
      {"moe_forward", moe_forward_step},
      {"norm", norm_step},
      {"pipeline_step", pipeline_step},
      {"redistribute", redistribute_step},
      {"reduce", reduce_step},
      {"reduce_scatter", reduce_scatter_step},
      {"rendezvous", rendezvous_step},
      {"scatter", scatter_step},
      {"send_recv", send_recv_step},
      {"split", split_step},
      {"zero_step", zero_step},
  };
  return kMakers.at(call)(group);
}

}  // namespace serried::testing
