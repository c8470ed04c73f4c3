// Rank 0 makes the memory, the others map it through /proc; each step is agreed through the store.
#include "serried/comm/backends/shm/connect.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::shm {
namespace {

// Every pair of ranks has streams and every rank a part of each stage: beyond this they would be too small to pay.
constexpr int kMaxRanks = 512;

bool makes_sense(const Greeting& greeting) {
  return greeting.memory.pid > 0 && greeting.memory.fd >= -1 && greeting.heap_bytes >= 0 &&
         greeting.heap_bytes <= kMaxHeapBytes && greeting.round_bytes > 0 &&
         greeting.round_bytes <= SegmentShape::kStageBytes && !greeting.host.empty();
}

std::vector<Greeting> exchange_greetings(const ConnectArgs& args, const Greeting& mine) {
  const detail::StoreRanks ranks{args.store, args.rank, args.world_size, args.timeout};
  std::vector<Greeting> greetings;
  for (const std::string& text : detail::exchange(ranks, args.backend, "shm/greeting", mine.text())) {
    greetings.push_back(parse_greeting(args.backend, int(greetings.size()), text));
  }
  return greetings;
}

// Small rounds let both sides work at once; where ranks share cores they cannot, and each round is a change of rank.
int64_t round_bytes(const WaitPolicy& policy) {
  return policy.own_core ? 64 << 10 : SegmentShape::kStageBytes;
}

void check_neighbours(const ConnectArgs& args, const std::vector<Greeting>& greetings) {
  for (int rank = 0; rank < args.world_size; ++rank) {
    if (greetings[rank].host != greetings[args.rank].host) {
      raise<c10::DistBackendError>(
          {args.backend,
           c10::str("rank ", rank, " runs on another host, or in another container, than rank ", args.rank, " (",
                    greetings[rank].host, " and ", greetings[args.rank].host, ")"),
           "use new_group(\"gloo\") across hosts"});
    }
    if (args.one_process && greetings[rank].memory.pid != greetings[args.rank].memory.pid) {
      raise<c10::ValueError>(
          {args.backend,
           c10::str("rank ", rank, " is process ", greetings[rank].memory.pid, " and rank ", args.rank, " process ",
                    greetings[args.rank].memory.pid, ": ranks must be threads of one process"),
           "use new_group(\"shm\") between processes, or run_ranks for threads"});
    }
  }
}

Segment attach(const SegmentShape& shape, const Greeting& owner) {
  std::string problem = shape.problem();
  if (owner.memory.fd < 0) problem = "no memory";
  if (problem.empty()) return Segment::attach(shape, owner.memory);
  raise<c10::DistBackendError>(
      {"shm", c10::str("rank 0 offers ", problem), "find out who else writes to the store of this job"});
}

// All ranks raise what the first of them met with.
void check_failures(const ConnectArgs& args, const std::string& mine) {
  const detail::StoreRanks ranks{args.store, args.rank, args.world_size, args.timeout};
  const std::vector<std::string> failures = detail::exchange(ranks, args.backend, "shm/failure", mine);
  for (int rank = 0; rank < args.world_size; ++rank) {
    if (failures[rank].empty()) continue;
    raise<c10::DistBackendError>({args.backend, c10::str("rank ", rank, " cannot share memory: ", failures[rank]), ""});
  }
}

}  // namespace

std::string Greeting::text() const {
  return memory.text() + " " + std::to_string(heap_bytes) + " " + std::to_string(round_bytes) + " " + host;
}

Greeting parse_greeting(std::string_view where, int rank, const std::string& text) {
  Greeting greeting;
  std::istringstream in(text);
  in >> greeting.memory.pid >> greeting.memory.fd >> greeting.heap_bytes >> greeting.round_bytes;
  // The rest as it is: names of hosts hold spaces.
  if (in && in.get() == ' ') greeting.host.assign(std::istreambuf_iterator<char>(in), {});
  if (makes_sense(greeting) && greeting.text() == text) return greeting;
  raise<c10::DistBackendError>({where,
                                c10::str("rank ", rank, " says \"", text, "\" where its process and memory should be"),
                                "find out who else writes to the store of this job"});
}

std::unique_ptr<Runner> connect(const ConnectArgs& args) {
  if (args.world_size > kMaxRanks) {
    raise<c10::ValueError>({args.backend,
                            c10::str(args.world_size, " ranks on one host; at most ", kMaxRanks, " share a segment"),
                            "use new_group(\"gloo\"), or \"fake\" to plan a large run"});
  }
  const WaitPolicy policy = WaitPolicy::for_ranks(args.world_size);
  SegmentShape shape{.world_size = args.world_size, .heap_bytes = args.heap_bytes, .round_bytes = round_bytes(policy)};
  std::optional<Segment> segment;
  std::string failure;
  if (args.rank == 0) failure = failure_of([&] { segment.emplace(Segment::create(shape)); });
  const detail::SharedFilePlace memory = segment ? segment->place() : detail::SharedFilePlace{.pid = getpid()};
  const Greeting mine{memory, args.heap_bytes, shape.round_bytes, detail::host_identity()};
  const std::vector<Greeting> greetings = exchange_greetings(args, mine);
  check_neighbours(args, greetings);
  // Rank 0 decides: every rank must lay the memory out alike.
  shape.heap_bytes = greetings[0].heap_bytes;
  shape.round_bytes = greetings[0].round_bytes;
  if (args.rank != 0) failure = failure_of([&] { segment.emplace(attach(shape, greetings[0])); });
  check_failures(args, failure);
  // One file of a process is enough for those who look from outside (serried top).
  if (args.rank != 0 && greetings[0].memory.pid == getpid()) segment->close_file();
  const bool one_process =
      std::all_of(greetings.begin(), greetings.end(), [](const Greeting& each) { return each.memory.pid == getpid(); });
  auto engine = std::make_unique<Engine>(std::move(*segment), args.rank, policy, one_process && !args.always_stage);
  engine->meet(args.timeout, detail::place_of(args.store));
  return engine;
}

}  // namespace serried::shm
