// What a piece of a test leaves in the trace.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "serried/base/trace_slices.h"

namespace serried::testing {

using nlohmann::json;

/// The slices that `fn` adds, as they stand in a file.
template <class Fn>
std::vector<json> slices_of(Fn&& fn) {
  trace::take_slices();  // forgets what other tests have recorded
  trace::start();
  fn();
  trace::stop();
  const std::string path = std::filesystem::temp_directory_path() / ("serried_slices_" + std::to_string(::getpid()));
  trace::write(path);
  const json root = json::parse(std::ifstream(path));
  std::filesystem::remove(path);
  std::vector<json> slices;
  for (const json& event : root.at("traceEvents")) {
    if (event.at("ph") == "X") slices.push_back(event);
  }
  return slices;
}

/// Those of `rank` whose name begins with `name`, in the order of their begin.
inline std::vector<json> named(const std::vector<json>& slices, int rank, const std::string& name) {
  std::vector<json> found;
  for (const json& slice : slices) {
    if (slice.at("pid") == rank && slice.at("name").get<std::string>().starts_with(name)) found.push_back(slice);
  }
  std::stable_sort(found.begin(), found.end(), [](const json& a, const json& b) { return a.at("ts") < b.at("ts"); });
  return found;
}

inline double begin_of(const json& slice) {
  return slice.at("ts");
}
inline double end_of(const json& slice) {
  return slice.at("ts").get<double>() + slice.at("dur").get<double>();
}

}  // namespace serried::testing
