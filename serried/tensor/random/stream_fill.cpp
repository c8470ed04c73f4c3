// How ATen's CPU kernels use up the generator's stream, chunk by chunk.
#include "serried/tensor/random/stream_fill.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/random/owned_runs.h"

namespace serried::detail {
namespace {

constexpr int64_t kChunk = 64 * 1024;
// normal_ of at least this many contiguous numbers works on blocks of as many.
constexpr int64_t kBlock = 16;

// The whole tensor as a kernel walks it: dims in memory order, outermost first.
struct Walk {
  c10::DimVector order;
  int64_t numel = 1;
  bool is_contiguous = true;
};

Walk walk_of(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  Walk walk;
  walk.order.resize(sizes.size());
  std::iota(walk.order.begin(), walk.order.end(), 0);
  std::stable_sort(walk.order.begin(), walk.order.end(),
                   [&](int64_t a, int64_t b) { return sizes[a] != 1 && sizes[b] != 1 && strides[a] > strides[b]; });
  for (int64_t d = int64_t(sizes.size()) - 1; d >= 0; --d) {
    walk.is_contiguous &= sizes[d] == 1 || strides[d] == walk.numel;
    walk.numel *= sizes[d];
  }
  return walk;
}

// Copies the rank's elements out of chunks that come in ascending order.
class Collector {
 public:
  Collector(const at::Tensor& part, OwnedRuns runs)
      : out_(static_cast<char*>(part.mutable_data_ptr())), item_(part.element_size()), runs_(std::move(runs)) {
    has_run_ = runs_.next(run_);
  }

  /// Whether a chunk that ends at `end` has elements of the rank that were not taken yet.
  bool wants(int64_t end) const { return has_run_ && run_.begin < end; }

  /// The first element not taken yet; `otherwise` at the end.
  int64_t next_begin(int64_t otherwise) const { return has_run_ ? run_.begin : otherwise; }

  /// `chunk` holds the elements from `begin` on; those before `end` are taken.
  void take(const void* chunk, int64_t begin, int64_t end) {
    while (wants(end)) {
      const int64_t n = std::min(end, run_.end()) - run_.begin;
      std::memcpy(out_, static_cast<const char*>(chunk) + (run_.begin - begin) * item_, n * item_);
      out_ += n * item_;
      run_ = {run_.begin + n, run_.size - n};
      if (run_.size == 0) has_run_ = runs_.next(run_);
    }
  }

 private:
  char* out_;
  int64_t item_;
  OwnedRuns runs_;
  Span run_;
  bool has_run_ = false;
};

void skip_draws(const at::Generator& generator, int64_t num_draws) {
  auto* impl = at::check_generator<at::CPUGeneratorImpl>(generator);
  std::lock_guard<std::mutex> lock(impl->mutex_);
  at::mt19937 engine = impl->engine();
  for (int64_t i = 0; i < num_draws; ++i) engine();
  impl->set_engine(engine);
}

void call(const StreamOp& op, const at::Tensor& self, const at::Generator& generator) {
  torch::jit::Stack stack;
  stack.emplace_back(self);
  stack.insert(stack.end(), op.arguments.begin(), op.arguments.end());
  stack.emplace_back(generator);
  op.op.callBoxed(stack);
}

bool is_normal(const StreamOp& op) {
  return op.op.operator_name().name == "aten::normal_";
}

// 32-bit numbers that one element takes off the stream; 0 where only drawing tells.
int64_t draws_per_element(const StreamOp& op, at::ScalarType dtype) {
  const std::string& name = op.op.operator_name().name;
  const int64_t wide = dtype == at::kDouble ? 2 : 1;
  if (name == "aten::uniform_" || is_normal(op)) return wide;
  if (name == "aten::cauchy_" || name == "aten::geometric_" || name == "aten::exponential_") return 2;
  if (name != "aten::random_") return 0;
  if (op.arguments.empty()) return dtype == at::kLong ? 2 : wide;
  const c10::IValue& to = op.arguments.back();
  if (to.isNone()) return 0;
  const int64_t from = op.arguments.size() == 2 ? op.arguments.front().toInt() : 0;
  // Larger ranges may take two, depending on the dtype.
  return to.toInt() - from < (1 << 24) && from > -(1 << 24) ? 1 : 0;
}

// Draws a tensor of `numel` elements, one chunk after the other.
class Stream {
 public:
  Stream(const StreamOp& op, const at::Generator& generator, at::ScalarType dtype, const Walk& walk)
      : op_(op), generator_(generator), numel_(walk.numel), draws_(draws_per_element(op, dtype)) {
    in_blocks_ = is_normal(op) && walk.is_contiguous && numel_ >= kBlock;
    // Normal numbers come in pairs elsewhere, of which the generator keeps the second.
    if (is_normal(op) && !in_blocks_) draws_ = 0;
    const int64_t room = std::min(kChunk, (numel_ + kBlock - 1) / kBlock * kBlock);
    buffer_ = at::empty({room}, dtype);
    // A tensor with gaps keeps normal_ off its path for blocks.
    if (is_normal(op) && !in_blocks_) buffer_ = at::empty({room * 2}, dtype).slice(0, 0, room * 2, 2);
    redraws_whole_tail_ = dtype == at::kFloat || dtype == at::kDouble;
  }

