// What benchmarks measure: rows of ours beside a reference, as a table for people and as JSON for programs.
#pragma once

#include <string>
#include <vector>

namespace serried::bench {

struct Row {
  std::string bench;
  std::string name;  // the case
  double ours = 0;
  double reference = 0;
  std::string reference_name;
  double goal = 0;          // the ratio to reach; 0: none is set
  std::string unit = "us";  // of ours and the reference; one table, one unit

  double ratio() const { return ours / reference; }
};

/// Prints the rows as one table, with the ratio and whether the goal is met.
void print_table(const std::vector<Row>& rows);

/// Adds the rows to the list in the JSON file at `path`, which is made if it is not there.
void append_json(const std::vector<Row>& rows, const std::string& path);

/// A number that another program has left for a case in a file of JSON lines; 0 where there is none.
double number_in_lines(const std::string& path, const std::string& name, const std::string& what);

/// The median; the values are reordered.
double median(std::vector<double>& values);

/// "1 KiB", "64 MiB"
std::string size_text(long bytes);

}  // namespace serried::bench
