// Byte ranges of files into parts of tensors.
#include "serried/checkpoint/reader.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <optional>

#include "serried/base/text.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/runs.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/parts.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::checkpoint::detail {
namespace {

using serried::detail::LocalOnly;
using serried::detail::sizes_text;

std::string looks_text(const FileTensor& tensor) {
  return watch::dtype_name(tensor.dtype) + sizes_text(tensor.sizes);
}

bool is_real_number(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype);
}

// Somebody outside of autograd has written it.
void note_write(const at::Tensor& t) {
  const auto bump = [](const at::Tensor& written) {
    if (!written.is_inference()) written.unsafeGetTensorImpl()->bump_version();
  };
  bump(t);
  const at::Tensor part = part_of(t);
  if (!part.is_same(t)) bump(part);
  if (serried::detail::GatherOnUse* gather = serried::detail::gather_of(t)) gather->note_write();
}

// Reads one tensor's part.
class PartReader {
 public:
  PartReader(const Reading& reading, std::optional<Failure>& failure)
      : reading_(reading), spec_(spec_of(reading.to)), part_(part_of(reading.to)), failure_(failure) {}

  void run() {
    if (spec_ && !spec_->mesh.contains_this_rank()) return;
    const Placements rows = spec_ ? rows_instead(*spec_) : Placements();
    if (!rows.empty()) return read_rows(rows);
    if (failure_) return;
    try {
      read_part(spec_ ? Region::of(*spec_) : Region::whole(reading_.from->sizes));
    } catch (const std::exception&) {
      failure_ = current_failure();  // e.g. no memory: the others wait for this rank at the next tensor in short runs
    }
  }

 private:
  bool can_read_in_place() const {
    return part_.device().is_cpu() && part_.is_contiguous() && !part_.is_conj() && !part_.is_neg() &&
           part_.scalar_type() == reading_.from->dtype;
  }

  void read_part(const Region& region) {
    if (can_read_in_place()) {
      read(region, part_.mutable_data_ptr());
    } else {
      store(read_region(region));
    }
  }

  at::Tensor read_region(const Region& region) {
    const LocalOnly local_only;
    at::Tensor read_here = at::empty(region.part_sizes(), at::TensorOptions(reading_.from->dtype).device(at::kCPU));
    read(region, read_here.mutable_data_ptr());
    return read_here;
  }

  // Takes part in what all ranks do even where it cannot read.
  void read_rows(const Placements& rows) {
    const at::Tensor mine = read_region(Region::of(*spec_, rows)).to(part_.device());
    const SpecPtr from =
        intern_spec(spec_->mesh, rows, spec_->sizes, serried::contiguous_strides(spec_->sizes), mine.scalar_type());
    store(redistribute_local(mine, *from, spec_->placements));
  }

  void store(const at::Tensor& value) const {
    if (failure_) return;
    const LocalOnly local_only;
    try {
      part_.copy_(value);
    } catch (const std::exception&) {
      failure_ = current_failure();
    }
  }

  void read(const Region& region, void* to) const {
    if (failure_) return;
    auto* data = static_cast<char*>(to);
    const int64_t begin = reading_.file->begin_of(*reading_.from);
    try {
      for_each_run(region, int64_t(c10::elementSize(reading_.from->dtype)), [&](const Run& run) {
        reading_.file->read(begin + run.in_file, data + run.in_part, run.num_bytes);
      });
    } catch (const std::exception&) {
      failure_ = current_failure();
    }
  }

  const Reading& reading_;
  const SpecPtr spec_;
  const at::Tensor part_;
  std::optional<Failure>& failure_;
};

}  // namespace

TensorFile::TensorFile(const std::string& path)
    : path_(path),
      was_there_(false),
      file_(File::open_to_read(path)),
      identity_(file_->identity()),
      num_bytes_(identity_.num_bytes) {
  read_header();
}

