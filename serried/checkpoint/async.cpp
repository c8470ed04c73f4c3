// async_save: copies into memory that is used again, a thread that writes, a group of its own for what ranks say.
#include <ATen/ATen.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/base/trace.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/keep.h"
#include "serried/checkpoint/save_job.h"
#include "serried/comm/groups/named_group.h"
#include "serried/tape/tape.h"

namespace serried::checkpoint {
namespace detail {
namespace {

struct StagedPiece {
  size_t file;
  int64_t offset;
  int64_t size;
};

// What a rank copies its part into.
struct Staging {
  at::Tensor memory;
  std::vector<StagedPiece> pieces = {};
};

void reserve(const WriteOrder& order, Staging& staging) {
  const int64_t total = std::accumulate(order.planned_bytes.begin(), order.planned_bytes.end(), int64_t(0));
  if (staging.memory.defined() && staging.memory.numel() >= total) return;
  staging.memory.reset();  // before the larger one is there
  staging.memory = at::empty({total}, at::TensorOptions(at::kByte).device(at::kCPU));
}

void stage(const SavePlan& plan, const Ranks& ranks, Staging& staging) {
  staging.pieces.clear();
  char* next = static_cast<char*>(staging.memory.mutable_data_ptr());
  for_each_piece(plan, ranks.is_first(), [&](size_t file, int64_t offset, const char* data, int64_t size) {
    staging.pieces.push_back({file, offset, size});
    std::memcpy(next, data, size_t(size));
    next += size;
  });
}

// The working directory may be another one by the time it is written.
std::string absolute_path(const std::string& path) {
  if (path.empty()) return path;
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(path, error).string();
  if (error) fail_with_errno("find the working directory for", path, error.value());
  return absolute;
}

}  // namespace
}  // namespace detail

class Saving::Job {
 public:
  explicit Job(std::function<void()> work)
      : label_(rank_label()), thread_([this, work = std::move(work)] { run(work); }) {}

  ~Job() {
    thread_.join();
    if (error_ && !is_reported_) {
      try {
        std::rethrow_exception(error_);
      } catch (const c10::Error& error) {
        log::warn_once(std::string("an async_save that nobody waited for failed: ") + error.what_without_backtrace());
      } catch (const std::exception& error) {
        log::warn_once(std::string("an async_save that nobody waited for failed: ") + error.what());
      }
    }
  }

  bool is_done() const { return is_done_.load(); }
  int rank() const { return label_.rank; }

  void wait_quietly() {
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, [this] { return is_done_.load(); });
  }

  void wait() {
    wait_quietly();
    if (!error_) return;
    is_reported_ = true;
    std::rethrow_exception(error_);
  }

 private:
  void run(const std::function<void()>& work) {
    const ThreadRankLabel label(label_);
    try {
      try {
        work();
      } catch (const detail::Failure& failure) {
        detail::raise_failure("checkpoint::async_save", failure);
      }
    } catch (...) {
      error_ = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    is_done_ = true;
    ended_.notify_all();
  }

  const RankLabel label_;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> is_done_ = false;
  std::exception_ptr error_;  // set before is_done_
  std::atomic<bool> is_reported_ = false;
  std::thread thread_;
};

bool Saving::done() const {
  return job_ == nullptr || job_->is_done();
}

void Saving::wait() const {
  if (job_ != nullptr) job_->wait();
}

namespace detail {
namespace {

// What async_save keeps from one call to the next, for a group or, without one, for the process.
struct Background {
  c10::weak_intrusive_ptr<c10d::ProcessGroup> parent{Group()};
  Group group = {};  // of the thread that writes; null where there is one rank
  Staging staging = {};
  std::weak_ptr<Saving::Job> job = {};
  std::mutex mutex = {};  // of staging and job: without a group several threads may save
};

// The mutex is held.
void wait_for_job(const Background& background) {
  if (const std::shared_ptr<Saving::Job> job = background.job.lock()) job->wait_quietly();
}

// Never destroyed: at the end of the process groups are gone in an order that nobody knows.
class Backgrounds {
 public:
  static Backgrounds& all() {
    static auto* const backgrounds = new Backgrounds;
    return *backgrounds;
  }

  std::shared_ptr<Background> find(const Group& group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    forget_gone();
    const auto found = by_group_.find(group.get());
    return found == by_group_.end() ? nullptr : found->second;
  }

