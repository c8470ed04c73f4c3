// A small GPT learns to write, letter by letter: data parallel on all ranks, with samples, progress, a trace and
// checkpoints.
// Start it with: serried run -n 2 build/bin/06_gpt
// Kill it at any time, and let it go on with any number of ranks:
//                serried run -n 4 build/bin/06_gpt --checkpoint gpt_checkpoint --resume
// Any number of ranks ends with the same loss: the batch is that of all ranks together, whoever computes which part.
#include <serried/serried.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <numbers>
#include <optional>
#include <sstream>
#include <thread>

namespace {

namespace nn = torch::nn;
namespace checkpoint = serried::checkpoint;
using serried::Group;
using serried::trace::Span;

constexpr int64_t kContext = 64;  // letters that the next one is guessed from
constexpr int64_t kWidth = 128;
constexpr int64_t kHeads = 4;
constexpr int64_t kLayers = 3;
constexpr int64_t kBatch = 16;  // of all ranks together
constexpr double kLearningRate = 3e-3;
constexpr int kTracedSteps = 10;  // the last ones

struct Arguments {
  int steps = 700;
  std::string text = GPT_TEXT;
  std::string trace = "";
  std::string checkpoint = "";  // a folder, replaced by each save
  int save_every = 50;          // steps
  bool resume = false;
};

// The model.

nn::LayerNorm layer_norm() {
  return nn::LayerNorm(nn::LayerNormOptions({kWidth}));
}

struct BlockImpl : nn::Module {
  nn::LayerNorm norm_1 = register_module("norm_1", layer_norm());
  nn::Linear qkv = register_module("qkv", nn::Linear(nn::LinearOptions(kWidth, 3 * kWidth).bias(false)));
  nn::Linear out = register_module("out", nn::Linear(kWidth, kWidth));
  nn::LayerNorm norm_2 = register_module("norm_2", layer_norm());
  nn::Linear up = register_module("up", nn::Linear(kWidth, 4 * kWidth));
  nn::Linear down = register_module("down", nn::Linear(4 * kWidth, kWidth));

  at::Tensor attention(const at::Tensor& x) {
    // [batch, time, 3 * width] -> query, key, value of [batch, heads, time, width / heads]
    const at::Tensor parts = qkv(x).unflatten(-1, {3, kHeads, kWidth / kHeads}).permute({2, 0, 3, 1, 4});
    const at::Tensor y =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, /*dropout_p=*/0, /*is_causal=*/true);
    return out(y.transpose(1, 2).flatten(2));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + attention(norm_1(x));
    return x + down(torch::gelu(up(norm_2(x))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  nn::Embedding letters{nullptr};
  nn::Embedding places = register_module("places", nn::Embedding(kContext, kWidth));
  nn::Sequential blocks = register_module("blocks", nn::Sequential());
  nn::LayerNorm norm = register_module("norm", layer_norm());
  nn::Linear head{nullptr};

  explicit GptImpl(int64_t num_letters) {
    letters = register_module("letters", nn::Embedding(num_letters, kWidth));
    head = register_module("head", nn::Linear(kWidth, num_letters));
    for (int64_t i = 0; i < kLayers; ++i) blocks->push_back(Block());
    nn::init::normal_(letters->weight, 0, 0.1);
    nn::init::normal_(places->weight, 0, 0.1);
  }

  /// Logits of the letter after each of `ids` [batch, time].
  at::Tensor forward(const at::Tensor& ids) {
    return head(norm(blocks->forward(letters(ids) + places(at::arange(ids.size(1))))));
  }
};
TORCH_MODULE(Gpt);

// The text.

struct Text {
  std::string letters;  // every letter there is, sorted; an id is a place in it
  at::Tensor ids;
};

Text read_text(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream content;
  content << file.rdbuf();
  const std::string text = content.str();
  TORCH_CHECK_VALUE(int64_t(text.size()) > 2 * kContext, "there is no text to learn from in ", path);
  Text result{.letters = text, .ids = at::empty({int64_t(text.size())}, at::kLong)};
  std::sort(result.letters.begin(), result.letters.end());
  result.letters.erase(std::unique(result.letters.begin(), result.letters.end()), result.letters.end());
  auto* ids = result.ids.mutable_data_ptr<int64_t>();
  for (char letter : text) *ids++ = int64_t(result.letters.find(letter));
  return result;
}

/// This rank's share of the batch of a step: [share, kContext + 1]. They may differ by one.
at::Tensor batch_of(const Text& text, int step, const Group& world) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(step));
  const at::Tensor begins = at::randint(text.ids.size(0) - kContext, {kBatch}, generator, at::kLong);
  const at::Tensor mine = begins.tensor_split(world->getSize())[size_t(world->getRank())];
  return text.ids.index({mine.unsqueeze(1) + at::arange(kContext + 1)});
}

/// What the model makes of `num_letters` more letters.
std::string write_some(Gpt& model, const Text& text, int64_t num_letters) {
  at::NoGradGuard no_grad;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(0));
  const std::string begin = "\nA wise man ";
  std::string written = begin;
  std::vector<int64_t> ids;
  for (char letter : begin) ids.push_back(int64_t(text.letters.find(letter)));
  for (int64_t i = 0; i < num_letters; ++i) {
    const auto first = ids.end() - std::min<int64_t>(int64_t(ids.size()), kContext);
    const at::Tensor logits = model(at::tensor(std::vector<int64_t>(first, ids.end())).unsqueeze(0))[0][-1];
    ids.push_back(at::multinomial((logits / 0.5).softmax(0), 1, false, generator).item<int64_t>());
    written += text.letters[size_t(ids.back())];
  }
  return written;
}

