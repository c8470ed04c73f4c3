// The way from a collective to a backend.
#include "serried/comm/collectives/transport.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/comm/collectives/average.h"
#include "serried/comm/collectives/cut.h"
#include "serried/comm/collectives/premultiply.h"
#include "serried/comm/collectives/watch.h"

namespace serried::detail {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

std::string device_list(const Group& group) {
  std::vector<std::string> names;
  for (const at::Device& device : group->getDeviceTypes()) names.push_back(device.str());
  std::sort(names.begin(), names.end());
  return names.empty() ? "none" : c10::Join(", ", names);
}

// Such a group has no name either: c10d keeps it in the backends.
void check_has_backend(std::string_view where, const Group& group) {
  if (group->hasBackends()) return;
  raise<c10::ValueError>({where, "the group has no backend", "make the group with new_group"});
}

c10::intrusive_ptr<c10d::Backend> find_backend(std::string_view where, const Group& group, const at::Tensor& x) {
  if (x.layout() != at::kStrided) {
    raise<c10::NotImplementedError>({where, c10::str("the tensor is ", x.layout(), ", collectives take strided ones"),
                                     "pass x.to_dense(), or all-reduce it with group->allreduce"});
  }
  check_has_backend(where, group);
  const at::DeviceType device = x.device().type();
  if (group->hasBackendForDeviceType(device)) return group->getBackend(device);
  raise<c10::ValueError>({where,
                          c10::str(watch::describe_tensor(x), " is on ", x.device(), ", and group \"",
                                   group->getGroupName(), "\" serves: ", device_list(group)),
                          "move the tensor to a device the group serves, or make the group with {.device = ...}"});
}

// The group's own where it serves the CPU, else whatever it serves.
c10::intrusive_ptr<c10d::Backend> any_backend(std::string_view where, const Group& group) {
  check_has_backend(where, group);
  if (group->hasBackendForDeviceType(at::kCPU)) return group->getBackend(at::kCPU);
  return group->getDefaultBackend();
}

// Dtypes that any backend can carry under their own name, so that its checks and messages speak of them.
bool is_common(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong: return true;
    default: return false;
  }
}

// What only moves may move as bytes: a backend that cannot name the dtype still carries it.
at::Tensor carried(const at::Tensor& x) {
  return is_common(x.scalar_type()) ? x : x.view({-1}).view(at::kByte);
}

at::Tensor carried_flat(const at::Tensor& x) {
  return carried(x).view({-1});
}

// Backends without complex numbers can add their parts.
at::Tensor addable(const at::Tensor& x, RedOpType op) {
  return x.is_complex() && op == RedOpType::SUM ? at::view_as_real(x) : x;
}

bool same_sizes(const std::vector<at::Tensor>& pieces) {
  return std::all_of(pieces.begin(), pieces.end(),
                     [&](const at::Tensor& piece) { return piece.sizes() == pieces[0].sizes(); });
}

std::vector<at::Tensor> all_flat(const std::vector<at::Tensor>& pieces) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& piece : pieces) flat.push_back(carried_flat(piece));
  return flat;
}

std::vector<int64_t> lengths(const std::vector<at::Tensor>& flat) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& piece : flat) sizes.push_back(piece.numel());
  return sizes;
}

}  // namespace

Transport::Transport(std::string_view where, const Group& group, const at::Tensor& x)
    : where_(where),
      backend_(find_backend(where, group, x)),
      direct_(x.is_cpu() ? dynamic_cast<DirectCollectives*>(backend_.get()) : nullptr) {}

Transport::Transport(std::string_view where, const Group& group)
    : where_(where), backend_(any_backend(where, group)), direct_(dynamic_cast<DirectCollectives*>(backend_.get())) {}

template <class Start>
void Transport::finish(Start start) const {
  std::string text;
  try {
    start()->wait();
    return;
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    text = error.what();
  }
  raise<c10::DistBackendError>(
      {where_, backend_->getBackendName() + ": " + text,
       "see what the other ranks report; if one is only slow, make the group with a longer {.timeout}"});
}

void Transport::all_reduce(const at::Tensor& input, const at::Tensor& output, const c10d::ReduceOp& op) const {
  if (direct_) return direct_->direct_all_reduce(input, output, op);
  if (!output.is_same(input)) output.copy_(input);
  // Not every backend has AVG and PREMUL_SUM, but every one can add.
  if (op.op_ == RedOpType::PREMUL_SUM) output.copy_(premultiplied(output, op));
  const bool average = op.op_ == RedOpType::AVG;
  const int64_t count = backend_->getSize();
  const at::Tensor reduced = average ? average_addends(output, count) : output;
  c10d::AllreduceOptions options;
  options.reduceOp = average || op.op_ == RedOpType::PREMUL_SUM ? c10d::ReduceOp(RedOpType::SUM) : op;
  std::vector<at::Tensor> tensors{addable(reduced, options.reduceOp.op_)};
  finish([&] { return backend_->allreduce(tensors, options); });
  if (average) write_average(output, reduced, count);
}