  /// The one that is there by then: another thread may have been faster.
  std::shared_ptr<Background> add(const Group& group, std::shared_ptr<Background> background) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto* const ours = dynamic_cast<serried::detail::NamedGroup*>(group.get());
    if (ours != nullptr) ours->at_end([this, key = group.get()] { forget(key); });
    return by_group_.emplace(group.get(), std::move(background)).first->second;
  }

  void note_job(const std::shared_ptr<Saving::Job>& job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(jobs_, [](const auto& each) { return each.second.expired(); });
    jobs_.emplace_back(job->rank(), job);
  }

  /// Those of a rank, whatever group they are of: ranks may be threads of one process.
  std::vector<std::shared_ptr<Saving::Job>> jobs_of(int rank) {
    std::vector<std::shared_ptr<Saving::Job>> jobs;
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [owner, job] : jobs_) {
      if (owner == rank) jobs.push_back(job.lock());
    }
    std::erase(jobs, nullptr);
    return jobs;
  }

 private:
  // With the group goes the memory that its saves have used.
  void forget(const c10d::ProcessGroup* key) {
    std::shared_ptr<Background> last;  // what is in it has locks of its own to take
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_group_.find(key);
    if (found == by_group_.end()) return;
    last = std::move(found->second);
    by_group_.erase(found);
  }

  // Of groups that do not say when they end: another one may get the address of one that is gone.
  void forget_gone() {
    std::erase_if(by_group_, [](const auto& item) { return item.first != nullptr && item.second->parent.expired(); });
  }

  std::mutex mutex_;
  std::map<const c10d::ProcessGroup*, std::shared_ptr<Background>> by_group_;
  std::vector<std::pair<int, std::weak_ptr<Saving::Job>>> jobs_;  // by rank
};

Group sibling_of(const Group& group) {
  if (!group || group->getSize() == 1) return nullptr;
  std::vector<int> ranks;
  for (int rank = 0; rank < group->getSize(); ++rank) ranks.push_back(rank);
  return split_group(group, {ranks});
}

std::shared_ptr<Background> background_of(const Group& group) {
  if (auto found = Backgrounds::all().find(group)) return found;
  auto made = std::make_shared<Background>();
  made->parent = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group);
  made->group = sibling_of(group);
  return Backgrounds::all().add(group, made);
}

}  // namespace

// Each goes on without its callers: all ranks of its group have begun it.
void wait_for_saving() {
  for (const std::shared_ptr<Saving::Job>& job : Backgrounds::all().jobs_of(rank_label().rank)) job->wait_quietly();
}

}  // namespace detail

Saving async_save(const std::string& path, const Contents& contents, SaveOptions options) {
  const trace::Span span("checkpoint::async_save", trace::kSetup);
  detail::refuse_recording("checkpoint::async_save");
  const detail::Ranks ranks(detail::group_to_save_with(options.process_group));
  detail::wait_for_saving();
  const std::shared_ptr<detail::Background> background = detail::background_of(ranks.group());
  const std::lock_guard<std::mutex> lock(background->mutex);
  detail::wait_for_job(*background);
  auto order = std::make_shared<detail::WriteOrder>();
  std::string place;
  try {
    const detail::SavePlan plan = detail::make_plan(contents, ranks, options);
    ranks.together([&] {
      place = detail::absolute_path(path);
      *order = detail::order_of(plan, ranks.is_first());
      detail::reserve(*order, background->staging);
      return std::string();
    });
    ranks.together([&] {
      detail::stage(plan, ranks, background->staging);
      return std::string();
    });
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::async_save", failure);
  }
  auto job = std::make_shared<Saving::Job>([path = place, options, order, background] {
    const detail::Ranks together(background->group);
    detail::write_checkpoint(path, std::move(*order), together, [&](detail::Writer& writer) {
      const auto* next = static_cast<const char*>(background->staging.memory.const_data_ptr());
      for (const detail::StagedPiece& piece : background->staging.pieces) {
        writer.take(piece.file, piece.offset, next, piece.size);
        next += piece.size;
      }
    });
    together.together([&] {
      if (together.is_first()) detail::remove_older(path, options);
      return std::string();
    });
  });
  background->job = job;
  detail::Backgrounds::all().note_job(job);
  return Saving(std::move(job));
}

}  // namespace serried::checkpoint
