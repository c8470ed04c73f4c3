// Graphs in files.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "serried/graph/graph.h"

namespace serried::graph {

/// All of a graph but the data of its tensors: the same graph gives the same text. Groups stand there by name, DTensors
/// by their placements. ValueError for a constant that has no text, such as a generator of the user's own.
std::string to_text(const Graph& graph);
/// The graph that `to_text` wrote, without the data of its tensors. ValueError that names the line for anything else.
Graph parse_graph(std::string_view text);

struct SaveOptions {
  bool persistent_data = false;  // else persistent values are saved by shape, and bound again after `load`
};

/// Writes the text and the data of constants, bit for bit; the file is there whole or not at all.
void save(const Graph& graph, const std::string& path, const SaveOptions& options = {});

/// What `save` wrote. ValueError for a file that is missing, damaged or of another version.
Graph load(const std::string& path);

/// Those that `bind_persistent` gives tensors to, in this order.
std::vector<ValueId> persistent_values(const Graph& graph);

/// Makes `tensors` the persistent values, in order; DTensors stand for their parts. ValueError, and nothing is bound,
/// where one does not fit.
void bind_persistent(Graph& graph, const std::vector<at::Tensor>& tensors);
/// The same for graphs whose persistent values all have names.
void bind_persistent_by_name(Graph& graph, const std::map<std::string, at::Tensor>& tensors);

}  // namespace serried::graph
