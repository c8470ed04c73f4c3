// save: plan, write, compare, commit; every step ends with all ranks knowing how the others fared.
#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/base/trace.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/commit.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/packed.h"
#include "serried/checkpoint/keep.h"
#include "serried/checkpoint/save_job.h"
#include "serried/tape/recorder.h"

namespace serried::checkpoint {
namespace detail {
namespace {

using nlohmann::json;
using Hash = Writer::Hash;

// Every byte of every file has one writer.
void check_volume(const SavePlan& plan, const std::vector<std::string>& planned) {
  std::vector<int64_t> sums(plan.files.size(), 0);
  for (const std::string& rank : planned) {
    const auto bytes = unpacked<int64_t>(rank);
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += bytes.at(i);
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i] == plan.files[i].num_bytes) continue;
    fail(c10::str(plan.files[i].name, " has ", plan.files[i].num_bytes, " bytes, and the ranks would write ", sums[i]),
         "check that all ranks have the same meshes; if they do, this is an error of serried");
  }
}

// `places`: the folder that rank 0 has made, and the paths of the others.
void check_same_path(const std::vector<std::string>& places) {
  for (size_t rank = 1; rank < places.size(); ++rank) {
    if (places[0].starts_with(without_end_slashes(places[rank]) + ".partial-")) continue;
    fail(c10::str("rank ", rank, " saves to ", places[rank], ", and rank 0 writes ", places[0]),
         "pass the same path on every rank");
  }
}

void make_files(const std::string& folder, const SavePlan& plan) {
  for (const PlannedFile& file : plan.files) File::create(folder + "/" + file.name).resize(file.num_bytes);
}

// Blocks that several ranks have written parts of, read back by one.
std::vector<Hash> hash_shared_blocks(const std::string& folder, const SavePlan& plan, const Ranks& ranks) {
  std::vector<Hash> hashes;
  std::string block;
  size_t number = 0;
  for (size_t i = 0; i < plan.files.size(); ++i) {
    const IndexedFile& indexed = plan.index.files[i];
    const BlockGrid grid = plan.index.grid_of(indexed.num_bytes);
    std::optional<File> file;
    for (int64_t b = 0; b < grid.num_blocks(); ++b) {
      if (indexed.hashes[size_t(b)] != 0 || int(number++ % size_t(ranks.size())) != ranks.rank()) continue;
      if (!file) file.emplace(File::open_to_read(folder + "/" + indexed.name));
      block.resize(size_t(grid.end(b) - grid.begin(b)));
      file->read(grid.begin(b), block.data(), int64_t(block.size()));
      hashes.push_back({int64_t(i), b, hash_of_block(grid, b, block.data())});
    }
  }
  return hashes;
}

void note_hashes(SavePlan& plan, const std::vector<std::string>& of_ranks) {
  for (const std::string& rank : of_ranks) {
    for (const Hash& each : unpacked<Hash>(rank)) {
      plan.index.files.at(size_t(each.file)).hashes.at(size_t(each.block)) = each.hash;
    }
  }
}

bool lacks_hashes(const SavePlan& plan) {
  for (const IndexedFile& file : plan.index.files) {
    for (uint64_t hash : file.hashes) {
      if (hash == 0) return true;
    }
  }
  return false;
}

void write_weight_maps(const std::string& folder, SavePlan& plan) {
  std::map<std::string, json> maps;
  std::map<std::string, int64_t> bytes;
  for (const PlannedTensor& tensor : plan.tensors) {
    maps[tensor.entry][tensor.name] = plan.files[tensor.file].name;
    bytes[tensor.entry] += bytes_of(tensor.dtype, tensor.sizes);
  }
  for (const auto& [entry, map] : maps) {
    const json object = {{"metadata", {{"total_size", bytes[entry]}}}, {"weight_map", map}};
    const std::string text = object.dump(1) + "\n";
    write_file(folder + "/" + weight_map_name(entry), text);
    const BlockGrid grid = plan.index.grid_of(int64_t(text.size()));
    IndexedFile& file = plan.index.weight_maps.emplace_back(IndexedFile{weight_map_name(entry), grid.file_bytes});
    for (int64_t b = 0; b < grid.num_blocks(); ++b) {
      file.hashes.push_back(hash_of_block(grid, b, text.data() + grid.begin(b)));
    }
  }
}

// Makes the first use of a hash unambiguous: 0 stands for "not known yet".
void clear_hashes(SavePlan& plan) {
  plan.index.files.clear();
  for (const PlannedFile& file : plan.files) {
    const BlockGrid grid = plan.index.grid_of(file.num_bytes);
    plan.index.files.push_back({file.name, file.num_bytes, std::vector<uint64_t>(size_t(grid.num_blocks()), 0)});
  }
}

}  // namespace

