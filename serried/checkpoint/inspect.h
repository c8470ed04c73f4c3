// Looking at checkpoints: what is in them, whether it is whole, how two of them differ.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "serried/checkpoint/reader.h"

namespace serried::checkpoint::detail {

/// `done` of `total` bytes, and what is looked at. Called from one thread at a time, not always from the same.
using OnBytes = std::function<void(int64_t done, int64_t total, const std::string& what)>;

/// A table of what the checkpoint has, with its values.
std::string listing(const std::string& folder);

/// The same as a JSON object.
std::string listing_json(const std::string& folder);

/// Reads every byte and compares all blocks with their hashes, by as many threads as there are cores. A sentence for
/// each thing that is wrong; Failure where there is no checkpoint.
std::vector<std::string> verify(const std::string& folder, const OnBytes& on_bytes = {});

/// A line for each difference, and one for what many parameters of an optimizer have in common: names, looks, contents,
/// values. None where both are the same training state, however many ranks wrote them.
std::vector<std::string> differences(const std::string& first, const std::string& second, const OnBytes& on_bytes = {});

struct TextOptions {
  bool all = false;      // not only an excerpt of a large tensor
  bool as_json = false;  // in one line, always all
};

/// A value, "step", or a tensor, "model.first.weight", as text: by the names of a listing or of differences. "model/w"
/// is the w of "model" also where "model.w" means something else, too.
std::string text_of(const std::string& folder, const std::string& name, const TextOptions& options = {});

}  // namespace serried::checkpoint::detail
