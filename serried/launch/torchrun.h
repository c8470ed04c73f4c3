// What `serried run` has in place of torchrun's options.
#pragma once

#include <string>
#include <string_view>

namespace serried::launch {

/// What to do instead of passing torchrun's `option` ("--standalone", "--rdzv_backend=c10d"); empty where torchrun has
/// none of that name.
std::string instead_of_torchrun(std::string_view option);

/// What torchrun's words for a number of ranks mean: "auto" and "cpu" are the cores this process may use, "gpu" is
/// refused; other texts stay as they are.
std::string number_of_ranks(const std::string& text);

}  // namespace serried::launch
