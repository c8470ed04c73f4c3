// How two launchers prove to each other that they have the same token, before anything else is said.
#pragma once

#include <string>

#include "serried/launch/fd.h"

namespace serried::launch {

/// One end of it. Nothing that the other end sends is parsed: pieces of fixed sizes are compared, and no more is read
/// than belongs to them.
///     leader → member   version, nonce
///     member → leader   version, nonce, HMAC(token, "member", both nonces)
///     leader → member   HMAC(token, "leader", both nonces)
class Handshake {
 public:
  enum class Side { leader, member };
  enum class State {
    open,
    agreed,
    no_launcher,     // what answers is another program
    other_protocol,  // a launcher of a serried whose launchers speak otherwise
    other_token,     // or none: a leader tells that by closing the connection
    closed_early,    // by the other end
  };

  Handshake(Side side, std::string token);

  /// Sends and reads what it can without blocking.
  State advance(const Fd& socket);

  /// What poll() should wait for.
  short events() const;

 private:
  State send_rest(const Fd& socket);
  State read_rest(const Fd& socket);
  State take();
  std::string proof_of(Side side) const;

  const Side side_;
  const std::string token_;
  const std::string own_nonce_;
  std::string their_nonce_;
  std::string out_;
  std::string in_;
  size_t expected_;  // bytes of the next piece; 0: none
};

}  // namespace serried::launch
