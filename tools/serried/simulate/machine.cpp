// machine.json, read strictly: a key that is misspelt would leave the machine with another number than meant.
#include "tools/serried/simulate/machine.h"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "serried/base/edit_distance.h"
#include "serried/base/text.h"
#include "tools/serried/simulate/error.h"
#include "tools/serried/simulate/json_lines.h"

namespace serried::simulation {
namespace {

using serried::detail::edit_distance;
using serried::detail::printable;

constexpr double kMostRanks = 1e7;
constexpr double kMostUs = 1e9;
constexpr double kMostNs = 1e6;

struct Range {
  double least;
  double most;
};

std::string number_text(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.10g", number);
  return text;
}

// One object: its keys are asked for one by one, and none may be left.
class Keys {
 public:
  Keys(const JsonObject& object, std::string where, const std::string& file)
      : object_(object), where_(std::move(where)), file_(file) {}

  bool has(const std::string& key) {
    known_.insert(key);
    return object_.entries.count(key) > 0;
  }

  /// Required.
  double number(const std::string& key, Range range) {
    const JsonObject::Entry& entry = at(key);
    if (const double* number = std::get_if<double>(&entry.value)) return checked(key, entry.line, *number, range);
    fail(entry.line, quoted(key) + " is an object", "write a number there");
  }

  int64_t count(const std::string& key) {
    const double number = this->number(key, {1, kMostRanks});
    if (number == std::floor(number)) return int64_t(number);
    fail(at(key).line, quoted(key) + " is " + number_text(number), "write a whole number");
  }

  Fitted fitted(const std::string& key, Range range) {
    const JsonObject::Entry& entry = at(key);
    if (const double* number = std::get_if<double>(&entry.value)) {
      return Fitted::exactly(checked(key, entry.line, *number, range));
    }
    Keys keys = inside(key);
    const Fitted found{keys.number("value", range), keys.number("low", range), keys.number("high", range)};
    keys.finish();
    if (found.low <= found.value && found.value <= found.high) return found;
    fail(entry.line, quoted(key) + " is not between its low and its high", "let low <= value <= high");
  }

  Fitted fitted_or_zero(const std::string& key, Range range) {
    return has(key) ? fitted(key, range) : Fitted::exactly(0);
  }

  /// Required.
  Keys inside(const std::string& key) {
    const JsonObject::Entry& entry = at(key);
    if (const JsonObject* object = std::get_if<JsonObject>(&entry.value)) return Keys(*object, full(key), file_);
    fail(entry.line, quoted(key) + " is a number", "write an object there, {...}");
  }

  /// An error for keys that nobody asked for.
  void finish() const {
    for (const auto& [key, entry] : object_.entries) {
      if (known_.count(key) > 0) continue;
      std::string nearest, list;
      for (const std::string& known : known_) {
        list += (list.empty() ? "" : ", ") + known;
        const bool is_nearer = nearest.empty() || edit_distance(key, known) < edit_distance(key, nearest);
        if (is_nearer && edit_distance(key, known) <= known.size() / 2) nearest = known;
      }
      const std::string place = where_.empty() ? "" : " in \"" + where_ + "\"";
      const std::string guess = nearest.empty() ? "" : "; did you mean \"" + nearest + "\"?";
      fail(entry.line, "there is no key \"" + printable(key.substr(0, 60)) + "\"" + place + guess, "known are " + list);
    }
  }

 private:
  [[noreturn]] void fail(int line, const std::string& what, const std::string& fix) const {
    throw SimulationError(file_ + ", line " + std::to_string(line) + ": " + what, fix);
  }

  // Put together bit by bit: g++ 12 warns of what it makes of one expression.
  std::string quoted(const std::string& key) const {
    std::string text = "\"";
    text += full(key);
    text += '"';
    return text;
  }

  std::string full(const std::string& key) const { return where_.empty() ? key : where_ + "." + key; }

  const JsonObject::Entry& at(const std::string& key) {
    known_.insert(key);
    const auto found = object_.entries.find(key);
    if (found != object_.entries.end()) return found->second;
    finish();  // a key that is misspelt says more than one that is missing
    const std::string place = where_.empty() ? "it" : "\"" + where_ + "\"";
    fail(object_.line, place + " has no \"" + key + "\"", "add the key; docs/simulation.md says what it means");
  }

  double checked(const std::string& key, int line, double number, Range range) const {
    if (number >= range.least && number <= range.most) return number;
    fail(line, quoted(key) + " is " + number_text(number),
         "write a number from " + number_text(range.least) + " to " + number_text(range.most));
  }

