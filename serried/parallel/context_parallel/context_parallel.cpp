// Cuts buffers, opens the scope that attention looks for, and gathers what was cut.
#include "serried/parallel/context_parallel/context_parallel.h"

#include <ATen/ATen.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "serried/base/error.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/piece_sizes.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/context_parallel/cut_buffers.h"
#include "serried/tape/recorder.h"
#include "serried/tape/tape.h"
#include "serried/tensor/attention/sequence_scope.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

using detail::SequenceCut;
using detail::SequenceScope;

constexpr const char* kContextParallel = "ContextParallel";
constexpr const char* kDocumentsAddUp = "documents add up to ";

void check_axis(std::string_view where, const DeviceMesh& mesh) {
  if (mesh.ndim() != 1) {
    raise<c10::ValueError>(
        {where, c10::str(mesh.to_string(), " has ", mesh.ndim(), " axes, and a sequence is cut over one of them"),
         "pass one axis: mesh[\"cp\"]"});
  }
  if (mesh.contains_this_rank()) return;
  raise<c10::ValueError>(
      {where, c10::str("this rank is not in ", mesh.to_string()), "call it on ranks of the mesh only"});
}

int64_t checked_dim(std::string_view where, int64_t dim, const at::Tensor& t) {
  if (dim >= -t.dim() && dim < t.dim()) return dim < 0 ? dim + t.dim() : dim;
  raise<c10::IndexError>({where, c10::str("dim ", dim, " is to be the sequence of ", watch::describe_tensor(t)),
                          t.dim() == 0 ? std::string("pass a tensor with a dim for the sequence")
                                       : c10::str("pass a dim from ", -t.dim(), " to ", t.dim() - 1)});
}

void check_documents(std::string_view where, const std::vector<int64_t>& documents) {
  for (size_t i = 0; i < documents.size(); ++i) {
    if (documents[i] > 0) continue;
    raise<c10::ValueError>(
        {where, c10::str("document ", i, " has ", documents[i], " positions"), "pass lengths of 1 or more"});
  }
}

void check_buffer(const ContextParallelOptions& options, size_t index) {
  const at::Tensor& buffer = options.buffers[index];
  const std::string name = c10::str("buffer ", index);
  if (!buffer.defined()) raise<c10::ValueError>({kContextParallel, name + " is undefined", "pass tensors"});
  if (dist_meta(buffer.unsafeGetTensorImpl()) != nullptr) {
    raise<c10::ValueError>(
        {kContextParallel, name + " is distributed already",
         "leave it out: DTensors are cut by distribute_tensor(x, mesh, {BalancedShard(dim)}), and need no scope"});
  }
  if (!buffer.is_leaf()) {
    raise<c10::ValueError>(
        {kContextParallel,
         c10::str(name, ", ", watch::describe_tensor(buffer), ", is the result of an op that autograd recorded"),
         "pass what it was made of, or cut it by context_parallel_shard, which is differentiable"});
  }
  for (size_t other = 0; other < index; ++other) {
    if (!options.buffers[other].is_same(buffer)) continue;
    raise<c10::ValueError>(
        {kContextParallel, c10::str("buffers ", other, " and ", index, " are one tensor"), "pass each of them once"});
  }
}

void check_lists(const ContextParallelOptions& options) {
  if (options.buffers.size() != options.seq_dims.size()) {
    raise<c10::ValueError>(
        {kContextParallel,
         c10::str("there are ", options.buffers.size(), " buffers and ", options.seq_dims.size(), " seq_dims"),
         "pass one dim per buffer"});
  }
  for (size_t i = 0; i < options.no_restore.size(); ++i) {
    const bool is_known = std::any_of(options.buffers.begin(), options.buffers.end(),
                                      [&](const at::Tensor& t) { return t.is_same(options.no_restore[i]); });
    if (is_known) continue;
    raise<c10::ValueError>({kContextParallel, c10::str("tensor ", i, " of no_restore is none of the buffers"),
                            "name buffers there, or leave it out"});
  }
}

