// Listings, verification and comparison.
#include "serried/checkpoint/inspect.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <iomanip>
#include <mutex>
#include <numeric>
#include <set>
#include <sstream>
#include <thread>

#include "serried/base/text.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/values.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/spec.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;
using serried::detail::bytes_text;
using serried::detail::printable;

std::string looks(const FileTensor& tensor) {
  return watch::dtype_name(tensor.dtype) + serried::detail::sizes_text(tensor.sizes);
}

std::string shown(const json& value) {
  const std::string text = printable(value.dump(-1, ' ', true));
  return text.size() <= 200 ? text : text.substr(0, 197) + "...";
}

struct BlockToCheck {
  size_t file;
  int64_t block;
};

// What is wrong, from several threads.
class Findings {
 public:
  void add(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_.push_back(std::move(text));
  }
  std::vector<std::string> sorted() && {
    std::sort(texts_.begin(), texts_.end());
    return std::move(texts_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

void check_blocks(const std::vector<IndexedFile>& indexed, int64_t block_bytes,
                  const std::vector<std::shared_ptr<File>>& files, const std::vector<BlockToCheck>& blocks,
                  const OnBytes& on_bytes, Findings& findings) {
  std::atomic<size_t> next = 0;
  std::atomic<int64_t> done = 0;
  int64_t total = 0;
  for (const IndexedFile& file : indexed) total += file.num_bytes;
  const auto work = [&] {
    std::string bytes(size_t(block_bytes), '\0');
    for (size_t i = next++; i < blocks.size(); i = next++) {
      const IndexedFile& file = indexed[blocks[i].file];
      const BlockGrid grid{file.num_bytes, block_bytes};
      const int64_t begin = grid.begin(blocks[i].block), end = grid.end(blocks[i].block);
      try {
        files[blocks[i].file]->read(begin, bytes.data(), end - begin);
        if (hash_of(bytes.data(), end - begin) != file.hashes[size_t(blocks[i].block)]) {
          findings.add(c10::str(file.name, ": bytes ", begin, " to ", end, " are not those that were saved"));
        }
      } catch (const Failure& failure) {
        findings.add(failure.text);
      }
      done += end - begin;
    }
  };
  std::vector<std::thread> threads;
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  for (unsigned i = 1; i < count; ++i) threads.emplace_back(work);
  if (on_bytes) on_bytes(0, total, "");
  work();
  for (std::thread& thread : threads) thread.join();
  if (on_bytes) on_bytes(done, total, "");
}

// A tensor of a checkpoint by its whole name.
struct Found {
  std::shared_ptr<TensorFile> file;
  const FileTensor* tensor = nullptr;
};

std::map<std::string, Found> tensors_of(Checkpoint& checkpoint) {
  std::map<std::string, Found> found;
  for (const auto& [entry, indexed] : checkpoint.index().entries) {
    for (const auto& file : checkpoint.files(entry)) {
      for (const FileTensor& tensor : file->header().tensors) {
        found[entry == kValuesEntry ? tensor.name : entry + "." + tensor.name] = {file, &tensor};
      }
    }
  }
  return found;
}

bool names_tensor(const json& value) {
  return value.is_object() && value.contains("$tensor");
}

void compare_values(const std::string& name, const json& first, const json& second, std::vector<std::string>& lines) {
  if (first == second) return;
  // Tensors among values are compared with all the others.
  if (names_tensor(first) && (second.is_null() || names_tensor(second))) return;
  if (names_tensor(second) && first.is_null()) return;
  if (first.is_object() && second.is_object()) {
    std::set<std::string> keys;
    for (const auto& [key, value] : first.items()) keys.insert(key);
    for (const auto& [key, value] : second.items()) keys.insert(key);
    for (const std::string& key : keys) {
      const std::string inner = name.empty() ? key : name + "." + key;
      compare_values(inner, first.value(key, json()), second.value(key, json()), lines);
    }
    return;
  }
  lines.push_back(c10::str(printable(name), ": ", shown(first), " and ", shown(second)));
}

// Random states, of each rank or of one for all.
void compare_ranks(const std::string& name, const json& first, const json& second, std::vector<std::string>& lines) {
  if (first == second || !first.is_array() || !second.is_array()) return;
  const auto whose = [](const json& list) {
    return list.size() == 1 ? std::string("of one rank for all") : c10::str("of each of ", list.size(), " ranks");
  };
  if (first.size() != second.size()) {
    lines.push_back(c10::str(printable(name), ": ", whose(first), ", and ", whose(second)));
    return;
  }
  const auto rank = std::mismatch(first.begin(), first.end(), second.begin()).first - first.begin();
  lines.push_back(c10::str(printable(name), ": what each rank has differs first on rank ", rank));
}

// Which elements have other bytes.
at::Tensor elements_that_differ(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& t) {
    return at::from_blob(t.mutable_data_ptr(), {t.numel(), t.element_size()}, at::kByte);
  };
  return bytes(a).ne(bytes(b)).any(1);
}

std::string compare_contents(const Found& first, const Found& second) {
  const at::Tensor a = read_whole(*first.file, *first.tensor), b = read_whole(*second.file, *second.tensor);
  if (hash_of(a.const_data_ptr(), int64_t(a.nbytes())) == hash_of(b.const_data_ptr(), int64_t(b.nbytes()))) return "";
  const at::Tensor which = elements_that_differ(a, b);
  const auto wide = c10::isComplexType(a.scalar_type()) ? at::kComplexDouble : at::kDouble;
  const at::Tensor one = a.reshape(-1).to(wide).masked_select(which),
                   other = b.reshape(-1).to(wide).masked_select(which);
  const at::Tensor lack = one.isnan().logical_xor(other.isnan());
  const at::Tensor by = (one - other).abs().masked_fill(one.isnan().logical_or(other.isnan()), 0);
  const std::string text = c10::str(which.sum().item<int64_t>(), " of ", a.numel(), " elements differ, ");
  const auto num_lack = lack.sum().item<int64_t>();
  if (num_lack > 0) return c10::str(text, num_lack, " of them NaN on one side");
  return c10::str(text, "by at most ", by.max().item<double>());
}

// How many letters have to be changed to come from one to the other, and less where one ends with the other.
size_t distance(const std::string& name, const std::string& known) {
  if (known.ends_with("." + name)) return 0;
  std::vector<size_t> row(known.size() + 1);
  std::iota(row.begin(), row.end(), size_t(0));
  for (size_t i = 0; i < name.size(); ++i) {
    size_t corner = row[0]++;
    for (size_t j = 0; j < known.size(); ++j) {
      const size_t changed = corner + (name[i] == known[j] ? 0 : 1);
      corner = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back() + 1;
}

[[noreturn]] void fail_for_name(const Checkpoint& checkpoint, const std::map<std::string, Found>& tensors,
                                const std::string& name) {
  std::vector<std::string> there;
  for (const auto& [known, value] : checkpoint.index().values.items()) {
    if (!names_tensor(value)) there.push_back(known);
  }
  for (const auto& [known, found] : tensors) there.push_back(known);
  constexpr size_t kFew = 20, kNearest = 5;
  const size_t count = there.size();
  const std::string what = count <= kFew ? "it has: " : c10::str("the nearest of ", count, " names: ");
  if (count > kFew) {
    std::stable_sort(there.begin(), there.end(),
                     [&](const std::string& a, const std::string& b) { return distance(name, a) < distance(name, b); });
    there.resize(kNearest);
  }
  fail(c10::str(checkpoint.folder(), " has no \"", printable(name), "\"; ", what, list_of_names(there)),
       "name one of these; serried checkpoint ls shows all");
}

void compare_tensors(Checkpoint& first, Checkpoint& second, const OnBytes& on_bytes, std::vector<std::string>& lines) {
  const std::map<std::string, Found> mine = tensors_of(first), theirs = tensors_of(second);
  int64_t total = 0, done = 0;
  for (const auto& [name, found] : mine) total += found.tensor->end - found.tensor->begin;
  for (const auto& [name, found] : mine) {
    if (on_bytes) on_bytes(done, total, printable(name));
    done += found.tensor->end - found.tensor->begin;
    const auto other = theirs.find(name);
    if (other == theirs.end()) {
      lines.push_back(printable(name) + ": only in the first");
    } else if (looks(*found.tensor) != looks(*other->second.tensor)) {
      lines.push_back(c10::str(printable(name), ": ", looks(*found.tensor), " and ", looks(*other->second.tensor)));
    } else if (const std::string text = compare_contents(found, other->second); !text.empty()) {
      lines.push_back(printable(name) + ": " + text);
    }
  }
  for (const auto& [name, found] : theirs) {
    if (mine.count(name) == 0) lines.push_back(printable(name) + ": only in the second");
  }
}

}  // namespace

std::string listing(const std::string& folder) {
  Checkpoint checkpoint(folder);
  const Index& index = checkpoint.index();
  int64_t total = 0;
  for (const IndexedFile& file : index.files) total += file.num_bytes;
  std::ostringstream out;
  out << folder << ": " << bytes_text(total) << " in " << index.files.size() << " files, saved by " << index.world_size
      << (index.world_size == 1 ? " rank" : " ranks") << "\n";
  for (const auto& [name, value] : index.values.items())
    out << "  " << printable(name) << " = " << shown(value) << "\n";
  for (const auto& [entry, indexed] : index.entries) {
    out << entry << "\n";
    for (const auto& file : checkpoint.files(entry)) {
      for (const FileTensor& tensor : file->header().tensors) {
        out << "  " << std::left << std::setw(40) << printable(tensor.name) << " " << std::setw(20) << looks(tensor)
            << " " << bytes_text(tensor.end - tensor.begin) << "\n";
      }
    }
    for (const auto& [alias, name] : indexed.aliases) {
      out << "  " << printable(alias) << " is " << printable(name) << "\n";
    }
  }
  return out.str();
}

std::vector<std::string> verify(const std::string& path, const OnBytes& on_bytes) {
  const std::string folder = place_of(path);
  const Index index = read_index(folder);
  std::vector<IndexedFile> all = index.files;
  all.insert(all.end(), index.weight_maps.begin(), index.weight_maps.end());
  Findings findings;
  std::vector<std::shared_ptr<File>> files(all.size());
  std::vector<BlockToCheck> blocks;
  for (size_t i = 0; i < all.size(); ++i) {
    try {
      if (i < index.files.size()) const TensorFile whole(folder, all[i], index.block_bytes);  // that it has a header
      files[i] = std::make_shared<File>(File::open_to_read(folder + "/" + all[i].name));
      check_length(*files[i], all[i]);
      for (size_t b = 0; b < all[i].hashes.size(); ++b) blocks.push_back({i, int64_t(b)});
    } catch (const Failure& failure) {
      findings.add(failure.text);
    }
  }
  check_blocks(all, index.block_bytes, files, blocks, on_bytes, findings);
  return std::move(findings).sorted();
}

std::vector<std::string> differences(const std::string& first, const std::string& second, const OnBytes& on_bytes) {
  Checkpoint a(first), b(second);
  std::vector<std::string> lines;
  compare_values("", a.index().values, b.index().values, lines);
  std::set<std::string> entries;
  for (const auto& [name, entry] : a.index().entries) entries.insert(name);
  for (const auto& [name, entry] : b.index().entries) entries.insert(name);
  const auto entry_of = [](const Checkpoint& checkpoint, const std::string& name) {
    const auto found = checkpoint.index().entries.find(name);
    return found == checkpoint.index().entries.end() ? IndexedEntry() : found->second;
  };
  for (const std::string& name : entries) {
    const IndexedEntry mine = entry_of(a, name), theirs = entry_of(b, name);
    compare_values(name, mine.values, theirs.values, lines);
    compare_ranks(name, mine.per_rank, theirs.per_rank, lines);
  }
  compare_tensors(a, b, on_bytes, lines);
  return lines;
}

std::string text_of(const std::string& folder, const std::string& name) {
  Checkpoint checkpoint(folder);
  const std::map<std::string, Found> tensors = tensors_of(checkpoint);
  std::ostringstream out;
  const auto found = tensors.find(name);
  if (found != tensors.end()) {
    const at::Tensor value = read_whole(*found->second.file, *found->second.tensor);
    out << looks(*found->second.tensor);
    if (!value.is_complex()) {
      out << "\n" << value << "\n";
    } else {
      out << ", real and imaginary parts in the last dim\n" << at::view_as_real(value) << "\n";
    }
    return out.str();
  }
  const auto entry = checkpoint.index().entries.find(name);
  if (entry != checkpoint.index().entries.end()) return printable(entry->second.values.dump(-1, ' ', true)) + "\n";
  const json* value = find_value(checkpoint.index().values, name);
  if (value == nullptr) fail_for_name(checkpoint, tensors, name);
  out << read_value(folder, name) << "\n";
  return out.str();
}

}  // namespace serried::checkpoint::detail
