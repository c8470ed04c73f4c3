// Rows that windows read, against a search over all pixels and weights.
#include <gtest/gtest.h>

#include <set>

#include "serried/spmd/windows.h"

namespace serried::spmd {
namespace {

// Calls visit(window, size) for all small ones.
template <class Visit>
void for_each_window(Visit visit) {
  for (int64_t kernel = 1; kernel <= 5; ++kernel) {
    for (int64_t stride = 1; stride <= 3; ++stride) {
      for (int64_t dilation = 1; dilation <= 2; ++dilation) {
        for (int64_t padding = 0; padding <= 2; ++padding) {
          for (int64_t size = 1; size <= 9; ++size) {
            visit(Window{.kernel = kernel, .stride = stride, .dilation = dilation, .padding = padding}, size);
          }
        }
      }
    }
  }
}

std::set<int64_t> rows_of(const Window& window, int64_t output) {
  std::set<int64_t> rows;
  for (int64_t k = 0; k < window.kernel; ++k)
    rows.insert(output * window.stride - window.padding + k * window.dilation);
  return rows;
}

TEST(Windows, ReachFromTheFirstRowThatAnyOutputReadsToTheLast) {
  int64_t num_checked = 0;
  for_each_window([&](const Window& window, int64_t size) {
    // All outputs whose windows lie within the padded image, one by one.
    int64_t count = 0;
    while (*rows_of(window, count).rbegin() < size + window.padding) ++count;
    EXPECT_EQ(std::max<int64_t>(num_outputs(window, size), 0), count);
    for (int64_t begin = 0; begin < count; ++begin) {
      for (int64_t end = begin + 1; end <= count; ++end) {
        std::set<int64_t> rows;
        for (int64_t output = begin; output < end; ++output) rows.merge(rows_of(window, output));
        const Span found = window_rows(window, {begin, end - begin});
        ASSERT_EQ(found.begin, *rows.begin());
        ASSERT_EQ(found.end(), *rows.rbegin() + 1);
        ++num_checked;
      }
    }
    EXPECT_EQ(window_rows(window, {1, 0}).size, 0);
  });
  EXPECT_GT(num_checked, 5000);
}

TEST(Windows, OfTransposedConvolutionsNameExactlyTheRowsThatWrite) {
  int64_t num_checked = 0;
  for_each_window([&](const Window& window, int64_t size) {
    const int64_t num = (size - 1) * window.stride - 2 * window.padding + window.extent() + 1;
    for (int64_t begin = 0; begin < num; ++begin) {
      for (int64_t end = begin + 1; end <= num; ++end) {
        // A dilated window may jump over these outputs: it counts with all it reaches.
        std::set<int64_t> writing;
        for (int64_t row = 0; row < size; ++row) {
          const Span reached = transposed_outputs(window, {row, 1});
          if (reached.begin < end && reached.end() > begin) writing.insert(row);
        }
        const Span found = transposed_rows(window, size, {begin, end - begin});
        ASSERT_EQ(found.size, int64_t(writing.size()));
        if (found.size > 0) ASSERT_EQ(found.begin, *writing.begin());
        ++num_checked;
      }
    }
  });
  EXPECT_GT(num_checked, 5000);
}

TEST(Windows, OfAverageCountRowsOfTheImageOrOfThePaddedOne) {
  for_each_window([](const Window& window, int64_t size) {
    if (window.dilation != 1 || window.padding > window.kernel / 2) return;
    for (const bool round_up : {false, true}) {
      const Span outputs{0, std::max<int64_t>(num_outputs(window, size, round_up), 0)};
      const std::vector<int64_t> inside = rows_averaged(window, size, outputs, false);
      const std::vector<int64_t> padded = rows_averaged(window, size, outputs, true);
      for (int64_t output = 0; output < outputs.size; ++output) {
        int64_t num_inside = 0, num_padded = 0;
        for (const int64_t row : rows_of(window, output)) {
          num_inside += row >= 0 && row < size;
          num_padded += row < size + window.padding;
        }
        EXPECT_EQ(inside[size_t(output)], num_inside);
        EXPECT_EQ(padded[size_t(output)], num_padded);
      }
    }
  });
}

TEST(Windows, OfAdaptivePoolsCoverTheImage) {
  EXPECT_EQ(adaptive_rows(10, 4, {1, 1}), (Span{2, 3}));
  for (int64_t size = 1; size <= 12; ++size) {
    for (int64_t outputs = 1; outputs <= 12; ++outputs) {
      EXPECT_EQ(adaptive_rows(size, outputs, {0, outputs}), (Span{0, size}));
      EXPECT_EQ(adaptive_rows(size, outputs, {outputs, 0}).size, 0);
    }
  }
}

}  // namespace
}  // namespace serried::spmd
