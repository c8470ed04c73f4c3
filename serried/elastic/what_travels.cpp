// The same for state that every rank has whole and for what is spread over them.
#include "serried/elastic/what_travels.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/values.h"

namespace serried::detail {

using checkpoint::detail::fail;

void check_utf8(const std::string& entry, const checkpoint::detail::Item& item) {
  if (!checkpoint::detail::is_utf8(item.name)) fail(c10::str("a name of \"", entry, "\" is not UTF-8"), "rename it");
}

void check_not_per_rank(const std::string& entry, const checkpoint::detail::Part& part) {
  if (!part.per_rank) return;
  fail(c10::str("\"", entry, "\" differs from rank to rank, as random generators do"),
       "leave it out: each rank's generators are put back before a step is done again");
}

at::Tensor bytes_of_tensor(const at::Tensor& tensor) {
  return tensor.detach().contiguous().reshape({-1}).view(at::kByte);
}

uint64_t hash_of_bytes(const at::Tensor& bytes) {
  const at::Tensor here = bytes.cpu();
  return checkpoint::detail::hash_of(here.const_data_ptr(), here.numel());
}

std::string text_of(const nlohmann::json& value) {
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace serried::detail
