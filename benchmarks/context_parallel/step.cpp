// Causal attention of one long sequence, forward and backward: cut over the ranks beside the whole on one of them.
//
// `serried run -n 2 bench_context_parallel <results.json> [pytorch.jsonl]`; the last file holds what pytorch.py has
// measured. The whole sequence is computed by every rank at once, so that both have the machine under the same load.
#include <torch/torch.h>

#include <string>

#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/context_parallel/context_parallel.h"

namespace {

using namespace serried;
using namespace serried::bench;

constexpr int64_t kBatch = 1, kHeads = 4, kLength = 4096, kSize = 64;

// Every rank is to take 1 / 1.8 of the time for two ranks, and as much of its share for more.
double goal_for(int64_t ranks) {
  return 1 / (0.9 * double(ranks));
}

std::vector<at::Tensor> whole_tensors() {
  torch::manual_seed(1);
  std::vector<at::Tensor> tensors;
  for (int i = 0; i < 4; ++i) tensors.push_back(torch::randn({kBatch, kHeads, kLength, kSize}));
  return tensors;
}

void forward_and_backward(const std::vector<at::Tensor>& t) {
  for (int i = 0; i < 3; ++i) t[size_t(i)].mutable_grad() = at::Tensor();
  at::scaled_dot_product_attention(t[0], t[1], t[2], {}, 0.0, /*is_causal=*/true).backward(t[3]);
}

void require_grad(std::vector<at::Tensor>& tensors) {
  for (int i = 0; i < 3; ++i) tensors[size_t(i)].requires_grad_();
}

Contender whole() {
  std::vector<at::Tensor> tensors = whole_tensors();
  require_grad(tensors);
  return {"one rank", [tensors] { forward_and_backward(tensors); }};
}

Contender cut(const DeviceMesh& mesh, AttentionWay way) {
  std::vector<at::Tensor> tensors = whole_tensors();
  for (at::Tensor& t : tensors) t = context_parallel_shard(mesh, t, {.seq_dim = 2});
  require_grad(tensors);
  return {std::string(to_string(way)), [=] {
            const ContextParallel scope(mesh, {.rotate = way, .length = kLength});
            forward_and_backward(tensors);
          }};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  at::set_num_threads(1);
  const Group world = new_group();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->getSize()}, {"cp"}, {.group = world});
  std::vector<Contender> contenders = {whole(), cut(mesh, AttentionWay::heads), cut(mesh, AttentionWay::gather),
                                       cut(mesh, AttentionWay::ring)};
  take_turns(contenders, world, {.rounds = 6, .block_us = 1});
  if (world->getRank() != 0) return 0;
  const double reference = lower_quartile(contenders[0].times);
  const std::string path = argc > 2 ? argv[2] : "";
  std::vector<Row> rows;
  for (size_t i = 1; i < contenders.size(); ++i) {
    rows.push_back({"context_parallel", contenders[i].name, lower_quartile(contenders[i].times), reference, "one rank",
                    goal_for(world->getSize())});
  }
  for (const char* name : {"allgather", "alltoall"}) {
    const double theirs = path.empty() ? 0 : number_in_lines(path, name, "step_us");
    if (theirs > 0)
      rows.push_back({"context_parallel", "ring", rows.back().ours, theirs, c10::str("PyTorch, ", name), 1});
  }
  print_table(rows);
  append_json(rows, argv[1]);
}
