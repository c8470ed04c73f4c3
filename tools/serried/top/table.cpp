// Columns, their order of importance, and what to leave out.
#include "tools/serried/top/table.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <nlohmann/json.hpp>

#include "serried/base/text.h"
#include "tools/serried/top/text.h"

namespace serried::top {
namespace {

constexpr const char* kBold = "\x1b[1m";
constexpr const char* kReverse = "\x1b[7m";
constexpr const char* kReset = "\x1b[0m";

struct Column {
  std::string title;
  size_t least_width;   // so that the columns stay where they are
  bool right;           // numbers
  size_t needed_width;  // of the window: narrower ones do without it
  std::function<std::string(const Row&)> text;
};

std::string rank_text(const Row& row) {
  return std::to_string(row.rank) + (row.thread < 0 ? "" : "." + std::to_string(row.thread));
}

std::string percent_text(double percent) {
  return percent < 0 ? "-" : std::to_string(int(percent + 0.5)) + "%";
}

std::string memory_text(const Row& row, int64_t bytes) {
  return row.state == State::gone ? "-" : short_bytes(bytes);
}

std::string waits_on_text(const Row& row) {
  if (row.state != State::waiting) return "";
  return row.knows_on_whom ? list_text(row.waits_on) : "?";
}

std::string call_and_user(const Row& row) {
  if (row.place.call.empty()) return row.state == State::gone ? "" : "no group seen";
  return row.place.part_of.empty() ? row.place.call : row.place.call + ", " + row.place.part_of;
}

std::string call_bytes(const Row& row) {
  return row.place.bytes < 0 ? "" : detail::bytes_text(row.place.bytes);
}

bool any_steps(const Snapshot& snapshot) {
  return std::any_of(snapshot.rows.begin(), snapshot.rows.end(), [](const Row& row) { return row.has_steps; });
}

std::vector<Column> columns_for(const Snapshot& snapshot, size_t width) {
  const bool steps = any_steps(snapshot);
  const std::vector<Column> all = {
      {"rank", 4, true, 0, rank_text},
      {"pid", 4, true, 0, [](const Row& row) { return row.pid == 0 ? "-" : std::to_string(row.pid); }},
      {"state", 7, false, 0, [](const Row& row) { return std::string(state_text(row.state)); }},
      {"step/s", 6, true, steps ? 0 : ~size_t(0), [](const Row& row) { return rate_text(row.steps_per_second); }},
      {"call/s", 6, true, size_t(steps ? 100 : 0), [](const Row& row) { return rate_text(row.calls_per_second); }},
      {"cpu", 4, true, 60, [](const Row& row) { return percent_text(row.cpu_percent); }},
      {"mem", 4, true, 60, [](const Row& row) { return memory_text(row, row.resident_bytes); }},
      {"shm", 4, true, 110, [](const Row& row) { return memory_text(row, row.shared_bytes); }},
      {"for", 5, true, 0, [](const Row& row) { return row.waits_seconds < 0 ? "" : duration_text(row.waits_seconds); }},
      {"waits on", 8, false, 0, waits_on_text},
      {"last call", 9, false, 0, call_and_user},
      {"bytes", 8, true, 100, call_bytes},
      {"group", 5, false, 120, [](const Row& row) { return row.place.group; }},
  };
  std::vector<Column> chosen;
  for (const Column& column : all) {
    if (column.needed_width <= width) chosen.push_back(column);
  }
  return chosen;
}

std::string cut(std::string text, size_t width) {
  if (text.size() <= width) return text;
  text.resize(width);
  for (size_t i = width - std::min<size_t>(width, 2); i < width; ++i) text[i] = '.';
  return text;
}

std::string padded(const std::string& text, size_t width, bool right) {
  const std::string space(width - std::min(width, text.size()), ' ');
  return right ? space + text : text + space;
}

const char* colour_of(State state) {
  switch (state) {
    case State::running: return "\x1b[32m";
    case State::waiting: return "\x1b[33m";
    case State::stopped:
    case State::gone: return "\x1b[31m";
  }
  return "";
}

/// Texts of all rows, and widths that fit the window.
class Grid {
 public:
  Grid(const std::vector<const Row*>& rows, std::vector<Column> columns, const TableOptions& options)
      : columns_(std::move(columns)), options_(options) {
    for (const Column& column : columns_) widths_.push_back(column.least_width);
    for (const Row* row : rows) {
      std::vector<std::string>& line = lines_.emplace_back();
      for (size_t i = 0; i < columns_.size(); ++i) {
        line.push_back(columns_[i].text(*row));
        widths_[i] = std::max(widths_[i], line.back().size());
      }
      states_.push_back(row->state);
    }
    shrink("waits on", 12);
    shrink("group", 24);
    shrink("last call", 0);
  }

