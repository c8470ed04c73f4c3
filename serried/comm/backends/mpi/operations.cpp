// MPI hands an operation no closure, so each pair of dtype and reduction has a function of its own around shm's kernel.
#include "serried/comm/backends/mpi/operations.h"

#include <array>
#include <map>
#include <utility>

#include "serried/comm/backends/mpi/library.h"
#include "serried/comm/backends/shm/reduce_kernels.h"

namespace serried::mpi {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

constexpr std::array kDtypes{at::kFloat,         at::kDouble, at::kHalf,   at::kBFloat16, at::kComplexFloat,
                             at::kComplexDouble, at::kBool,   at::kByte,   at::kChar,     at::kShort,
                             at::kInt,           at::kLong,   at::kUInt16, at::kUInt32,   at::kUInt64};
constexpr std::array kOps{RedOpType::SUM,  RedOpType::PRODUCT, RedOpType::MIN, RedOpType::MAX,
                          RedOpType::BAND, RedOpType::BOR,     RedOpType::BXOR};

template <size_t Pair>
void apply(void* in, void* in_and_out, int* count, MPI_Datatype*) {
  static const shm::ReduceKernel kernel =
      shm::find_reduce_kernel(kDtypes[Pair / kOps.size()], kOps[Pair % kOps.size()]);
  const void* sources[] = {in, in_and_out};
  kernel(in_and_out, sources, 2, *count);
}

template <size_t... Pairs>
constexpr std::array<MPI_User_function*, sizeof...(Pairs)> functions(std::index_sequence<Pairs...>) {
  return {apply<Pairs>...};
}

constexpr auto kFunctions = functions(std::make_index_sequence<kDtypes.size() * kOps.size()>());

template <class List, class Value>
size_t index_in(const List& list, Value value) {
  for (size_t i = 0; i < list.size(); ++i) {
    if (list[i] == value) return i;
  }
  TORCH_INTERNAL_ASSERT(false, "no reduction in the table");
}

// Only its size matters to MPI.
MPI_Datatype type_of(int64_t element_bytes) {
  switch (element_bytes) {
    case 1: return MPI_UINT8_T;
    case 2: return MPI_UINT16_T;
    case 4: return MPI_UINT32_T;
    case 8: return MPI_UINT64_T;
    case 16: return MPI_C_DOUBLE_COMPLEX;
    default: TORCH_INTERNAL_ASSERT(false, "elements of ", element_bytes, " bytes");
  }
}

}  // namespace

Reduction reduction_of(at::ScalarType dtype, RedOpType op) {
  static std::map<size_t, MPI_Op> made;
  const size_t pair = index_in(kDtypes, dtype) * kOps.size() + index_in(kOps, op);
  const auto element_bytes = int64_t(c10::elementSize(dtype));
  if (const auto found = made.find(pair); found != made.end()) {
    return {type_of(element_bytes), element_bytes, found->second};
  }
  MPI_Op operation = MPI_OP_NULL;
  require(MPI_Op_create(kFunctions[pair], /*commute=*/1, &operation), "MPI_Op_create");
  made.emplace(pair, operation);
  return {type_of(element_bytes), element_bytes, operation};
}

}  // namespace serried::mpi
