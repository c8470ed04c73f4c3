// PowerSGD as hooks: which gradients are compressed, and what is kept between iterations.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/hash.h"
#include "serried/base/log.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/hooks/chain_queue.h"
#include "serried/parallel/ddp/hooks/low_rank.h"
#include "serried/parallel/ddp/hooks/steps.h"
#include "serried/tape/tape.h"

namespace serried::hooks {
namespace {

using detail::BucketMemory;
using detail::Parts;
using detail::Stack;

void check_options(const char* hook, const PowerSGDOptions& options) {
  if (options.rank < 1) {
    raise<c10::ValueError>({hook, c10::str("rank is ", options.rank), "pass a rank of 1 or more; 1 to 4 is usual"});
  }
  if (options.start_iter > 1 || !(options.use_error_feedback || options.warm_start)) return;
  raise<c10::ValueError>(
      {hook,
       c10::str("start_iter is ", options.start_iter,
                ", but buckets are rebuilt after the first iteration and their errors and factors with them"),
       "pass a start_iter of 2 or more, or switch use_error_feedback and warm_start off"});
}

// What PyTorch's numpy.random.RandomState(seed).randint(1'000'000'000) gives, call after call.
class Seeds {
 public:
  explicit Seeds(uint32_t seed) : random_(seed) {}

  uint64_t next() {
    constexpr uint32_t kMask = (1U << 30) - 1;
    uint32_t drawn = random_() & kMask;
    while (drawn >= 1'000'000'000) drawn = random_() & kMask;
    return drawn;
  }

 private:
  std::mt19937 random_;
};

int64_t num_sent(const Stack& stack) {
  return stack.batch() * (stack.rows + stack.cols) * stack.rank;
}

int64_t num_sent(const Parts& parts) {
  int64_t count = 0;
  for (const at::Tensor& gradient : parts.plain) count += gradient.numel();
  for (const Stack& stack : parts.stacks) count += num_sent(stack);
  return count;
}

Parts parts_by_gradient(const c10d::GradBucket& bucket, const PowerSGDOptions& options) {
  Parts parts;
  std::vector<std::pair<int64_t, int64_t>> shapes;  // in the order of their first gradients
  std::map<std::pair<int64_t, int64_t>, std::vector<Stack>> by_shape;
  for (const at::Tensor& gradient : bucket.getGradients()) {
    Stack stack{.gradients = {gradient.view(-1)}};
    stack.rows = gradient.dim() == 0 ? 1 : gradient.size(0);
    stack.cols = gradient.numel() / std::max<int64_t>(stack.rows, 1);
    stack.rank = std::min({stack.rows, stack.cols, options.rank});
    if (double(num_sent(stack)) * options.min_compression_rate >= double(gradient.numel())) {
      parts.plain.push_back(stack.gradients.front());
      continue;
    }
    auto& same = by_shape[{stack.rows, stack.cols}];
    if (same.empty()) shapes.push_back({stack.rows, stack.cols});
    if (same.empty() || !options.batch_tensors_with_same_shape) {
      same.push_back(std::move(stack));
    } else {
      same.front().gradients.push_back(stack.gradients.front());
    }
  }
  for (const auto& shape : shapes) {
    for (Stack& stack : by_shape[shape]) parts.stacks.push_back(std::move(stack));
  }
  return parts;
}

Parts whole_bucket(const c10d::GradBucket& bucket, const PowerSGDOptions& options) {
  const at::Tensor flat = bucket.getBuffer().view(-1);
  const int64_t side = int64_t(std::ceil(std::sqrt(double(flat.numel()))));
  if (side == 0) return {};
  return {.stacks = {{.gradients = {flat}, .rows = side, .cols = side, .rank = std::min(side, options.rank)}},
          .plain = {}};
}

std::string phase_text(uint64_t phase) {
  if (phase == detail::Iterations::kBefore) return "a plain mean";
  return phase == detail::Iterations::kFromThere ? "compression from a random start" : "compression";
}

// What draws on the host before a replay can do so once.
void check_one_draw(int64_t num_in_call) {
  if (num_in_call == 0) return;
  raise<c10::NotImplementedError>(
      {"power_sgd", "a captured function runs backward twice, and without warm_start each draws its own factors",
       "capture one backward at a time, or leave warm_start on"});
}

class PowerSGD : public std::enable_shared_from_this<PowerSGD> {
 public:
  using Divide = Parts (*)(const c10d::GradBucket&, const PowerSGDOptions&);

  PowerSGD(Divide divide, const PowerSGDOptions& options)
      : divide_(divide), options_(options), seeds_(options.random_seed) {}