  std::string title() const {
    std::vector<std::string> titles;
    for (const Column& column : columns_) titles.push_back(column.title);
    const std::string text = line_of(titles, nullptr);
    return options_.coloured ? kReverse + padded(text, options_.width, false) + kReset : text;
  }

  std::vector<std::string> lines() const {
    std::vector<std::string> result;
    for (size_t i = 0; i < lines_.size(); ++i) result.push_back(line_of(lines_[i], &states_[i]));
    return result;
  }

 private:
  size_t total() const {
    size_t sum = columns_.size() - 1;
    for (const size_t width : widths_) sum += width;
    return sum;
  }

  // Takes from the column what the line has too much, down to `least` or its title.
  void shrink(const std::string& title, size_t least) {
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (columns_[i].title != title || total() <= options_.width) continue;
      const size_t too_much = total() - options_.width;
      const size_t floor = std::max(least, title.size());
      if (widths_[i] > floor) widths_[i] -= std::min(widths_[i] - floor, too_much);
    }
  }

  std::string line_of(const std::vector<std::string>& texts, const State* state) const {
    std::string line;
    size_t drawn = 0;
    for (size_t i = 0; i < texts.size() && drawn < options_.width; ++i) {
      const size_t room = std::min(widths_[i], options_.width - drawn);
      const std::string text = padded(cut(texts[i], room), room, columns_[i].right);
      const bool is_coloured = options_.coloured && state != nullptr && columns_[i].title == "state";
      line += is_coloured ? colour_of(*state) + text + kReset : text;
      drawn += room;
      if (i + 1 < texts.size() && drawn < options_.width) {
        line += ' ';
        ++drawn;
      }
    }
    if (state == nullptr || !options_.coloured) line.erase(line.find_last_not_of(' ') + 1);
    return line;
  }