  void run(Collector& collector) {
    if (!in_blocks_) return body(collector, numel_, numel_);
    const int64_t tail = numel_ % kBlock;
    body(collector, numel_ - tail, tail == 0 ? numel_ : numel_ - kBlock);
    if (tail == 0) return;
    // The last 16 are drawn anew, over what the last block gave; only some kernels draw the odd ones before that.
    if (redraws_whole_tail_) skip_draws(generator_, tail * draws_);
    collector.take(draw(kBlock), numel_ - kBlock, numel_);
  }

 private:
  // Elements [0, size) of the stream, of which those before `keep` count.
  void body(Collector& collector, int64_t size, int64_t keep) {
    for (int64_t begin = 0; begin < size;) {
      const int64_t gap = begin_of_chunk(collector.next_begin(size), size) - begin;
      if (draws_ > 0 && gap > 0) {
        skip_draws(generator_, gap * draws_);
        begin += gap;
        continue;
      }
      const int64_t end = std::min(begin + kChunk, size);
      collector.take(draw(end - begin), begin, std::min(end, keep));
      begin = end;
    }
  }

  // Chunks may begin at any block.
  static int64_t begin_of_chunk(int64_t element, int64_t size) {
    return element >= size ? size : element / kBlock * kBlock;
  }

  const void* draw(int64_t n) {
    const at::Tensor chunk = buffer_.narrow(0, 0, n);
    call(op_, chunk, generator_);
    if (chunk.is_contiguous()) return chunk.const_data_ptr();
    packed_ = chunk.contiguous();
    return packed_.const_data_ptr();
  }

  const StreamOp& op_;
  const at::Generator& generator_;
  const int64_t numel_;
  int64_t draws_;
  bool in_blocks_ = false;
  bool redraws_whole_tail_ = false;
  at::Tensor buffer_;
  at::Tensor packed_;
};

// A complex tensor is filled as one of twice as many real numbers.
StreamOp real_op(StreamOp op) {
  if (is_normal(op)) op.arguments.at(1) = op.arguments.at(1).toDouble() / std::sqrt(2);
  return op;
}

struct Target {
  at::Tensor local;
  c10::DimVector sizes;
  c10::DimVector strides;
};

Target as_real(const Target& target) {
  Target real{at::view_as_real(target.local), target.sizes, target.strides};
  for (int64_t& stride : real.strides) stride *= 2;
  real.sizes.push_back(2);
  real.strides.push_back(1);
  return real;
}

void fill(const Target& target, const PlacedPart& placed, const StreamOp& op, const at::Generator& generator) {
  const at::Tensor& local = target.local;
  if (local.sizes() == c10::IntArrayRef(target.sizes) && local.strides() == c10::IntArrayRef(target.strides)) {
    return call(op, local, generator);
  }
  const Walk walk = walk_of(target.sizes, target.strides);
  if (walk.numel == 0) return call(op, local, generator);
  // An error must come on all ranks, also on those that draw nothing.
  if (local.numel() == 0) call(op, at::empty({1}, local.options()), generator.clone());
  const at::Tensor ordered = local.permute(walk.order);
  const bool in_place = ordered.is_contiguous();
  const at::Tensor part = in_place ? ordered : at::empty(ordered.sizes(), ordered.options());
  Collector collector(part, OwnedRuns(target.sizes, placed.placements, placed.at, walk.order));
  Stream(op, generator, local.scalar_type(), walk).run(collector);
  if (!in_place) ordered.copy_(part);
}

}  // namespace

StreamOp stream_op(const char* name, const char* overload, std::vector<c10::IValue> arguments) {
  return {c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), std::move(arguments)};
}

void stream_fill(const at::Tensor& local, const PlacedPart& placed, const StreamOp& op,
                 const at::Generator& generator) {
  const LocalOnly guard;
  const Target target{local, c10::DimVector(placed.sizes), c10::DimVector(placed.strides)};
  if (!local.is_complex()) return fill(target, placed, op, generator);
  fill(as_real(target), placed, real_op(op), generator);
}

}  // namespace serried::detail
