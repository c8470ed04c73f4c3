// What a CommDebugMode has seen, as text and as JSON.
#include <nlohmann/json.hpp>

#include <iomanip>
#include <sstream>

#include "serried/base/columns.h"
#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/tensor/debug/comm_debug_state.h"

namespace serried {
namespace {

using nlohmann::json;
using Tallies = std::map<std::string, CommDebugMode::Tally>;

std::string direction(bool backward) {
  return backward ? "backward" : "forward";
}

std::string shown(const std::string& path) {
  return path.empty() ? "(no scope)" : path;
}

void write_totals(std::ostream& out, const Tallies& totals) {
  CommDebugMode::Tally sum;
  for (const auto& [name, tally] : totals) {
    sum.count += tally.count;
    sum.bytes += tally.bytes;
  }
  const RankLabel label = rank_label();
  out << "communication";
  if (label.rank >= 0) out << " of rank " << label.rank << "/" << label.world_size;
  out << ": " << sum.count << (sum.count == 1 ? " call, " : " calls, ") << detail::bytes_text(sum.bytes) << "\n";
  for (const auto& [name, tally] : totals) {
    out << "  " << std::left << std::setw(16) << name << std::right << std::setw(6) << tally.count << "  "
        << detail::bytes_text(tally.bytes) << "\n";
  }
}

void write_regions(std::ostream& out, const std::vector<CommDebugMode::Region>& regions) {
  out << "by scope\n";
  for (const CommDebugMode::Region& region : regions) {
    out << "  " << std::left << std::setw(30) << shown(region.path) << std::setw(9) << direction(region.backward);
    out << (region.calls.empty() ? "" : " ") << detail::calls_text(region.calls) << "\n";
  }
}

void write_modules(std::ostream& out, const std::vector<CommDebugMode::ModuleCalls>& modules) {
  std::vector<detail::TextRow> rows = {{"by module", "forward", "backward"}};
  for (const CommDebugMode::ModuleCalls& module : modules) {
    rows.push_back({"  " + module.name(), detail::calls_text(module.forward), detail::calls_text(module.backward)});
  }
  out << detail::columns(rows);
}

// Equal lines once, with their number.
void write_redistributions(std::ostream& out, const std::vector<CommDebugMode::Redistribution>& list) {
  std::vector<std::pair<std::string, int64_t>> lines;
  for (const CommDebugMode::Redistribution& each : list) {
    const std::string text =
        c10::str(each.op, " ", each.tensor, " ", to_string(each.from), " -> ", to_string(each.to), ", ",
                 each.implicit ? "implicit" : "explicit", ", ", detail::bytes_text(each.bytes), ", ",
                 direction(each.backward), " of ", shown(each.path), each.module.empty() ? "" : ", ", each.module);
    if (lines.empty() || lines.back().first != text) lines.emplace_back(text, 0);
    ++lines.back().second;
  }
  out << "redistributions\n";
  for (const auto& [text, count] : lines) out << "  " << text << (count > 1 ? c10::str(" x", count) : "") << "\n";
}

json to_json(const Tallies& tallies) {
  json result = json::object();
  for (const auto& [name, tally] : tallies) result[name] = {{"count", tally.count}, {"bytes", tally.bytes}};
  return result;
}

json to_json(const CommDebugMode::Redistribution& each) {
  return {
      {"op", each.op},        {"tensor", each.tensor},     {"from", to_string(each.from)}, {"to", to_string(each.to)},
      {"bytes", each.bytes},  {"implicit", each.implicit}, {"backward", each.backward},    {"scope", each.path},
      {"module", each.module}};
}

}  // namespace

std::string detail::calls_text(const std::map<std::string, CommDebugMode::Tally>& calls) {
  std::string text;
  for (const auto& [name, tally] : calls) {
    text += c10::str(text.empty() ? "" : ", ", name, " x", tally.count, " (", bytes_text(tally.bytes), ")");
  }
  return text;
}

std::string CommDebugMode::report() const {
  std::ostringstream out;
  write_totals(out, state_->totals());
  if (!state_->regions.empty()) write_regions(out, state_->regions);
  if (state_->tracker && !by_module().empty()) write_modules(out, by_module());
  if (!state_->redistributions.empty()) write_redistributions(out, state_->redistributions);
  if (!state_->defaults.empty()) out << "replicate default, for want of a rule\n";
  for (const auto& [op, count] : state_->defaults) out << "  " << op << " x" << count << "\n";
  if (!state_->ops.empty()) out << "ops: on DTensors, on plain tensors\n";
  for (const auto& [op, count] : state_->ops) {
    out << "  " << std::left << std::setw(40) << op << std::right << std::setw(6) << count.distributed << std::setw(6)
        << count.plain << "\n";
  }
  return out.str();
}

std::string CommDebugMode::json() const {
  nlohmann::json document = {{"collectives", to_json(state_->totals())},
                             {"scopes", nlohmann::json::array()},
                             {"redistributions", nlohmann::json::array()},
                             {"defaults", state_->defaults},
                             {"ops", nlohmann::json::object()}};
  const RankLabel label = rank_label();
  if (label.rank >= 0) document["rank"] = label.rank;
  for (const Region& each : state_->regions) {
    document["scopes"].push_back({{"path", each.path}, {"backward", each.backward}, {"calls", to_json(each.calls)}});
  }
  if (state_->tracker) document["modules"] = nlohmann::json::array();
  for (const ModuleCalls& each : state_->tracker ? by_module() : std::vector<ModuleCalls>()) {
    document["modules"].push_back(
        {{"module", each.name()}, {"forward", to_json(each.forward)}, {"backward", to_json(each.backward)}});
  }
  for (const Redistribution& each : state_->redistributions) document["redistributions"].push_back(to_json(each));
  for (const auto& [op, count] : state_->ops) {
    document["ops"][op] = {{"distributed", count.distributed}, {"plain", count.plain}};
  }
  return document.dump(1);
}

}  // namespace serried
