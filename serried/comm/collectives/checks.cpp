// Checks of what users pass to collectives: once, before anything is sent.
#include "serried/comm/collectives/checks.h"

#include <algorithm>
#include <array>

#include "serried/base/error.h"
#include "serried/base/home_key.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/pieces.h"
#include "serried/comm/collectives/watch.h"

namespace serried {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

constexpr std::array<const char*, 9> kReduceOpNames = {"sum",  "avg", "product", "min",       "max",
                                                       "band", "bor", "bxor",    "premul_sum"};
constexpr size_t kNumParsedOps = 8;  // premul_sum needs a factor, which a name does not give

[[noreturn]] void raise_no_group(std::string_view where) {
  raise<c10::ValueError>(
      {where, "the group is null",
       "make one with new_group(), or pass current_process_group() where a ProcessGroupGuard is alive"});
}

[[noreturn]] void raise_no_factor(std::string_view where) {
  raise<c10::ValueError>({where, "the reduction premul_sum has no factor", "make it with c10d::makePreMulSum(factor)"});
}

// The same on every backend, and on a group of one, which reduces nothing.
void check_meaning(std::string_view where, const c10d::ReduceOp& op, at::ScalarType dtype) {
  const bool ordered = op.op_ == RedOpType::MIN || op.op_ == RedOpType::MAX;
  const bool bitwise = op.op_ >= RedOpType::BAND && op.op_ <= RedOpType::BXOR;
  const bool meaningless = (ordered && at::isComplexType(dtype)) || (op.op_ == RedOpType::AVG && dtype == at::kBool) ||
                           (bitwise && !at::isIntegralType(dtype, /*includeBool=*/true));
  if (!meaningless) return;
  raise<c10::ValueError>(
      {where, c10::str("op ", to_string(op.op_), " has no meaning for dtype ", watch::dtype_name(dtype)),
       "bitwise ops take integers and bool; min and max take no complex numbers; avg takes no bool"});
}

}  // namespace

