// Writes and reads index.json.
#include "serried/checkpoint/index.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>

#include "serried/base/text.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/files.h"
#include "serried/checkpoint/limits.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/parse_json.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

constexpr const char* kFormat = "serried checkpoint";
constexpr int64_t kOldestVersion = 2;
constexpr int64_t kMaxBlockBytes = int64_t(1) << 30;

constexpr std::string_view kChecksum = "{\n \"checksum\": \"";
constexpr size_t kHashLetters = 16;

std::string hash_text(uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

uint64_t hash_of_text(const std::string& text) {
  if (text.size() != kHashLetters || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw std::invalid_argument("a hash is damaged");
  }
  return std::stoull(text, nullptr, 16);
}

IndexedFile parse_file(const std::string& name, const json& object, int64_t block_bytes) {
  if (!is_file_name(name)) throw std::invalid_argument("a file has a name that leads elsewhere");
  IndexedFile file{name, object.at("bytes").get<int64_t>()};
  for (const auto& hash : object.at("blocks")) file.hashes.push_back(hash_of_text(hash.get<std::string>()));
  if (file.num_bytes < 0 || BlockGrid{file.num_bytes, block_bytes}.num_blocks() != int64_t(file.hashes.size())) {
    throw std::invalid_argument("a file has more or fewer hashes than blocks");
  }
  return file;
}

IndexedEntry parse_entry(const json& object) {
  IndexedEntry entry;
  entry.files = object.at("files").get<std::vector<std::string>>();
  entry.aliases = object.at("aliases").get<std::map<std::string, std::string>>();
  entry.values = object.at("values");
  entry.per_rank = object.at("per_rank");
  for (const std::string& file : entry.files) {
    if (!is_file_name(file)) throw std::invalid_argument("a file has a name that leads elsewhere");
  }
  return entry;
}

void check_version(const json& object, const std::string& path) {
  if (!object.is_object() || object.value("format", json()) != kFormat) {
    fail(path + " is not that of a checkpoint", "pass a folder that checkpoint::save wrote");
  }
  const int64_t version = object.at("version").get<int64_t>();
  if (version >= kOldestVersion && version <= kFormatVersion) return;
  fail(c10::str(path, " is of format ", version, ", and this serried reads format ", kFormatVersion),
       version > kFormatVersion ? "read it with a newer serried" : "save it again");
}

// The file as it was written, to the byte: values have no other guard.
void check_checksum(const std::string& text, const std::string& path) {
  const size_t begin = kChecksum.size() + kHashLetters + 2;  // and a quote and a comma
  if (text.size() >= begin && with_checksum(std::string(1, '{').append(text, begin)) == text) return;
  fail(path + " is not as it was saved: its checksum is another",
       "use another checkpoint; a file that was changed by hand cannot be loaded");
}

std::vector<std::string> checkpoints_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator item(folder, error), end; !error && item != end; item.increment(error)) {
    const std::string name = item->path().filename().string();
    if (!is_partial_name(name) && has_index(item->path().string())) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

// What is there instead of a checkpoint.
[[noreturn]] void fail_for_path(const std::string& path) {
  constexpr const char* kFix = "pass the folder of a checkpoint; one that ends with .partial-... was never finished";
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) fail(path + " does not exist", kFix);
  if (!fs::is_directory(status)) {
    fail(path + " is a single file, and a checkpoint is a folder",
         "load a safetensors file with load_safetensors(path, module)");
  }
  const std::vector<std::string> inside = checkpoints_in(path);
  if (inside.empty()) fail(path + " has no index.json: it is no checkpoint", kFix);
  fail(c10::str(path, " has no index.json: it is no checkpoint; there are some in it: ", list_of_names(inside)),
       "pass the folder of one of these; checkpoint::latest names the newest");
}

int64_t count_values(const json& value) {
  int64_t count = 1;
  if (!value.is_structured()) return count;
  for (const json& inside : value) count += count_values(inside);
  return count;
}

// What is written has to be read again, with its checksum.
void check_size(const json& object, const std::string& text) {
  const auto check = [](int64_t size, int64_t most, const char* what) {
    if (size <= most) return;
    fail(c10::str("index.json would have ", size, " ", what, ", and may have ", most),
         "save long lists and texts as tensors, or in several checkpoints");
  };
  check(int64_t(text.size()), format_limits().json_bytes, "bytes");
  check(count_values(object) + 1, format_limits().json_values, "values");
}

json json_of_file(const IndexedFile& file) {
  json hashes = json::array();
  for (uint64_t hash : file.hashes) hashes.push_back(hash_text(hash));
  return {{"bytes", file.num_bytes}, {"blocks", std::move(hashes)}};
}

}  // namespace

