// HMAC-SHA256, nonces and comparison are libcrypto's.
#include "serried/launch/handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

// Told first, so that another program is not taken for a launcher. The number changes with what launchers say.
const std::string kProtocolName = "serried launcher ";
const std::string kProtocol = kProtocolName + "2\n";
constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), int(count)) != 1) {
    throw LaunchError(kExitFailure, "libcrypto gives no random numbers", "let the launcher call getrandom()");
  }
  return bytes;
}

bool are_equal(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

bool would_block() {
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

}  // namespace

Handshake::Handshake(Side side, std::string token)
    : side_(side),
      token_(std::move(token)),
      own_nonce_(random_bytes(kNonceBytes)),
      out_(side == Side::leader ? kProtocol + own_nonce_ : ""),
      expected_(kProtocol.size() + kNonceBytes + (side == Side::leader ? kProofBytes : 0)) {}

// Each end proves something else: what the one said is of no use to who pretends to be the other.
std::string Handshake::proof_of(Side side) const {
  const bool is_own = side_ == Side::leader;
  const std::string text = (side == Side::leader ? "leader" : "member") + (is_own ? own_nonce_ : their_nonce_) +
                           (is_own ? their_nonce_ : own_nonce_);
  std::string proof(kProofBytes, '\0');
  unsigned int length = 0;
  const unsigned char* made =
      HMAC(EVP_sha256(), token_.data(), int(token_.size()), reinterpret_cast<const unsigned char*>(text.data()),
           text.size(), reinterpret_cast<unsigned char*>(proof.data()), &length);
  if (made == nullptr || length != kProofBytes) {
    throw LaunchError(kExitFailure, "libcrypto makes no HMAC-SHA256", "install OpenSSL 3 without restrictions");
  }
  return proof;
}

Handshake::State Handshake::advance(const Fd& socket) {
  for (;;) {
    if (const State sent = send_rest(socket); sent != State::agreed) return sent;
    if (expected_ == 0) return State::agreed;
    if (const State read = read_rest(socket); read != State::agreed) return read;
    if (const State taken = take(); taken != State::agreed) return taken;
  }
}

// agreed: all of it is sent.
Handshake::State Handshake::send_rest(const Fd& socket) {
  while (!out_.empty()) {
    const ssize_t sent = ::send(socket.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (sent < 0) return would_block() ? State::open : State::closed_early;
    out_.erase(0, size_t(sent));
  }
  return State::agreed;
}

// agreed: the whole piece is there.
Handshake::State Handshake::read_rest(const Fd& socket) {
  while (in_.size() < expected_) {
    char bytes[128];
    const ssize_t size = ::recv(socket.get(), bytes, std::min(sizeof bytes, expected_ - in_.size()), 0);
    if (size < 0 && would_block()) return State::open;
    // Who has the version and this end's proof and then closes does not like the proof.
    if (size <= 0) return their_nonce_.empty() ? State::closed_early : State::other_token;
    in_.append(bytes, size_t(size));
    // At once: another program may wait for us as we would wait for the rest of its words.
    const size_t told = std::min(in_.size(), kProtocol.size());
    if (their_nonce_.empty() && in_.compare(0, told, kProtocol, 0, told) != 0) {
      return in_.starts_with(kProtocolName) ? State::other_protocol : State::no_launcher;
    }
  }
  return State::agreed;
}

// agreed: the piece is what it should be.
Handshake::State Handshake::take() {
  const std::string piece = std::exchange(in_, {});
  if (!their_nonce_.empty()) {  // the leader's proof
    expected_ = 0;
    return are_equal(piece, proof_of(Side::leader)) ? State::agreed : State::other_token;
  }
  their_nonce_ = piece.substr(kProtocol.size(), kNonceBytes);
  if (side_ == Side::member) {
    out_ = kProtocol + own_nonce_ + proof_of(Side::member);
    expected_ = kProofBytes;
    return State::agreed;
  }
  if (!are_equal(piece.substr(kProtocol.size() + kNonceBytes), proof_of(Side::member))) return State::other_token;
  out_ = proof_of(Side::leader);
  expected_ = 0;
  return State::agreed;
}

short Handshake::events() const {
  return out_.empty() ? POLLIN : POLLOUT;
}

}  // namespace serried::launch