[[noreturn]] void raise_lengths_differ(const std::string& first, int64_t length, const std::string& second,
                                       int64_t other) {
  const bool of_documents = first == kDocumentsAddUp || second == kDocumentsAddUp;
  raise<c10::ValueError>({kContextParallel, c10::str("lengths differ: ", first, length, ", ", second, other),
                          of_documents ? "let the lengths of documents add up to that of the sequence"
                                       : "pass buffers of one sequence, with its dim as seq_dims"});
}

// What the buffers, the documents and the option say, which must be the same; none where nothing says it.
std::optional<int64_t> checked_length(const ContextParallelOptions& options) {
  std::optional<int64_t> length = options.length;
  std::string said_by = "length is ";
  const auto compare = [&](int64_t other, const std::string& by) {
    if (length.has_value() && *length != other) raise_lengths_differ(said_by, *length, by, other);
    if (!length.has_value()) said_by = by;
    length = other;
  };
  if (length.has_value() && *length < 0) {
    raise<c10::ValueError>({kContextParallel, c10::str("length is ", *length), "pass the number of positions"});
  }
  if (!options.documents.empty()) {
    compare(std::accumulate(options.documents.begin(), options.documents.end(), int64_t(0)), kDocumentsAddUp);
  }
  for (size_t i = 0; i < options.buffers.size(); ++i) {
    check_buffer(options, i);
    const int64_t dim = checked_dim(kContextParallel, options.seq_dims[i], options.buffers[i]);
    compare(options.buffers[i].size(dim), c10::str("dim ", dim, " of buffer ", i, " is "));
  }
  return length;
}

// Ranks that cut different sequences would exchange parts that do not fit.
void compare_ranks(const DeviceMesh& mesh, const std::optional<int64_t>& length,
                   const ContextParallelOptions& options) {
  if (mesh.size() == 1) return;
  const tape::Pause only_checks;
  std::string mine = c10::str("length ", length.has_value() ? std::to_string(*length) : "unknown", ", rotate ",
                              to_string(options.rotate));
  if (!options.documents.empty()) mine += c10::str(", documents ", c10::Join(" ", options.documents));
  const auto difference = detail::first_difference(mine, mesh.get_group(int64_t(0)));
  if (!difference.has_value()) return;
  raise<c10::ValueError>(
      {kContextParallel,
       c10::str("ranks differ: rank 0 of ", mesh.to_string(), " has ", difference->first.value_or(""), ", rank ",
                difference->rank, " has ", difference->other.value_or("")),
       "make the scope with the same sequence on every rank of the axis"});
}

SequenceCut cut_of(int64_t length, const std::vector<int64_t>& documents, int64_t ranks) {
  return documents.empty() ? SequenceCut(length, BalancedShard(0), ranks) : SequenceCut(documents, ranks);
}

detail::SequenceScopePtr scope_of(const DeviceMesh& mesh, const std::optional<int64_t>& length,
                                  const ContextParallelOptions& options) {
  auto scope = std::make_shared<SequenceScope>(SequenceScope{
      .mesh = mesh, .cut = std::nullopt, .way = options.rotate, .has_documents = !options.documents.empty()});
  if (length.has_value()) scope->cut = cut_of(*length, options.documents, mesh.size());
  size_t content = c10::hash_combine(mesh.id(), c10::hash_combine(size_t(length.value_or(-1)), size_t(options.rotate)));
  for (const int64_t document : options.documents) content = c10::hash_combine(content, size_t(document));
  scope->content = content == 0 ? 1 : content;
  return scope;
}

// Of all ranks: those whose own part fits would give positions in a wrong order where others raise.
void check_parts(std::string_view where, const DeviceMesh& mesh, const std::vector<int64_t>& sizes,
                 const SequenceCut& cut) {
  const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    if (cut.length() == all && cut.size(int64_t(rank)) == sizes[rank]) continue;
    raise<c10::ValueError>({where,
                            c10::str("rank ", rank, " of ", mesh.to_string(), " has ", sizes[rank], " of ", all,
                                     " positions, and its part of ", cut.length(), " is ", cut.size(int64_t(rank))),
                            "pass what was cut by ContextParallel or context_parallel_shard, with the same documents"});
  }
}

