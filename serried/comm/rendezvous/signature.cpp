// HMAC-SHA256, nonces and comparison are libcrypto's.
#include "serried/comm/rendezvous/signature.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"

namespace serried::detail {
namespace {

constexpr size_t kNonceBytes = 16;
constexpr size_t kSignatureBytes = 32;
constexpr size_t kHeadBytes = kNonceBytes + kSignatureBytes;
constexpr size_t kMinSecretBytes = 32;

[[noreturn]] void raise_no_crypto(const char* call) {
  raise<c10::DistStoreError>(
      {"store", c10::str("libcrypto's ", call, " failed"), "check the OpenSSL installation: openssl rand -hex 32"});
}

// With its length, so that two fields cannot be read as two others.
void append_field(Bytes& text, const uint8_t* data, size_t size) {
  for (int shift = 56; shift >= 0; shift -= 8) text.push_back(uint8_t(uint64_t(size) >> shift));
  text.insert(text.end(), data, data + size);
}

void append_field(Bytes& text, const std::string& field) {
  append_field(text, reinterpret_cast<const uint8_t*>(field.data()), field.size());
}

}  // namespace

Signer::Signer(std::string secret, std::string job) : secret_(std::move(secret)), job_(std::move(job)) {}

Bytes Signer::signature(const std::string& key, const uint8_t* nonce, const uint8_t* value, size_t size) const {
  Bytes text;
  text.reserve(size + key.size() + job_.size() + 128);
  append_field(text, "serried store 1");
  append_field(text, job_);
  append_field(text, key);
  append_field(text, nonce, kNonceBytes);
  append_field(text, value, size);
  Bytes result(kSignatureBytes);
  unsigned int length = 0;
  const uint8_t* made =
      HMAC(EVP_sha256(), secret_.data(), int(secret_.size()), text.data(), text.size(), result.data(), &length);
  if (made == nullptr || length != kSignatureBytes) raise_no_crypto("HMAC");
  return result;
}

Bytes Signer::seal(const std::string& key, const Bytes& value) const {
  Bytes sealed(kNonceBytes);
  if (RAND_bytes(sealed.data(), int(kNonceBytes)) != 1) raise_no_crypto("RAND_bytes");
  const Bytes mark = signature(key, sealed.data(), value.data(), value.size());
  sealed.reserve(kHeadBytes + value.size());
  sealed.insert(sealed.end(), mark.begin(), mark.end());
  sealed.insert(sealed.end(), value.begin(), value.end());
  return sealed;
}

std::optional<Bytes> Signer::open(const std::string& key, const Bytes& sealed) const {
  if (sealed.size() < kHeadBytes) return std::nullopt;
  const Bytes mark = signature(key, sealed.data(), sealed.data() + kHeadBytes, sealed.size() - kHeadBytes);
  if (CRYPTO_memcmp(mark.data(), sealed.data() + kNonceBytes, kSignatureBytes) != 0) return std::nullopt;
  return Bytes(sealed.begin() + kHeadBytes, sealed.end());
}

std::shared_ptr<const Signer> job_signer() {
  // Ranks sign their farewell when the process ends: libcrypto must not clean up before.
  static const int started = OPENSSL_init_crypto(OPENSSL_INIT_NO_ATEXIT, nullptr);
  if (started != 1) raise_no_crypto("OPENSSL_init_crypto");
  const std::string secret = env::text("SERRIED_JOB_SECRET");
  if (secret.empty()) return nullptr;
  if (secret.size() < kMinSecretBytes) {
    raise<c10::ValueError>({"environment",
                            c10::str("SERRIED_JOB_SECRET has ", secret.size(), " characters, at least ",
                                     kMinSecretBytes, " cannot be guessed"),
                            "set it to what openssl rand -hex 32 prints, the same on all ranks, or unset it"});
  }
  return std::make_shared<const Signer>(
      secret, c10::str(env::text("TORCHELASTIC_RUN_ID"), "/", env::integer("TORCHELASTIC_RESTART_COUNT")));
}

}  // namespace serried::detail
