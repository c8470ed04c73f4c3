// The calls of c10d::Backend: each checks its tensors and becomes a collective as the door describes them.
#include <numeric>
#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/mpi/backend.h"
#include "serried/comm/backends/shm/tensors.h"

namespace serried::mpi {
namespace {

using detail::Collective;
using shm::check_count;
using shm::check_dtype;
using shm::only;
using watch::Kind;

/// The dense tensors of one call. Where a tensor of the caller's is not, a copy of it stands here, and comes back.
struct Dense {
  const char* where;
  Tensors inputs = {}, outputs = {};
  shm::Task task = {};  // collects what is to be copied back

  void read(const at::Tensor& x) { inputs.push_back(shm::readable(where, x)); }
  void write(const at::Tensor& x) { outputs.push_back(shm::writable(where, x, task)); }
  void read(const Tensors& list) {
    for (const at::Tensor& x : list) read(x);
  }
  void write(const Tensors& list) {
    for (const at::Tensor& x : list) write(x);
  }

  Plan plan(Kind kind, const c10d::Backend& backend, const c10d::ReduceOp* op = nullptr, int root = -1, int tag = 0) {
    for (const at::Tensor& x : outputs) {
      if (!inputs.empty()) check_dtype(where, x, inputs.front());
    }
    Plan made = plan_of({kind, where, inputs, outputs, op, root, tag}, backend.getRank(), backend.getSize());
    if (task.after) {
      made.after = [first = std::move(made.after), then = std::move(task.after)] {
        if (first) first();
        then();
      };
    }
    made.kept.insert(made.kept.end(), task.keep_alive.begin(), task.keep_alive.end());
    return made;
  }
};

void check_numel(const char* where, const at::Tensor& x, int64_t expected) {
  check_count(where, c10::str("elements in ", watch::describe_tensor(x)), x.numel(), expected);
}

/// Views of `tensor` along dim 0, one per rank: by `sizes`, or equal where there are none.
Tensors cut(const char* where, const at::Tensor& tensor, std::vector<int64_t> sizes, int num_ranks) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (sizes.empty() && rows % num_ranks != 0) {
    raise<c10::ValueError>({where,
                            c10::str("dim 0 of ", watch::describe_tensor(tensor), " is not divisible by ", num_ranks),
                            "pass split sizes"});
  }
  if (sizes.empty()) sizes.assign(size_t(num_ranks), rows / num_ranks);
  check_count(where, "split sizes", int64_t(sizes.size()), num_ranks);
  check_count(where, c10::str("rows of ", watch::describe_tensor(tensor), " in the split sizes"),
              std::accumulate(sizes.begin(), sizes.end(), int64_t(0)), rows);
  const at::AutoDispatchBelowAutograd guard;
  return tensor.detach().split_with_sizes(sizes);
}

}  // namespace

WorkPtr MpiBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_root("broadcast", options.rootRank);
  Dense dense{"broadcast"};
  dense.write(only(dense.where, tensors));
  if (rank_ == options.rootRank) check_sent(dense.where, dense.outputs);
  return issue(dense.plan(Kind::broadcast, *this, nullptr, int(options.rootRank)), options.timeout);
}

WorkPtr MpiBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  Dense dense{"all_reduce"};
  dense.write(only(dense.where, tensors));
  dense.inputs = dense.outputs;
  check_sent(dense.where, dense.inputs);
  return issue(dense.plan(Kind::all_reduce, *this, &options.reduceOp), options.timeout);
}

WorkPtr MpiBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Plan> plans;
  for (const at::Tensor& x : tensors) {
    Dense dense{"all_reduce"};
    dense.write(x);
    dense.inputs = dense.outputs;
    check_sent(dense.where, dense.inputs);
    plans.push_back(dense.plan(Kind::all_reduce, *this, &options.reduceOp));
  }
  return issue_joined("all_reduce", std::move(plans), options.timeout);
}

WorkPtr MpiBackend::issue_joined(const char* where, std::vector<Plan> plans, std::chrono::milliseconds timeout) {
  if (plans.empty()) raise<c10::ValueError>({where, "the list of tensors is empty", "pass at least one tensor"});
  return issue(joined(std::move(plans)), timeout);
}

WorkPtr MpiBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_root("reduce", options.rootRank);
  Dense dense{"reduce"};
  dense.write(only(dense.where, tensors));
  dense.inputs = dense.outputs;
  check_sent(dense.where, dense.inputs);
  return issue(dense.plan(Kind::reduce, *this, &options.reduceOp, int(options.rootRank)), options.timeout);
}

WorkPtr MpiBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  Dense dense{"all_gather"};
  dense.read(only(dense.where, inputs));
  check_count(dense.where, "output lists", int64_t(outputs.size()), 1);
  check_count(dense.where, "outputs", int64_t(outputs.front().size()), size_);
  check_sent(dense.where, dense.inputs);
  dense.write(outputs.front());
  check_numel(dense.where, outputs.front()[size_t(rank_)], inputs.front().numel());
  return issue(dense.plan(Kind::all_gather, *this), options.timeout);
}

WorkPtr MpiBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr MpiBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  check_count("all_gather", "outputs", int64_t(outputs.size()), int64_t(inputs.size()));
  std::vector<Plan> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Dense dense{"all_gather"};
    dense.read(inputs[i]);
    check_sent(dense.where, dense.inputs);
    check_numel(dense.where, outputs[i], inputs[i].numel() * size_);
    dense.write(outputs[i]);
    plans.push_back(dense.plan(Kind::all_gather, *this));
  }
  if (plans.size() == 1) return issue(std::move(plans.front()), options.timeout);
  return issue_joined("all_gather", std::move(plans), options.timeout);
}

