// An all_reduce of two ranks by hand: one connection, a thread that sends and one that receives and adds.
#pragma once

#include <cstdint>
#include <string>

namespace serried::bench {

class SocketPair {
 public:
  /// Rank 0 listens at `address`, rank 1 connects.
  SocketPair(int rank, const std::string& address, uint16_t port);
  ~SocketPair();
  SocketPair(const SocketPair&) = delete;
  SocketPair& operator=(const SocketPair&) = delete;

  /// Each rank adds up one half and sends it back.
  void all_reduce(float* x, int64_t count);

 private:
  void send(const float* from, int64_t count) const;
  void add(float* to, int64_t count) const;
  void receive(float* to, int64_t count) const;

  const int rank_;
  int connection_ = -1;
};

}  // namespace serried::bench
