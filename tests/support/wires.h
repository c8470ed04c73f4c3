// Connected wires of one process, of each kind that there is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serried/comm/net/wire.h"

namespace serried::testing {

/// One per rank. Ends all at once, as ranks do: an end waits until its peers have what it has sent.
class Wires : public std::vector<std::unique_ptr<net::Wire>> {
 public:
  Wires() = default;
  Wires(Wires&&) = default;
  ~Wires();
};

/// "threads"; "ucx" and "gloo" go through the loopback device.
Wires make_wires(const std::string& kind, int size);

/// Whether all of these end within 20 s of progress on all wires.
bool finish(const Wires& wires, const std::vector<const net::Transfer*>& transfers);

}  // namespace serried::testing