namespace detail {

void check_group(std::string_view where, const Group& group) {
  if (!group) raise_no_group(where);
}

void check_call(std::string_view where, const at::Tensor& x, const Group& group) {
  check_group(where, group);
  if (x.defined()) return;
  raise<c10::ValueError>({where, "the tensor is undefined", "pass a tensor; at::empty({0}) is one without elements"});
}

bool is_dist_tensor(const at::Tensor& x) {
  return x.key_set().has(kHomeKey);
}

void check_not_distributed(std::string_view where, const at::Tensor& x) {
  if (!is_dist_tensor(x)) return;
  raise<c10::NotImplementedError>({where, watch::describe_tensor(x) + " is distributed over ranks",
                                   "pass the part of this rank, x.to_local(), or x.full_tensor()"});
}

void check_op(std::string_view where, const c10d::ReduceOp& op, const at::Tensor& x) {
  if (op.op_ == RedOpType::PREMUL_SUM && !op.supplement_) raise_no_factor(where);
  if (op.op_ < kReduceOpNames.size()) return check_meaning(where, op, x.scalar_type());
  const std::vector<std::string> known(kReduceOpNames.begin(), kReduceOpNames.begin() + kNumParsedOps);
  raise<c10::ValueError>({where, "the reduction is unused", "pass one of " + c10::Join(", ", known)});
}

int64_t checked_dim(std::string_view where, const char* name, const at::Tensor& x, int64_t dim) {
  if (x.dim() == 0) {
    raise<c10::ValueError>({where, watch::describe_tensor(x) + " has no dim to work along", "pass x.unsqueeze(0)"});
  }
  if (dim >= -x.dim() && dim < x.dim()) return dim < 0 ? dim + x.dim() : dim;
  raise<c10::IndexError>({where,
                          c10::str(name, " is ", dim, " and ", watch::describe_tensor(x), " has ", x.dim(), " dims"),
                          c10::str("pass a dim in [", -x.dim(), ", ", x.dim() - 1, "]")});
}

void check_rank(std::string_view where, const char* name, int rank, const Group& group) {
  if (rank >= 0 && rank < group->getSize()) return;
  raise<c10::ValueError>({where, c10::str(name, " is ", rank, " in a group of ", group->getSize(), " ranks"),
                          c10::str("pass a rank of the group: 0 to ", group->getSize() - 1)});
}

void check_peer(std::string_view where, int peer, int tag, const Group& group) {
  check_rank(where, "peer", peer, group);
  if (peer == group->getRank()) {
    raise<c10::ValueError>({where, c10::str("peer ", peer, " is this rank itself"), "copy the tensor instead"});
  }
  if (tag >= 0) return;
  raise<c10::ValueError>({where, c10::str("tag is ", tag), "pass a tag of 0 or more"});
}

void check_output(std::string_view where, const at::Tensor& output, const at::Tensor& x, int64_t num_elements) {
  if (output.defined() && output.scalar_type() == x.scalar_type() && output.numel() == num_elements &&
      output.is_contiguous() && x.is_contiguous()) {
    return;
  }
  const std::string given =
      !output.defined() ? "undefined"
                        : c10::str(watch::describe_tensor(output), output.is_contiguous() ? "" : " (not contiguous)");
  raise<c10::ValueError>(
      {where,
       c10::str("the output is ", given, " for ", watch::describe_tensor(x),
                x.is_contiguous() ? "" : " (not contiguous)"),
       c10::str("pass contiguous tensors of one dtype, the output with ", num_elements, " elements")});
}

void check_divisible(std::string_view where, const at::Tensor& x, const Group& group) {
  if (x.dim() > 0 && x.size(0) % group->getSize() == 0) return;
  raise<c10::ValueError>(
      {where,
       c10::str("dim 0 of ", watch::describe_tensor(x), " cannot be cut into ", group->getSize(), " equal pieces"),
       "use the functional form, which takes uneven pieces"});
}

std::vector<int64_t> checked_splits(const at::Tensor& x, int64_t dim, int num_ranks, std::vector<int64_t> sizes) {
  if (sizes.empty()) return shard_sizes(x.size(dim), num_ranks);
  const bool negative = std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; });
  if (!negative && int64_t(sizes.size()) == num_ranks && sum_of(sizes) == x.size(dim)) return sizes;
  raise<c10::ValueError>(
      {"all_to_all",
       c10::str("split_sizes are [", c10::Join(", ", sizes), "] for dim ", dim, " of ", watch::describe_tensor(x),
                " over ", num_ranks, " ranks"),
       c10::str("pass ", num_ranks, " sizes of 0 or more that add up to ", x.size(dim), ", or none to cut evenly")});
}

std::optional<int64_t> checked_timeout(std::string_view where, std::optional<std::chrono::milliseconds> timeout) {
  if (!timeout) return std::nullopt;
  if (timeout->count() > 0) return timeout->count();
  raise<c10::ValueError>({where, c10::str("the timeout is ", timeout->count(), " ms"),
                          "pass a timeout above 0, as in {.timeout = 30s}, or none for the group's"});
}

}  // namespace detail

// Not by c10d's constructor, which asserts.
Reduction::Reduction(RedOpType op) {
  if (op == RedOpType::PREMUL_SUM) raise_no_factor("ReduceOp::PREMUL_SUM");
  op_ = op;
}

c10d::ReduceOp parse_reduce_op(std::string_view name) {
  for (size_t i = 0; i < kNumParsedOps; ++i) {
    if (name == kReduceOpNames[i]) return RedOpType(i);
  }
  const std::vector<std::string> known(kReduceOpNames.begin(), kReduceOpNames.begin() + kNumParsedOps);
  raise<c10::ValueError>({"parse_reduce_op",
                          c10::str("unknown reduction \"", name, "\"; known: ", c10::Join(", ", known)),
                          "pass one of the known names"});
}

std::string to_string(RedOpType op) {
  return op < kReduceOpNames.size() ? kReduceOpNames[op] : "unused";
}

}  // namespace serried
