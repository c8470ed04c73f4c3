// What an op holds at most: its results, the inputs it had to move, and one buffer to move them through.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>

#include "serried/tensor/dtensor.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::on_mesh;

// Ranks are threads: each counts its own.
thread_local int64_t live_bytes = 0;
thread_local int64_t peak_bytes = 0;

/// LibTorch's allocator, with a count of what lives.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~CountingAllocator() override { c10::SetCPUAllocator(inner_, kPriority); }

  c10::DataPtr allocate(size_t bytes) override {
    live_bytes += int64_t(bytes);
    peak_bytes = std::max(peak_bytes, live_bytes);
    auto* block = new Block{inner_->allocate(bytes), int64_t(bytes)};
    return {block->memory.get(), block, &release, c10::kCPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { inner_->copy_data(to, from, bytes); }

 private:
  static constexpr uint8_t kPriority = 200;
  struct Block {
    c10::DataPtr memory;
    int64_t bytes;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    live_bytes -= block->bytes;
    delete block;
  }
  c10::Allocator* inner_;
};

/// The most that `run` held at once beyond what was there before, its results included.
int64_t peak_of(const std::function<at::Tensor()>& run) {
  run();  // plans and staging memory are made once
  const int64_t before = live_bytes;
  peak_bytes = live_bytes;
  const at::Tensor result = run();
  return peak_bytes - before;
}

constexpr int64_t kSlack = 8 << 10;  // indices, sizes, scalars

TEST(PeakMemory, IsResultsPlusWhatMovesPlusOneBuffer) {
  CountingAllocator counting;
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const int64_t n = 256, whole = n * n * 4, half = whole / 2;
    const auto cut = [&](int64_t dim) { return distribute_tensor(at::rand({n, n}), mesh, {Shard(dim)}); };
    const DTensor rows = cut(0), columns = cut(1), more_rows = cut(0);
    const DTensor all = distribute_tensor(at::rand({n, n}), mesh, {Replicate()});
    struct Case {
      const char* name;
      std::function<at::Tensor()> run;
      int64_t result, moved;
    };
    for (const Case& c :
         std::vector<Case>{{"add, nothing moves", [&] { return rows + more_rows; }, half, 0},
                           {"mm, nothing moves", [&] { return at::mm(rows, all); }, half, 0},
                           {"mm that leaves a Partial", [&] { return at::mm(columns, rows); }, whole, 0},
                           {"mm, an input is gathered", [&] { return at::mm(rows, more_rows); }, half, whole},
                           {"add of rows and columns", [&] { return rows + columns; }, half, half},
                           {"softmax along the cut", [&] { return at::softmax(columns, 1); }, half, n * 4},
                           {"log_softmax along the cut", [&] { return at::log_softmax(columns, 1); }, half, n * 4},
                           {"cumprod along the cut", [&] { return at::cumprod(columns, 1); }, whole, whole},
                           {"S0 -> S1", [&] { return rows.redistribute({Shard(1)}); }, half, 0},
                           {"S1 -> R", [&] { return columns.redistribute({Replicate()}); }, whole, 0},
                           {"S0 -> R", [&] { return rows.redistribute({Replicate()}); }, whole, 0}}) {
      const int64_t buffer = std::max(c.moved, c.name[0] == 'S' ? c.result : 0);
      const int64_t peak = peak_of(c.run);
      EXPECT_GE(peak, c.result) << c.name;
      EXPECT_LE(peak, c.result + c.moved + buffer + kSlack) << c.name;
    }
  });
}

}  // namespace
}  // namespace serried
