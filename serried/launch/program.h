// Finding the program to run, so that a wrong name is told before any rank starts.
#pragma once

#include <string>
#include <vector>

namespace serried::launch {

/// The path of `program`: itself if it has a slash, else found in PATH.
/// LaunchError with exit code 127 if there is none, 126 if it may not be executed.
std::string find_program(const std::string& program);

/// What commands of different jobs are told apart by. Programs of one name count as one, wherever a host has them.
struct CommandMark {
  std::string text = {};    // for people: the beginning
  std::string digest = {};  // SHA-256 in hexadecimal, of all arguments
};
CommandMark mark_of_command(const std::vector<std::string>& command);

}  // namespace serried::launch
