// A fixture that runs each test body over backends and world sizes.
#include "tests/support/on_ranks.h"

#include <torch/torch.h>

#include <cstdlib>

#include "serried/comm/backends/factories.h"

namespace serried::testing {

namespace {

// Threads of one process reach everything directly; this makes them go the way that processes go.
Group make_staged_group(const FactoryArgs& args) {
  FactoryArgs staged = args;
  staged.options["always_stage"] = true;
  return make_shm_group(staged);
}

// Under mpirun ranks are processes that all run this program: tests/process/mpi does that.
const char* ranks_of_mpirun() {
  return std::getenv("OMPI_COMM_WORLD_SIZE");
}

}  // namespace

std::vector<Setting> settings(const std::vector<int>& world_sizes) {
  std::vector<Setting> all;
  if (ranks_of_mpirun() != nullptr) {
    for (int world_size : world_sizes) {
      if (world_size == std::stoi(ranks_of_mpirun())) all.push_back({"mpi", world_size});
    }
    return all;
  }
  std::vector<std::string> backends = {"gloo", "shm", "shm_staged", "threads"};
  for (const HostLayout& layout : kHostLayouts) backends.emplace_back(layout.backend);
  for (const std::string& backend : backends) {
    for (int world_size : world_sizes) all.push_back({backend, world_size});
  }
  return all;
}

std::vector<Setting> settings_on_hosts(const std::vector<int>& world_sizes) {
  std::vector<Setting> all = settings(world_sizes);
  std::erase_if(all, [](const Setting& setting) { return !setting.backend.starts_with("hierarchical"); });
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  return info.param.backend + "_" + std::to_string(info.param.world_size);
}

// Known only while such a test runs: other tests look at the list of backends.
void OnRanks::SetUp() {
  if (is("shm_staged")) register_backend("shm_staged", make_staged_group);
  if (is_hierarchical()) layouts_.emplace();
}

void OnRanks::TearDown() {
  if (is("shm_staged")) unregister_backend("shm_staged");
  layouts_.reset();
}

void OnRanks::on_ranks(const std::function<void(const Group&)>& fn) {
  try {
    if (is("mpi")) return fn(new_group("mpi", {.timeout = std::chrono::seconds(60)}));
    run_ranks(world_size(), fn, {.backend = GetParam().backend, .timeout = std::chrono::seconds(60)});
  } catch (const c10::Error& error) {
    ADD_FAILURE() << error.what_without_backtrace();
  }
}

Group sibling(const Group& group, const std::string& backend) {
  return new_group(backend, {.timeout = std::chrono::seconds(60),
                             .store = group->getStore(),
                             .rank = group->getRank(),
                             .world_size = group->getSize(),
                             .backend_options = {}});
}

at::Tensor sample(at::IntArrayRef sizes, int rank, at::ScalarType dtype, int64_t salt) {
  const at::Tensor places = at::arange(c10::multiply_integers(sizes), at::kLong).view(sizes);
  const at::Tensor values = (places * 3 + rank * 5 + salt).remainder(7) - 3;
  if (dtype == at::kByte) return values.abs().to(dtype);
  if (dtype == at::kBool) return values.gt(0);
  if (!at::isComplexType(dtype)) return values.to(dtype);
  const at::Tensor imaginary = (places + rank * 2 + salt).remainder(5) - 2;
  return at::complex(values.to(at::kDouble), imaginary.to(at::kDouble)).to(dtype);
}

std::vector<at::Tensor> samples(at::IntArrayRef sizes, int world_size, at::ScalarType dtype, int64_t salt) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < world_size; ++rank) all.push_back(sample(sizes, rank, dtype, salt));
  return all;
}

at::Tensor sum_of(const std::vector<at::Tensor>& xs) {
  at::Tensor sum = xs[0].clone();
  for (size_t i = 1; i < xs.size(); ++i) sum = sum + xs[i];
  return sum;
}

}  // namespace serried::testing
