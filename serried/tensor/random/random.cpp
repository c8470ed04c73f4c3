// Which generator a rank draws from, and whether the ranks of a mesh agree.
#include "serried/tensor/random/random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/live_groups.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/random/random_fill.h"

namespace serried {
namespace {

// A generator and the meshes over which it was found equal.
struct RankStream {
  at::Generator generator;
  std::vector<uint64_t> checked;
};

at::Generator copy_of_default() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.clone();
}

// Rank threads reach their first draw at different times, and plain ops in between move torch's generator on. So the
// first of a run takes the copy, and the others copy that.
at::Generator copy_for_run(const std::shared_ptr<detail::LiveGroups>& run) {
  static std::mutex mutex;
  static std::map<std::weak_ptr<detail::LiveGroups>, at::Generator, std::owner_less<>> origins;
  std::lock_guard<std::mutex> lock(mutex);
  std::erase_if(origins, [](const auto& origin) { return origin.first.expired(); });
  auto [origin, is_new] = origins.try_emplace(run);
  if (is_new) origin->second = copy_of_default();
  return origin->second.clone();
}

RankStream& process_stream() {
  static RankStream stream{at::detail::getDefaultCPUGenerator(), {}};
  return stream;
}

RankStream& rank_stream() {
  const auto run = detail::live_groups_of_thread();
  if (!run) return process_stream();
  thread_local std::map<std::weak_ptr<detail::LiveGroups>, RankStream, std::owner_less<>> streams;
  RankStream& stream = streams[run];
  if (!stream.generator.defined()) stream.generator = copy_for_run(run);
  return stream;
}

int64_t hash_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  const auto* bytes = state.const_data_ptr<uint8_t>();
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t i = 0; i < state.numel(); ++i) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return int64_t(hash);
}

Group whole_group(const DeviceMesh& mesh) {
  if (mesh.ndim() == 1) return mesh.get_group(0);
  std::vector<int64_t> axes(mesh.ndim());
  std::iota(axes.begin(), axes.end(), 0);
  return mesh.get_merged_group(axes);
}

[[noreturn]] void raise_different(const DeviceMesh& mesh, const at::Tensor& hashes) {
  const auto* hash = hashes.const_data_ptr<int64_t>();
  std::string different;
  for (int64_t i = 1; i < hashes.numel(); ++i) {
    if (hash[i] == hash[0]) continue;
    different += (different.empty() ? "" : ", ") + std::to_string(mesh.rank_list().at(i));
  }
  raise<c10::ValueError>({"random",
                          c10::str("the generators of ranks ", different, " differ from rank ",
                                   mesh.rank_list().front(), "'s on ", mesh.to_string()),
                          "call manual_seed(seed, mesh) with one seed on every rank of the mesh"});
}

// Every rank of the mesh comes here at the same op, so all raise or none.
void compare(const at::Generator& generator, const DeviceMesh& mesh) {
  const tape::Pause only_checks;
  const detail::LocalOnly local;
  const Group group = whole_group(mesh);
  const int64_t hash = hash_of(generator);
  at::Tensor bounds = at::empty({2}, at::kLong);
  bounds.mutable_data_ptr<int64_t>()[0] = hash;
  bounds.mutable_data_ptr<int64_t>()[1] = ~hash;  // its minimum is the complement of the maximum
  all_reduce_(bounds, group, c10d::ReduceOp::MIN);
  const auto* bound = bounds.const_data_ptr<int64_t>();
  if (bound[0] == ~bound[1]) return;
  at::Tensor own = at::empty({1}, at::kLong);
  own.mutable_data_ptr<int64_t>()[0] = hash;
  raise_different(mesh, all_gather(own, group));
}

}  // namespace

void manual_seed(uint64_t seed, const DeviceMesh& mesh) {
  if (!mesh.contains_this_rank()) {
    raise<c10::ValueError>({"manual_seed", c10::str("rank ", mesh.get_rank(), " is not in ", mesh.to_string()),
                            "call it on the ranks of the mesh only: if (mesh.contains_this_rank())"});
  }
  RankStream& stream = rank_stream();
  // Other meshes stay checked: their ranks may not all have come here, and a comparison needs all of them.
  std::erase(stream.checked, mesh.id());
  if (!detail::live_groups_of_thread()) return at::manual_seed(seed);
  std::lock_guard<std::mutex> lock(stream.generator.mutex());
  stream.generator.set_current_seed(seed);
}

at::Generator rank_generator() {
  return rank_stream().generator;
}

uint64_t seed_for(uint64_t seed, int64_t stage) {
  if (stage < 0) {
    raise<c10::ValueError>({"seed_for", c10::str("stage is ", stage), "pass the number of the stage, 0 or more"});
  }
  if (stage == 0) return seed;
  // The finaliser of splitmix64: torch's generator looks at the low 32 bits only, so they must depend on all.
  uint64_t mixed = seed + uint64_t(stage) * 0x9e3779b97f4a7c15;
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 31);
}

at::Generator generator_for(const std::optional<at::Generator>& given, const DeviceMesh& mesh) {
  if (given && given->defined()) return *given;
  RankStream& stream = rank_stream();
  if (mesh.size() == 1 || std::find(stream.checked.begin(), stream.checked.end(), mesh.id()) != stream.checked.end()) {
    return stream.generator;
  }
  compare(stream.generator, mesh);
  stream.checked.push_back(mesh.id());
  return stream.generator;
}

void detail::note_new_state(const at::Generator& generator) {
  RankStream& stream = rank_stream();
  if (generator == stream.generator) stream.checked.clear();
}

void detail::put_rank_generator(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const DeviceMesh* mesh) {
  const std::optional<int> index = schema.argumentIndexWithName("generator");
  if (!index) return;
  c10::IValue& argument = torch::jit::peek(stack, *index, schema.arguments().size());
  if (!argument.isNone()) return;
  argument = mesh != nullptr ? generator_for(std::nullopt, *mesh) : rank_generator();
}

}  // namespace serried