// Training.

/// Warms up, then falls along a cosine.
double learning_rate(int step, int steps) {
  const double warm_up = std::min(1.0, (step + 1) / 20.0);
  return kLearningRate * warm_up * (0.55 + 0.45 * std::cos(std::numbers::pi * step / steps));
}

/// Prints a line now and then: how far, how good, how fast, and what share of the time backward was done and
/// communication was not.
class Progress {
 public:
  Progress(int done, int steps, const Group& world) : done_before_(done), steps_(steps), world_(world) {}

  bool is_due(int done) const { return done % std::max(1, steps_ / 20) == 0 || done == steps_; }
  void show(int done, double loss, const serried::DataParallelBase& ddp) const {
    if (world_->getRank() != 0) return;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
    const auto data = ddp.logging_data().to_map();
    const int64_t exposed_ns =
        data.at("avg_backward_comm_time").toInt() - data.at("avg_backward_compute_comm_overlap_time").toInt();
    const int filled = 24 * done / steps_, mine = done - done_before_;
    std::printf("  [%s%s] %4d/%d  loss %.4f  %6.0f tokens/s  exposed communication %4.1f %%\n",
                std::string(size_t(filled), '#').c_str(), std::string(size_t(24 - filled), '.').c_str(), done, steps_,
                loss, double(mine * kBatch * kContext) / seconds, 100e-9 * double(exposed_ns) * mine / seconds);
    std::fflush(stdout);
  }

 private:
  int done_before_;  // by the run that this one goes on from
  int steps_;
  Group world_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// What a run needs to go on from where another one was.
class Checkpoints {
 public:
  Checkpoints(Gpt model, torch::optim::Optimizer& optimizer, const Arguments& arguments)
      : model_(std::move(model)), optimizer_(optimizer), arguments_(arguments) {}

  struct Reached {
    int64_t step;  // the one to go on with
    double loss;
  };
  Reached resume(const Group& world) {
    if (!arguments_.resume) return {};
    const bool is_there = checkpoint::exists(arguments_.checkpoint);
    if (is_there) checkpoint::load(arguments_.checkpoint, contents());
    if (world->getRank() == 0) {
      std::printf(is_there ? "  goes on after step %ld\n" : "  there is no checkpoint yet\n", step_);
      if (step_ >= arguments_.steps) std::printf("  nothing is left to do of %d steps\n", arguments_.steps);
    }
    return {step_, loss_};
  }

  bool is_due(int64_t step) const {
    return !arguments_.checkpoint.empty() && (step % arguments_.save_every == 0 || step == arguments_.steps);
  }
  /// Written while training goes on.
  void save(int64_t step, double loss) {
    step_ = step;
    loss_ = loss;
    saving_ = checkpoint::async_save(arguments_.checkpoint, contents());
  }
  void finish() {
    if (saving_) saving_->wait();
  }

 private:
  checkpoint::Contents contents() {
    return {{"model", checkpoint::state_of(model_)},
            {"optimizer", checkpoint::state_of(optimizer_)},
            {"step", &step_},
            {"loss", &loss_}};
  }

