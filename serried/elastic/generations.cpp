// News of generations, and who waits for them.
#include "serried/elastic/generations.h"

namespace serried::detail {
namespace {

class FixedGeneration final : public Generations {
 public:
  FixedGeneration() { tell_table({.generation = 0}); }
  bool can_change() const override { return false; }
  void place(const GenerationTable&, GroupOptions&) override {}
};

}  // namespace

void Generations::tell_table(const GenerationTable& table) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (newest_ && newest_->generation >= table.generation) return;
    newest_ = table;
  }
  tell_listener();
}

void Generations::tell_over(int64_t generation) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (over_ >= generation) return;
    over_ = generation;
  }
  tell_listener();
}

std::optional<GenerationTable> Generations::newest() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return newest_;
}

bool Generations::is_over(int64_t generation) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_ >= generation;
}

bool Generations::has_ended(int64_t generation) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return over_ >= generation || (newest_ && newest_->generation > generation);
}

bool Generations::wait(const std::function<bool()>& holds, std::chrono::steady_clock::time_point deadline) const {
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto before = std::pair(newest_ ? newest_->generation : -1, over_);
    lock.unlock();
    if (holds()) return true;  // it asks this object
    lock.lock();
    const auto has_news = [&] { return std::pair(newest_ ? newest_->generation : -1, over_) != before; };
    if (!changed_.wait_until(lock, deadline, has_news)) return false;
  }
}

void Generations::listen(std::function<void()> news) {
  std::lock_guard<std::mutex> lock(listener_mutex_);
  listener_ = std::move(news);
}

void Generations::tell_listener() {
  changed_.notify_all();
  std::lock_guard<std::mutex> lock(listener_mutex_);
  if (listener_) listener_();
}

std::shared_ptr<Generations> fixed_generation() {
  return std::make_shared<FixedGeneration>();
}

}  // namespace serried::detail
