// One descriptor for two reasons to wake up: the engine has something, or another thread of this process does.
#pragma once

namespace serried::net {

/// One thread at a time rings, answers or asks.
class Doorbell {
 public:
  Doorbell();
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  /// Readable when the bell was rung or what was added is readable.
  int descriptor() const { return both_; }

  /// Adds a descriptor of somebody else's. Closed, it is no longer looked at.
  void add(int descriptor);

  void ring();

  bool is_rung() const { return is_rung_; }

  /// Whether it was rung since the last answer.
  bool answer();

 private:
  int both_ = -1;
  int bell_ = -1;
  bool is_rung_ = false;
};

}  // namespace serried::net
