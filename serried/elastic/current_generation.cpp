// Listens to news of generations, and ends what they end.
#include "serried/elastic/current_generation.h"

#include <utility>

namespace serried::detail {

CurrentGeneration::CurrentGeneration(std::shared_ptr<Generations> generations) : generations_(std::move(generations)) {
  generations_->listen([this] { on_news(); });
}

CurrentGeneration::~CurrentGeneration() {
  generations_->listen(nullptr);
}

void CurrentGeneration::begin_meeting(int64_t generation, bool after_loss) {
  std::shared_ptr<LiveGroups> left;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    left = std::exchange(groups_, std::make_shared<LiveGroups>(live_groups_of_thread()));
    generation_ = generation;
    meeting_ = true;
    ended_ = false;
  }
  if (left && after_loss) left->abort();
  on_news();  // what came before this one was known here
}

bool CurrentGeneration::end_meeting() {
  std::lock_guard<std::mutex> lock(mutex_);
  meeting_ = false;
  return !ended_;
}

std::shared_ptr<LiveGroups> CurrentGeneration::groups() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return groups_;
}

void CurrentGeneration::on_news() {
  std::shared_ptr<LiveGroups> ended;
  int64_t generation = -1;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    generation = generation_;
    ended_ = ended_ || generations_->is_over(generation) || (meeting_ && generations_->has_ended(generation));
    if (ended_) ended = groups_;
  }
  if (!ended) return;
  generations_->end_waits(generation);
  ended->abort();
}

}  // namespace serried::detail
