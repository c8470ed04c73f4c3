// Files of a trace made by hand.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/process/command.h"

namespace serried::testing {

using nlohmann::json;

/// Times in microseconds, of the rank's own clock.
struct HandMade {
  int rank = 0;
  std::string job = "job/0";
  std::string host = "a";
  std::string clock = "clock a";
  int64_t realtime_ns = 0;
  int world_size = 2;
  std::vector<json> events = {};

  void add(const std::string& name, const std::string& phase, double begin, double end, json args = json::object()) {
    events.push_back(
        {{"name", name}, {"cat", phase}, {"ph", "X"}, {"pid", rank}, {"tid", 1}, {"ts", begin}, {"dur", end - begin}});
    if (!args.empty()) events.back()["args"] = std::move(args);
  }

  /// A collective of the group "world", and the wait for it from `wait` on.
  void add_collective(int sequence, double begin, double wait, double end, const std::string& name = "all_reduce") {
    const json id{{"group", "world"}, {"sequence", sequence}};
    json args = id;
    args.update({{"bytes", 1000}, {"group_size", world_size}});
    add(name, "communication", begin, end, args);
    events.back()["tid"] = 2;
    add("wait for " + name, "wait", wait, end, id);
  }

  std::string text() const {
    json root;
    root["otherData"] = {
        {"job", job},       {"host", host}, {"clock", clock}, {"world_size", world_size}, {"realtime_ns", realtime_ns},
        {"monotonic_ns", 0}};
    root["traceEvents"] = events;
    return root.dump();
  }

  std::string write_to(const TemporaryFolder& folder) const {
    const std::string path = folder.path() + "/rank_" + std::to_string(rank) + ".json";
    write_file(path, text());
    return path;
  }
};

/// Events of a file that is whole, in its order.
inline std::vector<json> events_of(const std::string& path) {
  return json::parse(read_file(path)).at("traceEvents");
}

inline std::vector<json> of_kind(const std::vector<json>& events, const std::string& kind) {
  std::vector<json> found;
  for (const json& event : events) {
    if (event.at("ph") == kind) found.push_back(event);
  }
  return found;
}

}  // namespace serried::testing
