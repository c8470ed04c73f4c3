// Redistributions of a DTensor beside the raw collective and one copy, on two shared-memory ranks.
#include <serried/serried.h>

#include <chrono>
#include <functional>

#include "benchmarks/support/results.h"

namespace {

using namespace serried;
using at::Tensor;

double median_us(const Group& group, int calls, const std::function<void()>& run) {
  for (int i = 0; i < calls / 10 + 3; ++i) run();
  std::vector<double> times;
  for (int repetition = 0; repetition < 15; ++repetition) {
    barrier(group);
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) run();
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count() /
                    calls);
  }
  return bench::median(times);
}

struct Case {
  std::string name;
  std::function<void()> ours;
  std::function<void()> raw;
};

// The raw side allocates its output as a caller would, and copies where the layout needs it.
std::vector<Case> cases(const Group& group, const DeviceMesh& mesh, int64_t n) {
  const Tensor whole = at::randn({n, n});
  const int64_t ranks = group->getSize();
  const DTensor rows = distribute_tensor(whole, mesh, {Shard(0)});
  const DTensor pending = DTensor::from_local(whole.clone(), mesh, {Partial()});
  const Tensor part = rows.to_local();
  return {
      {"S0 -> R", [=] { rows.redistribute({Replicate()}); },
       [=] {
         all_gather_into(at::empty({n, n}), part.clone(), group);
       }},
      {"S0 -> S1", [=] { rows.redistribute({Shard(1)}); },
       [=] {
         const Tensor pieces = part.view({n / ranks, ranks, n / ranks}).transpose(0, 1).contiguous();
         all_to_all_into(at::empty({n, n / ranks}), pieces, group);
       }},
      {"P -> R", [=] { pending.redistribute({Replicate()}); },
       [=] {
         const Tensor copy = whole.clone();
         all_reduce_(copy, group);
       }},
      {"P -> S0", [=] { pending.redistribute({Shard(0)}); },
       [=] {
         reduce_scatter_into(at::empty({n / ranks, n}), whole.clone(), group);
       }},
  };
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  at::NoGradGuard no_grad;
  const Group group = new_group("shm");
  const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {}, {.group = group});
  std::vector<bench::Row> rows;
  for (int64_t n : {16, 1024}) {
    const int calls = n == 16 ? 3000 : 30;
    for (const Case& one : cases(group, mesh, n)) {
      const double raw = median_us(group, calls, one.raw);
      const double ours = median_us(group, calls, one.ours);
      rows.push_back({"redistribute", one.name + ", " + bench::size_text(n * n * 4), ours, raw, "raw + copy", 1.15});
    }
  }
  if (group->getRank() != 0) return 0;
  bench::print_table(rows);
  if (argc > 1) bench::append_json(rows, argv[1]);
}