  HookFuture operator()(const Group& group, c10d::GradBucket& bucket) {
    if (tape::is_recording()) rely_on_phase();
    if (tape::is_recording() && !options_.warm_start) check_one_draw(iterations_.num_in_call());
    const int64_t iteration = iterations_.before(group, bucket);
    const at::Tensor& buffer = bucket.getBuffer();
    const bool can_compress = buffer.layout() == at::kStrided && at::isFloatingType(buffer.scalar_type());
    Counted counted{.is_last = bucket.isLast()};
    Parts parts;
    std::shared_ptr<BucketMemory> memory;
    if (iteration >= options_.start_iter && can_compress) {
      parts = divide_(bucket, options_);
      counted.before = buffer.numel();
      counted.after = num_sent(parts);
      if (!parts.stacks.empty()) memory = memory_for(bucket, parts);
    }
    count(counted, iteration);
    if (tape::is_recording()) repeat_at_replays(counted, memory);
    if (!memory) return detail::average(group, buffer);

    if (!memory->is_warm) memory->draw(seeds_.next(), buffer.options());
    const auto mean =
        std::make_shared<detail::LowRankMean>(chains_.group(group), buffer, std::move(parts), memory, options_);
    return chains_.run([mean] { return mean->run(); });
  }

 private:
  struct Counted {  // of a bucket that is compressed: elements before and after
    int64_t before = 0;
    int64_t after = 0;
    bool is_last = false;
  };

  // A bucket that is cut differently from last time, or of another dtype, starts anew.
  std::shared_ptr<BucketMemory> memory_for(const c10d::GradBucket& bucket, const Parts& parts) {
    std::vector<std::vector<int64_t>> sizes;
    for (const Stack& stack : parts.stacks) sizes.push_back(stack.sizes());
    const at::ScalarType dtype = bucket.getBuffer().scalar_type();
    auto& memory = memories_[bucket.getIndex()];
    if (memory && memory->sizes == sizes && memory->dtype == dtype) return memory;
    memory = std::make_shared<BucketMemory>();
    memory->sizes = std::move(sizes);
    memory->dtype = dtype;
    return memory;
  }

  // Changes with whatever decides which ops an iteration runs.
  uint64_t phase() {
    uint64_t phase = iterations_.phase(options_.start_iter);
    for (const auto& [bucket, memory] : memories_) {
      if (memory->is_warm) phase = mix_hash(phase, bucket);
      for (const at::Tensor& error : memory->errors) phase = mix_hash(phase, uint64_t(error.unsafeGetTensorImpl()));
    }
    return phase;
  }

  void rely_on_phase() {
    const auto value = [state = weak_from_this()] {
      const auto alive = state.lock();
      return alive ? alive->phase() : UINT64_MAX;
    };
    tape::rely_on({.name = "what power_sgd does", .value = value, .subject = this, .text = phase_text});
  }

  // As in LowRankMean, errors are out of the memory while the iteration runs: if it fails, they are gone.
  void repeat_at_replays(const Counted& counted, const std::shared_ptr<BucketMemory>& memory) {
    const auto errors = std::make_shared<std::vector<at::Tensor>>();
    const auto state = weak_from_this();
    tape::before_replay([state, memory, errors] {
      const auto alive = state.lock();
      if (!alive || !memory) return;
      *errors = std::exchange(memory->errors, {});
      if (!memory->is_warm) memory->draw(alive->seeds_.next(), {});
    });
    tape::after_replay([state, memory, errors, counted] {
      const auto alive = state.lock();
      if (!alive) return;
      alive->count(counted, alive->iterations_.count());
      if (counted.is_last) alive->iterations_.next();
      if (!memory) return;
      if (!errors->empty()) memory->errors = std::move(*errors);
      memory->judge(alive->options_.warm_start);
    });
  }

  void count(const Counted& counted, int64_t iteration) {
    num_before_ += counted.before;
    num_after_ += counted.after;
    if (!counted.is_last || counted.before == 0 || iteration < next_report_) return;
    next_report_ = iteration + std::max<int64_t>(1, options_.compression_stats_logging_frequency);
    log::line(log::Topic::comm, "power_sgd: iteration ", iteration, ", ", num_before_, " elements before compression, ",
              num_after_, " after, rate ", num_after_ == 0 ? 0 : double(num_before_) / double(num_after_));
  }

  const Divide divide_;
  const PowerSGDOptions options_;
  Seeds seeds_;
  detail::Iterations iterations_;
  detail::ChainQueue chains_;
  std::map<size_t, std::shared_ptr<BucketMemory>> memories_;
  int64_t num_before_ = 0;
  int64_t num_after_ = 0;
  int64_t next_report_ = 0;
};

CommHook make_power_sgd(const char* name, PowerSGD::Divide divide, const PowerSGDOptions& options) {
  check_options(name, options);
  const auto state = std::make_shared<PowerSGD>(divide, options);
  return CommHook(name, [state](const Group& group, c10d::GradBucket& bucket) { return (*state)(group, bucket); });
}

}  // namespace

CommHook power_sgd(PowerSGDOptions options) {
  return make_power_sgd("power_sgd", parts_by_gradient, options);
}

CommHook batched_power_sgd(PowerSGDOptions options) {
  return make_power_sgd("batched_power_sgd", whole_bucket, options);
}

}  // namespace serried::hooks