void Transport::all_gather(const std::vector<at::Tensor>& pieces, const at::Tensor& input,
                           const at::Tensor& whole) const {
  if (whole.defined() && same_sizes(pieces)) return all_gather_flat(whole, input);
  if (direct_) return direct_->direct_all_gather(pieces, input);
  // Pieces of different sizes travel padded to the longest.
  const std::vector<at::Tensor> flat = all_flat(pieces);
  int64_t longest = 0;
  for (const at::Tensor& piece : flat) longest = std::max(longest, piece.numel());
  const at::Tensor mine = carried_flat(input);
  at::Tensor from = at::zeros({longest}, mine.options());
  from.narrow(0, 0, mine.numel()).copy_(mine);
  at::Tensor to = at::empty({backend_->getSize() * longest}, from.options());
  finish([&] { return backend_->_allgather_base(to, from); });
  for (size_t rank = 0; rank < flat.size(); ++rank) {
    flat[rank].copy_(to.narrow(0, int64_t(rank) * longest, flat[rank].numel()));
  }
}

void Transport::reduce_scatter(const at::Tensor& output, const std::vector<at::Tensor>& pieces,
                               const c10d::ReduceOp& op) const {
  if (direct_) return direct_->direct_reduce_scatter(output, pieces, op);
  // c10d's reduce_scatter takes equal pieces only; Gloo's is an all_reduce inside, so nothing is lost by saying so.
  std::vector<at::Tensor> flat;
  for (const at::Tensor& piece : pieces) flat.push_back(piece.view({-1}));
  const at::Tensor whole = at::cat(flat);
  all_reduce(whole, whole, op);
  int64_t begin = 0;
  for (int rank = 0; rank < backend_->getRank(); ++rank) begin += pieces[rank].numel();
  output.copy_(whole.narrow(0, begin, output.numel()).view(output.sizes()));
}

void Transport::all_to_all(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) const {
  if (direct_) return direct_->direct_all_to_all(outputs, inputs);
  const std::vector<at::Tensor> sent = all_flat(inputs);
  const std::vector<at::Tensor> flat = all_flat(outputs);
  const std::vector<int64_t> received_sizes = lengths(flat);
  at::Tensor from = at::cat(sent);
  at::Tensor to = at::empty({sum_of(received_sizes)}, from.options());
  // Backends take these by reference and may move them away.
  std::vector<int64_t> input_sizes = lengths(sent);
  std::vector<int64_t> output_sizes = received_sizes;
  finish([&] { return backend_->alltoall_base(to, from, output_sizes, input_sizes); });
  const std::vector<at::Tensor> received = to.split_with_sizes(received_sizes);
  for (size_t rank = 0; rank < flat.size(); ++rank) flat[rank].copy_(received[rank]);
}

void Transport::all_gather_flat(const at::Tensor& output, const at::Tensor& input) const {
  if (direct_) return direct_->direct_all_gather_flat(output, input);
  at::Tensor from = carried_flat(input);
  at::Tensor to = carried_flat(output);
  finish([&] { return backend_->_allgather_base(to, from); });
}

void Transport::reduce_scatter_flat(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const {
  if (direct_) return direct_->direct_reduce_scatter_flat(output, input, op);
  reduce_scatter(output, input.view({-1}).chunk(backend_->getSize()), op);
}

void Transport::all_to_all_flat(const at::Tensor& output, const at::Tensor& input) const {
  if (direct_) return direct_->direct_all_to_all_flat(output, input);
  at::Tensor from = carried_flat(input);
  at::Tensor to = carried_flat(output);
  std::vector<int64_t> equal;
  std::vector<int64_t> equal_too;
  finish([&] { return backend_->alltoall_base(to, from, equal, equal_too); });
}

void Transport::broadcast(const at::Tensor& x, int64_t src) const {
  if (direct_) return direct_->direct_broadcast(x, int(src));
  std::vector<at::Tensor> tensors{carried(x)};
  c10d::BroadcastOptions options;
  options.rootRank = src;
  finish([&] { return backend_->broadcast(tensors, options); });
}

void Transport::send(const at::Tensor& x, int64_t peer, int64_t tag) const {
  std::vector<at::Tensor> tensors{x};
  finish([&] { return backend_->send(tensors, int(peer), int(tag)); });
}

void Transport::recv(const at::Tensor& x, int64_t peer, int64_t tag) const {
  std::vector<at::Tensor> tensors{x};
  finish([&] { return backend_->recv(tensors, int(peer), int(tag)); });
}

void Transport::barrier() const {
  if (direct_) return direct_->direct_barrier();
  finish([&] { return backend_->barrier(); });
}

}  // namespace serried::detail
