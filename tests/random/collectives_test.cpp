// Random sequences of collectives on every backend, against the same program in plain LibTorch on one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/close.h"
#include "tests/support/on_ranks.h"
#include "tests/support/plain_collectives.h"
#include "tests/support/random_programs.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using testing::expect_close;
using testing::expect_equal;
using testing::for_random_programs;
using testing::reduced;
using testing::sample;
using testing::shard_sizes;
using RedOpType = ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Sizes = std::vector<int64_t>;

int64_t pick(std::mt19937_64& random, int64_t count) {
  return int64_t(random() % uint64_t(count));
}

template <class T>
const T& one_of(std::mt19937_64& random, const std::vector<T>& list) {
  return list[size_t(pick(random, int64_t(list.size())))];
}

// ---- What a program is made of.

struct Shape {
  Sizes sizes;
  at::ScalarType dtype;
};

const std::vector<RedOpType> kOps = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                                     ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};

/// One rank's run of a program: decisions that all ranks share come from `shared_`, this rank's own from `mine_`.
class Program {
 public:
  Program(uint64_t seed, const Group& world, std::string backend)
      : seed_(seed), mine_(seed * 1000 + uint64_t(world->getRank())), backend_(std::move(backend)), world_(world) {}

  void run() {
    for (int64_t step = 0; step < 12; ++step) {
      // Anew for each step: the parts of a split draw different numbers of numbers.
      shared_.seed(seed_ * 1000 + uint64_t(step));
      g_ = world_;
      if (world_->getSize() > 1 && pick(shared_, 4) == 0) g_ = part_of_world();
      n_ = g_->getSize();
      me_ = g_->getRank();
      what_ = c10::str(backend_, " of ", world_->getSize(), ", step ", step);
      switch (pick(shared_, 8)) {
        case 0: functional_reduction(); break;
        case 1: functional_move(); break;
        case 2: in_place(); break;
        case 3: into_outputs(); break;
        case 4: peers(); break;
        case 5: coalesced(); break;
        default: overlapping();
      }
    }
  }

 private:
  bool is_gloo() const { return backend_ == "gloo"; }

  Group part_of_world() {
    std::vector<int> ranks(world_->getSize());
    for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = int(i);
    std::shuffle(ranks.begin(), ranks.end(), shared_);
    const auto cut = ranks.begin() + pick(shared_, int64_t(ranks.size()));
    std::vector<std::vector<int>> parts;
    if (cut != ranks.begin()) parts.emplace_back(ranks.begin(), cut);
    parts.emplace_back(cut, ranks.end());
    return split_group(world_, parts);
  }

  Shape draw_shape(int64_t max_dims = 3) {
    static const std::vector<at::ScalarType> common = {at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                                       at::kByte,  at::kChar,   at::kInt,          at::kLong,
                                                       at::kBool,  at::kShort,  at::kComplexFloat, at::kComplexDouble};
    Shape shape;
    do {
      shape.dtype = one_of(shared_, common);
    } while (is_gloo() && (shape.dtype == at::kShort || at::isComplexType(shape.dtype)));
    if (pick(shared_, 6) == 0) {
      shape.sizes = {one_of<int64_t>(shared_, {5000, 20'001, 70'003})};
      return shape;
    }
    const int64_t dims = 1 + pick(shared_, max_dims);
    for (int64_t d = 0; d < dims; ++d) shape.sizes.push_back(pick(shared_, 7));
    return shape;
  }

  RedOpType draw_op(at::ScalarType dtype) {
    while (true) {
      const RedOpType op = one_of(shared_, kOps);
      const bool bitwise = op == ReduceOp::BAND || op == ReduceOp::BOR || op == ReduceOp::BXOR;
      const bool ordered = op == ReduceOp::MIN || op == ReduceOp::MAX;
      if (bitwise && !at::isIntegralType(dtype, /*includeBool=*/true)) continue;
      if (ordered && at::isComplexType(dtype)) continue;
      if (op == ReduceOp::AVG && dtype == at::kBool) continue;
      return op;
    }
  }