// From the order of ranks to that of the sequence.
at::Tensor in_order(const at::Tensor& gathered, int64_t dim, const SequenceCut& cut) {
  std::map<int64_t, at::Tensor> pieces;  // by where they begin
  int64_t first = 0;
  for (int64_t rank = 0; rank < cut.num_ranks(); ++rank) {
    for (const detail::SequenceChunk& chunk : cut.chunks(rank)) {
      pieces[chunk.begin] = gathered.narrow(dim, first + chunk.place, chunk.size);
    }
    first += cut.size(rank);
  }
  if (pieces.empty()) return gathered;
  std::vector<at::Tensor> ascending;
  for (const auto& [begin, piece] : pieces) ascending.push_back(piece);
  return at::cat(ascending, dim);
}

// A replay would not know that the tensor its caller passes is another one inside.
void refuse_in_capture() {
  if (!tape::is_replayed()) return;
  raise<c10::NotImplementedError>(
      {kContextParallel, "buffers would be cut inside of a captured function, which no op shows",
       "make the scope around the captured call, or cut by context_parallel_shard and pass .length"});
}

}  // namespace

ContextParallel::ContextParallel(const DeviceMesh& mesh, ContextParallelOptions options) {
  check_axis(kContextParallel, mesh);
  check_lists(options);
  check_documents(kContextParallel, options.documents);
  if (!options.buffers.empty()) refuse_in_capture();
  const std::optional<int64_t> length = checked_length(options);
  compare_ranks(mesh, length, options);
  const detail::SequenceScopePtr scope = scope_of(mesh, length, options);
  buffers_ = std::make_unique<detail::CutBuffers>();
  for (size_t i = 0; i < options.buffers.size(); ++i) {
    const at::NoGradGuard no_grad;
    const at::Tensor& buffer = options.buffers[i];
    const int64_t dim = checked_dim(kContextParallel, options.seq_dims[i], buffer);
    const bool is_restored = std::none_of(options.no_restore.begin(), options.no_restore.end(),
                                          [&](const at::Tensor& t) { return t.is_same(buffer); });
    buffers_->cut(buffer, detail::sequence_part(buffer.detach(), dim, *scope->cut, mesh.get_local_rank(int64_t(0))),
                  is_restored);
  }
  previous_ = detail::exchange_sequence_scope(scope);
}

ContextParallel::~ContextParallel() {
  detail::exchange_sequence_scope(std::move(previous_));
}

at::Tensor context_parallel_shard(const DeviceMesh& mesh, const at::Tensor& whole, ContextShardOptions options) {
  constexpr const char* kWhere = "context_parallel_shard";
  check_axis(kWhere, mesh);
  check_documents(kWhere, options.documents);
  const int64_t dim = checked_dim(kWhere, options.seq_dim, whole);
  const SequenceCut cut = cut_of(whole.size(dim), options.documents, mesh.size());
  if (cut.length() != whole.size(dim)) {
    raise<c10::ValueError>(
        {kWhere, c10::str("lengths differ: documents add up to ", cut.length(), ", dim ", dim, " is ", whole.size(dim)),
         "pass the lengths of all documents"});
  }
  return detail::sequence_part(whole, dim, cut, mesh.get_local_rank(int64_t(0)));
}

at::Tensor context_parallel_unshard(const DeviceMesh& mesh, const at::Tensor& local, ContextShardOptions options) {
  constexpr const char* kWhere = "context_parallel_unshard";
  check_axis(kWhere, mesh);
  check_documents(kWhere, options.documents);
  const int64_t dim = checked_dim(kWhere, options.seq_dim, local);
  const Group group = mesh.get_group(int64_t(0));
  detail::check_call(kWhere, local, group);
  const std::vector<int64_t> sizes = detail::GatherSizes(local, group, dim, {}, /*now=*/true).get();
  const at::Tensor gathered = detail::ops::all_gather(local, group, dim, sizes);
  SequenceCut cut = cut_of(gathered.size(dim), options.documents, mesh.size());
  const detail::SequenceScopePtr& scope = detail::sequence_scope();
  const bool is_in_scope = scope != nullptr && scope->mesh == mesh && scope->cut.has_value();
  if (options.documents.empty() && is_in_scope && scope->cut->length() == gathered.size(dim)) cut = *scope->cut;
  check_parts(kWhere, mesh, sizes, cut);
  return in_order(gathered, dim, cut);
}

}  // namespace serried
