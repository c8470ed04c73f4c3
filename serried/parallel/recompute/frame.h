// One segment between its first run and the end of backward: what it needs to run again, and what that gave.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "serried/parallel/recompute.h"
#include "serried/parallel/recompute/run_watch.h"
#include "serried/parallel/recompute/surroundings.h"
#include "serried/tensor/saved_tensors.h"

namespace serried::detail {

/// A tensor that the segment was called with. It belongs to a segment around this one, if there is one, as all that is
/// saved there does.
class KeptInput {
 public:
  /// `outer`: who keeps what is saved around the segment, or null.
  KeptInput(const at::Tensor& t, TensorKeeper* outer);
  bool is_unchanged() const { return noted_.is_unchanged(); }
  const NotedTensor& noted() const { return noted_; }
  /// For the second run, whose graph ends there. No leaf where it was none: as one it would get a node that holds it.
  at::Tensor get() const;

 private:
  NotedTensor noted_;
  bool requires_grad_;
  at::Tensor tensor_;  // or
  SavedHooks hooks_;
};

/// The keeper of the first run. Lives as long as something that the run saved may be asked for.
class Frame final : public TensorKeeper, public std::enable_shared_from_this<Frame> {
 public:
  Frame(std::shared_ptr<Segment> segment, const std::vector<at::Tensor>& tensors, TensorKeeper* outer);

  SavedHooks make_hooks() override;
  RunNotes& notes() { return notes_; }
  /// ValueError where what the first run read is not what a second would read.
  void check_repeatable() const;

  /// Saved in the first run: its number. A leaf is counted, and kept elsewhere.
  size_t add(const at::Tensor& t, bool is_leaf);
  /// Nobody will ask for it any more.
  void drop(size_t number);
  /// Number `number` of the second run, which this starts unless the running backward has done so.
  at::Tensor give(size_t number);

 private:
  friend class Collector;
  struct Slot {
    NotedTensor noted;
    bool is_wanted;
    int64_t work;  // of the first run until it was saved
  };

  void run_again();
  void run_segment(const std::vector<at::Tensor>& tensors, TensorKeeper& collector);
  void check_unchanged() const;
  std::vector<at::Tensor> inputs() const;
  void release(int64_t task);

  std::recursive_mutex mutex_;  // backward may run on several threads
  const std::shared_ptr<Segment> segment_;
  std::vector<KeptInput> inputs_;  // the defined ones
  std::vector<bool> is_defined_;
  const Surroundings surroundings_;
  RunNotes notes_;
  std::vector<Slot> slots_;
  std::vector<at::Tensor> collected_;  // undefined: not wanted, or given away
  int64_t task_ = -1;                  // the backward that collected them
};

/// This thread runs a function for recompute while alive, for the first or the second time. Nests.
class InSegment {
 public:
  InSegment();
  ~InSegment();
  InSegment(const InSegment&) = delete;
  InSegment& operator=(const InSegment&) = delete;
};

bool is_in_segment();

}  // namespace serried::detail