  Gpt model_;
  torch::optim::Optimizer& optimizer_;
  const Arguments& arguments_;
  int64_t step_ = 0;
  double loss_ = 0;  // of the batch of that step
  std::optional<checkpoint::Saving> saving_;
};

/// The loss of the last batch.
double train(Gpt model, const Text& text, const Arguments& arguments, const Group& world) {
  const serried::ProcessGroupGuard current(world);
  serried::DistributedDataParallel ddp(model, {.process_group = world, .stats_every = 1});
  torch::optim::AdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(kLearningRate).betas({0.9, 0.99}));
  Checkpoints checkpoints(model, optimizer, arguments);
  auto [reached, last_loss] = checkpoints.resume(world);
  const int first = int(reached);
  Progress progress(first, arguments.steps, world);
  for (int step = first; step < arguments.steps; ++step) {
    if (!arguments.trace.empty() && step == std::max(first, arguments.steps - kTracedSteps)) serried::trace::start();
    const Span whole("step", "gpt");
    const at::Tensor batch = batch_of(text, step, world);
    const at::Tensor logits = ddp(batch.slice(1, 0, kContext));
    at::Tensor loss = torch::cross_entropy_loss(logits.flatten(0, 1), batch.slice(1, 1).flatten());
    loss = serried::scale_loss(loss, batch.size(0), world);
    optimizer.zero_grad();
    loss.backward();
    const Span span("optimizer", serried::trace::kOptimizer);
    for (auto& group : optimizer.param_groups()) group.options().set_lr(learning_rate(step, arguments.steps));
    nn::utils::clip_grad_norm_(ddp.parameters(), 1.0);  // a jump would make rounding errors grow
    optimizer.step();
    const int done = step + 1;
    if (!progress.is_due(done) && !checkpoints.is_due(done)) continue;
    // Each rank's is weighted by its share: the average is that of the batch.
    last_loss = serried::all_reduce(loss.detach(), world, c10d::ReduceOp::AVG).item<double>();
    if (progress.is_due(done)) progress.show(done, last_loss, ddp);
    if (checkpoints.is_due(done)) checkpoints.save(done, last_loss);
  }
  checkpoints.finish();
  return last_loss;
}

/// One file with a row for every rank.
void write_trace(const std::string& path, const Group& world) {
  const auto part = [&](int rank) { return c10::str(path, ".rank_", rank); };
  serried::trace::stop();
  serried::trace::write(part(world->getRank()));
  serried::barrier(world);
  if (world->getRank() != 0) return;
  std::vector<std::string> parts;
  for (int rank = 0; rank < world->getSize(); ++rank) parts.push_back(part(rank));
  serried::trace::merge(parts, path);
  for (const std::string& file : parts) std::filesystem::remove(file);
}

void run(const Arguments& arguments) {
  const Group world = serried::new_group();
  const bool talks = world->getRank() == 0;
  at::set_num_threads(1);  // the ranks share the cores
  const Text text = read_text(arguments.text);
  torch::manual_seed(1);
  Gpt model(int64_t(text.letters.size()));

  int64_t size = 0;
  for (const at::Tensor& parameter : model->parameters()) size += parameter.numel();
  if (talks) {
    std::printf("A GPT of %ld parameters reads %s on %d rank%s.\n\nBefore:\n%s\n\nTraining:\n", size,
                std::filesystem::path(arguments.text).filename().c_str(), world->getSize(),
                world->getSize() == 1 ? "" : "s", write_some(model, text, 100).c_str());
    std::fflush(stdout);
  }
  const double loss = train(model, text, arguments, world);
  if (talks) std::printf("\nAfter:\n%s\n\n", write_some(model, text, 400).c_str());
  if (!arguments.trace.empty()) write_trace(arguments.trace, world);
  if (talks && !arguments.trace.empty()) {
    std::printf("The last %d steps of all ranks: %s, for ui.perfetto.dev\n", kTracedSteps, arguments.trace.c_str());
  }
  if (talks) std::printf("final loss %.7f, whatever the number of ranks\n", loss);
}

constexpr const char* kUsage =
    "usage: 06_gpt [--steps 700] [--text FILE] [--trace FILE] [--checkpoint FOLDER] [--save-every 50] [--resume]";

int positive(const std::string& value) {
  const int number = std::atoi(value.c_str());
  TORCH_CHECK_VALUE(number > 0, kUsage);
  return number;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--resume") {
      arguments.resume = true;
      continue;
    }
    const std::string value = i + 1 < argc ? argv[++i] : "";
    TORCH_CHECK_VALUE(!value.empty(), kUsage);
    if (name == "--steps") {
      arguments.steps = positive(value);
    } else if (name == "--save-every") {
      arguments.save_every = positive(value);
    } else if (name == "--text") {
      arguments.text = value;
    } else if (name == "--trace") {
      arguments.trace = value;
    } else if (name == "--checkpoint") {
      arguments.checkpoint = value;
    } else {
      TORCH_CHECK_VALUE(false, kUsage);
    }
  }
  TORCH_CHECK_VALUE(!arguments.resume || !arguments.checkpoint.empty(), "--resume needs --checkpoint FOLDER");
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
  return EXIT_SUCCESS;
}
