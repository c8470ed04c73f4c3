// Ranks change from parts of the sequence to parts of the heads, attend to the whole sequence, and change back: two
// all_to_alls, whatever the number of tensors.
#include <ATen/ATen.h>

#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/attention/sequence_attention.h"

namespace serried::detail {
namespace {

// A tensor that travels: [batch, heads, length] and maybe more dims behind, which stay whole.
struct Traveller {
  at::Tensor part;
  const SequenceCut& cut;

  at::Tensor of_heads(const at::Tensor& t, int64_t rank) const {
    const int64_t each = t.size(kHeadsDim) / cut.num_ranks();
    return t.narrow(kHeadsDim, rank * each, each);
  }
};

Sizes with(c10::IntArrayRef sizes, int64_t heads, int64_t length) {
  Sizes changed = sizes.vec();
  changed[kHeadsDim] = heads;
  changed[kLengthDim] = length;
  return changed;
}

// What tells every rank its sizes: with all heads, since the way back has only some of them.
uint32_t hash_of(const std::vector<Traveller>& travellers, int64_t heads_factor) {
  Sizes known;
  for (const Traveller& traveller : travellers) {
    known.insert(known.end(), {traveller.part.size(0), traveller.part.size(kHeadsDim) * heads_factor,
                               traveller.part.size(-1), traveller.cut.length()});
  }
  return watch::hash_sizes({known});
}

int64_t elements_of(const at::Tensor& t, int64_t heads, int64_t length) {
  return c10::multiply_integers(with(t.sizes(), heads, length));
}

// Copies what lies in `whole` at the positions of `rank` from or to its part, which holds them in a row.
template <class Copy>
void for_each_run(const SequenceCut& cut, int64_t rank, const at::Tensor& whole, const at::Tensor& part, Copy copy) {
  for (const SequenceChunk& chunk : cut.chunks(rank)) {
    copy(whole.narrow(kLengthDim, chunk.begin, chunk.size), part.narrow(kLengthDim, chunk.place, chunk.size));
  }
}

at::Tensor exchanged(const std::vector<at::Tensor>& pieces, const SequenceAttention& call, const Sizes& sent,
                     const Sizes& received, uint32_t sizes_of_all) {
  return ops::all_to_all(at::cat(pieces), call.group, 0, 0, sent, received, sizes_of_all);
}

// All positions of this rank's heads, of each tensor. They have one dtype.
std::vector<at::Tensor> to_heads(const SequenceAttention& call, const std::vector<Traveller>& travellers) {
  const int64_t ranks = call.keys.num_ranks();
  std::vector<at::Tensor> pieces;
  Sizes sent, received;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    int64_t out = 0, in = 0;
    for (const Traveller& traveller : travellers) {
      pieces.push_back(traveller.of_heads(traveller.part, peer).reshape({-1}));
      out += pieces.back().numel();
      in += elements_of(traveller.part, traveller.part.size(kHeadsDim) / ranks, traveller.cut.size(peer));
    }
    sent.push_back(out);
    received.push_back(in);
  }
  const at::Tensor flat = exchanged(pieces, call, sent, received, hash_of(travellers, 1));
  std::vector<at::Tensor> wholes;
  for (const Traveller& t : travellers) {
    wholes.push_back(at::empty(with(t.part.sizes(), t.part.size(kHeadsDim) / ranks, t.cut.length()), t.part.options()));
  }
  int64_t begin = 0;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    for (size_t i = 0; i < travellers.size(); ++i) {
      const Sizes sizes = with(wholes[i].sizes(), wholes[i].size(kHeadsDim), travellers[i].cut.size(peer));
      const int64_t count = c10::multiply_integers(sizes);
      for_each_run(travellers[i].cut, peer, wholes[i], flat.narrow(0, begin, count).view(sizes),
                   [](const at::Tensor& whole, const at::Tensor& part) { whole.copy_(part); });
      begin += count;
    }
  }
  return wholes;
}

