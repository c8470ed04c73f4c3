// A registry of copies by tensor; several pipelines may tie one.
#include "serried/parallel/pipeline/tied_copies.h"

#include <mutex>
#include <unordered_set>

namespace serried::detail {
namespace {

struct Copies {
  std::mutex mutex;
  std::unordered_multiset<const void*> tensors;
};

Copies& all_copies() {
  static Copies copies;
  return copies;
}

}  // namespace

TiedCopies::~TiedCopies() {
  Copies& all = all_copies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const at::Tensor& parameter : parameters_) all.tensors.erase(all.tensors.find(parameter.unsafeGetTensorImpl()));
}

void TiedCopies::add(const at::Tensor& parameter) {
  Copies& all = all_copies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.tensors.insert(parameter.unsafeGetTensorImpl());
  parameters_.push_back(parameter);
}

bool is_tied_copy(const at::Tensor& parameter) {
  Copies& all = all_copies();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return all.tensors.count(parameter.unsafeGetTensorImpl()) != 0;
}

}  // namespace serried::detail
