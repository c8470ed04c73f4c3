// The order in which passes use blocks, noted, so that the next one can be gathered while the last one computes.
#pragma once

#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <vector>

namespace serried::detail {

/// What blocks are used by. Each has an order of its own.
enum class Pass : uint8_t { none, forward, without_gradient, backward };

/// Notes the first pass and foretells the next ones. One that goes another way is noted anew, and foretold again only
/// when it has come that way more often than before. All of it follows from what was noted, so ranks that run the same
/// program foretell the same.
class Order {
 public:
  /// `begins_anew`: nothing else tells where a pass ends, so the first block begins a new one.
  void note(int64_t block, bool begins_anew = false);
  /// Where it was given up nothing is learned from it.
  void end_pass(bool completed = true);
  /// The blocks that are used after the one noted last; none where the past tells nothing.
  c10::ArrayRef<int64_t> expected() const;

 private:
  bool is_trusted() const { return num_equal_ >= num_needed_; }
  void change();

  std::vector<int64_t> noted_;
  size_t at_ = 0;       // how many of them the running pass has come by
  int num_equal_ = 0;   // passes that went this way
  int num_needed_ = 1;  // until it is believed
};

}  // namespace serried::detail