// The way back: all heads of this rank's positions.
std::vector<at::Tensor> from_heads(const SequenceAttention& call, const std::vector<Traveller>& travellers) {
  const int64_t ranks = call.keys.num_ranks();
  std::vector<at::Tensor> pieces;
  Sizes sent, received;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    int64_t out = 0, in = 0;
    for (const Traveller& traveller : travellers) {
      const at::Tensor& whole = traveller.part;
      const at::Tensor piece =
          at::empty(with(whole.sizes(), whole.size(kHeadsDim), traveller.cut.size(peer)), whole.options());
      for_each_run(traveller.cut, peer, whole, piece,
                   [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
      pieces.push_back(piece.view({-1}));
      out += piece.numel();
      in += elements_of(whole, whole.size(kHeadsDim), traveller.cut.size(call.rank()));
    }
    sent.push_back(out);
    received.push_back(in);
  }
  const at::Tensor flat = exchanged(pieces, call, sent, received, hash_of(travellers, ranks));
  std::vector<at::Tensor> parts;
  for (const Traveller& t : travellers) {
    parts.push_back(
        at::empty(with(t.part.sizes(), t.part.size(kHeadsDim) * ranks, t.cut.size(call.rank())), t.part.options()));
  }
  int64_t begin = 0;
  for (int64_t peer = 0; peer < ranks; ++peer) {
    for (size_t i = 0; i < travellers.size(); ++i) {
      const at::Tensor place = travellers[i].of_heads(parts[i], peer);
      place.copy_(flat.narrow(0, begin, place.numel()).view(place.sizes()));
      begin += place.numel();
    }
  }
  return parts;
}

std::vector<AttentionCall> whole_calls(const SequenceAttention& call) {
  return attention_calls(call.queries.documents(), call.keys.documents(), call.causal);
}

}  // namespace

AttentionResult attend_by_heads(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value) {
  const std::vector<at::Tensor> whole = to_heads(call, {{query, call.queries}, {key, call.keys}, {value, call.keys}});
  MergedAttention merged(whole[0], call.scale);
  for (const AttentionCall& each : whole_calls(call)) merged.add(each, whole[1], whole[2]);
  const AttentionResult result = merged.result();
  if (result.out.scalar_type() == result.lse.scalar_type()) {
    const std::vector<at::Tensor> parts =
        from_heads(call, {{result.out, call.queries}, {result.lse.unsqueeze(-1), call.queries}});
    return {parts[0], parts[1].squeeze(-1)};
  }
  return {from_heads(call, {{result.out, call.queries}})[0],
          from_heads(call, {{result.lse.unsqueeze(-1), call.queries}})[0].squeeze(-1)};
}

AttentionGradients attend_by_heads_backward(const SequenceAttention& call, const at::Tensor& grad_out,
                                            const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            const AttentionResult& forward) {
  std::vector<Traveller> travellers = {{grad_out, call.queries},
                                       {query, call.queries},
                                       {key, call.keys},
                                       {value, call.keys},
                                       {forward.out, call.queries}};
  const Traveller logarithms{forward.lse.unsqueeze(-1), call.queries};
  const bool together = forward.lse.scalar_type() == query.scalar_type();
  if (together) travellers.push_back(logarithms);
  const std::vector<at::Tensor> whole = to_heads(call, travellers);
  const at::Tensor lse = (together ? whole[5] : to_heads(call, {logarithms})[0]).squeeze(-1);
  AttentionBackward backward(whole[0], whole[1], {whole[4], lse}, call.scale);
  const at::ScalarType dtype = sum_dtype(query.scalar_type());
  const at::Tensor grad_key = at::zeros(whole[2].sizes(), whole[2].options().dtype(dtype));
  const at::Tensor grad_value = at::zeros(whole[3].sizes(), whole[3].options().dtype(dtype));
  for (const AttentionCall& each : whole_calls(call)) backward.add(each, whole[2], whole[3], grad_key, grad_value);
  const std::vector<at::Tensor> parts = from_heads(call, {{backward.grad_query(), call.queries},
                                                          {grad_key.to(key.scalar_type()), call.keys},
                                                          {grad_value.to(value.scalar_type()), call.keys}});
  return {parts[0], parts[1], parts[2]};
}

}  // namespace serried::detail
