// Listings and verification.
#include "serried/checkpoint/inspect.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <iomanip>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>

#include "serried/base/text.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/inspect_names.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;
using serried::detail::bytes_text;
using serried::detail::printable;

// Blocks of one file that are read at once.
struct BlocksToCheck {
  size_t file;
  int64_t first, count;
};

constexpr int64_t kBytesAtOnce = int64_t(1) << 20;  // fewer cost a file that is opened each time, more a cache

// What is wrong, from several threads.
class Findings {
 public:
  void add(std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    texts_.push_back(std::move(text));
  }
  void add(const Failure& failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    failure.is_for_want_of_files() ? void(failure_ = failure) : texts_.push_back(failure.text);
  }
  // Failure where there were too many open files to tell.
  std::vector<std::string> sorted() && {
    if (failure_) throw *failure_;
    std::sort(texts_.begin(), texts_.end());
    return std::move(texts_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
  std::optional<Failure> failure_;
};

// Opened each time: a process may not have all of them open. `on_block` gets each block and its bytes.
template <class OnBlock>
void read_blocks(const std::string& path, const BlockGrid& grid, const BlocksToCheck& blocks, std::string& bytes,
                 const OnBlock& on_block) {
  const int64_t last = blocks.first + blocks.count - 1, begin = grid.begin(blocks.first);
  bytes.resize(size_t(grid.end(last) - begin));
  File::open_to_read(path, true).read(begin, bytes.data(), int64_t(bytes.size()));
  for (int64_t block = blocks.first; block <= last; ++block) on_block(block, bytes.data() + grid.begin(block) - begin);
}

struct FilesToCheck {
  std::string folder;
  std::vector<IndexedFile> files;
  const Index& index;
};

// Which tensor that is, where the file has tensors and its header is whole.
std::string which_tensor(const FilesToCheck& all, size_t file, int64_t offset) {
  if (file >= all.index.files.size()) return "";
  try {
    const TensorFile whole(all.folder, all.files[file], all.index.grid_of(all.files[file].num_bytes));
    return c10::str(", of ", whole.tensor_at(offset), ",");
  } catch (const Failure&) {
    return "";
  }
}

void check_blocks(const FilesToCheck& all, const std::vector<BlocksToCheck>& blocks, const OnBytes& on_bytes,
                  Findings& findings) {
  std::atomic<size_t> next = 0;
  std::mutex mutex;  // of `done`, and of whom it is told
  int64_t done = 0, total = 0;
  for (const IndexedFile& file : all.files) total += file.num_bytes;
  const auto tell = [&](int64_t more, const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex);
    done += more;
    if (on_bytes) on_bytes(done, total, what);
  };
  const auto work = [&] {
    std::string bytes;
    for (size_t i = next++; i < blocks.size(); i = next++) {
      const IndexedFile& file = all.files[blocks[i].file];
      const BlockGrid grid = all.index.grid_of(file.num_bytes);
      try {
        read_blocks(all.folder + "/" + file.name, grid, blocks[i], bytes, [&](int64_t block, const char* data) {
          const int64_t begin = grid.begin(block), end = grid.end(block);
          if (hash_of_block(grid, block, data) != file.hashes[size_t(block)]) {
            findings.add(c10::str(file.name, ": bytes ", begin, " to ", end, which_tensor(all, blocks[i].file, begin),
                                  " are not those that were saved"));
          }
          tell(end - begin, file.name);
        });
      } catch (const Failure& failure) {
        findings.add(failure);
      }
    }
  };
  tell(0, "");
  std::vector<std::thread> threads;
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, 8u);
  for (unsigned i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

std::string listing_of(Checkpoint& checkpoint) {
  const Index& index = checkpoint.index();
  int64_t total = 0;
  for (const IndexedFile& file : index.files) total += file.num_bytes;
  std::ostringstream out;
  out << checkpoint.folder() << ": " << bytes_text(total) << " in " << index.files.size() << " files, saved by "
      << index.world_size << (index.world_size == 1 ? " rank" : " ranks") << "\n";
  for (const auto& [name, value] : index.values.items())
    out << "  " << printable(name) << " = " << shown_value(value) << "\n";
  for (const auto& [entry, indexed] : index.entries) {
    out << entry << "\n";
    for (const auto& file : checkpoint.files(entry)) {
      for (const FileTensor& tensor : file->header().tensors) {
        out << "  " << std::left << std::setw(40) << printable(tensor.name) << " " << std::setw(20) << looks_of(tensor)
            << " " << bytes_text(tensor.end - tensor.begin) << "\n";
      }
    }
    for (const auto& [alias, name] : indexed.aliases) {
      out << "  " << printable(alias) << " is " << printable(name) << "\n";
    }
  }
  return out.str();
}

std::string listing_json_of(Checkpoint& checkpoint) {
  const Index& index = checkpoint.index();
  json entries = json::object();
  for (const auto& [entry, indexed] : index.entries) {
    json tensors = json::object();
    for (const auto& file : checkpoint.files(entry)) {
      for (const FileTensor& tensor : file->header().tensors) {
        tensors[tensor.name] = {
            {"looks", looks_of(tensor)}, {"sizes", tensor.sizes}, {"bytes", tensor.end - tensor.begin}};
      }
    }
    entries[entry] = {{"tensors", std::move(tensors)}, {"aliases", indexed.aliases}};
  }
  int64_t total = 0;
  for (const IndexedFile& file : index.files) total += file.num_bytes;
  return json{{"bytes", total},
              {"files", index.files.size()},
              {"ranks", index.world_size},
              {"values", index.values},
              {"entries", std::move(entries)}}
             .dump(1, ' ', true) +
         "\n";
}

}  // namespace

std::string listing(const std::string& folder) {
  const auto checkpoint = std::make_unique<Checkpoint>(folder);
  return from_one(checkpoint, [&] { return listing_of(*checkpoint); });
}

std::string listing_json(const std::string& folder) {
  const auto checkpoint = std::make_unique<Checkpoint>(folder);
  return from_one(checkpoint, [&] { return listing_json_of(*checkpoint); });
}

std::vector<std::string> verify(const std::string& path, const OnBytes& on_bytes) {
  const std::string folder = place_of(path);
  const Index index = read_index(folder);
  FilesToCheck all{folder, index.files, index};
  all.files.insert(all.files.end(), index.weight_maps.begin(), index.weight_maps.end());
  Findings findings;
  std::vector<BlocksToCheck> blocks;
  const int64_t at_once = std::max<int64_t>(1, kBytesAtOnce / index.block_bytes);
  for (size_t i = 0; i < all.files.size(); ++i) {
    const IndexedFile& file = all.files[i];
    try {
      if (i < index.files.size()) const TensorFile whole(folder, file, index.grid_of(file.num_bytes));  // has a header
      check_length(File::open_to_read(folder + "/" + file.name, true), file);
      const auto count = int64_t(file.hashes.size());
      for (int64_t b = 0; b < count; b += at_once) blocks.push_back({i, b, std::min(at_once, count - b)});
    } catch (const Failure& failure) {
      findings.add(failure);
    }
  }
  check_blocks(all, blocks, on_bytes, findings);
  const std::vector<std::string> found = std::move(findings).sorted();
  if (!found.empty() && checksum_in(folder) != index.checksum) {
    fail(folder + " was replaced or removed by a save while it was read", "verify it again");
  }
  return found;
}

}  // namespace serried::checkpoint::detail
