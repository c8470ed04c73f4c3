// Ranks that lack memory in the middle of a save or a load: all ranks hear of it, and go on.
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <new>

#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/groups/ranks.h"
#include "serried/tensor/dtensor.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

// Ranks are threads: of each some tensor of just so many bytes is refused, the first that is made from now on being 1.
thread_local size_t refused_bytes = 0;
thread_local int refused_number = 0;

class RefusingAllocator final : public c10::Allocator {
 public:
  RefusingAllocator() : inner_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~RefusingAllocator() override { c10::SetCPUAllocator(inner_, kPriority); }
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == refused_bytes && --refused_number == 0) throw std::bad_alloc();
    return inner_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { inner_->copy_data(to, from, bytes); }

 private:
  static constexpr uint8_t kPriority = 200;
  c10::Allocator* inner_;
};

constexpr const char* kNoMemory =
    "rank 1: out of memory\n  fix: free some, or save and load on more ranks, each with less";

// A tensor that is copied to be written or read, and behind it one for which ranks exchange what they have.
struct TwoTensors {
  at::Tensor turned;
  DTensor columns;

  TwoTensors(const DeviceMesh& mesh, double value)
      : turned(torch::full({37, 53}, value).t()),
        columns(distribute_tensor(torch::full({8, 10}, value), mesh, {Shard(1)})) {}
  checkpoint::Contents contents() const { return {{"turned", turned}, {"zcolumns", columns}}; }
  size_t num_bytes() const { return turned.nbytes(); }
};

// What a rank is told of a call in which rank 1 lacks memory.
template <class Call>
std::string error_of(const DeviceMesh& mesh, const TwoTensors& tensors, int number, const Call& call) {
  if (mesh.get_rank() == 1) refused_bytes = tensors.num_bytes(), refused_number = number;
  const std::string text = error_text<c10::Error>(call);
  if (mesh.get_rank() == 1) EXPECT_LE(refused_number, 0) << "nothing was refused";
  refused_bytes = 0;
  return text;
}

void expect_no_memory_of(const std::string& text, const std::string& where) {
  EXPECT_EQ(text.find("[checkpoint::" + where + "] " + kNoMemory), 0u) << text;
}

class CheckpointMemory : public ::testing::Test {
 protected:
  const RefusingAllocator refusing_;
  const SmallLimits limits_{{.file_bytes = 1 << 20, .block_bytes = 64, .short_run = 1 << 10}};
  const Folder folder_;
};

TEST_F(CheckpointMemory, ARankWithoutItIsNamedByASaveAndTheOldOneStays) {
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const TwoTensors old(mesh, 1), next(mesh, 2);
    checkpoint::save(folder_ / "c", old.contents());
    // The first copy is made to compare what the ranks have, the second to be written.
    for (int number : {1, 2}) {
      expect_no_memory_of(error_of(mesh, next, number, [&] { checkpoint::save(folder_ / "c", next.contents()); }),
                          "save");
      EXPECT_EQ(checkpoint::read_value(folder_ / "c", "turned").toTensor().max().item<double>(), 1);
      const auto save = [&] { (void)checkpoint::async_save(folder_ / "c", next.contents()); };
      expect_no_memory_of(error_of(mesh, next, number, save), "async_save");
      EXPECT_EQ(checkpoint::read_value(folder_ / "c", "turned").toTensor().max().item<double>(), 1);
    }
    checkpoint::save(folder_ / "c", next.contents());
    EXPECT_EQ(checkpoint::read_value(folder_ / "c", "zcolumns").toTensor().min().item<double>(), 2);
  });
  EXPECT_EQ(folder_.names(), std::set<std::string>{"c"});
}

TEST_F(CheckpointMemory, ARankWithoutItIsNamedByALoad) {
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const TwoTensors saved(mesh, 1), loaded(mesh, 2);
    checkpoint::save(folder_ / "c", saved.contents());
    expect_no_memory_of(error_of(mesh, loaded, 1, [&] { checkpoint::load(folder_ / "c", loaded.contents()); }), "load");
    checkpoint::load(folder_ / "c", loaded.contents());
    expect_equal(loaded.turned, saved.turned);
    expect_equal(full(loaded.columns), full(saved.columns));
  });
}

}  // namespace
}  // namespace serried::testing
