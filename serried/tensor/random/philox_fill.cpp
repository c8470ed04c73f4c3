// The loops over Philox blocks.
#include "serried/tensor/random/philox_fill.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <array>
#include <cmath>

#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/random/owned_runs.h"

namespace serried::detail {
namespace {

using Block = std::array<uint32_t, 4>;

constexpr int64_t kGrain = 16 * 1024;

uint64_t wide(const Block& words, int i) {
  return uint64_t(words[2 * i]) << 32 | words[2 * i + 1];
}

Block next_block(at::Philox4_32& engine) {
  return {engine(), engine(), engine(), engine()};
}

// Elements [begin, begin + n) of the whole, `make` giving those of one block; the ends may cut a block.
template <class T, size_t lanes, class Make>
void fill_run(T* out, int64_t begin, int64_t n, uint64_t key, const Make& make) {
  at::Philox4_32 engine(key, 0, uint64_t(begin) / lanes);
  int64_t lane = begin % int64_t(lanes);
  for (int64_t done = 0; done < n;) {
    const std::array<T, lanes> values = make(next_block(engine));
    const int64_t count = std::min<int64_t>(lanes - lane, n - done);
    if (count == int64_t(lanes)) {
      std::copy(values.begin(), values.end(), out + done);
    } else {
      std::copy_n(values.begin() + lane, count, out + done);
    }
    done += count;
    lane = 0;
  }
}

template <class T, size_t lanes, class Make>
void fill_runs(const at::Tensor& part, OwnedRuns runs, uint64_t key, const Make& make) {
  T* out = part.mutable_data_ptr<T>();
  for (Span run; runs.next(run); out += run.size) {
    at::parallel_for(0, run.size, kGrain, [&](int64_t first, int64_t last) {
      fill_run<T, lanes>(out + first, run.begin + first, last - first, key, make);
    });
  }
}

struct RowMajorPart {
  at::Tensor part;  // contiguous, row-major
  OwnedRuns runs;
};

// `fill` writes a row-major part; here it gets one even where `local` has other strides. Complex numbers are two reals.
template <class Fill>
void with_part(const at::Tensor& local, const PlacedPart& placed, const Fill& fill) {
  const LocalOnly guard;
  if (local.numel() == 0) return;
  const bool in_place = local.is_contiguous();
  const at::Tensor part = in_place ? local : at::empty(local.sizes(), local.options());
  c10::DimVector sizes(placed.sizes);
  if (local.is_complex()) sizes.push_back(2);
  fill(
      RowMajorPart{local.is_complex() ? at::view_as_real(part) : part, OwnedRuns(sizes, placed.placements, placed.at)});
  if (!in_place) local.copy_(part);
}

// A value that rounds up to 1 in a narrow type becomes 0, as in ATen.
template <class T>
T below_one(float value) {
  const T narrow = static_cast<T>(value);
  return narrow == static_cast<T>(1) ? static_cast<T>(0) : narrow;
}

template <class T>
void fill_uniform(const RowMajorPart& target, uint64_t key) {
  if constexpr (std::is_same_v<T, double>) {
    fill_runs<T, 2>(target.part, target.runs, key, [](const Block& words) {
      return std::array<T, 2>{double(wide(words, 0) >> 11) * 0x1p-53, double(wide(words, 1) >> 11) * 0x1p-53};
    });
  } else {
    fill_runs<T, 4>(target.part, target.runs, key, [](const Block& words) {
      std::array<T, 4> values;
      for (int i = 0; i < 4; ++i) values[i] = below_one<T>(float(words[i] >> 8) * 0x1p-24f);
      return values;
    });
  }
}

// Uniform numbers in (0, 1] and [0, 1) become two normal ones.
template <class T, class Real>
void box_muller(Real first, Real second, Real scale, T* out) {
  const Real radius = scale * std::sqrt(Real(-2) * std::log(first));
  const Real angle = Real(2 * M_PI) * second;
  out[0] = static_cast<T>(radius * std::cos(angle));
  out[1] = static_cast<T>(radius * std::sin(angle));
}

template <class T>
void fill_normal(const RowMajorPart& target, uint64_t key, double scale) {
  if constexpr (std::is_same_v<T, double>) {
    fill_runs<T, 2>(target.part, target.runs, key, [scale](const Block& words) {
      std::array<T, 2> values;
      box_muller(double((wide(words, 0) >> 11) + 1) * 0x1p-53, double(wide(words, 1) >> 11) * 0x1p-53, scale,
                 values.data());
      return values;
    });
  } else {
    fill_runs<T, 4>(target.part, target.runs, key, [scale](const Block& words) {
      std::array<T, 4> values;
      for (int i = 0; i < 4; i += 2) {
        box_muller(float((words[i] >> 8) + 1) * 0x1p-24f, float(words[i + 1] >> 8) * 0x1p-24f, float(scale),
                   values.data() + i);
      }
      return values;
    });
  }
}

}  // namespace

void philox_bernoulli_(const at::Tensor& local, const PlacedPart& placed, uint64_t key, double p) {
  const uint64_t threshold = uint64_t(std::ldexp(p, 32));
  with_part(local, placed, [&](const RowMajorPart& target) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, target.part.scalar_type(), "bernoulli", [&] {
      fill_runs<scalar_t, 4>(target.part, target.runs, key, [threshold](const Block& words) {
        std::array<scalar_t, 4> values;
        for (int i = 0; i < 4; ++i) values[i] = static_cast<scalar_t>(words[i] < threshold);
        return values;
      });
    });
  });
}

void philox_uniform_(const at::Tensor& local, const PlacedPart& placed, uint64_t key) {
  with_part(local, placed, [&](const RowMajorPart& target) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, target.part.scalar_type(), "uniform",
                                    [&] { fill_uniform<scalar_t>(target, key); });
  });
}

void philox_normal_(const at::Tensor& local, const PlacedPart& placed, uint64_t key) {
  // A complex number's variance is the sum of its parts'.
  const double scale = local.is_complex() ? std::sqrt(0.5) : 1;
  with_part(local, placed, [&](const RowMajorPart& target) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, target.part.scalar_type(), "normal",
                                    [&] { fill_normal<scalar_t>(target, key, scale); });
  });
}

void philox_integers_(const at::Tensor& local, const PlacedPart& placed, uint64_t key, int64_t low, int64_t high) {
  const uint64_t range = uint64_t(high) - uint64_t(low);
  with_part(local, placed, [&](const RowMajorPart& target) {
    AT_DISPATCH_ALL_TYPES_AND3(at::kBool, at::kHalf, at::kBFloat16, target.part.scalar_type(), "randint", [&] {
      fill_runs<scalar_t, 2>(target.part, target.runs, key, [range, low](const Block& words) {
        return std::array<scalar_t, 2>{static_cast<scalar_t>(int64_t(wide(words, 0) % range + uint64_t(low))),
                                       static_cast<scalar_t>(int64_t(wide(words, 1) % range + uint64_t(low)))};
      });
    });
  });
}

uint64_t draw_key(const at::Generator& generator) {
  auto* impl = at::check_generator<at::CPUGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(impl->mutex_);
  return impl->random64();
}

}  // namespace serried::detail
