// Plain modules as safetensors files.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/collect.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/plain_source.h"
#include "serried/checkpoint/save_job.h"
#include "serried/checkpoint/source.h"
#include "serried/checkpoint/writer.h"
#include "serried/tensor/dtensor.h"

namespace serried {
namespace checkpoint::detail {
namespace {

Part part_for_file(const torch::nn::Module& module) {
  Part part = part_of_module(unwrapped(module));
  std::stable_sort(part.items.begin(), part.items.end(),
                   [](const Item& a, const Item& b) { return a.tensor.element_size() > b.tensor.element_size(); });
  return part;
}

void check_plain(const Part& part) {
  for (const Item& item : part.items) {
    if (is_dtensor(item.tensor)) {
      fail(c10::str("\"", item.name, "\" is a DTensor"),
           "save it with checkpoint::save, whose files are safetensors, too; load_safetensors takes DTensors");
    }
    check_can_save("", item.name, item.tensor);
    if (item.name != "__metadata__") continue;
    fail("a tensor has the name \"__metadata__\", which the format has for something else", "give it another name");
  }
}

FileHeader header_of(const Part& part, const SaveSafetensorsOptions& options) {
  FileHeader header;
  header.metadata = {{"format", "pt"}};
  header.metadata.insert(part.aliases.begin(), part.aliases.end());
  for (const auto& [key, text] : options.metadata) header.metadata[key] = text;
  int64_t end = 0;
  for (const Item& item : part.items) {
    const std::vector<int64_t> sizes = item.tensor.sizes().vec();
    const int64_t begin = end;
    end += bytes_of(item.tensor.scalar_type(), sizes);
    header.tensors.push_back({item.name, item.tensor.scalar_type(), sizes, begin, end});
  }
  return header;
}

void write_plain(const std::string& path, const torch::nn::Module& module, const SaveSafetensorsOptions& options) {
  const at::NoGradGuard no_grad;
  const Part part = part_for_file(module);
  check_plain(part);
  const FileHeader header = header_of(part, options);
  const std::string text = header_text(header);
  const File file = create_partial_file(path);
  try {
    file.write(0, text.data(), int64_t(text.size()));
    for (size_t i = 0; i < part.items.size(); ++i) {
      const at::Tensor bytes = bytes_to_write(part.items[i].tensor);
      file.write(int64_t(text.size()) + header.tensors[i].begin, bytes.const_data_ptr(), int64_t(bytes.nbytes()));
    }
    file.sync();
    check_replaces_file(path);
    if (::rename(file.path().c_str(), path.c_str()) != 0) fail_with_errno("rename a file to", path, errno);
    File::open_folder(parent_of(path)).sync();
  } catch (...) {
    ::unlink(file.path().c_str());
    throw;
  }
}

void check_plain_names(const std::string& path, const Wanted& wanted) {
  if (wanted.missing.empty() && wanted.extra.empty()) return;
  fail(c10::str(path, " has other names than the module: ", differences_of_names(wanted)),
       "load into the same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load what both have");
}

void read_plain(const std::string& path, const torch::nn::Module& module, const LoadSafetensorsOptions& options) {
  const PlainSource source(path);
  const Wanted wanted = match_names(part_for_file(module), source.part(), {.rename = options.rename});
  if (options.strict) check_plain_names(path, wanted);
  std::vector<Reading> readings;
  for (const Target& target : wanted.targets) {
    readings.push_back(source.reading(target.saved_name, target.tensor));
    check_looks(readings.back(), {options.convert, ""});
  }
  for (const auto& [one, other] : wanted.twins) check_twins(source.reading(one, {}), source.reading(other, {}), path);
  read_all(std::move(readings));
}

}  // namespace
}  // namespace checkpoint::detail

void save_safetensors(const std::string& path, const torch::nn::Module& module, SaveSafetensorsOptions options) {
  try {
    checkpoint::detail::refuse_recording("save_safetensors");
    checkpoint::detail::write_plain(path, module, options);
  } catch (const checkpoint::detail::Failure& failure) {
    checkpoint::detail::raise_failure("save_safetensors", failure);
  }
}

void load_safetensors(const std::string& path, const torch::nn::Module& module, LoadSafetensorsOptions options) {
  try {
    checkpoint::detail::refuse_recording("load_safetensors");
    checkpoint::detail::read_plain(path, module, options);
  } catch (const checkpoint::detail::Failure& failure) {
    checkpoint::detail::raise_failure("load_safetensors", failure);
  }
}

}  // namespace serried
