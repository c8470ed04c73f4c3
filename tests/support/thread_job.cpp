// Tables are made and told under one lock, in one order for all ranks.
#include "tests/support/thread_job.h"

#include <algorithm>
#include <map>

namespace serried::testing {

class ThreadJob::Tables final : public detail::Generations {
 public:
  bool can_change() const override { return true; }

  void place(const detail::GenerationTable& table, GroupOptions& options) override {
    if (before_meeting) before_meeting();
    std::lock_guard<std::mutex> lock(mutex_);
    options.store = stores_.at(table.generation);
    options.rank = table.rank;
    options.world_size = table.world_size;
  }

  void end_waits(int64_t generation) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto found = stores_.find(generation); found != stores_.end()) found->second->abort();
  }

  void tell(const detail::GenerationTable& table, const c10::intrusive_ptr<detail::RanksStore>& store) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stores_[table.generation] = store;
    }
    tell_table(table);
  }

  std::function<void()> before_meeting;

 private:
  std::mutex mutex_;
  std::map<int64_t, c10::intrusive_ptr<detail::RanksStore>> stores_;
};

std::shared_ptr<detail::Generations> ThreadJob::Rank::generations() const {
  return tables_;
}

void ThreadJob::Rank::before_meeting(std::function<void()> callback) {
  tables_->before_meeting = std::move(callback);
}

ThreadJob::~ThreadJob() {
  wait();
}

void ThreadJob::start(int num_ranks) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int i = 0; i < num_ranks; ++i)
    members_.push_back(std::make_shared<Rank>(next_id_++, std::make_shared<Tables>()));
  tell_tables();
  for (const auto& rank : members_) spawn(rank);
}

void ThreadJob::add(bool as_first) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto rank = std::make_shared<Rank>(next_id_++, std::make_shared<Tables>());
  members_.insert(as_first ? members_.begin() : members_.end(), rank);
  tell_tables();
  spawn(rank);
}

void ThreadJob::wait() {
  while (true) {
    std::thread thread;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (threads_.empty()) return;
      thread = std::move(threads_.back());
      threads_.pop_back();
    }
    thread.join();
  }
}

int ThreadJob::num_living() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return int(members_.size());
}

std::vector<std::string> ThreadJob::failures() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failures_;
}

void ThreadJob::spawn(const std::shared_ptr<Rank>& rank) {
  threads_.emplace_back([this, rank] { run(rank); });
}

void ThreadJob::run(const std::shared_ptr<Rank>& rank) {
  try {
    body_(*rank);
    return leave(rank, false);
  } catch (const Killed&) {
  } catch (const std::exception& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    failures_.push_back("rank " + std::to_string(rank->id()) + ": " + error.what());
  }
  leave(rank, true);
}

void ThreadJob::leave(const std::shared_ptr<Rank>& rank, bool is_loss) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::erase(members_, rank);
  if (!is_loss) return;
  for (const auto& member : members_) member->tables_->tell_over(generation_);
  tell_tables();
}

void ThreadJob::tell_tables() {
  ++generation_;
  store_ = c10::make_intrusive<detail::RanksStore>(std::chrono::seconds(20));
  const int world_size = int(members_.size());
  for (int rank = 0; rank < world_size; ++rank) {
    members_[size_t(rank)]->tables_->tell({.generation = generation_, .rank = rank, .world_size = world_size}, store_);
  }
}

}  // namespace serried::testing
