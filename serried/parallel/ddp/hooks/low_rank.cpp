// PowerSGD's algorithm for one bucket, in three steps with a sum over the ranks between them.
#include "serried/parallel/ddp/hooks/low_rank.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "serried/parallel/ddp/hooks/steps.h"
#include "serried/tape/tape.h"

namespace serried::hooks::detail {
namespace {

// Gram-Schmidt in f64 on one thread: reductions of ATen and LAPACK may round differently with other numbers of threads,
// and then the ranks' gradients would drift apart.
class Matrix {
 public:
  Matrix(double* data, int64_t rows, int64_t cols) : data_(data), rows_(rows), cols_(cols), overlaps_(cols) {}

  void orthogonalize(double epsilon) {
    for (int64_t col = 0; col < cols_; ++col) {
      double length = remove_earlier(col);
      // QR would choose some direction too. Without one a gradient of zeros would leave zeros to start from for ever.
      if (length == 0) {
        fill(col);
        length = remove_earlier(col);
      }
      for (int64_t row = 0; row < rows_; ++row) at(row)[col] /= length + epsilon;
    }
  }

 private:
  double* at(int64_t row) { return data_ + row * cols_; }

  // Takes what the earlier columns span out of `col`, and returns the length of what is left. Twice, because what the
  // first pass leaves of a column close to their span is mostly its rounding error.
  double remove_earlier(int64_t col) {
    for (int pass = 0; pass < 2; ++pass) {
      std::fill(overlaps_.begin(), overlaps_.end(), 0);
      for (int64_t row = 0; row < rows_; ++row) {
        for (int64_t j = 0; j < col; ++j) overlaps_[j] += at(row)[j] * at(row)[col];
      }
      for (int64_t row = 0; row < rows_; ++row) {
        for (int64_t j = 0; j < col; ++j) at(row)[col] -= overlaps_[j] * at(row)[j];
      }
    }
    double squares = 0;
    for (int64_t row = 0; row < rows_; ++row) squares += at(row)[col] * at(row)[col];
    return std::sqrt(squares);
  }

  void fill(int64_t col) {
    std::minstd_rand random(uint32_t(col) + 1);
    for (int64_t row = 0; row < rows_; ++row) at(row)[col] = double(random()) / double(random.max()) - 0.5;
  }

  double* data_;
  int64_t rows_;
  int64_t cols_;
  std::vector<double> overlaps_;
};

void orthogonalize_(const at::Tensor& matrices, double epsilon) {
  const at::Tensor work = matrices.to(at::kCPU, at::kDouble).contiguous();
  const int64_t rows = work.size(1);
  const int64_t cols = work.size(2);
  for (int64_t i = 0; i < work.size(0); ++i) {
    Matrix(work.mutable_data_ptr<double>() + i * rows * cols, rows, cols).orthogonalize(epsilon);
  }
  matrices.copy_(work);
}

TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("orthogonalize_(Tensor(a!) matrices, float epsilon) -> ()");
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("orthogonalize_", orthogonalize_);
}

// Cuts views off the front of a flat tensor.
class Cutter {
 public:
  explicit Cutter(at::Tensor flat) : flat_(std::move(flat)) {}

  at::Tensor next(at::IntArrayRef sizes) {
    const int64_t count = c10::multiply_integers(sizes);
    const at::Tensor view = flat_.narrow(0, begin_, count).view(sizes);
    begin_ += count;
    return view;
  }

 private:
  at::Tensor flat_;
  int64_t begin_ = 0;
};

// The elements of matrix `i` that its gradient has; the rest is padding.
at::Tensor filled_part(const at::Tensor& matrices, int64_t i, const at::Tensor& gradient) {
  return matrices.select(0, i).view(-1).narrow(0, 0, gradient.numel());
}

// Whether the gradient itself can serve as the matrix.
bool is_one_matrix(const Stack& stack) {
  return stack.batch() == 1 && stack.gradients.front().numel() == stack.rows * stack.cols;
}

}  // namespace

// An op while the thread is recorded: what happens to the numbers on the host would not be seen.
void orthogonalize(const at::Tensor& matrices, double epsilon) {
  if (!tape::is_recording()) return orthogonalize_(matrices, epsilon);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::orthogonalize_", "");
  torch::jit::Stack stack = {matrices, epsilon};
  tape::run(op, stack);
}

void BucketMemory::draw(uint64_t seed, const at::TensorOptions& options) {
  const tape::Pause off_tape;
  const at::NoGradGuard no_grad;
  int64_t count = 0;
  for (const auto& stack : sizes) count += stack[0] * stack[2] * stack[3];
  if (!right.defined()) right = at::empty({count}, options);
  const at::Generator random = at::detail::createCPUGenerator(seed);
  Cutter factors(right);
  for (const auto& stack : sizes) {
    const at::Tensor q = factors.next({stack[0], stack[2], stack[3]});
    q.copy_(at::randn(q.sizes(), random, at::TensorOptions(right.scalar_type())));
  }
}

