// Which file has which tensor.
#include "serried/checkpoint/plain_source.h"

#include <c10/util/StringUtil.h>

#include <filesystem>

#include "serried/base/text.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/limits.h"
#include "serried/checkpoint/parse_json.h"

namespace serried::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

constexpr const char* kOnlyFile = "model.safetensors";
constexpr const char* kIndexOfFiles = "model.safetensors.index.json";
constexpr const char* kIndexEnding = ".safetensors.index.json";

std::string named(const std::string& name) {
  return c10::str('"', serried::detail::printable(name), '"');
}

// The file or the index that a folder stands for.
std::string chosen_in(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return path;
  if (has_index(path)) {
    fail(path + " is the folder of a checkpoint",
         "load it with checkpoint::load(path, {{\"model\", state_of(module)}})");
  }
  for (const char* name : {kIndexOfFiles, kOnlyFile}) {
    if (fs::exists(fs::path(path) / name, error)) return (fs::path(path) / name).string();
  }
  fail(c10::str(path, " is a folder without ", kOnlyFile, " and ", kIndexOfFiles), "pass a safetensors file");
}

}  // namespace

std::map<std::string, std::string> parse_weight_map(const std::string& text, const std::string& index) {
  const nlohmann::json json = parse_json(text, index);
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  const char* fix = "the index is damaged or of another format: use a copy";
  if (!json.is_object() || map == json.end() || !map->is_object()) fail(index + " has no weight_map", fix);
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : map->items()) {
    if (!file.is_string() || !is_file_name(file.get<std::string>())) {
      fail(c10::str(index, " has no name of a file beside it for ", named(name)), fix);
    }
    files[name] = file.get<std::string>();
  }
  return files;
}

PlainSource::PlainSource(const std::string& path) {
  check_no_nul(path);
  const std::string chosen = chosen_in(path);
  const bool is_index = fs::path(chosen).filename().string().ends_with(kIndexEnding);
  places_ = is_index ? open_files_of(chosen) : open(chosen);
}

PlainSource::Places PlainSource::open(const std::string& path) {
  const auto file = std::make_shared<TensorFile>(path);
  Places places;
  for (const FileTensor& tensor : file->header().tensors) places[tensor.name] = {file, &tensor};
  metadata_.insert(file->header().metadata.begin(), file->header().metadata.end());
  return places;
}

// The index is what counts: what a file has besides is not part of the model.
PlainSource::Places PlainSource::open_files_of(const std::string& index) {
  const fs::path folder = parent_of(index);
  std::map<std::string, Places> by_file;
  Places all;
  for (const auto& [name, file_name] : parse_weight_map(read_file(index, format_limits().json_bytes), index)) {
    auto [found, is_new] = by_file.try_emplace(file_name);
    if (is_new) {
      found->second = open((folder / file_name).string());
      const bool is_one_of_many = by_file.size() > kFilesThatStayOpen && !found->second.empty();
      if (is_one_of_many) found->second.begin()->second.file->close_between_reads();
    }
    const auto place = found->second.find(name);
    if (place == found->second.end()) {
      fail(c10::str(index, " says that ", named(name), " is in ", file_name, ", where it is not"),
           "a file of another model is among them: copy all files anew");
    }
    all[name] = place->second;
  }
  return all;
}

// Metadata has other things than names of tensors, too.
SavedPart PlainSource::part() const {
  SavedPart part;
  for (const auto& [name, place] : places_) part.tensors.push_back(*place.tensor);
  for (const auto& [key, text] : metadata_) {
    if (places_.count(key) == 0 && places_.count(text) != 0) part.aliases[key] = text;
  }
  return part;
}

Reading PlainSource::reading(const std::string& name, const at::Tensor& into) const {
  const Place& place = places_.at(name);
  return {place.file, place.tensor, into};
}

}  // namespace serried::checkpoint::detail
