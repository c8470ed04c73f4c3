// Specs: equal content is one object while somebody uses it.
#include "serried/tensor/spec.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::on_mesh;

SpecPtr sample_spec(const DeviceMesh& mesh) {
  return intern_spec(mesh, {Shard(0)}, {8, 4}, {4, 1}, at::kFloat);
}

TEST(Spec, EqualContentIsTheSameObject) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const SpecPtr a = sample_spec(mesh);
    EXPECT_EQ(a.get(), sample_spec(mesh).get());
    EXPECT_EQ(a.get(), with_placements(*with_placements(*a, {Replicate()}), {Shard(0)}).get());
  });
}

TEST(Spec, EveryPartOfTheContentCounts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const SpecPtr a = sample_spec(mesh);
    const DeviceMesh other = init_device_mesh("cpu", {2}, {"tp"}, {.group = mesh.root_group()});
    for (const SpecPtr& b : {intern_spec(other, {Shard(0)}, {8, 4}, {4, 1}, at::kFloat),
                             intern_spec(mesh, {Shard(1)}, {8, 4}, {4, 1}, at::kFloat),
                             intern_spec(mesh, {Shard(0)}, {4, 8}, {4, 1}, at::kFloat),
                             intern_spec(mesh, {Shard(0)}, {8, 4}, {1, 8}, at::kFloat),
                             intern_spec(mesh, {Shard(0)}, {8, 4}, {4, 1}, at::kDouble)}) {
      EXPECT_NE(a.get(), b.get());
      EXPECT_NE(a->id, b->id);
    }
  });
}

TEST(Spec, AnIdIsNeverUsedTwice) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    const uint64_t first = sample_spec(mesh)->id;
    EXPECT_NE(sample_spec(mesh)->id, first) << "nobody used the first any more";
  });
}

TEST(Spec, TheTableKeepsNothingAlive) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    c10::weak_intrusive_ptr<Spec> last(sample_spec(mesh));
    EXPECT_TRUE(last.expired());
    for (int64_t size = 0; size < 1000; ++size) intern_spec(mesh, {Shard(0)}, {size}, {1}, at::kFloat);
    const SpecPtr kept = sample_spec(mesh);
    EXPECT_EQ(kept.use_count(), 1);
  });
}

TEST(Spec, ThreadsMayInternTheSameContent) {
  on_mesh({1}, [](const DeviceMesh& mesh) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&] {
        for (int64_t i = 0; i < 2000; ++i) {
          const SpecPtr a = intern_spec(mesh, {Shard(0)}, {i % 7, 3}, {3, 1}, at::kFloat);
          const SpecPtr b = intern_spec(mesh, {Shard(0)}, {i % 7, 3}, {3, 1}, at::kFloat);
          ASSERT_EQ(a.get(), b.get());
          ASSERT_EQ(a->sizes[0], i % 7);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  });
}

TEST(Spec, ReadsLikeEveryMessage) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DeviceMesh named = init_device_mesh("cpu", {2, 1}, {"dp", "tp"}, {.group = mesh.root_group()});
    const SpecPtr spec = intern_spec(named, {Shard(0), Partial("max")}, {8, 4}, {4, 1}, at::kBFloat16);
    EXPECT_EQ(spec->to_string(), "bf16[8,4] S0 P(max) on mesh dp=2 tp=1");
    EXPECT_EQ(sample_spec(mesh)->local_sizes(), (c10::DimVector{4, 4}));
  });
}

}  // namespace
}  // namespace serried
