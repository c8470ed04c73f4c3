// What Elastic does: steps, the meetings before them, and what is put back after a loss.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/elastic/before_step.h"
#include "serried/elastic/current_generation.h"
#include "serried/elastic/elastic.h"
#include "serried/elastic/meeting.h"
#include "serried/elastic/spread_versions.h"

namespace serried::detail {

class ElasticRun {
 public:
  explicit ElasticRun(ElasticOptions options);

  const Group& world() const;
  int64_t step() const { return standing_.step; }
  void set_step(int64_t step);
  void keep(checkpoint::Entry entry);
  void keep(std::string name, torch::optim::Optimizer& optimizer);
  void rebuild(std::function<checkpoint::Contents(const Group&)> build);
  void on_change(std::function<void(const Group&)> callback);
  void run(const std::function<void()>& fn);
  bool commit(bool fine);

 private:
  enum class Vote { none, refused, passed };

  void add(checkpoint::Entry entry);
  void check_before_first_run(const char* where) const;
  bool must_meet() const;
  void meet();
  GenerationTable next_table() const;
  void meet_in(const GenerationTable& table);
  void rebuild_in(const Group& group);
  void settle(const Group& group);
  /// Whether the step is done; false: again.
  bool attempt(const std::function<void()>& fn);
  void end_step();
  void recover(const std::exception_ptr& error);
  bool is_loss(const std::exception_ptr& error, int64_t generation) const;

  const ElasticOptions options_;
  const std::shared_ptr<Generations> generations_;
  CurrentGeneration current_;
  Group world_;
  const std::shared_ptr<uint64_t> num_changes_ = std::make_shared<uint64_t>(0);  // of world_
  int64_t generation_ = -1;  // that world_ is of; -1: of this rank alone
  int64_t tried_ = -1;       // the last one that this rank went to
  int64_t heard_of_ = -1;    // the newest one that any rank knew of at the last commit
  bool has_lost_ = false;    // in the generation that is, a rank
  Standing standing_;
  checkpoint::Contents kept_;
  std::optional<BeforeStep> before_step_;
  std::function<checkpoint::Contents(const Group&)> build_;  // none: every rank has everything whole
  std::optional<checkpoint::Contents> built_;                // with what is kept; none while ranks meet
  SpreadVersions versions_;                                  // of it
  std::vector<std::function<void(const Group&)>> callbacks_;
  bool in_step_ = false;
  Vote vote_ = Vote::none;
};

}  // namespace serried::detail
