// PATH lookup with the shell's exit codes: 127 for not found, 126 for not executable.
#include "serried/launch/program.h"

#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "serried/base/text.h"
#include "serried/launch/error.h"

namespace serried::launch {
namespace {

bool is_file(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode);
}

bool is_program(const std::string& path) {
  return is_file(path) && ::access(path.c_str(), X_OK) == 0;
}

[[noreturn]] void not_executable(const std::string& path) {
  struct stat info {};
  const bool is_directory = ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
  if (is_directory) throw LaunchError(kExitNotExecutable, path + " is a directory", "name the program inside it");
  throw LaunchError(kExitNotExecutable, path + " is not executable", "chmod +x " + path);
}

constexpr size_t kMostShown = 80;

}  // namespace

CommandMark mark_of_command(const std::vector<std::string>& command) {
  std::string all;
  CommandMark mark;
  for (const std::string& word : command) {
    const std::string name = all.empty() ? std::filesystem::path(word).filename().string() : word;
    mark.text += (all.empty() ? "" : " ") + name;
    all += name + '\0';
  }
  mark.text = detail::printable(mark.text);
  if (mark.text.size() > kMostShown) mark.text = mark.text.substr(0, kMostShown) + "...";
  unsigned char bytes[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  if (EVP_Digest(all.data(), all.size(), bytes, &size, EVP_sha256(), nullptr) != 1) {
    throw LaunchError(kExitFailure, "libcrypto makes no SHA-256", "install OpenSSL 3 without restrictions");
  }
  for (unsigned int i = 0; i < size; ++i) {
    mark.digest += {"0123456789abcdef"[bytes[i] >> 4], "0123456789abcdef"[bytes[i] & 15]};
  }
  return mark;
}

std::string find_program(const std::string& program) {
  if (program.find('/') != std::string::npos) {
    if (is_program(program)) return program;
    if (::access(program.c_str(), F_OK) == 0) not_executable(program);
    throw LaunchError(kExitNotFound, "program " + program + " does not exist",
                      "check the path; it is relative to the folder serried runs in");
  }
  const char* path = std::getenv("PATH");
  std::istringstream folders(path != nullptr ? path : "/usr/local/bin:/usr/bin:/bin");
  std::string denied;
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + program;
    if (is_program(candidate)) return candidate;
    if (denied.empty() && is_file(candidate)) denied = candidate;
  }
  if (!denied.empty()) not_executable(denied);
  const bool is_here = is_file(program);
  throw LaunchError(kExitNotFound, "program " + program + " is not in PATH",
                    is_here ? "write ./" + program + " for the one in this folder" : "write its path, as ./" + program);
}

}  // namespace serried::launch
