// Names, checks of sizes, and the way to each schedule's rows.
#include "serried/parallel/pipeline/schedule.h"

#include <array>

#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/parallel/pipeline/schedules/rows.h"

namespace serried {
namespace {

struct KnownSchedule {
  Schedule schedule;
  std::string_view name;
  std::array<std::string_view, 2> spellings;  // also understood
  std::optional<int64_t> stages_per_rank;
  std::vector<PipelineTable::Row> (*rows)(const TableOptions&);
};

// In the order of the enumerators.
constexpr KnownSchedule kKnownSchedules[] = {
    {Schedule::GPipe, "GPipe", {}, 1, detail::gpipe_rows},
    {Schedule::OneFOneB, "1F1B", {"onefoneb"}, 1, detail::one_f_one_b_rows},
    {Schedule::Interleaved, "Interleaved", {"interleaved1f1b"}, {}, detail::interleaved_rows},
    {Schedule::LoopedBFS, "LoopedBFS", {}, {}, detail::looped_bfs_rows},
    {Schedule::InterleavedZeroBubble, "InterleavedZeroBubble", {}, {}, detail::interleaved_zero_bubble_rows},
    {Schedule::ZBV, "ZBV", {"zbvzerobubble"}, 2, detail::zbv_rows},
    {Schedule::DualPipeV, "DualPipeV", {}, 2, detail::dual_pipe_v_rows},
};

const KnownSchedule& known(Schedule schedule) {
  return kKnownSchedules[size_t(schedule)];
}

std::string plain_letters(std::string_view name) {
  std::string plain;
  for (char letter : name) {
    if (letter == '-' || letter == '_') continue;
    plain += letter >= 'A' && letter <= 'Z' ? char(letter - 'A' + 'a') : letter;
  }
  return plain;
}

[[noreturn]] void refuse_sizes(const std::string& what, const std::string& fix) {
  raise<c10::ValueError>({"pipeline_table", what, fix});
}

std::string stages_text(int64_t count) {
  return std::to_string(count) + (count == 1 ? " stage" : " stages") + " per rank";
}

void check_stages_per_rank(Schedule schedule, int64_t given) {
  const std::optional<int64_t> needed = known(schedule).stages_per_rank;
  if (!needed || *needed == given) return;
  std::string fix = "pass .stages_per_rank = " + std::to_string(*needed) + ", and to Pipeline " +
                    (*needed == 1 ? "one module" : "a vector of " + std::to_string(*needed) + " modules") +
                    " on every rank";
  if (schedule == Schedule::GPipe) fix += ", or take LoopedBFS";
  if (schedule == Schedule::OneFOneB) fix += ", or take Interleaved";
  refuse_sizes(to_string(schedule) + " has " + stages_text(*needed) + ", not " + std::to_string(given), fix);
}

void check_sizes(const TableOptions& sizes) {
  const auto at_least_one = [](int64_t size, const std::string& name) {
    if (size < 1) refuse_sizes(name + " is " + std::to_string(size), "pass 1 or more");
  };
  at_least_one(sizes.ranks, "ranks");
  at_least_one(sizes.stages_per_rank, "stages_per_rank");
  at_least_one(sizes.microbatches, "microbatches");
  // Some hundred MiB: more is a mistake, and would end in std::bad_alloc.
  constexpr int64_t kMostForwards = int64_t(1) << 22;
  if (sizes.ranks <= kMostForwards && sizes.stages_per_rank <= kMostForwards / sizes.ranks &&
      sizes.microbatches <= kMostForwards / (sizes.ranks * sizes.stages_per_rank)) {
    return;
  }
  refuse_sizes(std::to_string(sizes.ranks) + " ranks with " + stages_text(sizes.stages_per_rank) + " and " +
                   std::to_string(sizes.microbatches) + " micro-batches have more than " +
                   std::to_string(kMostForwards) + " forwards",
               "pass smaller sizes");
}

}  // namespace

std::string to_string(Schedule schedule) {
  return std::string(known(schedule).name);
}

Schedule parse_schedule(std::string_view name) {
  const std::string plain = plain_letters(name);
  std::string names;
  for (const KnownSchedule& one : kKnownSchedules) {
    if (!plain.empty() && plain == plain_letters(one.name)) return one.schedule;
    for (std::string_view spelling : one.spellings) {
      if (!plain.empty() && plain == spelling) return one.schedule;
    }
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  }
  refuse_sizes("unknown schedule \"" + detail::printable(name) + "\"; known: " + names, "pass one of the known names");
}

std::optional<int64_t> stages_per_rank_of(Schedule schedule) {
  return known(schedule).stages_per_rank;
}

PipelineTable pipeline_table(Schedule schedule, const TableOptions& sizes) {
  check_sizes(sizes);
  check_stages_per_rank(schedule, sizes.stages_per_rank);
  return PipelineTable(known(schedule).rows(sizes));
}

}  // namespace serried