WorkPtr MpiBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr const char* where = "all_gather";
  check_count(where, "output lists", int64_t(outputs.size()), size_);
  std::vector<Plan> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Dense dense{where};
    dense.read(inputs[i]);
    check_sent(where, dense.inputs);
    for (const Tensors& list : outputs) {
      check_count(where, "outputs per rank", int64_t(list.size()), int64_t(inputs.size()));
      dense.write(list[i]);
    }
    check_numel(where, outputs[size_t(rank_)][i], inputs[i].numel());
    plans.push_back(dense.plan(Kind::all_gather, *this));
  }
  return issue_joined(where, std::move(plans), options.timeout);
}

WorkPtr MpiBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  Dense dense{"gather"};
  check_root(dense.where, options.rootRank);
  const bool is_root = rank_ == options.rootRank;
  dense.read(only(dense.where, inputs));
  check_sent(dense.where, dense.inputs);
  check_count(dense.where, "output lists", int64_t(outputs.size()), is_root ? 1 : 0);
  if (is_root) {
    check_count(dense.where, "outputs", int64_t(outputs.front().size()), size_);
    dense.write(outputs.front());
  }
  return issue(dense.plan(Kind::gather, *this, nullptr, int(options.rootRank)), options.timeout);
}

WorkPtr MpiBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  Dense dense{"scatter"};
  check_root(dense.where, options.rootRank);
  const bool is_root = rank_ == options.rootRank;
  dense.write(only(dense.where, outputs));
  check_count(dense.where, "input lists", int64_t(inputs.size()), is_root ? 1 : 0);
  if (is_root) {
    check_count(dense.where, "inputs", int64_t(inputs.front().size()), size_);
    for (const at::Tensor& input : inputs.front()) check_dtype(dense.where, input, outputs.front());
    dense.read(inputs.front());
    check_sent(dense.where, dense.inputs);
  }
  return issue(dense.plan(Kind::scatter, *this, nullptr, int(options.rootRank)), options.timeout);
}

WorkPtr MpiBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  Dense dense{"reduce_scatter"};
  check_count(dense.where, "input lists", int64_t(inputs.size()), 1);
  check_count(dense.where, "inputs", int64_t(inputs.front().size()), size_);
  dense.write(only(dense.where, outputs));
  for (const at::Tensor& input : inputs.front()) check_dtype(dense.where, input, outputs.front());
  dense.read(inputs.front());
  check_sent(dense.where, dense.inputs);
  check_numel(dense.where, inputs.front()[size_t(rank_)], outputs.front().numel());
  return issue(dense.plan(Kind::reduce_scatter, *this, &options.reduceOp), options.timeout);
}

WorkPtr MpiBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr MpiBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  check_count("reduce_scatter", "outputs", int64_t(outputs.size()), int64_t(inputs.size()));
  std::vector<Plan> plans;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Dense dense{"reduce_scatter"};
    check_numel(dense.where, inputs[i], outputs[i].numel() * size_);
    dense.read(inputs[i]);
    check_sent(dense.where, dense.inputs);
    dense.write(outputs[i]);
    plans.push_back(dense.plan(Kind::reduce_scatter, *this, &options.reduceOp));
  }
  if (plans.size() == 1) return issue(std::move(plans.front()), options.timeout);
  return issue_joined("reduce_scatter", std::move(plans), options.timeout);
}

WorkPtr MpiBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                  std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  Dense dense{"all_to_all"};
  dense.read(input);
  check_sent(dense.where, dense.inputs);
  dense.write(output);
  dense.inputs = cut(dense.where, dense.inputs.front(), input_sizes, size_);
  dense.outputs = cut(dense.where, dense.outputs.front(), output_sizes, size_);
  Plan plan = dense.plan(Kind::all_to_all, *this);
  plan.outputs = {output};
  return issue(std::move(plan), options.timeout);
}

WorkPtr MpiBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  Dense dense{"all_to_all"};
  check_count(dense.where, "outputs", int64_t(outputs.size()), size_);
  check_count(dense.where, "inputs", int64_t(inputs.size()), size_);
  for (const at::Tensor& input : inputs) check_dtype(dense.where, input, inputs.front());
  dense.read(inputs);
  check_sent(dense.where, dense.inputs);
  dense.write(outputs);
  return issue(dense.plan(Kind::all_to_all, *this), options.timeout);
}

WorkPtr MpiBackend::barrier(const c10d::BarrierOptions& options) {
  Dense dense{"barrier"};
  return issue(dense.plan(Kind::barrier, *this), options.timeout);
}

WorkPtr MpiBackend::transfer(Kind kind, Tensors& tensors, int peer, int tag) {
  const bool sends = kind == Kind::send;
  Dense dense{watch::kind_name(kind)};
  home_.require(dense.where);
  check_tag(dense.where, tag);
  if (peer != -1 || sends) check_root(dense.where, peer);
  if (sends) {
    dense.read(only(dense.where, tensors));
    check_sent(dense.where, dense.inputs);
  } else {
    dense.write(only(dense.where, tensors));
  }
  return issue_peer_call(dense.plan(kind, *this, nullptr, peer, tag), c10d::kUnsetTimeout);
}

WorkPtr MpiBackend::send(Tensors& tensors, int peer, int tag) {
  check_root("send", peer);
  return transfer(Kind::send, tensors, peer, tag);
}

WorkPtr MpiBackend::recv(Tensors& tensors, int peer, int tag) {
  check_root("recv", peer);
  return transfer(Kind::recv, tensors, peer, tag);
}

WorkPtr MpiBackend::recvAnysource(Tensors& tensors, int tag) {
  return transfer(Kind::recv, tensors, -1, tag);
}

}  // namespace serried::mpi