TensorFile::TensorFile(const std::string& folder, const IndexedFile& indexed, const BlockGrid& grid)
    : path_(folder + "/" + indexed.name),
      was_there_(true),
      file_(File::open_to_read(path_, was_there_)),
      identity_(file_->identity()),
      num_bytes_(identity_.num_bytes),
      hashes_(indexed.hashes),
      grid_(grid) {
  check_length(*file_, indexed);
  hasher_ = std::make_unique<BlockHasher>(grid_);
  read_header();
}

void check_length(const File& file, const IndexedFile& indexed) {
  if (file.size() == indexed.num_bytes) return;
  fail(c10::str(file.path(), " has ", file.size(), " bytes, and had ", indexed.num_bytes, " when it was saved"),
       "the file is cut short or was changed: use another checkpoint");
}

const File& TensorFile::file() {
  if (file_) return *file_;
  file_.emplace(File::open_to_read(path_, was_there_));
  if (file_->identity() == identity_) return *file_;
  file_.reset();
  fail(path_ + " was replaced or changed while it was read", "read it again when nobody writes it");
}

void TensorFile::close_between_reads() {
  closes_ = true;
  rest();
}

void TensorFile::rest() {
  if (closes_) file_.reset();
}

void TensorFile::read_header() {
  std::string first(size_t(std::min<int64_t>(8, num_bytes_)), '\0');
  file().read(0, first.data(), int64_t(first.size()));
  try {
    const int64_t length = header_length(first, num_bytes_);
    std::string text(size_t(length), '\0');
    file().read(8, text.data(), length);
    header_ = parse_header(text, num_bytes_ - 8 - length);
    note_read(0, (first + text).data(), 8 + length);
  } catch (const Failure& failure) {
    throw Failure(failure.kind, path() + ": " + failure.text, failure.fix, failure.error);
  }
}

void TensorFile::read(int64_t offset, void* data, int64_t size) {
  file().read(offset, data, size);
  note_read(offset, data, size);
}

void TensorFile::note_read(int64_t offset, const void* data, int64_t size) {
  if (!hasher_ || size == 0) return;
  hasher_->see(offset, data, size);
  const int64_t first = offset / grid_.block_bytes, last = (offset + size - 1) / grid_.block_bytes;
  touched_.insert({first, last});  // those between are whole
  const auto& seen = hasher_->hashes();
  for (auto next = seen.lower_bound(first); next != seen.end() && next->first <= last; ++next) {
    compare_hash(next->first, next->second);
  }
}

void TensorFile::compare_hash(int64_t block, uint64_t hash) const {
  if (hash == hashes_[size_t(block)]) return;
  fail(c10::str(path(), " is damaged: bytes ", grid_.begin(block), " to ", grid_.end(block), ", of ",
                tensor_at(grid_.begin(block)), ", are not those that were saved"),
       "use another checkpoint; serried checkpoint verify names all that is damaged");
}

std::vector<int64_t> TensorFile::blocks_in_parts() const {
  std::vector<int64_t> blocks;
  for (int64_t block : touched_) {
    if (hasher_->hashes().count(block) == 0) blocks.push_back(block);
  }
  return blocks;
}

void TensorFile::check_block(int64_t block, BlockPart known) {
  for (int64_t leaf = 0; leaf < known.num_leaves(); ++leaf) {
    if (known.knows(leaf)) continue;
    int64_t end = leaf + 1;
    while (end < known.num_leaves() && !known.knows(end)) ++end;
    read_leaves(block, leaf, end, known);
  }
  compare_hash(block, hash_of_leaves(known.hashes()));
  touched_.erase(block);
  rest();
}

void TensorFile::read_leaves(int64_t block, int64_t first, int64_t end, BlockPart& known) {
  const int64_t begin = grid_.leaf_begin(block, first);
  std::string bytes(size_t(grid_.leaf_end(block, end - 1) - begin), '\0');
  file().read(begin, bytes.data(), int64_t(bytes.size()));
  for (int64_t leaf = first; leaf < end; ++leaf) {
    const int64_t at = grid_.leaf_begin(block, leaf);
    known.note(leaf, hash_of(bytes.data() + (at - begin), grid_.leaf_end(block, leaf) - at));
  }
}

