// Writes and reads index.json.
#include "serried/checkpoint/index.h"

#include <c10/util/StringUtil.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "serried/base/text.h"
#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/files.h"
#include "serried/checkpoint/values.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "serried checkpoint";
constexpr int64_t kMaxIndexBytes = int64_t(1) << 30;

constexpr std::string_view kChecksum = "{\n \"checksum\": \"";

std::string hash_text(uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

uint64_t hash_of_text(const std::string& text) {
  if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw std::invalid_argument("a hash is damaged");
  }
  return std::stoull(text, nullptr, 16);
}

bool is_file_name(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

IndexedFile parse_file(const std::string& name, const json& object, int64_t block_bytes) {
  if (!is_file_name(name)) throw std::invalid_argument("a file has a name that leads elsewhere");
  IndexedFile file{name, object.at("bytes").get<int64_t>()};
  for (const auto& hash : object.at("blocks")) file.hashes.push_back(hash_of_text(hash.get<std::string>()));
  if (file.num_bytes < 0 || (file.num_bytes + block_bytes - 1) / block_bytes != int64_t(file.hashes.size())) {
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
  if (version == kFormatVersion) return;
  fail(c10::str(path, " is of format ", version, ", and this serried reads format ", kFormatVersion),
       version > kFormatVersion ? "read it with a newer serried" : "save it again");
}

// The file as it was written, to the byte: values have no other guard.
void check_checksum(const std::string& text, const std::string& path) {
  const size_t begin = kChecksum.size() + 18;  // 16 digits, a quote, a comma
  if (text.size() >= begin && with_checksum("{" + text.substr(begin)) == text) return;
  fail(path + " is not as it was saved: its checksum is another",
       "use another checkpoint; a file that was changed by hand cannot be loaded");
}

}  // namespace

std::string index_text(const Index& index) {
  json object = {{"format", kFormat},          {"version", kFormatVersion},        {"world_size", index.world_size},
                 {"saved_at", index.saved_at}, {"block_bytes", index.block_bytes}, {"values", index.values},
                 {"entries", json::object()},  {"files", json::object()}};
  for (const auto& [name, entry] : index.entries) {
    object["entries"][name] = {
        {"files", entry.files}, {"aliases", entry.aliases}, {"values", entry.values}, {"per_rank", entry.per_rank}};
  }
  for (const IndexedFile& file : index.files) {
    json hashes = json::array();
    for (uint64_t hash : file.hashes) hashes.push_back(hash_text(hash));
    object["files"][file.name] = {{"bytes", file.num_bytes}, {"blocks", std::move(hashes)}};
  }
  return with_checksum(object.dump(1) + "\n");
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
    if (index.block_bytes <= 0 || index.block_bytes > kMaxIndexBytes) {
      throw std::invalid_argument("block_bytes is no size of a block");
    }
    index.values = object.at("values");
    if (!index.values.is_object()) throw std::invalid_argument("values is no object");
    for (const auto& [name, entry] : object.at("entries").items()) index.entries[name] = parse_entry(entry);
    for (const auto& [name, file] : object.at("files").items()) {
      index.files.push_back(parse_file(name, file, index.block_bytes));
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
  if (!has_index(folder)) {
    const bool is_there = std::filesystem::is_directory(folder);
    fail(c10::str(folder, is_there ? " has no index.json: it is no checkpoint" : " does not exist"),
         "pass the folder of a checkpoint; one that ends with .partial-... was never finished");
  }
  return parse_index(read_file(path, kMaxIndexBytes), path);
}

bool is_checkpoint(const std::string& folder) {
  if (!has_index(folder)) return false;
  try {
    read_index(folder);
    return true;
  } catch (const Failure&) {
    return false;
  }
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
