// A small GPT trained under any combination of strategies, eagerly and captured, and the same in one process.
#pragma once

#include <torch/torch.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/loss_parallel.h"
#include "serried/parallel/recompute.h"
#include "serried/tensor/debug/comm_debug.h"
#include "tests/parallel/tensor_parallel/gpt.h"

namespace serried::testing::together {

struct Combination {
  int64_t replicas = 1;  // of shards
  int64_t dp = 1;
  int64_t tp = 1;
  bool by_ddp = false;  // else fully_shard
  gpt::GptOptions model = {};
  bool by_sequence = false;
  bool loss_parallel = false;
  bool recomputes = false;
  int64_t num_micro = 1;  // batches per step
  bool no_sync = false;   // for all of them but the last
  std::optional<at::ScalarType> low = {};
  bool same_batches = false;  // on every data parallel rank

  int64_t num_data_ranks() const { return replicas * dp; }
  int64_t num_ranks() const { return num_data_ranks() * tp; }
  at::ScalarType dtype() const { return low || same_batches ? at::kFloat : at::kDouble; }
  /// Norms of parts add up to that of one process but for the last bits, and with them all that is clipped.
  double max_norm() const { return same_batches ? 1e9 : 0.1; }
};

constexpr int kSteps = 20;

/// What a rank gets to train on.
inline gpt::Batch batch_of(const Combination& c, int64_t data_rank, int step, int64_t micro) {
  return gpt::batch_of(int((c.same_batches ? 0 : data_rank) + 10 * step + 1000 * micro));
}

inline gpt::Gpt make_net(const Combination& c) {
  gpt::Gpt net = gpt::make_gpt(c.model);
  net->to(c.dtype());
  return net;
}

/// The fused op of ours computes the last elements of a tensor otherwise than those before: parts have other last ones.
inline std::unique_ptr<torch::optim::Optimizer> make_optimizer(const Combination& c, torch::nn::Module& net) {
  const auto options = torch::optim::AdamWOptions(0.01);
  if (c.same_batches) return std::make_unique<torch::optim::AdamW>(net.parameters(), options);
  return std::make_unique<AdamW>(net.parameters(), options);
}

struct Trained {
  std::vector<at::Tensor> losses = {};  // mean over all ranks
  std::vector<at::Tensor> norms = {};
  std::vector<at::Tensor> parameters = {};                 // whole
  std::map<std::string, int64_t> counts = {}, bytes = {};  // of the last step
  int64_t replays = 0;
  std::string reason = {};  // why there are not more
};

inline at::Tensor logits_of(gpt::Gpt& net, const at::Tensor& ids, bool recomputes) {
  if (!recomputes) return net(ids);
  at::Tensor x = net->tokens(ids) + net->places(at::arange(ids.size(1)));
  for (size_t i = 0; i < net->blocks->size(); ++i) {
    auto block = net->blocks->ptr<gpt::BlockImpl>(i);
    x = recompute([block](const at::Tensor& y) { return block->forward(y); }, x);
  }
  return net->head(net->norm(x));
}

/// The net and what is wrapped around it, on one rank.
class Trainer {
 public:
  Trainer(const Combination& c, const Group& group)
      : c_(c),
        mesh_(init_device_mesh("cpu", {c.replicas, c.dp, c.tp}, {"replicate", "dp", "tp"}, {.group = group})),
        net_(make_net(c)) {
    if (c.tp > 1) {
      parallelize_module(*net_, mesh_["tp"], c.by_sequence ? gpt::sequence_plan(c.model) : gpt::tensor_plan(c.model));
    }
    if (c.by_ddp) {
      ddp_ = std::make_unique<DistributedDataParallel<gpt::Gpt>>(
          net_, DistributedDataParallelOptions{.process_group = mesh_.get_group("dp")});
    } else {
      shard();
    }
    optimizer_ = make_optimizer(c, *net_);
  }

  /// Loss of all batches, and norm of the gradients.
  std::vector<at::Tensor> step(const std::vector<at::Tensor>& ids, const std::vector<at::Tensor>& targets) {
    optimizer_->zero_grad();
    at::Tensor total;
    for (size_t micro = 0; micro < ids.size(); ++micro) {
      const bool syncs = !c_.no_sync || micro + 1 == ids.size();
      const auto unsynced = handle_ ? handle_->no_sync(!syncs) : FullyShardNoSync({}, false);
      const LossParallel guard(c_.loss_parallel);
      const at::Tensor due =
          c_.tp > 1 ? DTensor::from_local(targets[micro], mesh_["tp"], {Replicate()}) : targets[micro];
      const at::Tensor logits = ddp_ ? (*ddp_)(ids[micro]) : logits_of(net_, ids[micro], c_.recomputes);
      const at::Tensor loss = gpt::loss_of(logits, due) / double(ids.size());
      loss.backward();
      total = total.defined() ? total + loss.detach() : loss.detach();
    }
    const at::Tensor norm = clip_grad_norm_(net_->parameters(), c_.max_norm()).tensor();
    optimizer_->step();
    return {c_.tp > 1 ? DTensor(total).full_tensor() : total, norm};
  }