  std::vector<Column> columns_;
  const TableOptions& options_;
  std::vector<size_t> widths_;
  std::vector<std::vector<std::string>> lines_;
  std::vector<State> states_;
};

std::string headline(const Snapshot& snapshot, const TableOptions& options) {
  const Job& job = snapshot.job;
  std::string text = "serried top  job " + job.id + "  " + std::to_string(job.world_size) +
                     (job.world_size == 1 ? " rank" : " ranks") + "  " + duration_text(job.seconds);
  if (job.attempt > 0) text += "  restart " + std::to_string(job.attempt);
  text = cut(text + "  " + job.command, options.width);
  return options.coloured ? kBold + text + kReset : text;
}

// Sentences in lines; what follows the first is set in.
std::vector<std::string> wrapped(const std::vector<std::string>& notes, size_t width) {
  std::vector<std::string> lines;
  for (std::string rest : notes) {
    std::string indent;
    while (indent.size() + rest.size() > width && width > 10) {
      const size_t room = width - indent.size();
      const size_t space = rest.rfind(' ', room);
      const size_t end = space == std::string::npos || space == 0 ? room : space;
      lines.push_back(indent + rest.substr(0, end));
      rest = rest.substr(std::min(rest.size(), end + (end == space ? 1 : 0)));
      indent = "  ";
    }
    lines.push_back(cut(indent + rest, width));
  }
  return lines;
}

// Where not all rows have room: those that are waited for, stopped or gone, then those that wait; by rank among equals.
std::vector<const Row*> rows_to_show(const Snapshot& snapshot, size_t room) {
  std::vector<const Row*> rows;
  for (const Row& row : snapshot.rows) rows.push_back(&row);
  if (rows.size() <= room) return rows;
  std::vector<int> waited_for;
  for (const Row& row : snapshot.rows) waited_for.insert(waited_for.end(), row.waits_on.begin(), row.waits_on.end());
  const auto importance = [&](const Row* row) {
    const int number = row->thread < 0 ? row->rank : row->thread;
    if (row->state == State::stopped || row->state == State::gone) return 0;
    return std::count(waited_for.begin(), waited_for.end(), number) > 0 ? 0 : row->state == State::waiting ? 1 : 2;
  };
  std::stable_sort(rows.begin(), rows.end(), [&](const Row* a, const Row* b) { return importance(a) < importance(b); });
  rows.resize(room);
  return rows;
}

nlohmann::json known(double value) {
  return value < 0 ? nlohmann::json() : nlohmann::json(value);
}

nlohmann::json json_of(const Row& row) {
  return {{"rank", row.rank},
          {"thread", row.thread < 0 ? nlohmann::json() : nlohmann::json(row.thread)},
          {"pid", row.pid == 0 ? nlohmann::json() : nlohmann::json(row.pid)},
          {"state", state_text(row.state)},
          {"steps_per_second", known(row.steps_per_second)},
          {"calls_per_second", known(row.calls_per_second)},
          {"cpu_percent", known(row.cpu_percent)},
          {"resident_bytes", row.resident_bytes},
          {"shared_bytes", row.shared_bytes},
          {"call", row.place.call},
          {"part_of", row.place.part_of},
          {"sequence", row.place.sequence},
          {"bytes", row.place.bytes < 0 ? nlohmann::json() : nlohmann::json(row.place.bytes)},
          {"group", row.place.group},
          {"waits_seconds", known(row.waits_seconds)},
          {"waits_on", row.knows_on_whom ? nlohmann::json(row.waits_on) : nlohmann::json()}};
}

}  // namespace

std::vector<std::string> table_of(const Snapshot& snapshot, const TableOptions& options) {
  std::vector<std::string> notes = snapshot.notes;
  if (any_steps(snapshot)) notes.push_back("a step is a backward pass that DistributedDataParallel averaged");
  std::vector<std::string> below = wrapped(notes, options.width);
  std::vector<std::string> lines = {headline(snapshot, options)};
  // Of a low window, the ranks get half at least.
  constexpr size_t kAround = 3;  // headline, titles, and what parts ranks and notes
  const size_t left = std::max(options.height, kAround + 1) - kAround;
  if (options.height != 0) below.resize(std::min(below.size(), left / 2));
  const size_t room = options.height == 0 ? snapshot.rows.size() : left - below.size();
  const std::vector<const Row*> rows = rows_to_show(snapshot, room);
  const Grid grid(rows, columns_for(snapshot, options.width), options);
  lines.push_back(grid.title());
  for (std::string& line : grid.lines()) lines.push_back(std::move(line));
  if (rows.size() < snapshot.rows.size()) {
    lines.push_back(cut(
        "... " + std::to_string(snapshot.rows.size() - rows.size()) + " more ranks: enlarge the window, or use --once",
        options.width));
  } else if (!below.empty()) {
    lines.push_back("");
  }
  lines.insert(lines.end(), below.begin(), below.end());
  if (options.height != 0) lines.resize(std::min(lines.size(), options.height));
  return lines;
}

std::string json_of(const Snapshot& snapshot) {
  nlohmann::json rows = nlohmann::json::array();
  for (const Row& row : snapshot.rows) rows.push_back(json_of(row));
  const Job& job = snapshot.job;
  const nlohmann::json document = {
      {"job", job.id},          {"launcher", job.launcher}, {"command", job.command}, {"world_size", job.world_size},
      {"restart", job.attempt}, {"seconds", job.seconds},   {"ranks", rows},          {"notes", snapshot.notes}};
  return document.dump(2);
}

}  // namespace serried::top
