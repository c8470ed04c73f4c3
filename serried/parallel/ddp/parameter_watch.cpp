// Compares identities, sizes and storages before each forward; names are asked for only where something has changed.
#include "serried/parallel/ddp/parameter_watch.h"

#include <algorithm>
#include <utility>

#include "serried/base/error.h"
#include "serried/tensor/parts.h"

namespace serried::detail {
namespace {

constexpr const char* kWrapAgain = "wrap the module again, and give its parameters to a new optimizer";

[[noreturn]] void raise_changed(const std::string& what, const std::string& fix) {
  raise<c10::ValueError>({"DistributedDataParallel", what, fix});
}

std::string placing_text(const SpecPtr& spec) {
  return spec ? spec->to_string() : "a plain tensor";
}

}  // namespace

ParameterWatch::ParameterWatch(std::shared_ptr<const torch::nn::Module> module, std::set<std::string> ignored,
                               const std::vector<at::Tensor>& managed)
    : module_(std::move(module)), ignored_(std::move(ignored)) {
  for (const at::Tensor& tensor : managed) managed_.insert(tensor.unsafeGetTensorImpl());
  seen_ = look();
  has_new_memory();
}

std::vector<ParameterWatch::Seen> ParameterWatch::look() const {
  std::vector<Seen> list;
  for (const auto& item : module_->named_parameters()) {
    list.push_back({.name = item.key(),
                    .tensor = item.value(),
                    .is_ignored = ignored_.count(item.key()) != 0,
                    .is_managed = managed_.count(item.value().unsafeGetTensorImpl()) != 0,
                    .sizes = item.value().sizes().vec(),
                    .spec = spec_of(item.value())});
  }
  return list;
}

bool ParameterWatch::is_known(const std::vector<at::Tensor>& parameters) const {
  return std::equal(parameters.begin(), parameters.end(), seen_.begin(), seen_.end(),
                    [](const at::Tensor& now, const Seen& seen) { return now.is_same(seen.tensor); });
}

void ParameterWatch::check_all_are_there(const std::vector<Seen>& now) const {
  for (const Seen& seen : seen_) {
    if (seen.is_ignored || !seen.is_managed) continue;
    const auto found = std::find_if(now.begin(), now.end(), [&](const Seen& other) { return other.name == seen.name; });
    if (found == now.end()) raise_changed(seen.name + " was in the module when it was wrapped and is gone", kWrapAgain);
    if (found->tensor.is_same(seen.tensor)) continue;
    raise_changed(seen.name + " is another tensor than when the module was wrapped: nobody averages its gradient",
                  kWrapAgain);
  }
}

void ParameterWatch::check(const Seen& seen) const {
  if (!seen.is_managed && seen.tensor.requires_grad()) {
    raise_changed(seen.name +
                      " requires a gradient that nobody averages: when the module was wrapped it did not, or "
                      "was not there",
                  "set requires_grad before the module is wrapped: wrap it again");
  }
  if (!seen.is_managed) return;
  if (spec_of(seen.tensor) != seen.spec) {
    raise_changed(c10::str(seen.name, " was ", placing_text(seen.spec), " when the module was wrapped and is ",
                           placing_text(spec_of(seen.tensor))),
                  "distribute parameters before the module is wrapped: wrap it again");
  }
  if (seen.tensor.sizes() == seen.sizes) return;
  raise_changed(c10::str(seen.name, " had sizes ", c10::IntArrayRef(seen.sizes),
                         " when the module was wrapped and has ", seen.tensor.sizes()),
                "load a file of the same model, or wrap the module again");
}

bool ParameterWatch::has_new_memory() {
  if (!is_known(module_->parameters())) {
    std::vector<Seen> now = look();
    check_all_are_there(now);
    seen_ = std::move(now);
  }
  for (const Seen& seen : seen_) {
    if (!seen.is_ignored) check(seen);
  }
  bool is_new = false;
  for (Seen& seen : seen_) {
    if (seen.is_ignored) continue;
    const at::Tensor part = part_of(seen.tensor);
    if (!part.has_storage()) continue;
    c10::StorageImpl* storage = part.storage().unsafeGetStorageImpl();
    if (storage == seen.storage._unsafe_get_target() && part.storage_offset() == seen.offset) continue;
    is_new = true;
    seen.offset = part.storage_offset();
    seen.storage = StoragePtr(part.storage().getWeakStorageImpl());
  }
  return is_new;
}

}  // namespace serried::detail
