// What a score says.
#include "tests/conformance/report.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <fstream>
#include <iomanip>
#include <ostream>
#include <sstream>

namespace serried::testing {
namespace {

double percent(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : 100.0 * double(part) / double(whole);
}

void add(Counts& counts, const Outcome& outcome) {
  counts.combinations += 1;
  counts.right += outcome.status == Status::right;
  counts.raises += outcome.status == Status::raises;
  counts.wrong += outcome.status == Status::wrong;
  counts.defaults += outcome.took_default;
}

bool is_listed(const Outcome& outcome, const std::string& kind) {
  if (kind == "default") return outcome.took_default;
  return kind == "raises" ? outcome.status == Status::raises : outcome.status == Status::wrong;
}

constexpr int kNameWidth = 52;

void print_row(std::ostream& out, const std::string& name, const Counts& counts, const std::string& other) {
  out << std::left << std::setw(kNameWidth) << name << std::right << std::setw(8) << counts.combinations << std::setw(8)
      << counts.right << std::setw(8) << counts.raises << std::setw(8) << counts.wrong << std::setw(8)
      << counts.defaults << std::setw(10) << other << "\n";
}

nlohmann::json to_json(const Counts& counts) {
  return {{"combinations", counts.combinations},
          {"right", counts.right},
          {"raises", counts.raises},
          {"wrong", counts.wrong},
          {"default", counts.defaults}};
}

}  // namespace

double Counts::default_percent() const {
  return percent(defaults, combinations);
}

CountsByOverload count(const Score& score) {
  CountsByOverload counts;
  for (const Trial& trial : score.trials) add(counts[score.files[trial.file].name], trial.outcome);
  return counts;
}

Counts total(const CountsByOverload& counts) {
  Counts sum;
  for (const auto& [name, each] : counts) {
    sum.combinations += each.combinations;
    sum.right += each.right;
    sum.raises += each.raises;
    sum.wrong += each.wrong;
    sum.defaults += each.defaults;
  }
  return sum;
}

CountsByOverload read_counts(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot read ", path);
  CountsByOverload counts;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string name;
    Counts each;
    TORCH_CHECK(words >> name >> each.combinations >> each.right >> each.raises >> each.wrong, path, ": ", line);
    counts[name] = each;
  }
  return counts;
}

std::vector<std::string> worse_than(const CountsByOverload& reference, const CountsByOverload& counts) {
  std::vector<std::string> names;
  for (const auto& [name, each] : counts) {
    const auto other = reference.find(name);
    if (other != reference.end() && each.right < other->second.right) names.push_back(name);
  }
  return names;
}

bool keeps_limits(const Counts& totals) {
  return totals.wrong <= kMaxWrong && totals.raises <= kMaxRaises && totals.default_percent() <= kMaxDefaultPercent;
}

void print_table(std::ostream& out, const CountsByOverload& counts, const CountsByOverload& reference) {
  out << std::left << std::setw(kNameWidth) << "overload" << std::right << std::setw(8) << "all" << std::setw(8)
      << "right" << std::setw(8) << "raises" << std::setw(8) << "wrong" << std::setw(8) << "default" << std::setw(10)
      << "PyTorch"
      << "\n";
  Counts other;
  for (const auto& [name, each] : counts) {
    const auto found = reference.find(name);
    if (found != reference.end()) other.right += found->second.right;
    if (each.fully_right() && each.defaults == 0) continue;
    print_row(out, name, each, found == reference.end() ? "-" : std::to_string(found->second.right));
  }
  const Counts sum = total(counts);
  print_row(out, "total", sum, reference.empty() ? "-" : std::to_string(other.right));
  const int64_t fully =
      std::count_if(counts.begin(), counts.end(), [](const auto& entry) { return entry.second.fully_right(); });
  out << std::fixed << std::setprecision(2) << "right " << percent(sum.right, sum.combinations) << " %, raises "
      << percent(sum.raises, sum.combinations) << " %, wrong " << percent(sum.wrong, sum.combinations)
      << " %, replicate default " << sum.default_percent() << " %; overloads fully right " << fully << " of "
      << counts.size() << "\n";
}

void print_list(std::ostream& out, const Score& score, const std::string& kind) {
  for (const Trial& trial : score.trials) {
    if (!is_listed(trial.outcome, kind)) continue;
    out << kind << " " << describe(score, trial);
    if (!trial.outcome.text.empty()) out << " :: " << trial.outcome.text;
    out << "\n";
  }
}

void write_json(const std::string& path, const CountsByOverload& counts) {
  nlohmann::json overloads;
  for (const auto& [name, each] : counts) overloads[name] = to_json(each);
  std::ofstream file(path);
  TORCH_CHECK(file, "cannot write ", path);
  file << nlohmann::json{{"total", to_json(total(counts))}, {"overloads", overloads}}.dump(1) << "\n";
}

}  // namespace serried::testing
