// One index over all handler tables.
#include "serried/tensor/dispatch/handlers.h"

#include <string>
#include <unordered_map>

#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

const std::unordered_map<std::string_view, Handler>& index() {
  static const auto handlers = [] {
    std::unordered_map<std::string_view, Handler> map;
    for (auto* table :
         {&random_handlers, &host_read_handlers, &reduction_handlers, &softmax_handlers, &loss_handlers,
          &batch_norm_handlers, &metadata_handlers, &own_tensor_handlers, &image_convolution_handlers,
          &image_pool_handlers, &image_adaptive_pool_handlers, &image_resize_handlers, &attention_handlers}) {
      for (const HandlerEntry& entry : table()) map.emplace(entry.op, entry.run);
    }
    return map;
  }();
  return handlers;
}

}  // namespace

Handler find_handler(const c10::FunctionSchema& schema) {
  const auto& handlers = index();
  const auto exact = handlers.find(schema.name() + "." + schema.overload_name());
  if (exact != handlers.end()) return exact->second;
  const auto any = handlers.find(schema.name());
  return any == handlers.end() ? nullptr : any->second;
}

namespace detail {

bool finish(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::initializer_list<c10::IValue> results) {
  torch::jit::drop(stack, op.schema().arguments().size());
  stack.insert(stack.end(), results.begin(), results.end());
  return true;
}

at::Tensor local_as(const DTensorMeta& meta, const Placements& to) {
  return meta.spec->placements == to ? meta.local : redistribute_local(meta.local, *meta.spec, to);
}

at::Tensor whole_local(const DTensorMeta& meta) {
  return local_as(meta, Placements(meta.spec->placements.size()));
}

}  // namespace detail

}  // namespace serried
