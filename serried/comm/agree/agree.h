// What all ranks must say alike, compared through the store.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <string>
#include <string_view>

namespace serried::detail {

/// The text that the first rank to come wrote under `key`: `mine`, if that was this one. Waits for nobody.
std::string first_text(c10d::Store& store, const std::string& key, const std::string& mine);

/// ValueError that shows both texts if another rank wrote another one under `key`.
void agree(c10d::Store& store, const std::string& key, std::string_view where, const std::string& mine);

}  // namespace serried::detail
