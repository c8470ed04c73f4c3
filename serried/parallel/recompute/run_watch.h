// Looks on while a function runs, so that a second run of it does the same and leaves no trace.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/util/DimVector.h>

#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "serried/tape/recorder.h"

namespace serried::detail {

struct OpTraits;

/// What a tensor was at one moment, without holding it.
struct NotedTensor {
  NotedTensor(const c10::TensorImpl& t, const c10::VariableVersion& counter_);

  c10::VariableVersion counter;  // shared with the tensor and its views
  uint32_t version;
  c10::DimVector sizes;
  at::ScalarType dtype;

  bool is_unchanged() const { return !counter.enabled() || counter.current_version() == version; }
  /// "f32[512,4]"
  std::string to_string() const;
};

/// What the first run tells the second.
struct RunNotes {
  struct Drawing {
    at::Generator generator;
    at::Tensor state;  // before the first draw
  };
  using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

  std::vector<NotedTensor> reads;                                    // tensors that the function did not make
  std::unordered_map<const c10::StorageImpl*, WeakStorage> written;  // of such tensors
  std::unordered_set<const c10::StorageImpl*> saved;  // memory of what autograd saves, while the first run lasts
  int64_t work = 0;           // of the first run so far: elements that ops have read and made, roughly
  bool writes_saved = false;  // as rrelu does, whose noise is saved before it is drawn: so the second run goes on
  std::vector<Drawing> drawings;
  bool keeps_draws = false;                    // a replay draws once, so the second run gets the numbers of the first
  std::vector<std::vector<at::Tensor>> draws;  // then
};

/// Sees every op of this thread while alive, and hands it on to who recorded before. A second run of what neither
/// writes to others' tensors nor draws has nothing to be watched for.
class RunWatch final : public tape::Recorder, private tape::Notes {
 public:
  enum class Run : uint8_t { first, again };
  RunWatch(RunNotes& notes, Run which);
  ~RunWatch() override;
  RunWatch(const RunWatch&) = delete;
  RunWatch& operator=(const RunWatch&) = delete;

  /// In the first run: notes what it reads, writes and draws. ValueError for a plain draw where ranks are threads.
  /// In the second: writes to what the first run wrote too go nowhere.
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void rely_on(tape::Fact fact) override;
  void rely_on_life(const std::string& name, std::weak_ptr<const void> object) override;
  void before_replay(std::function<void()> action) override;
  void after_replay(std::function<void()> action) override;
  void meet(c10::TensorImpl* dtensor) override;
  void read_whole(c10::TensorImpl* dtensor) override;
  tape::Recorder* behind() const override { return behind_; }
  tape::Notes* notes() override { return behind_ == nullptr || behind_->notes() != nullptr ? this : nullptr; }
  bool replays() const override { return behind_ != nullptr && behind_->replays(); }

 private:
  void read(const c10::TensorImpl& plain, const c10::VariableVersion& counter) override;
  void made(const at::Tensor& plain) override;
  void note_made(const c10::StorageImpl* storage);
  void hand_on(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  void note_operands(const OpTraits& traits, at::ArrayRef<c10::IValue> arguments);
  const c10::VariableVersion& counter_of(const at::Tensor& t) const;
  void note_results(const c10::OperatorHandle& op, const torch::jit::Stack& stack,
                    const std::vector<const c10::StorageImpl*>& operands);
  void spare_written(const OpTraits& traits, torch::jit::Stack& stack, size_t num_arguments);
  at::Tensor spared(const at::Tensor& t);
  void note_draw(const c10::OperatorHandle& op, const OpTraits& traits, at::ArrayRef<c10::IValue> arguments);
  void keep_draw(const c10::OperatorHandle& op, const OpTraits& traits, const std::vector<c10::IValue>& arguments,
                 const torch::jit::Stack& stack);
  void repeat_draw(const c10::OperatorHandle& op, const OpTraits& traits, torch::jit::Stack& stack);

  RunNotes& notes_;
  const Run which_;
  tape::Recorder* const behind_;
  const bool is_idle_;
  std::unordered_set<const c10::StorageImpl*> born_;   // in this run; an address used again is born again
  std::unordered_set<const c10::StorageImpl*> reads_;  // that have been noted
  std::unordered_set<const c10::TensorImpl*> wholes_;  // that have been noted
  // A write to a DTensor is counted by the DTensor, not by its part.
  std::unordered_map<const c10::StorageImpl*, c10::VariableVersion> counters_of_parts_;
  // Autograd counts a write that went to a copy too.
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions_of_spared_;
  size_t num_draws_ = 0;
  const tape::OnlookerScope scope_;
};

/// While alive the generators stand where the first run found them.
class GeneratorsPutBack {
 public:
  explicit GeneratorsPutBack(const RunNotes& notes);
  ~GeneratorsPutBack();
  GeneratorsPutBack(const GeneratorsPutBack&) = delete;
  GeneratorsPutBack& operator=(const GeneratorsPutBack&) = delete;

 private:
  std::vector<RunNotes::Drawing> now_;
};

}  // namespace serried::detail