  /// The values of `rank`; all ranks know those of all.
  at::Tensor values(const Shape& shape, int rank) {
    if (!rows_equal_) return sample(shape.sizes, rank, shape.dtype, salt_);
    Sizes one_row = shape.sizes;
    one_row[0] = 1;
    return sample(one_row, rank, shape.dtype, salt_).expand(shape.sizes);
  }

  void draw_kind_of_values() {
    salt_ = pick(shared_, 1000);
    rows_equal_ = pick(shared_, 5) == 0;
  }

  Tensors all_values(const Shape& shape) {
    draw_kind_of_values();
    Tensors all;
    for (int r = 0; r < n_; ++r) all.push_back(values(shape, r));
    return all;
  }

  /// The same values in memory of another kind, which each rank chooses for itself.
  at::Tensor laid_out(const at::Tensor& x, bool only_contiguous = false) {
    const int64_t last = x.size(-1);
    switch (pick(mine_, only_contiguous ? 3 : 6)) {
      case 0: {  // in the middle of another tensor
        const at::Tensor base = at::zeros({x.numel() + 5}, x.options());
        return base.narrow(0, 3, x.numel()).view(x.sizes()).copy_(x);
      }
      case 1: {
        if (is_gloo()) return x.clone();
        const at::Tensor block = g_->getBackend(at::kCPU)->allocateTensor(x.numel(), x.options());
        return block.view(x.sizes()).copy_(x);
      }
      case 2: return x.clone();
      case 3: return x.transpose(0, -1).clone(at::MemoryFormat::Contiguous).transpose(0, -1);
      case 4: {  // every second of the last dim
        Sizes twice = x.sizes().vec();
        twice.back() *= 2;
        return at::zeros(twice, x.options()).slice(-1, 0, 2 * last, 2).copy_(x);
      }
      default: return x.is_complex() ? x.conj_physical().conj() : x.flip(0).flip(0);
    }
  }

  /// What only is read may also be one row seen many times.
  at::Tensor as_input(const at::Tensor& x) { return rows_equal_ && pick(mine_, 2) == 0 ? x : laid_out(x); }

  /// Compares a functional collective and its gradient with `meaning` on all ranks' inputs.
  void compare(const at::Tensor& input, const Tensors& all, const std::function<at::Tensor(const at::Tensor&)>& call,
               const std::function<Tensors(const Tensors&)>& meaning, bool differentiable) {
    const bool grad = differentiable && (input.is_floating_point() || input.is_complex()) && pick(shared_, 2) == 0;
    Tensors leaves;
    for (const at::Tensor& x : all) leaves.push_back(x.detach().clone().set_requires_grad(grad));
    const at::Tensor mine = input.detach().set_requires_grad(grad);
    const at::Tensor output = call(mine);
    const Tensors outputs = meaning(leaves);
    expect_close(output.detach(), outputs[size_t(me_)].detach(), what_);
    if (!grad) return;
    at::Tensor total;
    for (size_t r = 0; r < outputs.size(); ++r) {
      const at::Tensor term = at::real((outputs[r] * weights(outputs[r], int(r))).sum());
      total = total.defined() ? total + term : term;
    }
    total.backward();
    at::real((output * weights(output, me_)).sum()).backward();
    const at::Tensor expected = leaves[size_t(me_)].grad();  // none where nobody used this rank's input
    expect_close(mine.grad(), expected.defined() ? expected : at::zeros_like(all[size_t(me_)]), what_ + ", gradient");
  }

  static at::Tensor weights(const at::Tensor& like, int rank) {
    return sample(like.sizes(), rank, like.scalar_type(), 3);
  }

