// Inputs that every rank can make for all others; expected are plain copies, and sums in the order of ranks.
#include "tests/hosts/every_collective.h"

#include <cstring>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/OpMathType.h>
#include <c10/util/StringUtil.h>

namespace serried::testing {
namespace {

using Tensors = std::vector<at::Tensor>;

/// All calls with one dtype and one size.
class Calls {
 public:
  Calls(const Group& group, at::ScalarType dtype, int64_t size)
      : group_(group), me_(group->getRank()), n_(group->getSize()), dtype_(dtype), size_(size) {}

  std::string run() {
    reductions();
    moves();
    exchanges();
    return differs_;
  }

 private:
  /// Less for low ranks, and of small sizes nothing for the first.
  int64_t size_of(int rank) const { return size_ * (rank + 1) / 2; }

  /// What `from` has for `to`: sums of it depend on the order of addition.
  at::Tensor piece(int from, int to, int64_t size) const {
    at::Generator generator = at::detail::createCPUGenerator(uint64_t(1 + from * 100 + to));
    return at::randn({size}, generator, at::kDouble).mul_(50).to(dtype_);
  }

  template <class Make>
  at::Tensor sum(const Make& make) const {
    const at::ScalarType wide = at::toOpMathType(dtype_);
    at::Tensor total = make(0).to(wide).clone();
    for (int rank = 1; rank < n_; ++rank) total = total + make(rank).to(wide);
    return total.to(dtype_);
  }

  void expect(const at::Tensor& actual, const at::Tensor& expected, const char* call) {
    const bool same =
        actual.nbytes() == expected.nbytes() &&
        (actual.nbytes() == 0 || std::memcmp(actual.const_data_ptr(), expected.const_data_ptr(), actual.nbytes()) == 0);
    if (!same) differs_ += c10::str(" ", call, " of ", c10::toString(dtype_), " x ", size_);
  }

  void reductions() {
    const auto whole = [&](int rank) { return piece(rank, 0, size_); };
    Tensors x{whole(me_)};
    group_->allreduce(x)->wait();
    expect(x[0], sum(whole), "all_reduce");

    x = {whole(me_)};
    c10d::ReduceOptions to_last;
    to_last.rootRank = n_ - 1;
    group_->reduce(x, to_last)->wait();
    if (me_ == n_ - 1) expect(x[0], sum(whole), "reduce");

    std::vector<Tensors> inputs(1);
    for (int to = 0; to < n_; ++to) inputs[0].push_back(piece(me_, to, size_of(to)));
    Tensors mine{at::zeros({size_of(me_)}, dtype_)};
    group_->reduce_scatter(mine, inputs)->wait();
    expect(mine[0], sum([&](int rank) { return piece(rank, me_, size_of(me_)); }), "reduce_scatter");
  }

  void moves() {
    Tensors x{piece(me_, 0, size_)};
    c10d::BroadcastOptions from_1;
    from_1.rootRank = 1;
    group_->broadcast(x, from_1)->wait();
    expect(x[0], piece(1, 0, size_), "broadcast");

    Tensors own{piece(me_, 0, size_)};
    std::vector<Tensors> gathered;
    if (me_ == 1) gathered.emplace_back(size_t(n_));
    for (Tensors& list : gathered) {
      for (at::Tensor& one : list) one = at::zeros({size_}, dtype_);
    }
    c10d::GatherOptions to_1;
    to_1.rootRank = 1;
    group_->gather(gathered, own, to_1)->wait();
    for (int from = 0; me_ == 1 && from < n_; ++from)
      expect(gathered[0][size_t(from)], piece(from, 0, size_), "gather");

    std::vector<Tensors> dealt;
    if (me_ == n_ - 1) dealt.emplace_back();
    for (int to = 0; me_ == n_ - 1 && to < n_; ++to) dealt[0].push_back(piece(me_, to, size_));
    Tensors got{at::zeros({size_}, dtype_)};
    c10d::ScatterOptions from_last;
    from_last.rootRank = n_ - 1;
    group_->scatter(got, dealt, from_last)->wait();
    expect(got[0], piece(n_ - 1, me_, size_), "scatter");
  }

  void exchanges() {
    Tensors own{piece(me_, 0, size_of(me_))};
    std::vector<Tensors> all(1);
    for (int from = 0; from < n_; ++from) all[0].push_back(at::zeros({size_of(from)}, dtype_));
    group_->allgather(all, own)->wait();
    for (int from = 0; from < n_; ++from) expect(all[0][size_t(from)], piece(from, 0, size_of(from)), "all_gather");

    Tensors inputs, outputs;
    for (int peer = 0; peer < n_; ++peer) {
      inputs.push_back(piece(me_, peer, size_of(peer)));
      outputs.push_back(at::zeros({size_of(me_)}, dtype_));
    }
    group_->alltoall(outputs, inputs)->wait();
    for (int from = 0; from < n_; ++from) expect(outputs[size_t(from)], piece(from, me_, size_of(me_)), "all_to_all");
  }

  const Group& group_;
  const int me_;
  const int n_;
  const at::ScalarType dtype_;
  const int64_t size_;
  std::string differs_;
};

}  // namespace

std::string calls_with_other_bits(const Group& group) {
  std::string all;
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong}) {
    for (const int64_t size : {1, 17, 9001, 150'001}) all += Calls(group, dtype, size).run();
  }
  return all;
}

}  // namespace serried::testing