  const JsonObject& object_;
  const std::string where_;
  const std::string& file_;
  std::set<std::string> known_ = {};
};

MemoryLevel read_memory(Keys keys) {
  keys.has("beta_ns_per_byte"), keys.has("gamma_ns_per_byte");
  const MemoryLevel level{keys.fitted("alpha_us", {0, kMostUs}), keys.fitted("beta_ns_per_byte", {0, kMostNs}),
                          keys.fitted("gamma_ns_per_byte", {0, kMostNs})};
  keys.finish();
  return level;
}

NicLevel read_nic(Keys keys) {
  keys.has("beta_ns_per_byte"), keys.has("message_us");
  const NicLevel level{keys.fitted("alpha_us", {0, kMostUs}), keys.fitted("beta_ns_per_byte", {0, kMostNs}),
                       keys.fitted_or_zero("message_us", {0, kMostUs})};
  keys.finish();
  return level;
}

Uplink read_uplink(Keys keys) {
  keys.has("oversubscription"), keys.has("alpha_us");
  const Uplink uplink{keys.count("hosts"), keys.number("oversubscription", {1, 1e6}),
                      keys.fitted_or_zero("alpha_us", {0, kMostUs})};
  keys.finish();
  return uplink;
}

Compute read_compute(Keys keys) {
  keys.has("ns_per_flop"), keys.has("ns_per_byte");
  const Compute compute{keys.fitted("op_us", {0, kMostUs}), keys.fitted("ns_per_flop", {0, kMostNs}),
                        keys.fitted("ns_per_byte", {0, kMostNs})};
  keys.finish();
  return compute;
}

double read_jitter(Keys keys) {
  const double sigma = keys.number("sigma", {0, 1});
  keys.finish();
  return sigma;
}

nlohmann::ordered_json json_of(const Fitted& number) {
  if (!number.has_interval()) return number.value;
  return {{"value", number.value}, {"low", number.low}, {"high", number.high}};
}

nlohmann::ordered_json json_of(const NicLevel& level) {
  nlohmann::ordered_json json = {{"alpha_us", json_of(level.alpha_us)},
                                 {"beta_ns_per_byte", json_of(level.beta_ns_per_byte)}};
  if (level.message_us != Fitted::exactly(0)) json["message_us"] = json_of(level.message_us);
  return json;
}

}  // namespace

Machine parse_machine(std::string_view text, const std::string& name) {
  const JsonObject root = parse_json_lines(text, name);
  Keys keys(root, "", name);
  for (const char* key : {"ranks_per_host", "memory", "nic_out", "nic_in"}) keys.has(key);
  Machine machine;
  if (keys.has("cores_per_host")) machine.cores_per_host = keys.count("cores_per_host");
  if (keys.has("hosts")) machine.hosts = keys.count("hosts");
  if (keys.has("uplink")) machine.uplink = read_uplink(keys.inside("uplink"));
  if (keys.has("compute")) machine.compute = read_compute(keys.inside("compute"));
  if (keys.has("jitter")) machine.jitter_sigma = read_jitter(keys.inside("jitter"));
  machine.ranks_per_host = keys.count("ranks_per_host");
  machine.memory = read_memory(keys.inside("memory"));
  machine.nic_out = read_nic(keys.inside("nic_out"));
  machine.nic_in = read_nic(keys.inside("nic_in"));
  keys.finish();
  return machine;
}

Machine example_machine() {
  const auto exactly = Fitted::exactly;
  return {.ranks_per_host = 8,
          .cores_per_host = 8,
          .memory = {exactly(3), exactly(0.05), exactly(0.1)},
          .nic_out = {exactly(15), exactly(0.32), exactly(1)},
          .nic_in = {exactly(0), exactly(0.32), exactly(0)},
          .uplink = Uplink{.hosts = 16, .oversubscription = 3, .alpha_us = exactly(2)},
          .compute = Compute{exactly(2), exactly(0.02), exactly(0.1)},
          .jitter_sigma = 0.03};
}

Machine read_machine(const std::string& path) {
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  if (in.is_open() && !in.bad()) return parse_machine(text, printable(path));
  throw SimulationError("cannot read \"" + printable(path) + "\": " + std::strerror(errno),
                        "pass a machine as JSON; docs/simulation.md has one");
}

std::string to_json(const Machine& machine) {
  nlohmann::ordered_json json;
  json["ranks_per_host"] = machine.ranks_per_host;
  if (machine.cores_per_host > 0) json["cores_per_host"] = machine.cores_per_host;
  if (machine.hosts) json["hosts"] = *machine.hosts;
  json["memory"] = {{"alpha_us", json_of(machine.memory.alpha_us)},
                    {"beta_ns_per_byte", json_of(machine.memory.beta_ns_per_byte)},
                    {"gamma_ns_per_byte", json_of(machine.memory.gamma_ns_per_byte)}};
  json["nic_out"] = json_of(machine.nic_out);
  json["nic_in"] = json_of(machine.nic_in);
  if (machine.uplink) {
    json["uplink"] = {{"hosts", machine.uplink->hosts}, {"oversubscription", machine.uplink->oversubscription}};
    json["uplink"]["alpha_us"] = json_of(machine.uplink->alpha_us);
  }
  if (machine.compute) {
    json["compute"] = {{"op_us", json_of(machine.compute->op_us)},
                       {"ns_per_flop", json_of(machine.compute->ns_per_flop)},
                       {"ns_per_byte", json_of(machine.compute->ns_per_byte)}};
  }
  if (machine.jitter_sigma > 0) json["jitter"] = {{"sigma", machine.jitter_sigma}};
  return json.dump(2) + "\n";
}

}  // namespace serried::simulation