  void functional_reduction() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const RedOpType op = draw_op(shape.dtype);
    const bool differentiable = op == ReduceOp::SUM || op == ReduceOp::AVG;
    const at::Tensor x = as_input(all[size_t(me_)]);
    const int64_t dim = pick(shared_, int64_t(shape.sizes.size()));
    if (pick(shared_, 2) == 0) {
      what_ += c10::str(": all_reduce ", to_string(op), " ", shape.sizes, " ", shape.dtype);
      return compare(
          x, all, [&](const at::Tensor& t) { return all_reduce(t, g_, op); },
          [&](const Tensors& xs) { return Tensors(size_t(n_), reduced(op, xs)); }, differentiable);
    }
    what_ += c10::str(": reduce_scatter ", to_string(op), " ", shape.sizes, " ", shape.dtype);
    compare(
        x, all, [&](const at::Tensor& t) { return reduce_scatter(t, g_, {.dim = dim, .op = op}); },
        [&](const Tensors& xs) { return reduced(op, xs).split_with_sizes(shard_sizes(xs[0].size(dim), n_), dim); },
        differentiable);
  }

  void functional_move() {
    Shape shape = draw_shape();
    const int64_t dim = pick(shared_, int64_t(shape.sizes.size()));
    draw_kind_of_values();
    const int64_t kind = pick(shared_, 3);
    Tensors all;
    for (int r = 0; r < n_; ++r) {
      if (kind == 0) shape.sizes[size_t(dim)] = pick(shared_, 6);  // uneven
      all.push_back(values(shape, r));
    }
    const at::Tensor x = as_input(all[size_t(me_)]);
    if (kind == 0) {
      what_ += c10::str(": all_gather ", shape.sizes, " ", shape.dtype, " dim ", dim);
      return compare(
          x, all, [&](const at::Tensor& t) { return all_gather(t, g_, {.dim = dim}); },
          [&](const Tensors& xs) { return Tensors(size_t(n_), at::cat(xs, dim)); }, true);
    }
    if (kind == 1) {
      const int src = int(pick(shared_, n_));
      what_ += c10::str(": broadcast ", shape.sizes, " ", shape.dtype);
      return compare(
          x, all, [&](const at::Tensor& t) { return broadcast(t, g_, {.src = src}); },
          [&](const Tensors& xs) { return Tensors(size_t(n_), xs[size_t(src)]); }, true);
    }
    exchange(x, all, dim);
  }

  /// all_to_all with sizes that differ by sender and receiver, or cut evenly.
  void exchange(const at::Tensor& x, const Tensors& all, int64_t split_dim) {
    const bool even = pick(shared_, 2) == 0;
    const int64_t concat_dim = even ? pick(shared_, x.dim()) : split_dim;
    std::vector<Sizes> cuts;  // by sender
    for (int r = 0; r < n_; ++r) {
      Sizes cut = shard_sizes(x.size(split_dim), n_);
      if (!even) std::shuffle(cut.begin(), cut.end(), shared_);
      cuts.push_back(cut);
    }
    what_ += c10::str(": all_to_all ", x.sizes(), " ", x.scalar_type(), " from ", split_dim, " to ", concat_dim);
    const Sizes mine = even ? Sizes() : cuts[size_t(me_)];
    compare(
        x, all,
        [&](const at::Tensor& t) {
          return all_to_all(t, g_, {.split_dim = split_dim, .concat_dim = concat_dim, .split_sizes = mine});
        },
        [&](const Tensors& xs) {
          Tensors outputs;
          for (int to = 0; to < n_; ++to) {
            Tensors pieces;
            for (int from = 0; from < n_; ++from) {
              pieces.push_back(xs[size_t(from)].split_with_sizes(cuts[size_t(from)], split_dim)[size_t(to)]);
            }
            outputs.push_back(at::cat(pieces, concat_dim));
          }
          return outputs;
        },
        true);
  }

  void in_place() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const at::Tensor x = laid_out(all[size_t(me_)]);
    const int64_t version = x._version();
    if (pick(shared_, 2) == 0) {
      const RedOpType op = draw_op(shape.dtype);
      what_ += c10::str(": all_reduce_ ", to_string(op), " ", shape.sizes, " ", shape.dtype);
      all_reduce_(x, g_, op);
      expect_close(x, reduced(op, all), what_);
    } else {
      const int src = int(pick(shared_, n_));
      what_ += c10::str(": broadcast_ ", shape.sizes, " ", shape.dtype);
      broadcast_(x, g_, {.src = src});
      expect_equal(x, all[size_t(src)], what_);
    }
    EXPECT_GT(x._version(), version) << what_;
  }

  void into_outputs() {
    Shape shape = draw_shape();
    if (pick(shared_, 2) == 0) {
      const Tensors all = all_values(shape);
      Sizes sizes = shape.sizes;
      sizes[0] *= n_;
      at::Tensor output = laid_out(at::zeros(sizes, shape.dtype), /*only_contiguous=*/true);
      what_ += c10::str(": all_gather_into ", shape.sizes, " ", shape.dtype);
      all_gather_into(output, laid_out(all[size_t(me_)], true), g_);
      return expect_equal(output, at::cat(all), what_);
    }
    shape.sizes[0] *= n_;
    const Tensors all = all_values(shape);
    const int64_t rows = shape.sizes[0] / n_;
    if (pick(shared_, 2) == 0) {
      const RedOpType op = draw_op(shape.dtype);
      what_ += c10::str(": reduce_scatter_into ", to_string(op), " ", shape.sizes, " ", shape.dtype);
      const at::Tensor expected = reduced(op, all).narrow(0, me_ * rows, rows);
      at::Tensor output = laid_out(at::zeros_like(expected), true);
      reduce_scatter_into(output, laid_out(all[size_t(me_)], true), g_, op);
      return expect_close(output, expected, what_);
    }
    Tensors chunks;
    for (const at::Tensor& x : all) chunks.push_back(x.narrow(0, me_ * rows, rows));
    at::Tensor output = laid_out(at::zeros(shape.sizes, shape.dtype), true);
    what_ += c10::str(": all_to_all_into ", shape.sizes, " ", shape.dtype);
    all_to_all_into(output, laid_out(all[size_t(me_)], true), g_);
    expect_equal(output, at::cat(chunks), what_);
  }

  // ---- c10d's own methods: started in one order, waited for in any.

  struct Pending {
    WorkPtr work;
    std::function<void()> check;
  };

  void settle(std::vector<Pending>& pending) {
    std::vector<size_t> order(pending.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), mine_);
    for (const size_t i : order) {
      if (pending[i].work) pending[i].work->wait();
    }
    for (const Pending& each : pending) each.check();
  }

  /// gloo takes memory as it lies; and of a lazy conjugate the dispatcher hands c10d a copy, which nobody sees again.
  at::Tensor for_c10d(const at::Tensor& x) { return laid_out(x, is_gloo()).resolve_conj(); }

  Pending start_reduction() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const RedOpType op = draw_op(shape.dtype);
    const std::string what = what_ + c10::str(" c10d ", to_string(op), " ", shape.sizes, " ", shape.dtype);
    Tensors tensors{for_c10d(all[size_t(me_)])};
    const int64_t kind = pick(shared_, 3);
    if (kind == 0) {
      c10d::AllreduceOptions options;
      options.reduceOp = op;
      WorkPtr work = g_->allreduce(tensors, options);
      return {work, [=] { expect_close(tensors[0], reduced(op, all), what + ", allreduce"); }};
    }
    const int root = int(pick(shared_, n_));
    if (kind == 1) {
      c10d::ReduceOptions options;
      options.reduceOp = op;
      options.rootRank = root;
      WorkPtr work = g_->reduce(tensors, options);
      return {work, [=, me = me_] {
                if (me == root) expect_close(tensors[0], reduced(op, all), what + ", reduce");
              }};
    }
    c10d::BroadcastOptions options;
    options.rootRank = root;
    WorkPtr work = g_->broadcast(tensors, options);
    return {work, [=] { expect_equal(tensors[0], all[size_t(root)], what + ", broadcast"); }};
  }

  Pending start_gather() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const std::string what = what_ + c10::str(" c10d gather ", shape.sizes, " ", shape.dtype);
    Tensors inputs{for_c10d(all[size_t(me_)])};
    const int root = int(pick(shared_, n_));
    const bool everywhere = pick(shared_, 2) == 0;
    std::vector<Tensors> outputs;
    if (everywhere || me_ == root) {
      outputs.emplace_back();
      for (const at::Tensor& x : all) outputs[0].push_back(for_c10d(at::zeros_like(x)));
    }
    c10d::GatherOptions options;
    options.rootRank = root;
    WorkPtr work = everywhere ? g_->allgather(outputs, inputs) : g_->gather(outputs, inputs, options);
    return {work, [=] {
              for (size_t r = 0; !outputs.empty() && r < all.size(); ++r) expect_equal(outputs[0][r], all[r], what);
            }};
  }

  Pending start_scatter() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const std::string what = what_ + c10::str(" c10d scatter ", shape.sizes, " ", shape.dtype);
    const int root = int(pick(shared_, n_));
    Tensors outputs{for_c10d(at::zeros_like(all[0]))};
    std::vector<Tensors> inputs;
    if (me_ == root) {
      inputs.emplace_back();
      for (const at::Tensor& x : all) inputs[0].push_back(for_c10d(x));
    }
    c10d::ScatterOptions options;
    options.rootRank = root;
    WorkPtr work = g_->scatter(outputs, inputs, options);
    return {work, [=, me = me_] { expect_equal(outputs[0], all[size_t(me)], what); }};
  }

  Pending start_exchange() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const std::string what = what_ + c10::str(" c10d alltoall ", shape.sizes, " ", shape.dtype);
    // Rank r sends its values, shifted by the receiver's number so that pieces differ.
    const auto piece = [&](int from, int to) { return all[size_t((from + 2 * to) % n_)]; };
    Tensors inputs, outputs, expected;
    for (int r = 0; r < n_; ++r) {
      inputs.push_back(for_c10d(piece(me_, r)));
      outputs.push_back(for_c10d(at::zeros_like(all[0])));
      expected.push_back(piece(r, me_));
    }
    WorkPtr work = g_->alltoall(outputs, inputs);
    return {work, [=] {
              for (size_t r = 0; r < outputs.size(); ++r) expect_equal(outputs[r], expected[r], what);
            }};
  }

  Pending start_reduce_scatter() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const RedOpType op = draw_op(shape.dtype);
    const std::string what =
        what_ + c10::str(" c10d reduce_scatter ", to_string(op), " ", shape.sizes, " ", shape.dtype);
    c10d::ReduceScatterOptions options;
    options.reduceOp = op;
    Tensors outputs{for_c10d(at::zeros_like(all[0]))};
    std::vector<Tensors> inputs{Tensors()};
    for (int r = 0; r < n_; ++r) inputs[0].push_back(for_c10d(all[size_t((me_ + r) % n_)]));
    Tensors terms;
    for (int r = 0; r < n_; ++r) terms.push_back(all[size_t((r + me_) % n_)]);
    WorkPtr work = g_->reduce_scatter(outputs, inputs, options);
    return {work, [=] { expect_close(outputs[0], reduced(op, terms), what); }};
  }

  /// The forms that take one tensor for all pieces.
  Pending start_flat() {
    Shape shape = draw_shape();
    const Tensors pieces = all_values(shape);
    const std::string what = what_ + c10::str(" c10d flat ", shape.sizes, " ", shape.dtype);
    if (pick(shared_, 3) == 0) {
      at::Tensor input = for_c10d(pieces[size_t(me_)]);
      at::Tensor output = for_c10d(at::zeros_like(at::cat(pieces)));
      WorkPtr work = g_->all_gather_single(output, input);
      return {work, [=] { expect_equal(output, at::cat(pieces), what + ", all_gather"); }};
    }
    shape.sizes[0] *= n_;
    const Tensors all = all_values(shape);
    const int64_t rows = shape.sizes[0] / n_;
    at::Tensor input = for_c10d(all[size_t(me_)]);
    if (pick(shared_, 2) == 0) {
      c10d::ReduceScatterOptions options;
      options.reduceOp = draw_op(shape.dtype);
      const RedOpType op = options.reduceOp;
      const at::Tensor expected = reduced(op, all).narrow(0, me_ * rows, rows);
      at::Tensor output = for_c10d(at::zeros_like(expected));
      WorkPtr work = g_->reduce_scatter_single(output, input, options);
      return {work, [=] { expect_close(output, expected, what + ", reduce_scatter " + to_string(op)); }};
    }
    Tensors expected;
    for (const at::Tensor& x : all) expected.push_back(x.narrow(0, me_ * rows, rows));
    at::Tensor output = for_c10d(at::zeros_like(input));
    std::vector<int64_t> output_sizes, input_sizes;
    WorkPtr work = g_->all_to_all_single(output, input, output_sizes, input_sizes);
    return {work, [=] { expect_equal(output, at::cat(expected), what + ", all_to_all"); }};
  }

  void overlapping() {
    std::vector<Pending> pending;
    for (int64_t i = 1 + pick(shared_, 6); i > 0; --i) {
      switch (pick(shared_, 8)) {
        case 6: pending.push_back(start_flat()); break;
        case 7: pending.push_back({g_->barrier(), [] {}}); break;
        case 0: pending.push_back(start_gather()); break;
        case 1: pending.push_back(start_scatter()); break;
        case 2: pending.push_back(start_exchange()); break;
        case 3: pending.push_back(start_reduce_scatter()); break;
        default: pending.push_back(start_reduction());
      }
    }
    settle(pending);
  }

  void coalesced() {
    const RedOpType op = one_of<RedOpType>(shared_, {ReduceOp::SUM, ReduceOp::MAX, ReduceOp::PRODUCT});
    Tensors tensors, expected;
    Shape shape = draw_shape();
    if (at::isComplexType(shape.dtype)) shape.dtype = at::kDouble;
    for (int64_t i = 1 + pick(shared_, 4); i > 0; --i) {
      shape.sizes = draw_shape().sizes;
      const Tensors all = all_values(shape);
      tensors.push_back(for_c10d(all[size_t(me_)]));
      expected.push_back(reduced(op, all));
    }
    what_ += c10::str(": coalesced ", to_string(op), " ", shape.dtype, " x ", tensors.size());
    c10d::AllreduceCoalescedOptions options;
    options.reduceOp = op;
    g_->allreduce_coalesced(tensors, options)->wait();
    for (size_t i = 0; i < tensors.size(); ++i) expect_close(tensors[i], expected[i], what_);
  }

  /// Everybody sends to the next and to the one after it, with tags, in an order of its own.
  void peers() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    what_ += c10::str(": peers ", shape.sizes, " ", shape.dtype);
    if (n_ == 1) return;
    std::vector<Pending> pending;
    std::vector<int64_t> orders{0, 1, 2, 3};
    std::shuffle(orders.begin(), orders.end(), mine_);
    for (const int64_t order : orders) {
      const int distance = order % 2 == 0 ? 1 : n_ - 1;
      const int tag = int(order % 2);
      if (order < 2) {
        Tensors sent{for_c10d(all[size_t(me_)])};
        WorkPtr work = g_->send(sent, (me_ + distance) % n_, tag);
        pending.push_back({work, [sent] {}});
      } else {
        const int from = (me_ + n_ - distance) % n_;
        Tensors received{for_c10d(at::zeros_like(all[0]))};
        WorkPtr work = g_->recv(received, from, tag);
        pending.push_back({work, [=, what = what_] { expect_equal(received[0], all[size_t(from)], what); }});
      }
    }
    settle(pending);
  }

  const uint64_t seed_;
  std::mt19937_64 shared_;
  std::mt19937_64 mine_;
  const std::string backend_;
  const Group world_;
  Group g_;
  int n_ = 1;
  int me_ = 0;
  int64_t salt_ = 0;
  bool rows_equal_ = false;
  std::string what_;
};

void run_program(uint64_t seed, const std::string& backend) {
  const int world_size = 1 + int(seed % 4);
  run_ranks(world_size, [&](const Group& g) {
    const bool staged = backend == "shm_staged";
    const Group world =
        new_group(staged ? "shm" : backend,
                  {.timeout = std::chrono::seconds(20),
                   .store = g->getStore(),
                   .rank = g->getRank(),
                   .world_size = g->getSize(),
                   .backend_options = staged ? BackendOptions{{"always_stage", true}} : BackendOptions()});
    Program(seed, world, backend).run();
    barrier(g);
  });
}

TEST(RandomCollectives, OnThreadsEqualPlainLibTorch) {
  for_random_programs(150, [](uint64_t seed) { run_program(seed, "threads"); });
}

TEST(RandomCollectives, OnSharedMemoryEqualPlainLibTorch) {
  for_random_programs(150, [](uint64_t seed) { run_program(seed, "shm_staged"); });
}

TEST(RandomCollectives, OnGlooEqualPlainLibTorch) {
  for_random_programs(60, [](uint64_t seed) { run_program(seed, "gloo"); });
}

}  // namespace
}  // namespace serried
