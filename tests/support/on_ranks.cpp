// A fixture that runs each test body over backends and world sizes.
#include "tests/support/on_ranks.h"

#include <torch/torch.h>

#include <cstdlib>

#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/backends/factories.h"
#include "serried/comm/backends/hierarchical/group.h"
#include "tests/support/thread_wire.h"

namespace serried::testing {

namespace {

// Threads of one process reach everything directly; this makes them go the way that processes go.
Group make_staged_group(const FactoryArgs& args) {
  FactoryArgs staged = args;
  staged.options["always_stage"] = true;
  return make_shm_group(staged);
}

// Ranks of several hosts, as threads that do as if: which host a rank is on.
struct Hosts {
  const char* backend;
  int (*host_of)(int rank, int world_size);
};

constexpr Hosts kHosts[] = {
    {"hierarchical_alone", [](int rank, int) { return rank; }},
    {"hierarchical_pairs", [](int rank, int) { return rank / 2; }},
    {"hierarchical_uneven", [](int rank, int world_size) { return int(rank + 1 == world_size); }},
    {"hierarchical_mixed", [](int rank, int) { return rank % 2; }},
};

std::unique_ptr<net::Wire> connected_thread_wire(const shm::ConnectArgs& args) {
  auto wire = std::make_unique<ThreadWire>(args.rank);
  const detail::StoreRanks ranks{args.store, args.rank, args.world_size, args.timeout};
  wire->connect(detail::exchange(ranks, "new_group", "thread wire", wire->address()));
  return wire;
}

Group make_group_of_hosts(const FactoryArgs& args, const Hosts& hosts) {
  FactoryArgs placed = args;
  placed.options["host"] = std::to_string(hosts.host_of(args.rank, args.world_size));
  // Half of the backends reach tensors of neighbours, half stage them.
  placed.options["always_stage"] = hosts.backend == std::string("hierarchical_pairs");
  return hierarchical::make_group_over(placed, {.make_wire = connected_thread_wire});
}

}  // namespace

std::vector<Setting> settings(const std::vector<int>& world_sizes) {
  std::vector<Setting> all;
  std::vector<std::string> backends = {"gloo", "shm", "shm_staged", "threads"};
  for (const Hosts& hosts : kHosts) backends.push_back(hosts.backend);
  for (const std::string& backend : backends) {
    for (int world_size : world_sizes) all.push_back({backend, world_size});
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Setting>& info) {
  return info.param.backend + "_" + std::to_string(info.param.world_size);
}

// Known only while such a test runs: other tests look at the list of backends.
void OnRanks::SetUp() {
  if (is("shm_staged")) register_backend("shm_staged", make_staged_group);
  for (const Hosts& hosts : kHosts) {
    if (!is(hosts.backend)) continue;
    register_backend(hosts.backend, [&hosts](const FactoryArgs& args) { return make_group_of_hosts(args, hosts); });
  }
}

void OnRanks::TearDown() {
  if (is("shm_staged") || is_hierarchical()) unregister_backend(GetParam().backend);
}

void OnRanks::on_ranks(const std::function<void(const Group&)>& fn) {
  try {
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
