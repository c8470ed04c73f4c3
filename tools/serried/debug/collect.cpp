// Finding black boxes in /proc.
#include "tools/serried/debug/collect.h"

#include <optional>
#include <utility>

#include "serried/launch/dump.h"
#include "serried/launch/socket.h"
#include "serried/launch/version.h"

namespace serried::debug {
namespace {

using launch::BlackBox;
using launch::RankSeen;

void take_boxes(const top::Proc& proc, pid_t pid, int rank, const std::string& job, std::map<int, BlackBox>& boxes) {
  const std::optional<uid_t> owner = proc.owner(pid);
  if (!owner) return;
  for (const top::MemoryFile& file : proc.memory_files(pid)) {
    if (file.name != black_box::kFileName) continue;
    BlackBox box = BlackBox::open(proc.file_path(pid, file.fd), *owner);
    const int number = rank >= 0 ? rank : box.rank();
    if (box.file() != nullptr && box.job() == job && box.pid() != 0) boxes.insert_or_assign(number, std::move(box));
  }
}

}  // namespace

launch::HostSeen collect(top::Proc& proc, const top::Job& job, launch::Seconds patience) {
  std::map<int, BlackBox> boxes;
  take_boxes(proc, job.launcher, -1, job.id, boxes);
  for (const auto& [rank, pid] : job.ranks) {
    if (!boxes.contains(rank)) take_boxes(proc, pid, rank, job.id, boxes);
  }
  const int64_t now = launch::monotonic_ns();
  launch::HostSeen seen{.version = launch::version_text(),
                        .host = launch::host_name(),
                        .node = job.node,
                        .job = job.id,
                        .attempt = job.attempt,
                        .world_size = job.world_size,
                        .why = "somebody asked for it",
                        .now_ns = now};
  std::map<int, pid_t> ranks = job.ranks;
  for (const int rank : job.gone) ranks[rank] = 0;
  for (const auto& [rank, pid] : ranks) {
    RankSeen of_rank{.rank = rank, .pid = pid, .state = pid == 0 ? 'Z' : launch::process_state(pid)};
    const auto box = boxes.find(rank);
    if (box == boxes.end()) {
      of_rank.problem = "it has made no group, or its memory cannot be opened";
    } else {
      of_rank.groups = box->second.groups(now, 0);
    }
    seen.ranks.push_back(std::move(of_rank));
  }
  std::map<int, const BlackBox*> of_ranks;
  for (const auto& [rank, box] : boxes) of_ranks[rank] = &box;
  launch::add_calls(seen, of_ranks);
  launch::add_stacks(seen, patience);
  return seen;
}

}  // namespace serried::debug
