// Graphs as text, and what goes with it into a file.
#include "serried/graph/text/serialize.h"

#include <filesystem>
#include <fstream>
#include <optional>

#include "serried/base/error.h"
#include "serried/graph/text/archive.h"
#include "serried/graph/text/layout_text.h"
#include "serried/graph/text/literal.h"
#include "serried/graph/text/text.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

using c10::IValue;

// Only what is not as for most.
std::string value_line(const Value& value, size_t id) {
  const TensorMeta& meta = value.meta;
  std::string text = c10::str("value %", id, " ", kind_name(value.kind));
  if (value.kind != ValueKind::work) {
    text += " " + meta.to_string();
    if (meta.strides != serried::contiguous_strides(meta.sizes)) text += " strides " + numbers_text(meta.strides);
    if (meta.offset != 0) text += c10::str(" offset ", meta.offset);
    if (meta.device != at::kCPU) text += " device " + meta.device.str();
  }
  if (value.storage >= 0) text += c10::str(" storage ", value.storage);
  if (value.arena_offset != 0) text += c10::str(" at ", value.arena_offset);
  if (!value.name.empty()) text += " name " + quoted_text(value.name);
  return text + "\n";
}

std::string id_text(ValueId id) {
  return id == kNoValue ? "undefined" : "%" + std::to_string(id);
}

std::string ids_text(const std::vector<ValueId>& ids) {
  std::string text = "[";
  for (ValueId id : ids) text += (text.size() > 1 ? ", " : "") + id_text(id);
  return text + "]";
}

// One line for each DTensor.
std::string layout_lines(std::string_view word, const std::vector<ValueId>& ids, const DTensorLayouts& layouts) {
  std::string text;
  for (size_t i = 0; i < ids.size(); ++i) {
    const DTensorLayout* layout = find_layout(layouts, i);
    if (layout != nullptr) text += c10::str(word, i, " placed ", layout_text(*layout), "\n");
  }
  return text;
}

// Nothing where it is not known: so it was before there were phases. Nor of a collective, which its op shows.
std::string phase_text(Phase phase) {
  return phase == Phase::other || phase == Phase::collective ? "" : c10::str(" phase ", phase_name(phase));
}

void check_has_text(const Node& node) {
  for (size_t k = 0; k < node.arguments.size(); ++k) {
    const Argument& argument = node.arguments[k];
    const bool is_generator = argument.kind == Argument::Kind::generator;
    if (!is_generator && (argument.kind != Argument::Kind::constant || has_literal(argument.constant))) continue;
    raise<c10::ValueError>(
        {"save",
         c10::str("argument \"", node.op.schema().arguments()[k].name(), "\" of ",
                  c10::toString(node.op.operator_name()), " is a ",
                  is_generator ? "generator" : literal_text(argument.constant), ", which exists in this process only"),
         "use the default generator in the captured function, and no op that takes a storage"});
  }
}

bool has_saved_data(const Value& value, const SaveOptions& options) {
  return value.kind == ValueKind::constant || (value.kind == ValueKind::persistent && options.persistent_data);
}

void write_file(const std::string& path, const Archive& archive) {
  const std::string partial = path + ".partial";
  std::ofstream out(partial, std::ios::binary);
  pack(archive, out);
  out.close();
  std::error_code error;
  if (out) std::filesystem::rename(partial, path, error);
  if (out && !error) return;
  std::filesystem::remove(partial, error);
  raise<c10::ValueError>({"save", "cannot write " + path, "give the path of a file in a folder that can be written"});
}

Archive read_archive(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  const std::string fix = "give the path of a file that serried::graph::save wrote";
  if (!in || std::filesystem::is_directory(path)) raise<c10::ValueError>({"load", "cannot read " + path, fix});
  std::optional<Archive> archive = unpack(in);
  if (archive && archive->ids.size() == archive->tensors.size()) return std::move(*archive);
  raise<c10::ValueError>(
      {"load", c10::str(path, " (", std::filesystem::file_size(path), " bytes) is no saved graph, or a damaged one"),
       fix});
}

std::string name_of(const Graph& graph, ValueId id) {
  return value_text(graph, id) + " is " + graph.value(id).meta.to_string();
}

bool are_alike(const TensorMeta& a, const TensorMeta& b) {
  return a.sizes == b.sizes && a.strides == b.strides && a.dtype == b.dtype && a.device == b.device;
}

void check_saved(const std::string& path, const Graph& graph, int64_t id, const at::Tensor& t) {
  const std::string fix = "give the path of a file that serried::graph::save wrote";
  if (id < 0 || id >= int64_t(graph.values().size())) {
    raise<c10::ValueError>({"load", c10::str(path, " has a tensor for value %", id, ", which its graph lacks"), fix});
  }
  const std::string name = name_of(graph, ValueId(id));
  if (!t.defined()) raise<c10::ValueError>({"load", c10::str(path, ": ", name, ", and its tensor is undefined"), fix});
  const TensorMeta got = meta_of(t);
  if (are_alike(got, graph.value(ValueId(id)).meta)) return;
  raise<c10::ValueError>({"load",
                          c10::str(path, ": ", name, ", and its tensor ", got.to_string(), " with strides ",
                                   numbers_text(got.strides), " on ", got.device.str()),
                          fix});
}

