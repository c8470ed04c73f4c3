// Forward and backward of a mixture of experts, taking turns with its raw exchanges and products alone.
//
// `serried run -n 2 bench_experts <results.json>`. Raw is what no mixture can leave out: all_to_alls of the same rows,
// two each way, and the products of the same rows with the same weights; no routing, no order, no weighted sum.
#include <torch/torch.h>

#include <cstdio>
#include <numeric>

#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/parallel/expert_parallel/moe.h"

namespace {

using namespace serried;
using namespace serried::bench;
using at::Tensor;

struct Size {
  const char* name;
  int64_t tokens, width, hidden, num_experts, top_k;
};

/// This rank's experts.
struct Weights {
  explicit Weights(const Size& size, int64_t num_local)
      : up((torch::randn({num_local, size.width, size.hidden}) * 0.02).requires_grad_()),
        down((torch::randn({num_local, size.hidden, size.width}) * 0.02).requires_grad_()) {}
  Tensor up, down;
};

class Mixture {
 public:
  Mixture(const Size& size, const Group& group)
      : size_(size),
        group_(group),
        mesh_(DeviceMesh::from_group(group)),
        x_(torch::randn({size.tokens, size.width}).requires_grad_()),
        logits_(torch::randn({size.tokens, size.num_experts}).requires_grad_()),
        weights_(size, size.num_experts / group->getSize()) {}

  void step(std::optional<double> capacity) {
    forget();
    run(x_, logits_, capacity).sum().backward();
  }

  Step captured_step(double capacity) {
    const auto captured =
        std::make_shared<Captured<std::function<Tensor()>>>(capture(std::function<Tensor()>([=, this] {
          forget();
          const Tensor loss = run(x_, logits_, capacity).sum();
          loss.backward();
          return loss.detach();
        })));
    return [captured] { (*captured)(); };
  }

  /// The same rows between the same ranks and through the same products.
  Step raw_step(std::optional<double> capacity) {
    const torch::NoGradGuard no_grad;
    const Tensor experts = std::get<1>(logits_.topk(size_.top_k));
    const DispatchedTokens sent =
        dispatch_tokens(x_, experts, size_.num_experts, {.mesh = mesh_, .capacity = capacity});
    const int64_t num_local = int64_t(sent.counts.size());
    std::vector<int64_t> sizes;
    for (int rank = 0; rank < group_->getSize(); ++rank) {
      const Tensor theirs = sent.tokens_per_expert.narrow(0, rank * num_local, num_local);
      sizes.push_back(capacity ? sent.tokens.size(0) / group_->getSize() : theirs.sum().item<int64_t>());
    }
    const Tensor rows = torch::randn({std::accumulate(sizes.begin(), sizes.end(), int64_t(0)), size_.width});
    return [=, this] {
      const Tensor arrived = all_to_all(rows, group_, {.split_sizes = sizes}).requires_grad_();
      const Tensor results = products(arrived, sent);
      const Tensor back = results.detach();
      all_to_all(back, group_, {.split_sizes = pieces_of(back)});
      const Tensor grad = all_to_all(rows, group_, {.split_sizes = sizes});
      forget();
      results.backward(grad);
      all_to_all(arrived.grad(), group_, {.split_sizes = pieces_of(back)});
    };
  }

 private:
  void forget() {
    for (const Tensor& t : {x_, logits_, weights_.up, weights_.down}) t.mutable_grad().reset();
  }
  Tensor products(const Tensor& rows, const DispatchedTokens& sent) const {
    return expert_linear(torch::relu(expert_linear(rows, sent, weights_.up)), sent, weights_.down);
  }
  Tensor run(const Tensor& x, const Tensor& logits, std::optional<double> capacity) const {
    return moe(x, logits, [this](const DispatchedTokens& sent) { return products(sent.tokens, sent); },
               {.mesh = mesh_, .top_k = size_.top_k, .capacity = capacity});
  }
  /// Rows for each rank on the way back: as many for each, but for the rest.
  std::vector<int64_t> pieces_of(const Tensor& rows) const {
    const int64_t ranks = group_->getSize();
    std::vector<int64_t> sizes(size_t(ranks), rows.size(0) / ranks);
    sizes.back() += rows.size(0) % ranks;
    return sizes;
  }

  const Size size_;
  const Group group_;
  const DeviceMesh mesh_;
  Tensor x_, logits_;
  Weights weights_;
};

std::vector<Row> measured(const Size& size, const Group& group) {
  Mixture mixture(size, group);
  std::vector<Contender> all = {{"dropless", [&] { mixture.step({}); }},
                                {"raw", mixture.raw_step({})},
                                {"capacity 1.25", [&] { mixture.step(1.25); }},
                                {"capacity 1.25, captured", mixture.captured_step(1.25)},
                                {"raw of capacity", mixture.raw_step(1.25)}};
  take_turns(all, group, {.warm_up = 5, .rounds = 12, .block_us = 100e3});
  std::vector<Row> rows;
  for (const auto& [ours, raw] : {std::pair(0, 1), std::pair(2, 4), std::pair(3, 4)}) {
    const Contender &mine = all[size_t(ours)], &reference = all[size_t(raw)];
    rows.push_back({"experts", std::string(size.name) + ", " + mine.name, lower_quartile(mine.times),
                    lower_quartile(reference.times), "all_to_alls and products", 1.15, "us"});
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: bench_experts <results.json>\n");
    return 2;
  }
  at::set_num_threads(1);
  const Group group = new_group();
  torch::manual_seed(group->getRank());
  for (const Size& size : {Size{"1024 tokens of 256, 8 experts, top 2", 1024, 256, 1024, 8, 2},
                           Size{"4096 tokens of 128, 16 experts, top 1", 4096, 128, 256, 16, 1}}) {
    const std::vector<Row> rows = measured(size, group);
    if (group->getRank() != 0) continue;
    print_table(rows);
    append_json(rows, argv[1]);
  }
}
