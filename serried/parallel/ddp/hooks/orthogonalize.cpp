// Gram-Schmidt in f64 on one thread: reductions of ATen and LAPACK may round differently with other numbers of threads,
// and then the ranks' gradients would drift apart.
#include "serried/parallel/ddp/hooks/orthogonalize.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include <torch/library.h>

#include "serried/tape/tape.h"

namespace serried::hooks::detail {
namespace {

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

}  // namespace

// An op while the thread is recorded: what happens to the numbers on the host would not be seen.
void orthogonalize(const at::Tensor& matrices, double epsilon) {
  if (!tape::is_recording()) return orthogonalize_(matrices, epsilon);
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::orthogonalize_", "");
  torch::jit::Stack stack = {matrices, epsilon};
  tape::run(op, stack);
}

}  // namespace serried::hooks::detail
