// While a rank waits for its neighbours, messages of what it has under way with other hosts must go on.
#pragma once

namespace serried::hierarchical {

/// Says so while it lives.
class MovesParts {
 public:
  explicit MovesParts(bool& moves) : moves_(moves) { moves_ = true; }
  ~MovesParts() { moves_ = false; }
  MovesParts(const MovesParts&) = delete;
  MovesParts& operator=(const MovesParts&) = delete;

 private:
  bool& moves_;
};

}  // namespace serried::hierarchical