// Without the tensor's gradient, which the graph must not keep alive.
at::Tensor fitting(const Graph& graph, ValueId id, const at::Tensor& t) {
  const std::string fix = "bind the tensors that the function was captured with, or others of the same layout";
  if (!t.defined())
    raise<c10::ValueError>({"bind_persistent", name_of(graph, id) + ", and the tensor is undefined", fix});
  const at::Tensor part = part_of(t);
  const TensorMeta &want = graph.value(id).meta, got = meta_of(part);
  if (are_alike(got, want)) return part.variable_data();
  raise<c10::ValueError>({"bind_persistent",
                          c10::str(name_of(graph, id), " with strides ", numbers_text(want.strides), " on ",
                                   want.device.str(), ", and the tensor ", got.to_string(), " with strides ",
                                   numbers_text(got.strides), " on ", got.device.str()),
                          fix});
}

}  // namespace

std::string to_text(const Graph& graph) {
  std::string text = std::string(kFormat) + "\n";
  if (graph.arena_bytes() > 0) text += c10::str("arena ", graph.arena_bytes(), "\n");
  for (size_t id = 0; id < graph.values().size(); ++id) text += value_line(graph.value(ValueId(id)), id);
  text += "inputs " + ids_text(graph.inputs()) + "\n";
  text += layout_lines("input ", graph.inputs(), graph.input_layouts());
  for (size_t i = 0; i < graph.nodes().size(); ++i) {
    check_has_text(graph.nodes()[i]);
    text += "node " + line_of(graph, i, LineStyle::complete) + phase_text(graph.nodes()[i].phase) + "\n";
  }
  for (const Gradient& gradient : graph.gradients()) {
    text += "gradient " + id_text(gradient.value) + " of " + quoted_text(gradient.parameter) + "\n";
  }
  text += "outputs " + ids_text(graph.outputs()) + "\n";
  text += layout_lines("output ", graph.outputs(), graph.output_layouts());
  return text + std::string(kEnd) + "\n";
}

void save(const Graph& graph, const std::string& path, const SaveOptions& options) {
  Archive archive{.text = to_text(graph)};
  for (size_t id = 0; id < graph.values().size(); ++id) {
    const Value& value = graph.value(ValueId(id));
    if (!value.tensor.defined() || !has_saved_data(value, options)) continue;
    archive.ids.push_back(int64_t(id));
    archive.tensors.push_back(value.tensor.detach());
  }
  write_file(path, archive);
}

Graph load(const std::string& path) {
  Archive archive = read_archive(path);
  Graph graph = parse_graph(archive.text);
  for (size_t i = 0; i < archive.ids.size(); ++i) {
    check_saved(path, graph, archive.ids[i], archive.tensors[i]);
    graph.value(ValueId(archive.ids[i])).tensor = std::move(archive.tensors[i]);
  }
  return graph;
}

std::vector<ValueId> persistent_values(const Graph& graph) {
  std::vector<ValueId> found;
  for (size_t id = 0; id < graph.values().size(); ++id) {
    if (graph.value(ValueId(id)).kind == ValueKind::persistent) found.push_back(ValueId(id));
  }
  return found;
}

void bind_persistent(Graph& graph, const std::vector<at::Tensor>& tensors) {
  const std::vector<ValueId> ids = persistent_values(graph);
  if (ids.size() != tensors.size()) {
    raise<c10::ValueError>({"bind_persistent",
                            c10::str(tensors.size(), " tensors for ", ids.size(), " persistent values"),
                            "give one tensor for each of serried::graph::persistent_values(graph), in that order"});
  }
  std::vector<at::Tensor> fitted;
  for (size_t i = 0; i < ids.size(); ++i) fitted.push_back(fitting(graph, ids[i], tensors[i]));
  for (size_t i = 0; i < ids.size(); ++i) graph.value(ids[i]).tensor = fitted[i];
}

void bind_persistent_by_name(Graph& graph, const std::map<std::string, at::Tensor>& tensors) {
  std::vector<at::Tensor> ordered;
  for (ValueId id : persistent_values(graph)) {
    const auto found = tensors.find(graph.value(id).name);
    if (found == tensors.end()) {
      raise<c10::ValueError>({"bind_persistent", "there is no tensor for " + value_text(graph, id),
                              "name every persistent value, and give a tensor for each name"});
    }
    ordered.push_back(found->second);
  }
  bind_persistent(graph, ordered);
}

}  // namespace serried::graph