  Trained train(bool is_captured) {
    auto captured = capture([this](const std::vector<at::Tensor>& ids, const std::vector<at::Tensor>& targets) {
      return step(ids, targets);
    });
    Trained trained;
    for (int i = 0; i < kSteps; ++i) {
      std::vector<at::Tensor> ids, targets;
      for (int64_t micro = 0; micro < c_.num_micro; ++micro) {
        const gpt::Batch batch = batch_of(c_, data_rank(), i, micro);
        ids.push_back(batch.ids);
        targets.push_back(batch.targets);
      }
      const CommDebugMode comm;
      const std::vector<at::Tensor> results = is_captured ? captured(ids, targets) : step(ids, targets);
      trained.counts = comm.counts();
      for (const auto& [name, count] : trained.counts) trained.bytes[name] = comm.bytes(name);
      trained.losses.push_back(all_reduce(results[0].detach().clone(), mesh_.root_group(), c10d::ReduceOp::AVG));
      trained.norms.push_back(results[1].clone());
    }
    trained.replays = captured.replays();
    trained.reason = captured.last_recapture_reason();
    const at::NoGradGuard no_grad;
    for (const at::Tensor& p : net_->parameters()) {
      const at::Tensor value = p.detach();
      trained.parameters.push_back(is_dtensor(value) ? DTensor(value).full_tensor().clone() : value.clone());
    }
    return trained;
  }

  const DeviceMesh& mesh() const { return mesh_; }
  gpt::Gpt& net() { return net_; }
  const FullyShardHandle& handle() const { return *handle_; }

 private:
  int64_t data_rank() const { return mesh_.get_local_rank("replicate") * c_.dp + mesh_.get_local_rank("dp"); }

  void shard() {
    const DeviceMesh over = c_.replicas > 1 ? mesh_.slice({"replicate", "dp"}) : mesh_["dp"];
    FullyShardOptions options{.mesh = over};
    if (c_.low) options.mixed_precision = {.param_dtype = c_.low, .reduce_dtype = at::kFloat};
    for (const auto& block : *net_->blocks) fully_shard(*block.ptr(), options);
    handle_ = fully_shard(*net_, options);
  }

  const Combination c_;
  const DeviceMesh mesh_;
  gpt::Gpt net_;
  std::unique_ptr<DistributedDataParallel<gpt::Gpt>> ddp_;
  std::optional<FullyShardHandle> handle_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// One process on the batches of all ranks, side by side.
inline Trained train_alone(const Combination& c) {
  gpt::Gpt net = make_net(c);
  const auto optimizer = make_optimizer(c, *net);
  Trained trained;
  for (int i = 0; i < kSteps; ++i) {
    std::vector<at::Tensor> ids, targets;
    for (int64_t micro = 0; micro < c.num_micro; ++micro) {
      for (int64_t rank = 0; rank < (c.same_batches ? 1 : c.num_data_ranks()); ++rank) {
        const gpt::Batch batch = batch_of(c, rank, i, micro);
        ids.push_back(batch.ids);
        targets.push_back(batch.targets);
      }
    }
    optimizer->zero_grad();
    const at::Tensor loss = gpt::loss_of(net(at::cat(ids)), at::cat(targets));
    loss.backward();
    trained.losses.push_back(loss.detach());
    trained.norms.push_back(clip_grad_norm_(net->parameters(), c.max_norm()).tensor());
    optimizer->step();
  }
  for (const at::Tensor& p : net->parameters()) trained.parameters.push_back(p.detach());
  return trained;
}

/// How near two trainings must be; 0: bit for bit.
struct Nearness {
  double of_all = 1e-9;
  double of_norms = of_all;
};

/// What differs first by more than that; empty where nothing does.
inline std::string first_difference(const Trained& actual, const Trained& expected, const Nearness& near) {
  struct Compared {
    const char* what;
    const std::vector<at::Tensor>&a, &b;
    double tolerance;
  };
  for (const Compared& each : {Compared{"loss of step", actual.losses, expected.losses, near.of_all},
                               {"norm of step", actual.norms, expected.norms, near.of_norms},
                               {"parameter", actual.parameters, expected.parameters, near.of_all}}) {
    if (each.a.size() != each.b.size()) return c10::str(each.what, ": ", each.a.size(), " and not ", each.b.size());
    for (size_t i = 0; i < each.a.size(); ++i) {
      const at::Tensor a = each.a[i].to(each.b[i].scalar_type()), b = each.b[i];
      if (each.tolerance == 0 ? at::equal(a, b) : at::allclose(a, b, each.tolerance, each.tolerance)) continue;
      return c10::str(each.what, " ", i, " differs by ", (a - b).abs().max().item<double>());
    }
  }
  return "";
}

/// Whether numbers of f64 have the same bits on all ranks of the group.
inline bool same_on_all_ranks(const std::vector<at::Tensor>& norms, const Group& group) {
  const at::Tensor mine = at::stack(norms).view(at::kLong);
  const at::Tensor all = all_gather(mine, group).view({group->getSize(), mine.numel()});
  return at::equal(all, all.select(0, 0).expand_as(all));
}

}  // namespace serried::testing::together