void BucketMemory::judge(bool warm_start) {
  const tape::Pause off_tape;
  const bool is_finite = at::isfinite(right).all().item<bool>();
  is_warm = is_finite && warm_start;
  if (!is_finite) errors.clear();
}

LowRankMean::LowRankMean(const Group& group, at::Tensor buffer, Parts parts, std::shared_ptr<BucketMemory> memory,
                         const PowerSGDOptions& options)
    : group_(group),
      world_size_(group_->getSize()),
      buffer_(std::move(buffer)),
      parts_(std::move(parts)),
      memory_(std::move(memory)),
      options_(options) {}

HookFuture LowRankMean::run() {
  lay_out();
  load();
  start();
  const auto self = shared_from_this();
  const HookFuture right = after_async(sum_left(), [self] { return self->sum_right(); });
  return after(right, [self](const c10::IValue&) { return self->finish(); });
}

void LowRankMean::lay_out() {
  int64_t num_left = 0;
  int64_t num_right = 0;
  for (const at::Tensor& gradient : parts_.plain) num_left += gradient.numel();
  for (const Stack& stack : parts_.stacks) {
    num_left += stack.batch() * stack.rows * stack.rank;
    num_right += stack.batch() * stack.cols * stack.rank;
  }
  left_ = at::empty({num_left}, buffer_.options());
  right_ = at::empty({num_right}, buffer_.options());
  Cutter left(left_);
  Cutter right(right_);
  for (const at::Tensor& gradient : parts_.plain) plain_.push_back(left.next(gradient.sizes()));
  for (const Stack& stack : parts_.stacks) {
    ps_.push_back(left.next({stack.batch(), stack.rows, stack.rank}));
    qs_.push_back(right.next({stack.batch(), stack.cols, stack.rank}));
  }
}

// The matrices are the old errors with the gradients added. A run that fails leaves no errors behind: they would count
// its gradients twice.
void LowRankMean::load() {
  for (size_t i = 0; i < plain_.size(); ++i) plain_[i].copy_(parts_.plain[i]);
  matrices_ = std::exchange(memory_->errors, {});
  if (!matrices_.empty()) {
    for (size_t s = 0; s < matrices_.size(); ++s) {
      const auto& gradients = parts_.stacks[s].gradients;
      for (size_t i = 0; i < gradients.size(); ++i) filled_part(matrices_[s], i, gradients[i]).add_(gradients[i]);
    }
    return;
  }
  for (const Stack& stack : parts_.stacks) {
    if (is_one_matrix(stack) && !options_.use_error_feedback) {
      matrices_.push_back(stack.gradients.front().view({1, stack.rows, stack.cols}));
      continue;
    }
    const at::Tensor matrices = at::zeros({stack.batch(), stack.rows, stack.cols}, buffer_.options());
    for (int64_t i = 0; i < stack.batch(); ++i) filled_part(matrices, i, stack.gradients[i]).copy_(stack.gradients[i]);
    matrices_.push_back(matrices);
  }
}

void LowRankMean::start() {
  right_.copy_(memory_->right);
  for (const at::Tensor& q : qs_) orthogonalize(q, options_.orthogonalization_epsilon);
}

HookFuture LowRankMean::sum_left() {
  for (size_t s = 0; s < ps_.size(); ++s) at::bmm_out(ps_[s], matrices_[s], qs_[s]);
  return start_sum(group_, left_);
}

HookFuture LowRankMean::sum_right() {
  for (size_t i = 0; i < plain_.size(); ++i) parts_.plain[i].copy_(plain_[i].div_(world_size_));
  for (size_t s = 0; s < ps_.size(); ++s) {
    orthogonalize(ps_[s], options_.orthogonalization_epsilon);
    at::bmm_out(qs_[s], matrices_[s].transpose(1, 2), ps_[s]);
  }
  return start_sum(group_, right_);
}

at::Tensor LowRankMean::finish() {
  right_.div_(world_size_);
  for (size_t s = 0; s < parts_.stacks.size(); ++s) store(s);
  remember();
  return buffer_;
}

void LowRankMean::store(size_t s) {
  const Stack& stack = parts_.stacks[s];
  at::Tensor product =
      is_one_matrix(stack) ? stack.gradients.front().view({1, stack.rows, stack.cols}) : at::empty_like(matrices_[s]);
  at::bmm_out(product, ps_[s], qs_[s].transpose(1, 2));
  if (!is_one_matrix(stack)) {
    for (int64_t i = 0; i < stack.batch(); ++i) stack.gradients[i].copy_(filled_part(product, i, stack.gradients[i]));
  }
  if (options_.use_error_feedback) matrices_[s].sub_(product);
}

// Plain gradients have no errors: PyTorch keeps each rank's distance from the mean for them too, which cancels out.
void LowRankMean::remember() {
  memory_->right.copy_(right_);
  if (options_.use_error_feedback) memory_->errors = std::move(matrices_);
  memory_->judge(options_.warm_start);
}

}  // namespace serried::hooks::detail
