// A save from the plan to the folder: what is left to do once it is known what goes where.
#pragma once

#include <functional>
#include <string>

#include "serried/checkpoint/plan.h"
#include "serried/checkpoint/ranks.h"
#include "serried/checkpoint/writer.h"

namespace serried::checkpoint::detail {

/// Gives this rank's pieces to a writer.
using WritePieces = std::function<void(Writer&)>;

/// A plan without its tensors, which training may change while it is carried out.
struct WriteOrder {
  SavePlan plan;
  std::vector<int64_t> planned_bytes;  // of this rank, per file
};
WriteOrder order_of(const SavePlan& plan, bool is_first);

/// Writes a planned checkpoint and commits it. All ranks call it; Failure on all of them where one of them fails.
void write_checkpoint(const std::string& path, WriteOrder order, const Ranks& ranks, const WritePieces& write);

/// Waits for what async_save has under way on this rank, with whatever group, and whether it goes well or not.
void wait_for_saving();

/// ValueError inside a function that is being captured.
void refuse_recording(const char* where);

/// The group to save or load with: the one given, or else the current one; null: none.
Group chosen_group(const Group& given);
/// The same to save with. A process that saves alone and is one of several ranks is warned: each may write to one path.
Group group_to_save_with(const Group& given);

}  // namespace serried::checkpoint::detail