bool is_file_name(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

std::string index_text(const Index& index) {
  json object = {{"format", kFormat},
                 {"version", kFormatVersion},
                 {"world_size", index.world_size},
                 {"saved_at", index.saved_at},
                 {"block_bytes", index.block_bytes},
                 {"leaf_bytes", index.leaf_bytes},
                 {"values", index.values},
                 {"entries", json::object()},
                 {"files", json::object()},
                 {"weight_maps", json::object()}};
  for (const auto& [name, entry] : index.entries) {
    object["entries"][name] = {
        {"files", entry.files}, {"aliases", entry.aliases}, {"values", entry.values}, {"per_rank", entry.per_rank}};
  }
  for (const IndexedFile& file : index.files) object["files"][file.name] = json_of_file(file);
  for (const IndexedFile& file : index.weight_maps) object["weight_maps"][file.name] = json_of_file(file);
  std::string text = with_checksum(object.dump(1) + "\n");
  check_size(object, text);
  return text;
}

std::string with_checksum(const std::string& text) {
  const std::string_view rest = std::string_view(text).substr(text.empty() ? 0 : 1);
  return c10::str(kChecksum, hash_text(hash_of(rest.data(), int64_t(rest.size()))), "\",", rest);
}

Index parse_index(const std::string& text, const std::string& path) {
  const json object = parse_json(text, path);
  try {
    check_version(object, path);
    check_checksum(text, path);
    Index index;
    index.checksum = object.at("checksum").get<std::string>();
    index.saved_at = object.at("saved_at").get<int64_t>();
    index.world_size = object.at("world_size").get<int64_t>();
    index.block_bytes = object.at("block_bytes").get<int64_t>();
    if (index.block_bytes <= 0 || index.block_bytes > kMaxBlockBytes) {
      throw std::invalid_argument("block_bytes is no size of a block");
    }
    index.leaf_bytes = object.value("leaf_bytes", index.block_bytes);  // older checkpoints lack it
    if (index.leaf_bytes <= 0 || index.block_bytes % index.leaf_bytes != 0) {
      throw std::invalid_argument("leaf_bytes does not divide block_bytes");
    }
    index.values = object.at("values");
    if (!index.values.is_object()) throw std::invalid_argument("values is no object");
    for (const auto& [name, entry] : object.at("entries").items()) index.entries[name] = parse_entry(entry);
    for (const auto& [name, file] : object.at("files").items()) {
      index.files.push_back(parse_file(name, file, index.block_bytes));
    }
    const json weight_maps = object.value("weight_maps", json::object());  // older checkpoints lack it
    for (const auto& [name, file] : weight_maps.items()) {
      index.weight_maps.push_back(parse_file(name, file, index.block_bytes));
    }
    return index;
  } catch (const Failure&) {
    throw;
  } catch (const std::exception& error) {
    fail(c10::str(path, " is damaged: ", serried::detail::printable(error.what())), "use another checkpoint");
  }
}

Index read_index(const std::string& folder) {
  const std::string path = folder + "/" + kIndexName;
  if (!has_index(folder)) fail_for_path(folder);
  return parse_index(read_file(path, format_limits().json_bytes), path);
}

std::optional<Index> index_of(const std::string& folder) {
  if (!has_index(folder)) return std::nullopt;
  try {
    return read_index(folder);
  } catch (const Failure& failure) {
    if (failure.is_for_want_of_files()) throw;
    return std::nullopt;
  }
}

std::optional<std::string> checksum_in(const std::string& folder) {
  std::string first(kChecksum.size() + kHashLetters, '\0');
  try {
    File::open_to_read(folder + "/" + kIndexName).read(0, first.data(), int64_t(first.size()));
  } catch (const Failure& failure) {
    if (failure.is_for_want_of_files()) throw;
    return std::nullopt;
  }
  return first.substr(kChecksum.size());
}

std::string weight_map_name(const std::string& entry) {
  return entry + ".safetensors.index.json";
}

std::vector<std::string> other_things_in(const std::string& folder, const Index& index) {
  std::set<std::string> known = {kIndexName};
  for (const IndexedFile& file : index.files) known.insert(file.name);
  for (const auto& [entry, indexed] : index.entries) known.insert(weight_map_name(entry));
  std::vector<std::string> others;
  for (const auto& item : fs::directory_iterator(folder)) {
    const std::string name = item.path().filename().string();
    if (known.count(name) == 0) others.push_back(name);
  }
  std::sort(others.begin(), others.end());
  return others;
}

bool has_index(const std::string& folder) {
  return ::access((folder + "/" + kIndexName).c_str(), F_OK) == 0;
}

void check_entry_name(const std::string& name) {
  constexpr const char* kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  const bool is_good = !name.empty() && name.size() <= 100 && name.front() != '.' &&
                       name.find_first_not_of(kLetters) == std::string::npos;
  if (!is_good) {
    fail(c10::str("the name \"", serried::detail::printable(name), "\" cannot be part of a file's"),
         "use letters, digits, _, - and . in the names of what is saved");
  }
  if (name == kValuesEntry || name == "index") {
    fail(c10::str("the name \"", name, "\" is taken by the format"), "use another name");
  }
}

}  // namespace serried::checkpoint::detail
