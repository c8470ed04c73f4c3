// The secret that lets launchers of one job on several machines know each other.
#pragma once

#include <string>
#include <vector>

namespace serried::launch {

/// Names of variables that hold it or say where it is: no rank gets them.
const std::vector<std::string>& token_variables();

/// That of SERRIED_TOKEN_FILE, which nobody else may read, or of SERRIED_TOKEN; empty: there is none.
/// LaunchError where the file cannot be read or is open to others, where the token is shorter than 32 characters, and
/// where both variables are set.
std::string read_token();

/// 32 random bytes in hexadecimal.
std::string make_token();

}  // namespace serried::launch
