// One function to write and one to read each struct. Texts are made printable on their way in: they are shown.
#include "serried/launch/seen_json.h"

#include <nlohmann/json.hpp>

#include <algorithm>

#include "serried/base/text.h"

namespace serried::launch {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "serried dump 1";
constexpr size_t kMostText = 1 << 16;
constexpr size_t kMostItems = 1 << 20;
constexpr int kMostRanks = 1 << 20;

json json_of(const GroupSeen& group);
json json_of(const RankSeen& rank);

json json_of(const CallSeen& call) {
  json object = {{"sequence", call.sequence}, {"call", call.text},      {"group", call.group},
                 {"issued", call.issued_ns},  {"begun", call.begun_ns}, {"ended", call.ended_ns}};
  if (!call.agreed.empty()) object["agreed"] = call.agreed;
  if (!call.part_of.empty()) object["part_of"] = call.part_of;
  if (call.failed) object["failed"] = true;
  return object;
}

template <class T>
json list_of(const std::vector<T>& items) {
  json list = json::array();
  for (const T& item : items) list.push_back(json_of(item));
  return list;
}

json json_of(const GroupSeen& group) {
  return {{"id", group.id},
          {"name", group.name},
          {"rank", group.rank},
          {"world_size", group.world_size},
          {"job_rank", group.job_rank},
          {"closed", group.closed},
          {"num_issued", group.num_issued},
          {"num_ended", group.num_ended},
          {"ended_sequence", group.ended_sequence},
          {"ended", group.ended_ns},
          {"newest", json_of(group.newest)},
          {"open", list_of(group.open)}};
}

json json_of(const RankSeen& rank) {
  const uint64_t num_lost = rank.num_calls - std::min<uint64_t>(rank.num_calls, rank.calls.size());
  return {{"rank", rank.rank},
          {"pid", rank.pid},
          {"state", std::string(1, rank.state)},
          {"problem", rank.problem},
          {"stack", rank.stack},
          {"num_calls", rank.num_calls},
          {"num_lost", num_lost},
          {"groups", list_of(rank.groups)},
          {"calls", list_of(rank.calls)}};
}

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error(what);
}

std::string text_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return "";
  if (!found->is_string()) refuse(std::string("\"") + key + "\" is no text");
  return detail::printable(found->get_ref<const std::string&>().substr(0, kMostText));
}

// Stacks have lines.
std::string lines_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_string()) return "";
  std::string text = found->get_ref<const std::string&>().substr(0, kMostText);
  for (char& letter : text) {
    if (letter != '\n') letter = detail::printable({&letter, 1})[0];
  }
  return text;
}

template <class T>
T whole_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return T();
  if (!found->is_number_integer()) refuse(std::string("\"") + key + "\" is no whole number");
  if (found->is_number_unsigned()) {
    const auto value = found->get<uint64_t>();
    if (value > uint64_t(std::numeric_limits<T>::max())) refuse(std::string("\"") + key + "\" is too large");
    return T(value);
  }
  const auto value = found->get<int64_t>();
  if (value < 0 && std::is_unsigned_v<T>) refuse(std::string("\"") + key + "\" is negative");
  if (value < int64_t(std::numeric_limits<T>::min())) refuse(std::string("\"") + key + "\" is too small");
  return T(value);
}

bool flag_in(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) return false;
  if (!found->is_boolean()) refuse(std::string("\"") + key + "\" is neither true nor false");
  return found->get<bool>();
}

const json& object_in(const json& value) {
  if (!value.is_object()) refuse("a value is no object");
  return value;
}

template <class T, class Read>
std::vector<T> list_in(const json& object, const char* key, Read read) {
  const auto found = object.find(key);
  if (found == object.end()) return {};
  if (!found->is_array() || found->size() > kMostItems) refuse(std::string("\"") + key + "\" is no list");
  std::vector<T> items;
  for (const json& item : *found) items.push_back(read(object_in(item)));
  return items;
}

