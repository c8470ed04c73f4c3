// A fixture that runs each test body over backends and world sizes, ranks as threads, or as processes of mpirun.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "serried/comm/groups/ranks.h"
#include "tests/support/many_hosts.h"

namespace serried::testing {

struct Setting {
  std::string backend;
  int world_size;

  friend void PrintTo(const Setting& setting, std::ostream* out) {
    *out << setting.backend << " with " << setting.world_size << " ranks";
  }
};

/// Every backend whose ranks can be threads, with each of the world sizes; where hosts matter, each way to lay ranks
/// out over hosts. Under mpirun the mpi backend, where its world is of one of these sizes.
std::vector<Setting> settings(const std::vector<int>& world_sizes);

/// Those of them with hosts.
std::vector<Setting> settings_on_hosts(const std::vector<int>& world_sizes);

/// "shm_3"
std::string name_of(const ::testing::TestParamInfo<Setting>& info);

class OnRanks : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override;
  void TearDown() override;

  int world_size() const { return GetParam().world_size; }
  bool is(const std::string& backend) const { return GetParam().backend == backend; }
  bool is_hierarchical() const { return GetParam().backend.starts_with("hierarchical"); }

  /// Runs `fn` on every rank; a failure that leaves a rank is a test failure with its text.
  void on_ranks(const std::function<void(const Group&)>& fn);

 private:
  std::optional<HostLayoutBackends> layouts_;
};

/// Another group of the same ranks, made on the store of `group`.
Group sibling(const Group& group, const std::string& backend);

/// Values that differ by rank and place, small enough that sums and products of four ranks are exact in every dtype.
at::Tensor sample(at::IntArrayRef sizes, int rank, at::ScalarType dtype = at::kFloat, int64_t salt = 0);

/// `sample` of every rank, in rank order.
std::vector<at::Tensor> samples(at::IntArrayRef sizes, int world_size, at::ScalarType dtype = at::kFloat,
                                int64_t salt = 0);

/// The tensors added up, in their order; never one of them itself.
at::Tensor sum_of(const std::vector<at::Tensor>& xs);

/// What every backend is tried with.
inline const std::vector<at::ScalarType> kAllDtypes = {at::kFloat,        at::kDouble,        at::kHalf, at::kBFloat16,
                                                       at::kComplexFloat, at::kComplexDouble, at::kBool, at::kByte,
                                                       at::kChar,         at::kShort,         at::kInt,  at::kLong};

}  // namespace serried::testing
