// One index over all handler tables.
#include "serried/tensor/dispatch/handlers.h"

#include <string>
#include <unordered_map>

namespace serried {
namespace {

const std::unordered_map<std::string_view, Handler>& index() {
  static const auto handlers = [] {
    std::unordered_map<std::string_view, Handler> map;
    for (auto* table : {&random_handlers, &host_read_handlers, &reduction_handlers, &loss_handlers,
                        &batch_norm_handlers, &metadata_handlers, &own_output_handlers}) {
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

}  // namespace serried