std::string TensorFile::tensor_at(int64_t offset) const {
  if (offset < header_.num_bytes) return "the header and on";
  for (const FileTensor& tensor : header_.tensors) {
    if (header_.num_bytes + tensor.end > offset) return "\"" + serried::detail::printable(tensor.name) + "\" and on";
  }
  return "no tensor";
}

Checkpoint::Checkpoint(const std::string& folder) : folder_(place_of(folder)), index_(read_index(folder_)) {}

bool Checkpoint::was_replaced() const {
  return checksum_in(folder_) != index_.checksum;
}

const IndexedEntry& Checkpoint::entry(const std::string& name) const {
  const auto found = index_.entries.find(name);
  if (found != index_.entries.end()) return found->second;
  if (index_.values.contains(name)) {
    fail(c10::str("\"", name, "\" is a value in the checkpoint, and is loaded into a state"),
         "pass a pointer to a variable, or a tensor");
  }
  std::vector<std::string> there;
  for (const auto& [known, entry] : index_.entries) {
    if (known != kValuesEntry) there.push_back(known);
  }
  for (const auto& [known, value] : index_.values.items()) there.push_back(known);
  fail(c10::str(folder_, " has no \"", name, "\"; it has: ", c10::Join(", ", there)), "load what is there");
}

std::vector<std::shared_ptr<TensorFile>> Checkpoint::files(const std::string& name) {
  std::vector<std::shared_ptr<TensorFile>> files;
  const auto indexed_entry = index_.entries.find(name);
  if (indexed_entry == index_.entries.end()) return files;
  for (const std::string& name_of_file : indexed_entry->second.files) files.push_back(file(name_of_file));
  return files;
}

std::shared_ptr<TensorFile> Checkpoint::file(const std::string& name) {
  std::shared_ptr<TensorFile>& file = files_[name];
  if (file) return file;
  const auto indexed = std::find_if(index_.files.begin(), index_.files.end(),
                                    [&](const IndexedFile& each) { return each.name == name; });
  if (indexed == index_.files.end())
    fail(c10::str("the index of ", folder_, " lacks ", name), "use another checkpoint");
  file = std::make_shared<TensorFile>(folder_, *indexed, index_.grid_of(indexed->num_bytes));
  if (files_.size() > kFilesThatStayOpen) file->close_between_reads();
  return file;
}

SavedPart Checkpoint::part(const std::string& name) {
  const IndexedEntry& indexed = entry(name);
  SavedPart part;
  for (const auto& file : files(name)) {
    part.tensors.insert(part.tensors.end(), file->header().tensors.begin(), file->header().tensors.end());
  }
  part.aliases = indexed.aliases;
  if (!indexed.values.is_null()) part.values = std::make_shared<const nlohmann::json>(indexed.values);
  if (!indexed.per_rank.is_null()) part.per_rank = std::make_shared<const nlohmann::json>(indexed.per_rank);
  return part;
}

void fail_for_replaced(const std::string& folder) {
  fail(folder + " was replaced or removed by a save while it was read",
       "load again, or load a checkpoint that no job saves to");
}

