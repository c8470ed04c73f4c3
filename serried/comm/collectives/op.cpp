// What the ops of all collectives share.
#include "serried/comm/collectives/op.h"

#include <array>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/chained_work.h"

namespace serried::detail {

std::string schema_text(const std::string& name, const std::string& arguments, const std::string& results) {
  return name + "(" + arguments + (arguments.empty() ? "" : ", ") + "int? timeout_ms=None) -> " + results;
}

ReduceOpPtr share(const c10d::ReduceOp& op) {
  static const std::array<ReduceOpPtr, c10d::ReduceOp::PREMUL_SUM> plain = [] {
    std::array<ReduceOpPtr, c10d::ReduceOp::PREMUL_SUM> all;
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::RedOpType(i));
    }
    return all;
  }();
  if (op.op_ < plain.size()) return plain[op.op_];
  return c10::make_intrusive<c10d::ReduceOp>(op);
}

void carry_out(const Group& group, const Collective& collective, WorkPtr* started) {
  if (started == nullptr) return run(group, collective);
  *started = start(group, collective);
}

void carry_out(const Group& group, const Collective& collective, WorkPtr* started, std::function<void()> after) {
  carry_out(group, collective, started);
  if (!after) return;
  if (started == nullptr) return after();
  *started = chained(std::move(*started), std::move(after));
}

WorkPtr chained(WorkPtr work, std::function<void()> after) {
  return c10::make_intrusive<ChainedWork>(std::move(work), std::move(after));
}

void check_strided(const char* where, const at::Tensor& x) {
  if (x.layout() == at::kStrided) return;
  raise<c10::NotImplementedError>({where, c10::str("the tensor is ", x.layout(), ", collectives take strided ones"),
                                   "pass x.to_dense(), or all-reduce it with group->allreduce"});
}

void raise_gradient_in_place(const at::Tensor& x, const char* where, const char* fix) {
  raise<c10::ValueError>({where,
                          watch::describe_tensor(x) + " requires grad, and writing into it in place has no gradient",
                          c10::str(fix, ", or call it under torch::NoGradGuard")});
}

void raise_gradient_into(const at::Tensor& output, const at::Tensor& x) {
  raise<c10::ValueError>({"collective into an output",
                          watch::describe_tensor(x.requires_grad() ? x : output) +
                              " requires grad, and writing into a given output has no gradient",
                          "use the functional form, or call it under torch::NoGradGuard"});
}

void move_into(watch::Kind kind, const char* where, const at::Tensor& output, const at::Tensor& x, const Group& group,
               TimeoutMs timeout, WorkPtr* started) {
  const at::Tensor input = x.contiguous();
  const Collective moving{
      .kind = kind, .where = where, .inputs = input, .outputs = output, .timeout = in_milliseconds(timeout)};
  carry_out(group, moving, started);
}

c10d::ReduceOp::RedOpType differentiable_op(AutogradContext* ctx, std::string_view where) {
  const auto op = c10d::ReduceOp::RedOpType(ctx->saved_data["op"].toInt());
  if (op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG) return op;
  raise<c10::NotImplementedError>(
      {where, "the reduction " + to_string(op) + " has no gradient",
       "reduce with sum or avg, or detach the input: " + std::string(where) + "(x.detach(), group, ...)"});
}

namespace {

void wait(const WorkPtr& work) {
  work->wait();
}

// Waiting has a place of its own in a graph.
TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("wait(__torch__.torch.classes.c10d.Work work) -> ()", wait);
}

}  // namespace
}  // namespace serried::detail
