// How a rank shows that it, and no stranger, wrote a value: a signature with the secret of the job.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace serried::detail {

using Bytes = std::vector<uint8_t>;

/// Signs values for the key they are stored under. Immutable; any thread.
class Signer {
 public:
  /// `job` tells attempts of one job apart: a value of an earlier attempt is a stranger's.
  Signer(std::string secret, std::string job);

  /// `value` with a nonce and a signature in front. Never the same twice.
  Bytes seal(const std::string& key, const Bytes& value) const;

  /// The value in `sealed`; nothing if no rank of the job wrote it under `key`.
  std::optional<Bytes> open(const std::string& key, const Bytes& sealed) const;

 private:
  Bytes signature(const std::string& key, const uint8_t* nonce, const uint8_t* value, size_t size) const;

  std::string secret_;
  std::string job_;
};

/// The signer of this job: SERRIED_JOB_SECRET, which the launcher sets. Null where there is none: then nothing is
/// signed. ValueError for a secret that can be guessed.
std::shared_ptr<const Signer> job_signer();

}  // namespace serried::detail
