// Keys and values go round: a rank computes with those it has while they travel on to its right neighbour and the next
// come from its left. In backward the sums of their gradients follow them, and come home last.
#include <array>
#include <optional>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/own_tags.h"
#include "serried/tensor/attention/key_parts.h"

namespace serried::detail {
namespace {

// Tags keep keys and gradients apart, and both from what users and pipelines send over the same group.
constexpr int kKeysTag = kRingTags;
constexpr int kGradientsTag = kRingTags + 1;

class Ring {
 public:
  explicit Ring(const SequenceAttention& call) : call_(call), num_ranks_(call.keys.num_ranks()), rank_(call.rank()) {}

  int64_t num_steps() const { return num_ranks_; }
  /// Whose keys this rank has in a step.
  int64_t owner(int64_t step) const { return (rank_ - step % num_ranks_ + num_ranks_) % num_ranks_; }
  int64_t size(int64_t step) const { return call_.keys.size(owner(step)); }

  std::vector<AttentionCall> calls(int64_t step) const {
    return attention_calls(call_.queries.chunks(rank_), call_.keys.chunks(owner(step)), call_.causal);
  }

  // What is empty does not travel: both sides know it.
  std::optional<Pending> send(const at::Tensor& x, int tag) const {
    if (x.numel() == 0) return std::nullopt;
    return async::send(x, call_.group, {.peer = int((rank_ + 1) % num_ranks_), .tag = tag});
  }
  std::optional<Pending> receive(const at::Tensor& x, int tag) const {
    if (x.numel() == 0) return std::nullopt;
    return async::recv(x, call_.group, {.peer = int((rank_ + num_ranks_ - 1) % num_ranks_), .tag = tag});
  }

 private:
  const SequenceAttention& call_;
  const int64_t num_ranks_;
  const int64_t rank_;
};

void wait(std::optional<Pending>& pending) {
  if (pending) pending->wait();
  pending.reset();
}

// Two buffers: what a rank computes with, and what comes next.
class TravellingKeys {
 public:
  TravellingKeys(const Ring& ring, const SequenceAttention& call, const at::Tensor& key, const at::Tensor& value)
      : ring_(ring),
        buffers_{KeyBuffer(key, call.keys, key.scalar_type()), KeyBuffer(key, call.keys, key.scalar_type())} {
    count_key_buffers(bytes());
    const at::Tensor own = at_step(0);
    own[0].copy_(key);
    own[1].copy_(value);
  }

  int64_t bytes() const { return buffers_[0].bytes() + buffers_[1].bytes(); }
  at::Tensor at_step(int64_t step) const { return buffers_[size_t(step % 2)].part(ring_.size(step)); }

  /// Passes those of `step` on and takes the next, while the caller computes.
  void start(int64_t step) {
    if (step + 1 == ring_.num_steps()) return;
    coming_ = ring_.receive(at_step(step + 1), kKeysTag);
    going_ = ring_.send(at_step(step), kKeysTag);
  }
  void finish() {
    wait(coming_);
    wait(going_);
  }

 private:
  const Ring& ring_;
  std::array<KeyBuffer, 2> buffers_;
  std::optional<Pending> coming_, going_;
};

}  // namespace

AttentionResult attend_by_ring(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value) {
  const Ring ring(call);
  TravellingKeys keys(ring, call, key, value);
  MergedAttention merged(query, call.scale);
  for (int64_t step = 0; step < ring.num_steps(); ++step) {
    keys.start(step);
    const at::Tensor here = keys.at_step(step);
    for (const AttentionCall& each : ring.calls(step)) merged.add(each, here[0], here[1]);
    keys.finish();
  }
  return merged.result();
}

// The sum of gradients of a rank's keys leaves that rank with the keys and grows at every stop. It is one step behind
// them, so that a rank computes its own share while the sum so far is on its way.
AttentionGradients attend_by_ring_backward(const SequenceAttention& call, const at::Tensor& grad_out,
                                           const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                           const AttentionResult& forward) {
  const Ring ring(call);
  TravellingKeys keys(ring, call, key, value);
  AttentionBackward backward(grad_out, query, forward, call.scale);
  const at::ScalarType dtype = sum_dtype(key.scalar_type());
  const std::array<KeyBuffer, 2> shares = {KeyBuffer(key, call.keys, dtype), KeyBuffer(key, call.keys, dtype)};
  const KeyBuffer sums(key, call.keys, dtype);
  count_key_buffers(keys.bytes() + shares[0].bytes() + shares[1].bytes() + sums.bytes());
  std::optional<Pending> going;
  for (int64_t step = 0; step < ring.num_steps(); ++step) {
    std::optional<Pending> coming = step > 0 ? ring.receive(sums.part(ring.size(step)), kGradientsTag) : std::nullopt;
    keys.start(step);
    const at::Tensor here = keys.at_step(step);
    const at::Tensor share = shares[size_t(step % 2)].part(ring.size(step));
    share.zero_();
    for (const AttentionCall& each : ring.calls(step)) backward.add(each, here[0], here[1], share[0], share[1]);
    wait(coming);
    if (step > 0) share.add_(sums.part(ring.size(step)));
    keys.finish();
    wait(going);
    going = ring.send(share, kGradientsTag);
  }
  const at::Tensor home = sums.part(call.keys.size(call.rank()));
  std::optional<Pending> coming = ring.receive(home, kGradientsTag);
  wait(coming);
  wait(going);
  return {backward.grad_query(), home[0].to(key.scalar_type(), false, true),
          home[1].to(value.scalar_type(), false, true)};
}

}  // namespace serried::detail