void check_looks(const Reading& reading, const ReadOptions& options) {
  const FileTensor& from = *reading.from;
  const at::Tensor& to = reading.to;
  const std::string name = c10::str("\"", options.what, serried::detail::printable(from.name), "\"");
  if (to.sizes() != c10::IntArrayRef(from.sizes)) {
    fail(c10::str(name, " has sizes ", sizes_text(from.sizes), " in the checkpoint, and ", sizes_text(to.sizes()),
                  " here"),
         "load into a model of the same sizes, or give it another name, so that {.strict = false} passes over it");
  }
  if (to.device().is_meta() || to.layout() != at::kStrided) {
    fail(c10::str(name, " is loaded into ", watch::describe_tensor(to), ", which has no memory of its own"),
         "load into a dense tensor on a device");
  }
  if (at::has_internal_overlap(part_of(to)) == at::MemOverlap::Yes) {
    fail(c10::str(name, " is loaded into ", watch::describe_tensor(to), ", elements of which share memory"),
         "clone() it first");
  }
  for (const Placement& placement : spec_of(to) ? spec_of(to)->placements : Placements()) {
    if (!placement.is_partial()) continue;
    fail(c10::str(name, " is loaded into ", spec_of(to)->to_string(), ", which is Partial"),
         "load into one that is Replicate or Shard");
  }
  if (to.scalar_type() == from.dtype) return;
  const bool can_convert = is_real_number(from.dtype) && is_real_number(to.scalar_type());
  if (can_convert && options.convert) return;
  fail(c10::str(name, " is ", looks_text(from), " in the checkpoint, and ", watch::describe_tensor(to), " here"),
       can_convert ? "pass {.convert = true}, or give the model the dtype that was saved"
                   : "load into a tensor of the dtype that was saved");
}

void read_all(std::vector<Reading> readings) {
  const tape::Pause off_tape;
  const at::NoGradGuard no_grad;
  std::stable_sort(readings.begin(), readings.end(), [](const Reading& a, const Reading& b) {
    return std::tie(a.file->path(), a.from->begin) < std::tie(b.file->path(), b.from->begin);
  });
  std::optional<Failure> failure;
  TensorFile* current = nullptr;
  for (const Reading& reading : readings) {
    if (current != nullptr && current != reading.file.get()) current->rest();
    current = reading.file.get();
    PartReader(reading, failure).run();
    note_write(reading.to);
  }
  if (current != nullptr) current->rest();
  if (failure) throw *failure;
}

void write_part(const at::Tensor& to, const at::Tensor& part) {
  {
    const LocalOnly local_only;
    part_of(to).copy_(part);
  }
  note_write(to);
}

void check_twins(const Reading& one, const Reading& other, const std::string& where) {
  constexpr int64_t kChunk = int64_t(1) << 20;
  const FileTensor &a = *one.from, &b = *other.from;
  if (a.dtype != b.dtype || a.sizes != b.sizes) fail_for_twins(a.name, b.name, where);
  std::string first(size_t(std::min(kChunk, a.end - a.begin)), '\0'), second = first;
  for (int64_t at = 0, end = a.end - a.begin; at < end; at += kChunk) {
    const int64_t size = std::min(kChunk, end - at);
    one.file->file().read(one.file->begin_of(a) + at, first.data(), size);
    other.file->file().read(other.file->begin_of(b) + at, second.data(), size);
    if (first != second) fail_for_twins(a.name, b.name, where);
  }
  one.file->rest();
  other.file->rest();
}

void fail_for_twins(const std::string& one, const std::string& other, const std::string& where) {
  using serried::detail::printable;
  fail(c10::str("of ", where, " \"", printable(one), "\" and \"", printable(other),
                "\" are one tensor here, and have different values there"),
       c10::str("load into a model that does not tie them, or take one of them away: {.strict = false, .rename = {{\"^",
                printable(one), "$\", \"not_used\"}}}"));
}

at::Tensor read_whole(TensorFile& file, const FileTensor& tensor) {
  const LocalOnly local_only;
  at::Tensor result = at::empty(tensor.sizes, at::TensorOptions(tensor.dtype).device(at::kCPU));
  file.read(file.begin_of(tensor), result.mutable_data_ptr(), int64_t(result.nbytes()));
  for (int64_t block : file.blocks_in_parts()) file.check_block(block, file.part_of_block(block));
  file.rest();
  return result;
}

}  // namespace serried::checkpoint::detail
