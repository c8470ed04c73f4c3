// Saving and loading a sharded model with its optimizer, in turn with raw writes and reads of as many bytes.
//
// `serried run -n 2 bench_checkpoint <layers> <width> <folder> <results.json> [pytorch.jsonl]`; the last file holds
// what pytorch.py has measured. Raw: each rank writes its part of one file by pwrite and fsync, and reads it by pread.
#include <fcntl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/optim/adam.h"
#include "serried/parallel/fsdp/fully_shard.h"

namespace {

using namespace serried;
using namespace serried::bench;
namespace fs = std::filesystem;

constexpr int kRounds = 7;
constexpr size_t kChunk = 8 << 20;  // bytes of one call

struct Net : torch::nn::Module {
  torch::nn::ModuleList layers;

  Net(int64_t count, int64_t width, const DeviceMesh& mesh) {
    register_module("layers", layers);
    for (int64_t i = 0; i < count; ++i) {
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
      fully_shard(*layers[size_t(i)], {.mesh = mesh});
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = layer->as<torch::nn::Linear>()->forward(x);
    return x;
  }
};

void check(bool holds, const char* what) {
  if (holds) return;
  std::perror(what);
  std::exit(1);
}

/// As many bytes as a rank's part of the checkpoint, in one file of all ranks.
class RawFile {
 public:
  RawFile(std::string path, size_t bytes, int rank) : path_(std::move(path)), memory_(bytes, char(1)), rank_(rank) {}

  void write() {
    const int file = ::open(path_.c_str(), O_CREAT | O_WRONLY, 0666);
    check(file >= 0, "open");
    for (size_t done = 0; done < memory_.size(); done += kChunk) {
      const size_t size = std::min(kChunk, memory_.size() - done);
      check(::pwrite(file, memory_.data() + done, size, off_t(begin() + done)) == ssize_t(size), "pwrite");
    }
    check(::fsync(file) == 0, "fsync");
    ::close(file);
  }
  void read() {
    const int file = ::open(path_.c_str(), O_RDONLY);
    check(file >= 0, "open");
    for (size_t done = 0; done < memory_.size(); done += kChunk) {
      const size_t size = std::min(kChunk, memory_.size() - done);
      check(::pread(file, memory_.data() + done, size, off_t(begin() + done)) == ssize_t(size), "pread");
    }
    ::close(file);
  }
  void copy() {
    copy_.resize(memory_.size());
    std::memcpy(copy_.data(), memory_.data(), memory_.size());
  }

 private:
  size_t begin() const { return size_t(rank_) * memory_.size(); }

  std::string path_;
  std::vector<char> memory_, copy_;
  int rank_;
};

/// The fastest of a few rounds in milliseconds: others write to the disk, too.
class Times {
 public:
  explicit Times(const Group& group) : group_(group) {}
  template <class Fn>
  void add(Fn&& fn) {
    barrier(group_);
    const double ms = slowest({us_of(fn)}, group_)[0] / 1e3;
    best_ = best_ == 0 ? ms : std::min(best_, ms);
  }
  double ms() const { return best_; }

 private:
  Group group_;
  double best_ = 0;
};

struct Measured {
  Times save, load, stall, raw_write, raw_read, copy;
};

Measured measure(int64_t count, int64_t width, const std::string& folder, const Group& group) {
  const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"dp"}, {.group = group});
  Net net(count, width, mesh);
  AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-3));
  net.forward(at::randn({4, width})).square().mean().backward();
  optimizer.step();
  const checkpoint::Contents contents = {{"model", checkpoint::state_of(net)},
                                         {"optim", checkpoint::state_of(optimizer)}};
  const size_t bytes = size_t(3 * count * width * width) * sizeof(float) / size_t(group->getSize());
  RawFile raw(folder + "/raw", bytes, group->getRank());
  Measured times{Times(group), Times(group), Times(group), Times(group), Times(group), Times(group)};
  const auto remove = [&](const std::string& name) {
    barrier(group);
    if (group->getRank() == 0) fs::remove_all(folder + "/" + name);
  };
  for (int round = 0; round < kRounds; ++round) {
    times.raw_write.add([&] { raw.write(); });
    times.raw_read.add([&] { raw.read(); });
    remove("raw");
    times.save.add([&] { checkpoint::save(folder + "/saved", contents); });
    times.load.add([&] { checkpoint::load(folder + "/saved", contents); });
    remove("saved");
    times.copy.add([&] { raw.copy(); });
    std::optional<checkpoint::Saving> saving;
    times.stall.add([&] { saving = checkpoint::async_save(folder + "/saved", contents); });
    saving->wait();
    remove("saved");
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc < 5) {
    std::fprintf(stderr, "usage: bench_checkpoint <layers> <width> <folder> <results.json> [pytorch.jsonl]\n");
    return 2;
  }
  const Group group = new_group();
  const ProcessGroupGuard current(group);
  fs::create_directories(argv[3]);
  const Measured times = measure(std::atol(argv[1]), std::atol(argv[2]), argv[3], group);
  if (group->getRank() != 0) return 0;
  const std::string name = std::string(argv[1]) + " x " + argv[2];
  std::vector<Row> rows;
  const auto add = [&](const char* what, const Times& ours, double reference, const char* reference_name, double goal) {
    if (reference > 0) {
      rows.push_back({"checkpoint", name + ", " + what, ours.ms(), reference, reference_name, goal, "ms"});
    }
  };
  const auto theirs = [&](const char* what) { return argc > 5 ? number_in_lines(argv[5], name, what) : 0; };
  add("save", times.save, times.raw_write.ms(), "pwrite and fsync", 1.25);
  add("load", times.load, times.raw_read.ms(), "pread", 1.25);
  add("async_save, stall", times.stall, times.copy.ms(), "memcpy", 1.2);
  add("save", times.save, theirs("save_ms"), "PyTorch's DCP", 0.5);
  add("load", times.load, theirs("load_ms"), "PyTorch's DCP", 0.5);
  add("async_save, stall", times.stall, theirs("stall_ms"), "PyTorch's DCP", 0.5);
  print_table(rows);
  append_json(rows, argv[4]);
}
