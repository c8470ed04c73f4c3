// A pipeline schedule as a table: what each rank does, in which order.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "serried/parallel/pipeline/action.h"

namespace serried {

/// How large a pipeline is.
struct TableOptions {
  int64_t ranks = 1;
  int64_t stages_per_rank = 1;
  int64_t microbatches = 1;
};

/// A row of actions per rank. Every stage is on one rank, and has for every micro-batch one F and either one B, or one
/// I and one W. Stages and micro-batches are as many as the actions name. An immutable value.
///     PipelineTable own = PipelineTable::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
class PipelineTable {
 public:
  using Row = std::vector<PipelineAction>;

  /// Row r is what rank r does. ValueError if an action is missing, there twice, out of range or on the wrong rank.
  /// Whether ranks would wait for each other for ever is for simulate() to find.
  explicit PipelineTable(std::vector<Row> rows);

  /// A line per rank; cells are separated by commas: stage, F B I W, micro-batch. Empty cells mean nothing, so that
  /// tables which PyTorch has written can be read. ValueError as above, and for a cell that names no action.
  static PipelineTable from_csv(std::string_view text);
  std::string to_csv() const;

  /// As from_csv and to_csv, for readers:
  ///     rank 0: 0F0 0F1 0B0 0B1
  ///     rank 1: 1F0 1B0 1F1 1B1
  static PipelineTable from_text(std::string_view text);
  std::string to_text() const;

  /// ValueError unless this is a table for exactly these sizes.
  void check(const TableOptions& sizes) const;

  const std::vector<Row>& rows() const { return rows_; }
  int64_t ranks() const { return int64_t(rows_.size()); }
  int64_t stages() const { return int64_t(rank_of_stage_.size()); }
  int64_t microbatches() const { return microbatches_; }

  /// IndexError if there is no such stage.
  int64_t rank_of(int64_t stage) const;
  /// Ascending, possibly none. IndexError if there is no such rank.
  std::vector<int64_t> stages_of(int64_t rank) const;

  bool operator==(const PipelineTable& other) const { return rows_ == other.rows_; }

 private:
  std::vector<Row> rows_;
  std::vector<int64_t> rank_of_stage_;
  int64_t microbatches_ = 0;
};

}  // namespace serried
