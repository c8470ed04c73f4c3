// Buckets of gradients made by hand, for hooks without a reducer.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <vector>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/comm_hook.h"
#include "tests/support/close.h"

namespace serried::testing {

using Shapes = std::vector<std::vector<int64_t>>;

struct BucketPlace {
  size_t index = 0;
  size_t count = 1;
  std::vector<at::Tensor> parameters = {};
};

/// Gradients of `shapes` one after another in `flat`. `shapes` must outlive the bucket.
inline c10d::GradBucket make_bucket(const at::Tensor& flat, const Shapes& shapes, const BucketPlace& place = {}) {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  size_t begin = 0;
  for (const auto& shape : shapes) {
    offsets.push_back(begin);
    lengths.push_back(size_t(c10::multiply_integers(shape)));
    sizes.emplace_back(shape);
    begin += lengths.back();
  }
  return c10d::GradBucket(place.index, place.count, flat, offsets, lengths, sizes, place.parameters, std::nullopt);
}

inline at::Tensor wait_for(const HookFuture& future) {
  future->waitAndThrow();
  return future->value().toTensor();
}

/// What `hook` makes of a bucket with one gradient.
inline at::Tensor run_hook(const CommHook& hook, const Group& group, const at::Tensor& gradient) {
  const Shapes shapes{gradient.sizes().vec()};
  c10d::GradBucket bucket = make_bucket(gradient.clone().view(-1), shapes);
  return wait_for(hook(group, bucket)).view(gradient.sizes());
}

/// Values that differ by rank, iteration and place; the same in scripts of PyTorch.
inline at::Tensor gradient_of(int64_t rank, int64_t iteration, at::IntArrayRef sizes) {
  const at::Tensor i = at::arange(c10::multiply_integers(sizes), at::kDouble);
  return (i * 0.37 * double(1 + iteration) + 1.3 * double(rank) + i * i * 0.01).sin().to(at::kFloat).view(sizes);
}

inline std::vector<at::Tensor> gradients_of_all(int64_t num_ranks, int64_t iteration, at::IntArrayRef sizes) {
  std::vector<at::Tensor> all;
  for (int64_t rank = 0; rank < num_ranks; ++rank) all.push_back(gradient_of(rank, iteration, sizes));
  return all;
}

inline at::Tensor mean_gradient(int64_t num_ranks, int64_t iteration, at::IntArrayRef sizes) {
  return at::stack(gradients_of_all(num_ranks, iteration, sizes)).mean(0);
}

/// Every rank has the same bits.
inline void expect_same_on_all_ranks(const at::Tensor& tensor, const Group& group) {
  const at::Tensor all = all_gather(tensor.reshape({1, -1}), group);
  for (int64_t rank = 1; rank < group->getSize(); ++rank) expect_equal(all[rank], all[0]);
}

}  // namespace serried::testing
