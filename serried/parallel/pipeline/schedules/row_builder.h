// Writes one rank's row: closed forms say which kind and stage comes next, this counts micro-batches.
#pragma once

#include <cstdint>
#include <deque>
#include <string_view>
#include <vector>

#include "serried/parallel/pipeline/table.h"

namespace serried::detail {

/// A row for the stages of one rank, which it calls 0, 1, ... Each kind takes the micro-batches of a stage in order.
class RowBuilder {
 public:
  /// Actions of micro-batches from `microbatches` on are left out: where a closed form needs more micro-batches than
  /// there are, it is written for as many as it needs. What is left waits for nothing that is missing, since an action
  /// needs only others of its own micro-batch.
  RowBuilder(std::vector<int64_t> stages, int64_t microbatches);

  void forward(int64_t stage);
  void backward(int64_t stage);
  void input(int64_t stage);
  /// The oldest I, of any stage, that has no W yet; nothing if there is none.
  void weight();
  /// The same of one stage.
  void weight(int64_t stage);
  bool owes_weights() const { return !owed_.empty(); }

  /// Does `words` so many times: "F0 I1 W1 W" is forward(0), input(1), weight(1), weight().
  RowBuilder& repeat(int64_t count, std::string_view words);

  PipelineTable::Row take() { return std::move(row_); }

 private:
  void add(PipelineAction::Kind kind, int64_t stage, int64_t microbatch);
  void do_word(std::string_view word);

  std::vector<int64_t> stages_;
  int64_t microbatches_;
  std::vector<int64_t> num_forwards_;
  std::vector<int64_t> num_backwards_;
  struct Owed {
    int64_t stage;
    int64_t microbatch;
  };
  std::deque<Owed> owed_;
  PipelineTable::Row row_;
};

/// r, r + p, ...
std::vector<int64_t> looped_stages(const TableOptions& sizes, int64_t rank);

/// r and 2p - 1 - r
std::vector<int64_t> v_stages(const TableOptions& sizes, int64_t rank);

}  // namespace serried::detail
