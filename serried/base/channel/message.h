// Messages as launchers and ranks exchange them: fields of any bytes. Free of LibTorch: the launcher uses it too.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace serried::channel {

/// A verb and its fields; fields may hold any bytes.
using Message = std::vector<std::string>;

/// How long the body of a message may be where both ends are known; what a stranger may send is less.
constexpr size_t kMostBytes = 10 << 20;
constexpr size_t kMostBytesOfStrangers = 1 << 20;

std::string encode(const Message& message);

/// Takes the first whole message off the front of `bytes`; empty if there is none yet.
/// std::runtime_error if the bytes are no message: another program speaks.
Message decode(std::string& bytes, size_t most = kMostBytesOfStrangers);

/// A field as std::to_string wrote it; std::runtime_error if it is no such number.
int number_in(const std::string& field);

}  // namespace serried::channel
