// Steps as they ran: their costs, their sums, and a line per action both ways.
#include "serried/parallel/pipeline/trace.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <tuple>

#include "serried/base/error.h"
#include "serried/base/text.h"

namespace serried {
namespace {

using Span = PipelineSimulation::Span;

constexpr std::string_view kHead = "rank,action,begin_us,end_us";

struct TracedAction {
  size_t rank;
  PipelineAction action;
  Span span;
};

std::string line_of(size_t rank, const PipelineAction& action, const Span& span) {
  char times[64];
  std::snprintf(times, sizeof times, "%.3f,%.3f", span.begin, span.end);
  return std::to_string(rank) + "," + to_cell(action) + "," + times + "\n";
}

// The text up to the next separator, which it takes off the rest.
std::string_view taken(std::string_view& rest, char separator) {
  const size_t end = std::min(rest.find(separator), rest.size());
  const std::string_view piece = rest.substr(0, end);
  rest.remove_prefix(std::min(end + 1, rest.size()));
  return piece;
}

template <class Number>
std::optional<Number> number_in(std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

std::optional<TracedAction> parse_line(std::string_view line) {
  if (line.ends_with('\r')) line.remove_suffix(1);
  const auto rank = number_in<uint32_t>(taken(line, ','));
  const auto action = parse_cell(taken(line, ','));
  const auto begin = number_in<double>(taken(line, ','));
  const auto end = number_in<double>(line);
  if (!rank || !action || !begin || !end || !(*begin >= 0 && *begin <= *end && std::isfinite(*end)))
    return std::nullopt;
  return TracedAction{*rank, *action, {*begin, *end}};
}

[[noreturn]] void refuse_line(std::string_view line, size_t number) {
  raise<c10::ValueError>({"PipelineTrace",
                          "\"" + detail::printable(line.substr(0, 40)) + "\" in line " + std::to_string(number) +
                              " is no action of a step",
                          "write rank,action,begin_us,end_us with ranks in order: 0,0F3,120.5,180"});
}

}  // namespace

PipelineCosts PipelineTrace::costs() const {
  using Key = std::tuple<PipelineAction::Kind, int64_t, int64_t>;
  const auto key_of = [](const PipelineAction& action) { return Key(action.kind, action.stage, action.microbatch); };
  const auto times = std::make_shared<std::map<Key, double>>();
  for (size_t rank = 0; rank < spans.size(); ++rank) {
    for (size_t i = 0; i < spans[rank].size(); ++i) {
      (*times)[key_of(table.rows()[rank][i])] = spans[rank][i].end - spans[rank][i].begin;
    }
  }
  PipelineCosts costs;
  costs.of = [times, key_of](const PipelineAction& action) { return times->at(key_of(action)); };
  return costs;
}

PipelineSimulation PipelineTrace::measured() const {
  PipelineSimulation result = simulate(table);  // for the peaks, which are those of the table
  result.spans = spans;
  result.makespan = 0;
  double busy = 0;
  for (const auto& row : spans) {
    for (const Span& span : row) {
      busy += span.end - span.begin;
      result.makespan = std::max(result.makespan, span.end);
    }
  }
  result.bubble = result.makespan > 0 ? std::max(0.0, 1 - busy / (result.makespan * double(spans.size()))) : 0;
  return result;
}

std::string PipelineTrace::to_csv() const {
  std::string text = std::string(kHead) + "\n";
  for (size_t rank = 0; rank < spans.size(); ++rank) {
    for (size_t i = 0; i < spans[rank].size(); ++i) text += line_of(rank, table.rows()[rank][i], spans[rank][i]);
  }
  return text;
}

PipelineTrace PipelineTrace::from_csv(std::string_view text) {
  std::vector<PipelineTable::Row> rows;
  std::vector<std::vector<Span>> spans;
  for (size_t number = 1; !text.empty(); ++number) {
    const std::string_view line = taken(text, '\n');
    if (number == 1 && is_pipeline_trace(line)) continue;
    const std::optional<TracedAction> traced = parse_line(line);
    if (!traced || traced->rank + 1 < rows.size() || traced->rank > rows.size()) refuse_line(line, number);
    if (traced->rank == rows.size()) {
      rows.emplace_back();
      spans.emplace_back();
    }
    rows.back().push_back(traced->action);
    spans.back().push_back(traced->span);
  }
  return {PipelineTable(std::move(rows)), std::move(spans)};
}

bool is_pipeline_trace(std::string_view csv) {
  return csv.starts_with(kHead);
}

}  // namespace serried
