// From the environment or a file of one's own.
#include "serried/launch/token.h"

#include <fcntl.h>
#include <openssl/rand.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "serried/launch/error.h"
#include "serried/launch/fd.h"

namespace serried::launch {
namespace {

constexpr const char* kTokenFile = "SERRIED_TOKEN_FILE";
constexpr const char* kToken = "SERRIED_TOKEN";
constexpr size_t kLeastCharacters = 32;
constexpr size_t kMostCharacters = 4096;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

[[noreturn]] void refuse_file(const std::string& path, const std::string& why, const std::string& fix) {
  throw LaunchError(kExitUsage, std::string(kTokenFile) + "=" + path + " " + why, fix);
}

std::string content_of(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) refuse_file(path, std::string("cannot be read: ") + std::strerror(errno), "serried token > " + path);
  struct stat status {};
  if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    refuse_file(path, "is no file", "serried token > FILE, and pass that");
  }
  if (status.st_uid != ::geteuid() || (status.st_mode & 077) != 0) {
    refuse_file(path, "can be read or changed by other users", "chmod 600 " + path + ", as the user that owns it");
  }
  std::string text(kMostCharacters, '\0');
  const ssize_t size = ::read(file.get(), text.data(), text.size());
  if (size < 0) refuse_file(path, std::string("cannot be read: ") + std::strerror(errno), "check the disk");
  text.resize(size_t(size));
  return text;
}

}  // namespace

const std::vector<std::string>& token_variables() {
  static const std::vector<std::string> names = {kTokenFile, kToken};
  return names;
}

std::string read_token() {
  const std::string path = variable(kTokenFile), given = variable(kToken);
  if (!path.empty() && !given.empty()) {
    throw LaunchError(kExitUsage, std::string(kTokenFile) + " and " + kToken + " are both set", "unset one of them");
  }
  std::string token = path.empty() ? given : content_of(path);
  while (!token.empty() && std::isspace(static_cast<unsigned char>(token.back())) != 0) token.pop_back();
  if (path.empty() && token.empty()) return token;
  if (token.size() < kLeastCharacters) {
    throw LaunchError(kExitUsage,
                      "the token of " + std::string(path.empty() ? kToken : kTokenFile) + " has " +
                          std::to_string(token.size()) + " characters, and needs " + std::to_string(kLeastCharacters),
                      "make one by: serried token");
  }
  return token;
}

std::string make_token() {
  unsigned char bytes[32];
  if (RAND_bytes(bytes, sizeof bytes) != 1) {
    throw LaunchError(kExitFailure, "libcrypto gives no random numbers", "let the launcher call getrandom()");
  }
  std::string text;
  for (const unsigned char byte : bytes) text += {"0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]};
  return text;
}

}  // namespace serried::launch
