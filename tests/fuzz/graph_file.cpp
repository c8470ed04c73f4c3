// Files of graphs. An input is the content of a file; one that begins with "ids " is packed into a well-formed archive
// first.
#include "tests/fuzz/target.h"

#include <ATen/ops/zeros.h>

#include <charconv>
#include <cstdio>
#include <fstream>
#include <memory>
#include <unistd.h>

#include "serried/graph/text/archive.h"
#include "serried/graph/text/serialize.h"

namespace serried::fuzz {
namespace {

constexpr std::string_view kIds = "ids ";

// A file of its own for each process, gone with it.
class ScratchFile {
 public:
  ScratchFile() : path_("/tmp/serried_fuzz_" + std::to_string(::getpid())) {}
  ~ScratchFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// "ids 0 3 -1\n<text>": an archive of the text with a tensor of two elements for each id.
graph::Archive archive_of(std::string_view bytes) {
  const size_t end = std::min(bytes.find('\n'), bytes.size());
  std::string_view numbers = bytes.substr(kIds.size(), end - std::min(end, kIds.size()));
  graph::Archive archive;
  while (!numbers.empty()) {
    int64_t id = 0;
    const auto [stop, error] = std::from_chars(numbers.data(), numbers.data() + numbers.size(), id);
    if (error == std::errc()) {
      archive.ids.push_back(id);
      archive.tensors.push_back(at::zeros({2}));
    }
    numbers.remove_prefix(std::max<size_t>(size_t(stop - numbers.data()), 1));
  }
  archive.text = bytes.substr(std::min(end + 1, bytes.size()));
  return archive;
}

}  // namespace

void run_graph_file(std::string_view bytes) {
  static const ScratchFile file;
  std::ofstream out(file.path(), std::ios::binary);
  if (bytes.starts_with(kIds)) {
    graph::pack(archive_of(bytes), out);
  } else {
    out << bytes;
  }
  out.close();
  std::optional<graph::Graph> graph;
  if (!succeeds<c10::ValueError>([&] { graph = graph::load(file.path()); })) return;
  for (const graph::Value& value : graph->values()) {
    if (!value.tensor.defined()) continue;
    require(graph::meta_of(value.tensor).sizes == value.meta.sizes, "a tensor that does not fit its value");
  }
  const std::string text = graph::to_text(*graph);
  graph::save(*graph, file.path());
  require(graph::to_text(graph::load(file.path())) == text, "a graph that does not come back from its file");
}

}  // namespace serried::fuzz
