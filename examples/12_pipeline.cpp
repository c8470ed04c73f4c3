// A small GPT cut into stages over 4 ranks, by three schedules, beside the same GPT in one process.
// Start it with: serried run -n 4 build/bin/12_pipeline
// All end with the same loss; the schedules differ in how long ranks wait, and in how many micro-batches they keep.
#include <serried/serried.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace {

namespace nn = torch::nn;
using namespace serried;

constexpr int64_t kContext = 32;
constexpr int64_t kWidth = 64;
constexpr int64_t kLayers = 8;
constexpr int64_t kBatch = 16;
constexpr int64_t kMicrobatches = 8;

// A layer that knows nothing of ranks.
struct BlockImpl : nn::Module {
  nn::LayerNorm norm_1 = register_module("norm_1", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear qkv = register_module("qkv", nn::Linear(kWidth, 3 * kWidth));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::LayerNorm norm_2 = register_module("norm_2", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
  nn::Linear up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
  nn::Linear down = register_module("down", nn::Linear(4 * kWidth, kWidth));

  at::Tensor forward(at::Tensor x) {
    const at::Tensor parts = qkv(norm_1(x)).unflatten(-1, {3, 2, kWidth / 2}).permute({2, 0, 3, 1, 4});
    const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    x = x + out(y.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm_2(x))));
  }
};
TORCH_MODULE(Block);

// Layers first to last - 1; the first stage reads letters, the last one guesses the next.
struct StageImpl : nn::Module {
  nn::Embedding letters{nullptr}, places{nullptr};
  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  nn::LayerNorm norm{nullptr};
  nn::Linear head{nullptr};

  StageImpl(int64_t index, int64_t count) {
    // Each layer has a seed of its own, so that every cut of the model starts with the same weights.
    const auto seeded_by = [](int64_t layer) { torch::manual_seed(uint64_t(100 + layer)); };
    if (index == 0) {
      seeded_by(-1);
      letters = register_module("letters", nn::Embedding(256, kWidth));
      places = register_module("places", nn::Embedding(kContext, kWidth));
    }
    for (int64_t layer = index * kLayers / count; layer < (index + 1) * kLayers / count; ++layer) {
      seeded_by(layer);
      blocks->push_back(Block());
    }
    if (index + 1 < count) return;
    seeded_by(kLayers);
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    head = register_module("head", nn::Linear(kWidth, 256));
  }

  at::Tensor forward(at::Tensor x) {
    if (letters) x = letters(x) + places(at::arange(x.size(1)));
    x = blocks->forward(x);
    return head ? head(norm(x)) : x;
  }
};
TORCH_MODULE(Stage);

at::Tensor loss_of(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

at::Tensor read_ids(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  TORCH_CHECK_VALUE(int64_t(text.size()) > 2 * kContext, "there is no text to learn from in ", path);
  at::Tensor ids = at::empty({int64_t(text.size())}, at::kLong);
  std::transform(text.begin(), text.end(), ids.mutable_data_ptr<int64_t>(), [](char c) { return uint8_t(c); });
  return ids;
}

// [kBatch, kContext + 1], the same on every rank.
at::Tensor batch_of(const at::Tensor& ids, int step) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(step));
  const at::Tensor begins = at::randint(ids.size(0) - kContext, {kBatch}, generator, at::kLong);
  return ids.index({begins.unsqueeze(1) + at::arange(kContext + 1)});
}

struct Result {
  double loss = 0;  // of the last batch, on every rank
  int64_t in_flight = 0;
};

Result train(const Group& group, const at::Tensor& ids, int steps, Schedule schedule) {
  const int64_t per_rank = stages_per_rank_of(schedule).value_or(2), ranks = group->getSize();
  const PipelineTable table =
      pipeline_table(schedule, {.ranks = ranks, .stages_per_rank = per_rank, .microbatches = kMicrobatches});
  std::vector<PipelineStage> stages;
  for (const int64_t index : table.stages_of(group->getRank())) stages.emplace_back(Stage(index, table.stages()));
  Pipeline pipe(stages, {.group = group, .schedule = schedule, .microbatches = kMicrobatches, .loss = loss_of});
  torch::optim::AdamW optimizer(pipe.parameters(), 1e-3);
  std::vector<at::Tensor> losses;
  for (int i = 0; i < steps; ++i) {
    const at::Tensor batch = batch_of(ids, i);
    optimizer.zero_grad();
    losses = pipe.step(batch.slice(1, 0, kContext), batch.slice(1, 1));  // empty but where the last stage is
    clip_grad_norm_(pipe.parameters(), 1.0, 2.0, {.pipeline = group});
    optimizer.step();
  }
  at::Tensor loss = losses.empty() ? torch::zeros({}) : at::stack(losses).mean();
  return {all_reduce(loss, group).item<double>(), pipe.peak_in_flight()};
}

double train_alone(const at::Tensor& ids, int steps) {
  Stage net(0, 1);
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);
  at::Tensor loss;
  for (int i = 0; i < steps; ++i) {
    const at::Tensor batch = batch_of(ids, i);
    optimizer.zero_grad();
    loss = loss_of(net(batch.slice(1, 0, kContext)), batch.slice(1, 1));
    loss.backward();
    nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
  }
  return loss.item<double>();
}

int run(int steps) {
  at::set_num_threads(1);  // the ranks share the cores
  const Group world = new_group();
  const at::Tensor ids = read_ids(GPT_TEXT);
  const double expected = train_alone(ids, steps);
  const bool speaks = world->getRank() == 0;
  if (speaks) std::printf("after %4d steps   loss      in flight on rank 0\none process       %.6f\n", steps, expected);
  bool is_same = true;
  for (const Schedule schedule : {Schedule::OneFOneB, Schedule::Interleaved, Schedule::ZBV}) {
    const Result result = train(world, ids, steps, schedule);
    is_same = is_same && std::abs(result.loss - expected) < 1e-3 * expected;
    if (speaks) {
      std::printf("%-16s  %.6f  %19lld\n", to_string(schedule).c_str(), result.loss, (long long)(result.in_flight));
    }
  }
  if (speaks) std::printf("The same loss: %s\n", is_same ? "yes" : "no");
  return is_same ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 60);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
