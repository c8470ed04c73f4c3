// Finding the program to run, so that a wrong name is told before any rank starts.
#pragma once

#include <string>

namespace serried::launch {

/// The path of `program`: itself if it has a slash, else found in PATH.
/// LaunchError with exit code 127 if there is none, 126 if it may not be executed.
std::string find_program(const std::string& program);

}  // namespace serried::launch
