// Prints the table of all built-in sharding rules; --write FILE puts it between the markers of docs/rules.md, --check
// FILE fails where it is out of date.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <sstream>

#include "serried/spmd/registry.h"
#include "serried/spmd/rows.h"
#include "serried/tensor/dispatch/handlers.h"
#include "tests/checks/unrecorded_calls.h"
#include "tests/support/sample_call.h"
#include "tests/support/vectors.h"

namespace serried::testing {
namespace {

constexpr std::string_view kBegin = "<!-- begin of the generated table -->\n";
constexpr std::string_view kEnd = "<!-- end of the generated table -->\n";

using NamesByOp = std::map<std::string, std::vector<std::string>, std::less<>>;

// "aten.add.Tensor" as schema name and overload.
std::optional<c10::OperatorHandle> handle_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  const std::string overload = name.substr(dot + 1);
  return c10::Dispatcher::singleton().findSchema(
      {"aten::" + name.substr(5, dot - 5), overload == "default" ? "" : overload});
}

// Recorded overloads by the names that a line of a table may have: "mm", "mm.out".
const NamesByOp& recorded() {
  static const NamesByOp names = [] {
    NamesByOp map;
    for (const std::string& name : vector_names()) {
      const auto op = handle_of(name);
      if (!op || op->schema().name().rfind("aten::_foreach_", 0) == 0) continue;
      const std::string base = spmd::base_name(op->schema());
      map[base].push_back(name);
      map[base + "." + op->schema().overload_name()].push_back(name);
    }
    return map;
  }();
  return names;
}

std::string shapes_of(const spmd::Call& call) {
  std::string text;
  for (const spmd::TensorArg& tensor : call.tensors()) {
    if (!text.empty()) text += " ";
    std::string sizes;
    for (const int64_t size : tensor.sizes) sizes += (sizes.empty() ? "" : ",") + std::to_string(size);
    text += "[" + sizes + "]";
  }
  return text;
}

// Of a rule that goes by shapes: the recorded call with most rows that cut something of several elements.
struct Example {
  std::string text;
  std::string shapes;
  size_t num_rows = 0;
};

bool is_readable(const spmd::Call& call) {
  return !call.tensors().empty() && call.tensors().size() <= 10 && call.tensor(0).numel() > 0;
}

void look_at(const spmd::Call& call, const spmd::RuleEntry& entry, Example& best) {
  if (!is_readable(call)) return;
  const std::string text = entry.dynamic(call);
  if (text.empty()) return;
  const spmd::Rule rule = spmd::parse_or_raise("rules_table", entry.name, text);
  const spmd::Bound bound = spmd::bind(rule, call);
  const std::vector<spmd::Row> rows = spmd::rows(bound);
  const auto num_rows = size_t(std::count_if(rows.begin(), rows.end(), [&](const spmd::Row& row) {
    return row.factor < 0 || bound.factors[size_t(row.factor)].size > 1;
  }));
  if (num_rows > best.num_rows) best = {text, shapes_of(call), num_rows};
}

Example example_of(const spmd::RuleEntry& entry) {
  Example best;
  if (const SampleCall* sample = unrecorded(std::string(entry.name))) look_at(sample->call(), entry, best);
  const auto found = recorded().find(entry.name);
  if (found == recorded().end()) return best;
  for (const std::string& name : found->second) {
    const VectorFile file = load_vectors(name);
    for (const VectorCase& one : file.cases) look_at(SampleCall(file.op.schema(), one.arguments).call(), entry, best);
  }
  return best;
}

// One row of the markdown table: ops that share a rule.
struct Line {
  const char* text = nullptr;
  spmd::DynamicRule dynamic = nullptr;
  Example example;
  std::vector<std::string> ops;
};

std::vector<Line> lines_of(const spmd::RuleTable& table) {
  std::vector<Line> lines;
  for (const spmd::RuleEntry& entry : table.entries) {
    const auto same = [&](const Line& line) {
      if (entry.dynamic != nullptr) return line.dynamic == entry.dynamic;
      return line.text != nullptr && std::string_view(line.text) == entry.text;
    };
    auto line = std::find_if(lines.begin(), lines.end(), same);
    if (line == lines.end()) line = lines.insert(lines.end(), {entry.text, entry.dynamic, {}, {}});
    line->ops.push_back("`" + std::string(entry.name) + "`");
    if (entry.dynamic != nullptr && line->example.text.empty()) line->example = example_of(entry);
  }
  return lines;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

std::string rule_of(const Line& line) {
  if (line.dynamic == nullptr) return "`" + std::string(line.text) + "`";
  if (line.example.text.empty()) return "by shape";
  return "by shape; `" + line.example.text + "` for " + line.example.shapes;
}

std::string handler_names() {
  std::ostringstream out;
  const std::pair<const char*, std::vector<HandlerEntry> (*)()> tables[] = {
      {"random numbers", random_handlers},
      {"what the host reads", host_read_handlers},
      {"reductions", reduction_handlers},
      {"softmax along a cut dim", softmax_handlers},
      {"losses", loss_handlers},
      {"norms over the batch", batch_norm_handlers},
      {"strides and storage", metadata_handlers},
  };
  for (const auto& [what, table] : tables) {
    std::vector<std::string> names;
    for (const HandlerEntry& entry : table()) names.push_back("`" + std::string(entry.op.substr(6)) + "`");
    out << "| " << what << " | " << joined(names) << " |\n";
  }
  return out.str();
}

std::string markdown() {
  std::ostringstream out;
  for (const spmd::RuleTable& table : spmd::rule_tables()) {
    out << "\n### " << table.family << "\n\n| Rule | Ops |\n| --- | --- |\n";
    for (const Line& line : lines_of(table)) out << "| " << rule_of(line) << " | " << joined(line.ops) << " |\n";
  }
  out << "\n### Not by rules alone\n\n| What | Ops |\n| --- | --- |\n" << handler_names() << "\n";
  return out.str();
}

std::string read(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The page with `table` between its markers.
std::string page_with(const std::string& page, const std::string& table) {
  const size_t begin = page.find(kBegin);
  const size_t end = page.find(kEnd);
  TORCH_CHECK(begin != page.npos && end != page.npos, "the page lacks the markers of the generated table");
  return page.substr(0, begin + kBegin.size()) + table + page.substr(end);
}

int run(const std::string& mode, const std::string& path, const std::string& program) {
  const std::string page = read(path);
  const std::string wanted = page_with(page, markdown());
  if (mode == "--write") {
    if (wanted != page) std::ofstream(path) << wanted;
    return 0;
  }
  if (wanted == page) return 0;
  std::cerr << path << ": the table of rules is out of date\n  fix: " << program << " --write " << path << "\n";
  return 1;
}

}  // namespace
}  // namespace serried::testing

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (argc == 3 && (mode == "--write" || mode == "--check")) return serried::testing::run(mode, argv[2], argv[0]);
  if (argc == 1) {
    std::cout << serried::testing::markdown();
    return 0;
  }
  std::cerr << "usage: serried_rules_table [--write FILE | --check FILE]\n";
  return 2;
}
