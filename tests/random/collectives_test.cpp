// Random sequences of collectives on every backend, against the same program in plain LibTorch on one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <random>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/close.h"
#include "tests/support/collective_programs.h"
#include "tests/support/on_ranks.h"
#include "tests/support/plain_collectives.h"
#include "tests/support/random_programs.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using testing::expect_close;
using testing::expect_equal;
using testing::for_random_programs;
using testing::one_of;
using testing::pick;
using testing::reduced;
using testing::sample;
using testing::shard_sizes;
using RedOpType = ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Sizes = std::vector<int64_t>;

class Program : testing::CollectiveProgram {
 public:
  using testing::CollectiveProgram::CollectiveProgram;

  void run() {
    for (int64_t step = 0; step < 12; ++step) {
      begin(step);
      switch (pick(shared_, 10)) {
        case 0: functional_reduction(); break;
        case 1: functional_move(); break;
        case 2: in_place(); break;
        case 3: into_outputs(); break;
        case 4: peers(); break;
        case 5: coalesced(); break;
        case 6: rooted_gather(); break;
        case 7: rooted_scatter(); break;
        default: overlapping();
      }
    }
  }

 private:
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
    const int64_t kind = pick(shared_, 3);
    if (kind == 0) {
      const int dst = int(pick(shared_, n_));
      what_ += c10::str(": reduce ", to_string(op), " ", shape.sizes, " ", shape.dtype, " to ", dst);
      return compare(
          x, all,
          [&](const at::Tensor& t) {
            const ReduceOptions options{.dst = dst, .op = op};
            return starts() ? async::reduce(t, g_, options).wait() : reduce(t, g_, options);
          },
          [&](const Tensors& xs) { return only_at(dst, reduced(op, xs)); }, differentiable);
    }
    if (kind == 1) {
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

  /// Each rank decides for itself whether it calls the blocking form.
  bool starts() { return pick(mine_, 2) == 0; }

  Tensors only_at(int root, const at::Tensor& y) {
    Tensors ys(size_t(n_), at::zeros_like(y));
    ys[size_t(root)] = y;
    return ys;
  }

  static at::Tensor in_one_row(const Tensors& xs) {
    Tensors rows;
    for (const at::Tensor& x : xs) rows.push_back(x.reshape({-1}));
    return at::cat(rows);
  }

  /// A gather of shapes that have nothing in common but the dtype.
  void rooted_gather() {
    const at::ScalarType dtype = draw_shape().dtype;
    draw_kind_of_values();
    Tensors all;
    for (int r = 0; r < n_; ++r) all.push_back(values({draw_shape().sizes, dtype}, r));
    const int dst = int(pick(shared_, n_));
    what_ += c10::str(": gather ", dtype, " to ", dst);
    compare(
        as_input(all[size_t(me_)]), all,
        [&](const at::Tensor& t) {
          const GatherOptions options{.dst = dst};
          return in_one_row(starts() ? async::gather(t, g_, options).wait() : gather(t, g_, options));
        },
        [&](const Tensors& xs) { return only_at(dst, in_one_row(xs)); }, true);
  }

  /// Of what one rank has, cut unevenly; the others pass nothing.
  void rooted_scatter() {
    const Shape shape = draw_shape();
    const Tensors all = all_values(shape);
    const int src = int(pick(shared_, n_));
    const int64_t dim = pick(shared_, int64_t(shape.sizes.size()));
    Sizes cut = shard_sizes(shape.sizes[size_t(dim)], n_);
    std::shuffle(cut.begin(), cut.end(), shared_);
    what_ += c10::str(": scatter ", shape.sizes, " ", shape.dtype, " from ", src);
    compare(
        as_input(all[size_t(me_)]), all,
        [&](const at::Tensor& t) {
          const Tensors list = me_ == src ? t.split_with_sizes(cut, dim) : Tensors();
          const ScatterOptions options{.src = src};
          const at::Tensor mine = starts() ? async::scatter(list, g_, options).wait() : scatter(list, g_, options);
          return t.requires_grad() ? mine + 0 * t.sum() : mine;  // so that every rank's input has a gradient
        },
        [&](const Tensors& xs) { return xs[size_t(src)].split_with_sizes(cut, dim); }, true);
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
