// Seals on the way in, opens on the way out; counters by compare and set. HMAC-SHA256, nonces and comparison are
// libcrypto's.
#include "serried/comm/rendezvous/signed_store.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <charconv>
#include <chrono>
#include <thread>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/comm/rendezvous/launch_environment.h"
#include "serried/comm/rendezvous/world_store.h"

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

// What a stranger has left in the place of a rank that comes a little later is overwritten by that rank.
constexpr std::chrono::seconds kPatience{1};

[[noreturn]] void raise_stranger(const std::string& key, const c10::intrusive_ptr<c10d::Store>& store) {
  const std::string place = place_of(store);
  raise<c10::DistStoreError>(
      {"store",
       c10::str("the key \"", key, "\" holds what no rank of this job wrote: its signature is ",
                "missing or wrong, so a stranger wrote it", place.empty() ? "" : " to the store at " + place),
       "find out who else reaches that store: another job with the same port or file, or somebody on this host or "
       "network; start the job anew"});
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
  return std::make_shared<const Signer>(secret, c10::str(env::text("TORCHELASTIC_RUN_ID"), "/", attempt_of_all()));
}

SignedStore::SignedStore(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<const Signer> signer)
    : store_(std::move(store)), signer_(std::move(signer)) {}

c10::intrusive_ptr<c10d::Store> SignedStore::clone() {
  return c10::make_intrusive<SignedStore>(store_->clone(), signer_);
}

Bytes SignedStore::open(const std::string& key, const Bytes& sealed) const {
  std::optional<Bytes> value = signer_->open(key, sealed);
  if (!value) raise_stranger(key, store_);
  return *std::move(value);
}

void SignedStore::set(const std::string& key, const Bytes& value) {
  store_->set(key, signer_->seal(key, value));
}

Bytes SignedStore::get(const std::string& key) {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (true) {
    if (std::optional<Bytes> value = signer_->open(key, store_->get(key))) return *std::move(value);
    if (std::chrono::steady_clock::now() > deadline) raise_stranger(key, store_);
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

/// Puts `change(old value)` in place of the old value, nothing for a key that is absent, and returns what the key holds
/// then. Where `change` gives nothing the key stays as it is.
template <class Change>
Bytes SignedStore::update(const std::string& key, const Change& change) {
  while (true) {
    const bool there = store_->check({key});
    const Bytes sealed = there ? store_->get(key) : Bytes{};
    const std::optional<Bytes> old = there ? std::optional(open(key, sealed)) : std::nullopt;
    const std::optional<Bytes> desired = change(old);
    if (!desired) return old.value_or(Bytes{});
    // No two seals are alike: what comes back tells whether it was this one that went in.
    const Bytes mine = signer_->seal(key, *desired);
    if (store_->compareSet(key, sealed, mine) == mine) return *desired;
  }
}

Bytes SignedStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  bool absent = false;
  Bytes result = update(key, [&](const std::optional<Bytes>& old) -> std::optional<Bytes> {
    absent = !old;
    if (old ? *old == expected : expected.empty()) return desired;
    return std::nullopt;
  });
  // As c10d's stores answer where there is nothing to compare with.
  return absent && !expected.empty() ? expected : result;
}

int64_t SignedStore::add(const std::string& key, int64_t value) {
  int64_t sum = 0;
  update(key, [&](const std::optional<Bytes>& old) -> std::optional<Bytes> {
    const std::string text = old ? std::string(old->begin(), old->end()) : "0";
    const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), sum);
    if (error != std::errc() || stop != text.data() + text.size()) {
      raise<c10::DistStoreError>({"store", c10::str("the key \"", key, "\" holds no number to add ", value, " to"),
                                  "count under a key of its own"});
    }
    const std::string counted = std::to_string(sum += value);
    return Bytes(counted.begin(), counted.end());
  });
  return sum;
}

void SignedStore::append(const std::string& key, const Bytes& value) {
  update(key, [&](const std::optional<Bytes>& old) -> std::optional<Bytes> {
    Bytes longer = old.value_or(Bytes{});
    longer.insert(longer.end(), value.begin(), value.end());
    return longer;
  });
}

std::vector<Bytes> SignedStore::multiGet(const std::vector<std::string>& keys) {
  std::vector<Bytes> values = store_->multiGet(keys);
  for (size_t i = 0; i < keys.size(); ++i) {
    std::optional<Bytes> value = signer_->open(keys[i], values[i]);
    values[i] = value ? *std::move(value) : get(keys[i]);
  }
  return values;
}

void SignedStore::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  std::vector<Bytes> sealed;
  for (size_t i = 0; i < keys.size() && i < values.size(); ++i) sealed.push_back(signer_->seal(keys[i], values[i]));
  // Lists of different length are the store's to refuse.
  sealed.resize(values.size());
  store_->multiSet(keys, sealed);
}

void SignedStore::queuePush(const std::string& key, const Bytes& value) {
  store_->queuePush(key, signer_->seal(key, value));
}

Bytes SignedStore::queuePop(const std::string& key, bool block) {
  return open(key, store_->queuePop(key, block));
}

c10::intrusive_ptr<c10d::Store> signed_for_job(const c10::intrusive_ptr<c10d::Store>& store) {
  const std::shared_ptr<const Signer> signer = job_signer();
  if (signer == nullptr) return store;
  return c10::make_intrusive<SignedStore>(store, signer);
}

}  // namespace serried::detail
