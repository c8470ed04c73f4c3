// Gradients travel to the first owner and back, point to point: other ranks of the pipeline have no part in it.
#include "serried/parallel/ddp/claim.h"
#include "serried/parallel/pipeline/tied.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/objects.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/pipeline/stage_run.h"
#include "serried/tape/tape.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/meta.h"

namespace serried::detail {
namespace {

// Behind those of messages, of which each stage has two.
constexpr int kFirstTieTag = (1 << 20) + (1 << 19);

std::string text_of(const PipelineParameter& parameter) {
  return "\"" + parameter.name + "\" of stage " + std::to_string(parameter.stage);
}

std::string layout_of(const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return watch::describe_tensor(parameter);
  return c10::str(watch::describe_tensor(parameter), " ", to_string(meta->spec->placements), " on ranks ",
                  c10::IntArrayRef(meta->spec->mesh.shape()));
}

at::Tensor part_of(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  return meta != nullptr ? meta->local : t;
}

void send_flag(bool flag, const Group& group, int peer, int tag) {
  const tape::Pause no_part_of_a_step;
  send(at::full({1}, int64_t(flag), at::kByte), group, {.peer = peer, .tag = tag});
}

bool receive_flag(const Group& group, int peer, int tag) {
  const tape::Pause no_part_of_a_step;
  const at::Tensor flag = at::empty({1}, at::kByte);
  recv(flag, group, {.peer = peer, .tag = tag});
  return flag.const_data_ptr<uint8_t>()[0] != 0;
}

// A part, or none.
void send_part(const at::Tensor& part, const Group& group, int peer, int tag) {
  send_flag(part.defined(), group, peer, tag);
  if (part.defined()) send(part.contiguous(), group, {.peer = peer, .tag = tag});
}

at::Tensor receive_part(const at::Tensor& like, const Group& group, int peer, int tag) {
  if (!receive_flag(group, peer, tag)) return {};
  at::Tensor part = at::empty(like.sizes(), like.options());
  recv(part, group, {.peer = peer, .tag = tag});
  return part;
}

[[noreturn]] void refuse_tie(const std::string& what) {
  raise<c10::ValueError>(
      {"Pipeline", what, "tie parameters of equal sizes, dtypes and layouts, by the names that their stages have"});
}

}  // namespace

TiedWeights::TiedWeights(Group group, const PipelineTable& table, std::vector<StageRun>& stages,
                         const std::vector<PipelineTie>& ties)
    : group_(std::move(group)), first_tag_(kFirstTieTag) {
  find_sets(table, ties);
  if (sets_.empty()) return;
  agree(stages);
  share_values();
  for (const Set& set : sets_) {
    for (const Owner& owner : set) {
      if (&owner != &set[0] && owner.parameter.defined() && !owner.is_shared) copies_.add(owner.parameter);
    }
  }
}

void TiedWeights::find_sets(const PipelineTable& table, const std::vector<PipelineTie>& ties) {
  std::vector<std::vector<PipelineParameter>> groups;
  for (const auto& [first, second] : ties) {
    std::vector<PipelineParameter> joined{first, second};
    for (auto it = groups.begin(); it != groups.end();) {
      const bool touches =
          std::any_of(it->begin(), it->end(), [&](const auto& p) { return p == first || p == second; });
      if (touches) joined.insert(joined.end(), it->begin(), it->end());
      it = touches ? groups.erase(it) : it + 1;
    }
    groups.push_back(std::move(joined));
  }
  for (auto& joined : groups) {
    std::stable_sort(joined.begin(), joined.end(), [](const auto& a, const auto& b) { return a.stage < b.stage; });
    Set set;
    for (const PipelineParameter& each : joined) {
      const auto is_it = [&](const Owner& owner) { return owner.of == each; };
      if (std::any_of(set.begin(), set.end(), is_it)) continue;
      if (each.stage < 0 || each.stage >= table.stages()) {
        refuse_tie("there is no stage for " + text_of(each) + ", which is tied: " + std::to_string(table.stages()) +
                   " stages");
      }
      set.push_back({.of = each, .rank = int(table.rank_of(each.stage))});
    }
    sets_.push_back(std::move(set));
  }
}

// How the first own parameter of a set lies, or what is wrong, behind a '!'.
std::string TiedWeights::find_own(Set& set, std::vector<StageRun>& stages) const {
  std::string layouts;
  for (Owner& owner : set) {
    if (owner.rank != group_->getRank()) continue;
    const auto stage =
        std::find_if(stages.begin(), stages.end(), [&](const StageRun& s) { return s.index() == owner.of.stage; });
    const auto named = stage->stage().module()->named_parameters();
    const at::Tensor* found = named.find(owner.of.name);
    if (found == nullptr) return "!there is no " + text_of(owner.of) + ", which is tied";
    owner.parameter = *found;
    for (const Owner& earlier : set) {
      if (&earlier == &owner) break;
      owner.is_shared = owner.is_shared || earlier.parameter.is_same(owner.parameter);
    }
    layouts += std::to_string(owner.of.stage) + (owner.is_shared ? "=" : ":") + layout_of(owner.parameter) + "\n";
  }
  return layouts;
}

void TiedWeights::agree(std::vector<StageRun>& stages) {
  for (Set& set : sets_) {
    std::vector<std::string> layouts;
    for (const std::string& text : all_gather_object(find_own(set, stages), group_)) {
      if (text.starts_with('!')) refuse_tie(text.substr(1));
      for (size_t begin = 0; begin < text.size();) {
        const size_t end = text.find('\n', begin);
        layouts.push_back(text.substr(begin, end - begin));
        begin = end + 1;
      }
    }
    for (const std::string& each : layouts) {
      const size_t colon = each.find_first_of(":=");
      const int64_t stage = std::stoll(each.substr(0, colon));
      for (Owner& owner : set) owner.is_shared = owner.is_shared || (owner.of.stage == stage && each[colon] == '=');
      const std::string first = layouts[0].substr(layouts[0].find_first_of(":=") + 1);
      if (each.substr(colon + 1) == first) continue;
      refuse_tie(text_of(set[0].of) + " and " + text_of(set.back().of) + " are tied, and one is " + first +
                 ", the other " + each.substr(colon + 1));
    }
  }
}

void TiedWeights::share_values() const {
  const at::NoGradGuard no_grad;
  const int rank = group_->getRank();
  for (size_t i = 0; i < sets_.size(); ++i) {
    const Owner& first = sets_[i][0];
    const int tag = first_tag_ + int(i);
    for (const Owner& owner : sets_[i]) {
      if (&owner == &first || owner.is_shared) continue;
      if (first.rank == rank && owner.rank == rank) {
        owner.parameter.detach().copy_(first.parameter.detach());
      } else if (first.rank == rank) {
        send(part_of(first.parameter.detach()).contiguous(), group_, {.peer = owner.rank, .tag = tag});
      } else if (owner.rank == rank) {
        const at::Tensor value = receive_value(owner, first.rank, tag);
        owner.parameter.detach().copy_(value);
      }
    }
  }
}

at::Tensor TiedWeights::receive_value(const Owner& owner, int peer, int tag) const {
  const at::Tensor detached = owner.parameter.detach();
  const DTensorMeta* meta = dtensor_meta(detached);
  const at::Tensor part = at::empty_like(part_of(detached), at::MemoryFormat::Contiguous);
  recv(part, group_, {.peer = peer, .tag = tag});
  return meta != nullptr ? wrap(part, meta->spec) : part;
}

void TiedWeights::put_aside() {
  for (Set& set : sets_) {
    for (Owner& owner : set) {
      if (!owner.parameter.defined() || owner.is_shared) continue;
      owner.aside = std::exchange(owner.parameter.mutable_grad(), at::Tensor());
      // A part of a bucket, into which this step writes.
      if (owner.aside.defined() && is_claimed(owner.parameter)) owner.aside = owner.aside.clone();
    }
  }
}

// At the first owner: the sum over all of them, in the order of stages; undefined where nobody has any.
at::Tensor TiedWeights::collected(const Set& set, int tag) const {
  at::Tensor sum;
  for (const Owner& owner : set) {
    if (owner.is_shared) continue;
    at::Tensor part;
    if (owner.rank == group_->getRank()) {
      part = owner.parameter.grad().defined() ? part_of(owner.parameter.grad()) : at::Tensor();
    } else {
      part = receive_part(part_of(set[0].parameter.detach()), group_, owner.rank, tag);
    }
    if (!part.defined()) continue;
    sum = sum.defined() ? sum + part : part.clone();  // what an owner adds to its own is not for the others
  }
  return sum;
}

void TiedWeights::hand_out(Set& set, const at::Tensor& sum, int tag) const {
  for (Owner& owner : set) {
    if (owner.is_shared) continue;
    if (owner.rank == group_->getRank()) {
      give(owner, sum);
    } else {
      send_part(sum, group_, owner.rank, tag);
    }
  }
}

// With what was there before the step, as backward would have added it.
void TiedWeights::give(Owner& owner, const at::Tensor& sum) const {
  at::Tensor& gradient = owner.parameter.mutable_grad();
  const at::Tensor aside = std::exchange(owner.aside, at::Tensor());
  if (sum.defined() && gradient.defined()) {
    const at::Tensor part = part_of(gradient);
    if (!part.is_same(sum)) part.copy_(sum);
  } else if (sum.defined()) {
    const DTensorMeta* meta = dtensor_meta(owner.parameter.detach());
    gradient = meta != nullptr ? wrap(sum.clone(), meta->spec) : sum.clone();
    if (meta != nullptr && meta->use) set_use(gradient, use_like_parameters());
  }
  if (!aside.defined()) return;
  if (gradient.defined()) {
    gradient.add_(aside);
  } else {
    gradient = aside;
  }
}

void TiedWeights::sum_gradients() {
  const at::NoGradGuard no_grad;
  const int rank = group_->getRank();
  for (size_t i = 0; i < sets_.size(); ++i) {
    Set& set = sets_[i];
    const int tag = first_tag_ + int(i);
    if (set[0].rank == rank) {
      hand_out(set, collected(set, tag), tag);
      continue;
    }
    for (const Owner& owner : set) {
      if (owner.rank != rank || owner.is_shared) continue;
      send_part(owner.parameter.grad().defined() ? part_of(owner.parameter.grad()) : at::Tensor(), group_, set[0].rank,
                tag);
    }
    for (Owner& owner : set) {
      if (owner.rank != rank || owner.is_shared) continue;
      give(owner, receive_part(part_of(owner.parameter.detach()), group_, set[0].rank, tag));
    }
  }
}

}  // namespace serried::detail
