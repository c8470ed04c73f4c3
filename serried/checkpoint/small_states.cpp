// State of schedulers, samplers and random generators: numbers only.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/source.h"
#include "serried/checkpoint/values.h"
#include "serried/tensor/random/random.h"

namespace serried::checkpoint {
namespace detail {
namespace {

using nlohmann::json;
using torch::optim::LRScheduler;
using Plateau = torch::optim::ReduceLROnPlateauScheduler;

// LibTorch gives a scheduler no way to save how far it is. Names its protected member; never made.
struct OpenScheduler : LRScheduler {
  static unsigned& step_count(LRScheduler& scheduler) { return scheduler.*(&OpenScheduler::step_count_); }
};

// The same for private members, which only an explicit instantiation may name.
template <class Tag, auto Member>
struct Opened {
  friend constexpr auto member_of(Tag) { return Member; }
};
struct BestTag {
  friend constexpr auto member_of(BestTag);
};
struct CooldownTag {
  friend constexpr auto member_of(CooldownTag);
};
struct EpochTag {
  friend constexpr auto member_of(EpochTag);
};
struct BadEpochsTag {
  friend constexpr auto member_of(BadEpochsTag);
};
template struct Opened<BestTag, &Plateau::best>;
template struct Opened<CooldownTag, &Plateau::cooldown_counter>;
template struct Opened<EpochTag, &Plateau::last_epoch>;
template struct Opened<BadEpochsTag, &Plateau::num_bad_epochs>;

const json& values_in(const SavedPart& saved, const char* key, const char* what) {
  if (saved.values && saved.values->is_object() && saved.values->contains(key)) return *saved.values;
  fail(c10::str("it is no ", what, " in the checkpoint"), "give it the name that it was saved under");
}

Part part_with(json values) {
  Part part;
  part.values = std::make_shared<json>(std::move(values));
  return part;
}

class SchedulerSource final : public Source {
 public:
  explicit SchedulerSource(LRScheduler& scheduler) : scheduler_(scheduler) {}
  Part collect(const CallContext&) override {
    return part_with({{"scheduler_steps", OpenScheduler::step_count(scheduler_)}});
  }
  Wanted want(const SavedPart& saved, const LoadOptions&, const CallContext&) override {
    const auto steps = values_in(saved, "scheduler_steps", "scheduler").at("scheduler_steps").get<unsigned>();
    return {.apply = [this, steps] { OpenScheduler::step_count(scheduler_) = steps; }};
  }

 private:
  LRScheduler& scheduler_;
};

class PlateauSource final : public Source {
 public:
  explicit PlateauSource(Plateau& scheduler) : scheduler_(scheduler) {}
  Part collect(const CallContext&) override {
    return part_with({{"plateau_best", number_json(scheduler_.*member_of(BestTag()))},
                      {"cooldown", scheduler_.*member_of(CooldownTag())},
                      {"epoch", scheduler_.*member_of(EpochTag())},
                      {"bad_epochs", scheduler_.*member_of(BadEpochsTag())}});
  }
  Wanted want(const SavedPart& saved, const LoadOptions&, const CallContext&) override {
    const json values = values_in(saved, "plateau_best", "scheduler of this kind");
    return {.apply = [this, values] {
      scheduler_.*member_of(BestTag()) = float(number_of(values.at("plateau_best")));
      scheduler_.*member_of(CooldownTag()) = values.at("cooldown").get<int>();
      scheduler_.*member_of(EpochTag()) = values.at("epoch").get<int>();
      scheduler_.*member_of(BadEpochsTag()) = values.at("bad_epochs").get<int>();
    }};
  }

 private:
  Plateau& scheduler_;
};

class SamplerSource final : public Source {
 public:
  SamplerSource(DistributedSampler& sampler, std::optional<size_t> consumed) : sampler_(sampler), consumed_(consumed) {}
  Part collect(const CallContext&) override {
    return part_with({{"sampler_epoch", sampler_.epoch()},
                      {"consumed", consumed_.value_or(sampler_.consumed())},
                      {"samples", sampler_.size()},
                      {"seed", seed()},
                      {"is_at_end", !consumed_ && sampler_.is_at_end()}});
  }
  Wanted want(const SavedPart& saved, const LoadOptions& options, const CallContext&) override {
    const json values = values_in(saved, "sampler_epoch", "sampler");
    const auto epoch = values.at("sampler_epoch").get<int64_t>();
    const auto consumed = values.at("consumed").get<size_t>();
    if (options.strict && consumed > 0) check_order(values);
    // What drop_last leaves out is no rest of the epoch, whatever number of ranks it divides by now.
    const bool is_over = values.value("is_at_end", false);
    return {.apply = [this, epoch, consumed, is_over] {
      sampler_.go_on(epoch, is_over ? std::max(consumed, sampler_.size()) : consumed);
    }};
  }

 private:
  json seed() const { return sampler_.order_seed() ? json(*sampler_.order_seed()) : json(); }

