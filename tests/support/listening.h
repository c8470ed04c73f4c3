// Where this process listens, as the kernel sees it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

namespace serried::testing {

/// "0100007F:1F90" or the 32 digits of IPv6, as /proc/net writes addresses: words in the order of this machine's bytes.
inline std::pair<std::string, int> parse_kernel_address(const std::string& text) {
  const std::string digits = text.substr(0, text.find(':'));
  uint32_t words[4] = {};
  for (size_t i = 0; i < digits.size() / 8; ++i) words[i] = uint32_t(std::stoul(digits.substr(8 * i, 8), nullptr, 16));
  char name[INET6_ADDRSTRLEN] = {};
  ::inet_ntop(digits.size() == 8 ? AF_INET : AF_INET6, words, name, sizeof name);
  return {name, std::stoi(text.substr(text.find(':') + 1), nullptr, 16)};
}

/// Port -> address of every TCP socket of this process that listens.
inline std::map<int, std::string> listening_sockets() {
  std::set<std::string> inodes;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  std::map<int, std::string> result;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream fields(line);
      std::string slot, local, remote, state, queues, timer, retransmits, uid, timeout, inode;
      fields >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> uid >> timeout >> inode;
      if (state != "0A" || !inodes.contains(inode)) continue;
      const auto [address, port] = parse_kernel_address(local);
      result[port] = address;
    }
  }
  return result;
}

}  // namespace serried::testing
