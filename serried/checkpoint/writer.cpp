// Runs of bytes, cut where another replica goes on, into files.
#include "serried/checkpoint/writer.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include "serried/checkpoint/limits.h"
#include "serried/checkpoint/runs.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/parts.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::checkpoint::detail {
namespace {

constexpr int64_t kBufferBytes = int64_t(1) << 20;
constexpr int64_t kBytesUnderWay = int64_t(8) << 20;  // written, before the disk begins with them

// Of [begin, begin + size) the pieces in blocks that this replica writes.
template <class Visit>
void for_each_own_piece(const PlannedTensor& tensor, int64_t begin, int64_t size, const Visit& visit) {
  if (tensor.replica < 0) return;
  if (tensor.num_replicas == 1) return visit(begin, size);
  const int64_t block_bytes = format_limits().block_bytes;
  const int64_t end = begin + size;
  for (int64_t at = begin; at < end;) {
    const int64_t block = at / block_bytes;
    const int64_t next = std::min(end, (block + 1) * block_bytes);
    if (block % tensor.num_replicas == tensor.replica) visit(at, next - at);
    at = next;
  }
}

Region region_of(const PlannedTensor& tensor) {
  if (!tensor.spec) return Region::whole(tensor.sizes);
  return Region::of(*tensor.spec, tensor.rows.empty() ? tensor.spec->placements : tensor.rows);
}

template <class Visit>
void for_each_run_of(const PlannedTensor& tensor, const Region& region, const Visit& visit) {
  for_each_run(region, int64_t(c10::elementSize(tensor.dtype)), [&](const Run& run) {
    for_each_own_piece(tensor, tensor.begin + run.in_file, run.num_bytes, [&](int64_t at, int64_t size) {
      visit(at, run.in_part + (at - tensor.begin - run.in_file), size);
    });
  });
}

void take_part(const PlannedTensor& tensor, const at::Tensor& part, const TakeBytes& take) {
  const serried::detail::LocalOnly local_only;
  const at::Tensor bytes = bytes_to_write(part);
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  for_each_run_of(tensor, region_of(tensor),
                  [&](int64_t at, int64_t in_part, int64_t size) { take(tensor.file, at, data + in_part, size); });
}

// A rank with nothing to write takes part where parts are brought to rows.
bool takes_part(const PlannedTensor& tensor) {
  if (!tensor.tensor.defined() || tensor.replica >= 0) return tensor.tensor.defined();
  return !tensor.rows.empty();
}

// Where the tensors of each file begin among all, and their end.
std::vector<size_t> begins_of_files(const SavePlan& plan) {
  std::vector<size_t> begins = {0};
  for (size_t i = 1; i < plan.tensors.size(); ++i) {
    if (plan.tensors[i].file != plan.tensors[i - 1].file) begins.push_back(i);
  }
  begins.push_back(plan.tensors.size());
  return begins;
}

}  // namespace

at::Tensor bytes_to_write(const at::Tensor& part) {
  return part.detach().contiguous().resolve_conj().resolve_neg().cpu();
}

std::vector<int64_t> planned_bytes_of(const SavePlan& plan, bool is_first) {
  std::vector<int64_t> bytes(plan.files.size(), 0);
  for (size_t i = 0; is_first && i < plan.files.size(); ++i) bytes[i] = int64_t(plan.files[i].header.size());
  for (const PlannedTensor& tensor : plan.tensors) {
    if (!takes_part(tensor)) continue;
    for_each_run_of(tensor, region_of(tensor), [&](int64_t, int64_t, int64_t size) { bytes[tensor.file] += size; });
  }
  return bytes;
}

void for_each_piece(const SavePlan& plan, bool is_first, const TakeBytes& take) {
  const tape::Pause off_tape;
  const at::NoGradGuard no_grad;
  std::optional<Failure> failure;
  const auto attempt = [&](const auto& step) {
    if (failure) return;
    try {
      step();
    } catch (const std::exception&) {
      failure = current_failure();
    }
  };
  const std::vector<size_t> begins = begins_of_files(plan);
  for (size_t turn = 0; turn < plan.files.size(); ++turn) {
    const size_t file = (plan.first_file + turn) % plan.files.size();
    const std::string& header = plan.files[file].header;
    if (is_first) attempt([&] { take(file, 0, header.data(), int64_t(header.size())); });
    for (size_t i = begins[file]; i < begins[file + 1]; ++i) {
      const PlannedTensor& tensor = plan.tensors[i];
      if (!takes_part(tensor)) continue;
      at::Tensor part = part_of(tensor.tensor);
      // What goes wrong in here goes wrong between ranks: after it they cannot take part in the next one together.
      if (!tensor.rows.empty()) part = redistribute_local(part, *tensor.spec, tensor.rows);
      attempt([&] { take_part(tensor, part, take); });
    }
  }
  if (failure) throw *failure;
}

Writer::Writer(std::string folder, const SavePlan& plan) : folder_(std::move(folder)), plan_(plan) {}

void Writer::take(size_t file, int64_t offset, const char* data, int64_t size) noexcept {
  if (failure_) return;
  try {
    if (current_ != file) open(file);
    hasher_->see(offset, data, size);
    write(offset, data, size);
  } catch (const Failure& failure) {
    failure_ = failure;
  } catch (const std::exception& error) {
    failure_ = Failure(Failure::Kind::system, error.what(), "");
  }
}

void Writer::open(size_t file) {
  close_file();
  const PlannedFile& planned = plan_.files[file];
  current_ = file;
  file_.emplace(File::open_to_write(folder_ + "/" + planned.name));
  hasher_.emplace(plan_.index.grid_of(planned.num_bytes));
}

void Writer::write(int64_t offset, const char* data, int64_t size) {
  const bool touches = offset == buffer_begin_ + int64_t(buffer_.size());
  const bool fits = int64_t(buffer_.size()) + size <= kBufferBytes;
  if (size < format_limits().short_run && touches && fits) {
    buffer_.append(data, size_t(size));
    return;
  }
  flush();
  if (size >= format_limits().short_run) {
    write_now(offset, data, size);
    buffer_begin_ = offset + size;
    return;
  }
  buffer_begin_ = offset;
  buffer_.append(data, size_t(size));
}

// The disk begins while more is written: at the end there is less to wait for.
void Writer::write_now(int64_t offset, const char* data, int64_t size) {
  while (size > 0) {
    const int64_t count = std::min(size, kBytesUnderWay - unstarted_);
    file_->write(offset, data, count);
    if (unstarted_ == 0) unstarted_begin_ = offset;
    unstarted_ += count;
    offset += count;
    data += count;
    size -= count;
    if (unstarted_ < kBytesUnderWay) continue;
    file_->start_writing(unstarted_begin_, offset);
    unstarted_ = 0;
  }
}

void Writer::flush() {
  if (!buffer_.empty()) write_now(buffer_begin_, buffer_.data(), int64_t(buffer_.size()));
  buffer_begin_ += int64_t(buffer_.size());
  buffer_.clear();
}

void Writer::close_file() {
  if (!file_) return;
  flush();
  file_->sync();
  for (const auto& [block, hash] : hasher_->hashes()) hashes_.push_back({int64_t(*current_), block, hash});
  file_.reset();
  hasher_.reset();
  current_.reset();
  buffer_begin_ = 0;
  unstarted_ = 0;
}

std::vector<Writer::Hash> Writer::finish() {
  if (failure_) throw *failure_;
  close_file();
  return std::move(hashes_);
}

}  // namespace serried::checkpoint::detail