WriteOrder order_of(const SavePlan& plan, bool is_first) {
  WriteOrder order{{{}, plan.files, plan.index}, planned_bytes_of(plan, is_first)};
  for (const PlannedTensor& tensor : plan.tensors) {
    order.plan.tensors.push_back({.entry = tensor.entry,
                                  .name = tensor.name,
                                  .dtype = tensor.dtype,
                                  .sizes = tensor.sizes,
                                  .file = tensor.file,
                                  .begin = tensor.begin});
  }
  clear_hashes(order.plan);
  return order;
}

void write_checkpoint(const std::string& path, WriteOrder order, const Ranks& ranks, const WritePieces& write) {
  SavePlan& plan = order.plan;
  std::unique_ptr<PartialFolder> partial;
  const std::vector<std::string> folders = ranks.together([&] {
    if (!ranks.is_first()) return path;
    partial = std::make_unique<PartialFolder>(path);
    make_files(partial->path(), plan);
    return partial->path();
  });
  check_same_path(folders);
  const std::string& folder = folders[0];
  check_volume(plan, ranks.together([&] { return packed(order.planned_bytes); }));
  Writer writer(folder, plan);
  note_hashes(plan, ranks.together([&] {
    write(writer);
    return packed(writer.finish());
  }));
  if (lacks_hashes(plan)) {
    note_hashes(plan, ranks.together([&] { return packed(hash_shared_blocks(folder, plan, ranks)); }));
  }
  ranks.together([&] {
    if (!ranks.is_first()) return std::string();
    write_weight_maps(folder, plan);
    plan.index.saved_at = time_of_save(path);
    write_file(folder + "/" + kIndexName, index_text(plan.index), plan.index.saved_at);
    partial->commit();
    log::line(log::Topic::checkpoint, "saved ", plan.tensors.size(), " tensors in ", plan.files.size(), " files to ",
              path);
    return std::string();
  });
}

void refuse_recording(const char* where) {
  if (!tape::is_replayed()) return;
  raise<c10::ValueError>({where, "inside a captured function, whose replays would not repeat it", "call it outside"});
}

Group chosen_group(const Group& given) {
  return given ? given : current_process_group();
}

Group group_to_save_with(const Group& given) {
  const Group group = chosen_group(given);
  const int64_t world_size = env::maybe_integer("WORLD_SIZE").value_or(1);
  if (!group && world_size > 1) {
    log::warn_once(c10::str("[checkpoint] saves alone, and is one of ", world_size,
                            " ranks: those that save together call it inside of a ProcessGroupGuard, or pass "
                            ".process_group"));
  }
  return group;
}

}  // namespace detail

void save(const std::string& path, const Contents& contents, SaveOptions options) {
  const trace::Span span("checkpoint::save", trace::kSetup);
  detail::refuse_recording("checkpoint::save");
  const detail::Ranks ranks(detail::group_to_save_with(options.process_group));
  try {
    detail::wait_for_saving();
    const detail::SavePlan plan = detail::make_plan(contents, ranks, options);
    detail::write_checkpoint(path, detail::order_of(plan, ranks.is_first()), ranks, [&](detail::Writer& writer) {
      detail::for_each_piece(plan, ranks.is_first(), [&](size_t file, int64_t offset, const char* data, int64_t size) {
        writer.take(file, offset, data, size);
      });
    });
    ranks.together([&] {
      if (ranks.is_first()) detail::remove_older(path, options);
      return std::string();
    });
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::save", failure);
  }
}

}  // namespace serried::checkpoint