int64_t time_in(const json& object, const char* key) {
  return std::max<int64_t>(0, whole_in<int64_t>(object, key));
}

CallSeen read_call(const json& object) {
  return {.sequence = whole_in<uint64_t>(object, "sequence"),
          .text = text_in(object, "call"),
          .agreed = text_in(object, "agreed"),
          .part_of = text_in(object, "part_of"),
          .group = whole_in<uint64_t>(object, "group"),
          .issued_ns = time_in(object, "issued"),
          .begun_ns = time_in(object, "begun"),
          .ended_ns = time_in(object, "ended"),
          .failed = flag_in(object, "failed")};
}

int rank_in(const json& object, const char* key, int least) {
  const int rank = whole_in<int>(object, key);
  if (rank < least || rank >= kMostRanks) refuse(std::string("\"") + key + "\" is " + std::to_string(rank));
  return rank;
}

GroupSeen read_group(const json& object) {
  const auto newest = object.find("newest");
  return {.id = whole_in<uint64_t>(object, "id"),
          .name = text_in(object, "name"),
          .rank = rank_in(object, "rank", 0),
          .world_size = rank_in(object, "world_size", 1),
          .job_rank = rank_in(object, "job_rank", -1),
          .closed = flag_in(object, "closed"),
          .num_issued = whole_in<uint64_t>(object, "num_issued"),
          .num_ended = whole_in<uint64_t>(object, "num_ended"),
          .ended_sequence = whole_in<uint64_t>(object, "ended_sequence"),
          .ended_ns = time_in(object, "ended"),
          .newest = newest == object.end() ? CallSeen() : read_call(object_in(*newest)),
          .open = list_in<CallSeen>(object, "open", read_call)};
}

RankSeen read_rank(const json& object) {
  const std::string state = text_in(object, "state");
  return {.rank = rank_in(object, "rank", 0),
          .pid = whole_in<int>(object, "pid"),
          .state = state.empty() ? '?' : state[0],
          .groups = list_in<GroupSeen>(object, "groups", read_group),
          .num_calls = whole_in<uint64_t>(object, "num_calls"),
          .calls = list_in<CallSeen>(object, "calls", read_call),
          .stack = lines_in(object, "stack"),
          .problem = text_in(object, "problem")};
}

HostSeen read_host(const json& object) {
  if (text_in(object, "format") != kFormat) {
    refuse("its format is \"" + text_in(object, "format") + "\", and this serried reads \"" + kFormat + "\"");
  }
  return {.version = text_in(object, "version"),
          .host = text_in(object, "host"),
          .node = rank_in(object, "node", 0),
          .job = text_in(object, "job"),
          .attempt = whole_in<int>(object, "attempt"),
          .world_size = rank_in(object, "world_size", 0),
          .why = text_in(object, "why"),
          .now_ns = time_in(object, "now"),
          .has_clock = flag_in(object, "has_clock"),
          .clock_offset_ns = whole_in<int64_t>(object, "clock_offset"),
          .clock_error_ns = time_in(object, "clock_error"),
          .ranks = list_in<RankSeen>(object, "ranks", read_rank)};
}

}  // namespace

std::string to_json(const HostSeen& seen, bool spaced) {
  const json object = {{"format", kFormat},
                       {"version", seen.version},
                       {"host", seen.host},
                       {"node", seen.node},
                       {"job", seen.job},
                       {"attempt", seen.attempt},
                       {"world_size", seen.world_size},
                       {"why", seen.why},
                       {"now", seen.now_ns},
                       {"has_clock", seen.has_clock},
                       {"clock_offset", seen.clock_offset_ns},
                       {"clock_error", seen.clock_error_ns},
                       {"ranks", list_of(seen.ranks)}};
  return object.dump(spaced ? 1 : -1, ' ', false, json::error_handler_t::replace);
}

HostSeen host_seen_from(const std::string& text) {
  const json parsed = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) refuse("it is no JSON, or has broken off");
  return read_host(object_in(parsed));
}

}  // namespace serried::launch
