// Tables and JSON.
#include "benchmarks/support/results.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

namespace serried::bench {

void print_table(const std::vector<Row>& rows) {
  if (rows.empty()) return;
  const std::string& unit = rows.front().unit;
  std::printf("\n%-42s %12s %12s  %-22s %7s %7s\n", rows.front().bench.c_str(), ("ours, " + unit).c_str(),
              ("theirs, " + unit).c_str(), "reference", "ratio", "goal");
  for (const Row& row : rows) {
    char goal[32] = "-";
    if (row.goal > 0) std::snprintf(goal, sizeof(goal), "%.2f %s", row.goal, row.ratio() <= row.goal ? "ok" : "MISSED");
    std::printf("%-42s %12.2f %12.2f  %-22s %7.2f  %s\n", row.name.c_str(), row.ours, row.reference,
                row.reference_name.c_str(), row.ratio(), goal);
  }
  std::fflush(stdout);
}

void append_json(const std::vector<Row>& rows, const std::string& path) {
  nlohmann::json all = nlohmann::json::array();
  if (std::ifstream in(path); in) all = nlohmann::json::parse(in);
  for (const Row& row : rows) {
    all.push_back({{"bench", row.bench},
                   {"case", row.name},
                   {"ours", row.ours},
                   {"reference", row.reference},
                   {"reference_name", row.reference_name},
                   {"ratio", row.ratio()},
                   {"unit", row.unit},
                   {"goal", row.goal > 0 ? nlohmann::json(row.goal) : nlohmann::json()}});
  }
  std::ofstream(path) << all.dump(1) << "\n";
}

double number_in_lines(const std::string& path, const std::string& name, const std::string& what) {
  std::ifstream lines(path);
  for (std::string line; std::getline(lines, line);) {
    const auto object = nlohmann::json::parse(line);
    if (object["case"] == name && object.contains(what)) return object[what];
  }
  return 0;
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

std::string size_text(long bytes) {
  return bytes >= 1 << 20 ? std::to_string(bytes >> 20) + " MiB" : std::to_string(bytes >> 10) + " KiB";
}

}  // namespace serried::bench