  // In another order what comes behind the first samples is not what they have left.
  void check_order(const json& saved) const {
    const auto text = [](const json& samples, const json& seed) {
      return c10::str(samples.dump(), " samples, ",
                      seed.is_null() ? "not shuffled" : "shuffled with seed " + seed.dump());
    };
    const json samples = sampler_.size(), saved_seed = saved.value("seed", seed());  // older checkpoints lack it
    if (saved.at("samples") == samples && saved_seed == seed()) return;
    fail(c10::str("a sampler is in the middle of an epoch of ", text(saved.at("samples"), saved_seed),
                  " in the checkpoint, and has ", text(samples, seed()), " here"),
         "make it of the same dataset with the same seed, or pass {.strict = false}: the samples that were used are "
         "then "
         "others than those that are left out");
  }

  DistributedSampler& sampler_;
  const std::optional<size_t> consumed_;
};

json state_json(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor state = generator.get_state().contiguous();
  std::vector<Item> none;
  const auto* data = static_cast<const char*>(state.const_data_ptr());
  // As a text that is no UTF-8, or as one that by chance is: both come back as they are.
  return json_of(Value(std::string(data, size_t(state.nbytes()))), "", none);
}

void set_state(at::Generator generator, const json& saved) {
  const std::string bytes = value_of(saved, {}).toStringRef();
  const at::Tensor state = at::empty({int64_t(bytes.size())}, at::kByte);
  std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  {
    const std::lock_guard<std::mutex> lock(generator.mutex());
    generator.set_state(state);
  }
  serried::detail::note_new_state(generator);  // ranks may have had different ones
}

// What one rank loads of what each had.
json state_of_rank(const SavedPart& saved, const CallContext& call) {
  if (!saved.per_rank || saved.per_rank->empty()) fail("the random state is damaged", "use another checkpoint");
  const size_t count = saved.per_rank->size();
  if (count > 1 && count != size_t(call.world_size)) {
    fail(c10::str("the random generators of ", count, " ranks differed when they were saved, and ", call.world_size,
                  call.world_size == 1 ? " rank loads" : " ranks load"),
         "load with as many ranks, or leave the random state out and seed anew");
  }
  return (*saved.per_rank)[count > 1 ? size_t(call.rank) : 0];
}

class GeneratorSource final : public Source {
 public:
  explicit GeneratorSource(at::Generator generator) : generator_(std::move(generator)) {}
  Part collect(const CallContext&) override {
    Part part = part_with({{"generator", device()}});
    part.per_rank = std::make_shared<json>(json{{"state", state_json(generator_)}});
    return part;
  }

  Wanted want(const SavedPart& saved, const LoadOptions&, const CallContext& call) override {
    const json theirs = values_in(saved, "generator", "random generator").at("generator");
    if (theirs != device()) {
      fail(c10::str("a random generator is one of ", theirs.dump(), " in the checkpoint, and of \"", device(),
                    "\" here"),
           "load into a generator of the same kind of device");
    }
    const json mine = state_of_rank(saved, call);
    return {.apply = [this, mine] { set_state(generator_, mine.at("state")); }};
  }

 private:
  std::string device() const { return c10::DeviceTypeName(generator_.device().type(), /*lower_case=*/true); }

  const at::Generator generator_;
};

class RandomSource final : public Source {
 public:
  Part collect(const CallContext&) override {
    Part part = part_with({{"random", "cpu"}});
    part.per_rank = std::make_shared<json>(
        json{{"default", state_json(at::detail::getDefaultCPUGenerator())}, {"tensors", state_json(rank_generator())}});
    return part;
  }

  Wanted want(const SavedPart& saved, const LoadOptions&, const CallContext& call) override {
    values_in(saved, "random", "random state");
    const json mine = state_of_rank(saved, call);
    return {.apply = [mine] {
      set_state(at::detail::getDefaultCPUGenerator(), mine.at("default"));
      set_state(rank_generator(), mine.at("tensors"));
    }};
  }
};

}  // namespace
}  // namespace detail

State state_of(torch::optim::LRScheduler& scheduler) {
  return State(std::make_shared<detail::SchedulerSource>(scheduler));
}

State state_of(torch::optim::ReduceLROnPlateauScheduler& scheduler) {
  return State(std::make_shared<detail::PlateauSource>(scheduler));
}

State state_of(DistributedSampler& sampler, std::optional<size_t> consumed) {
  return State(std::make_shared<detail::SamplerSource>(sampler, consumed));
}

State state_of(const at::Generator& generator) {
  if (!generator.defined()) {
    raise<c10::ValueError>(
        {"checkpoint::state_of", "the generator is undefined", "pass one that was made, as by at::make_generator"});
  }
  return State(std::make_shared<detail::GeneratorSource>(generator));
}

State random_state() {
  return State(std::make_shared<detail::RandomSource>());
}

}  // namespace serried::checkpoint
