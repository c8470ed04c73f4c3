// The memory of a group as `serried top` reads and draws it: an input is all of the memory.
#include "tests/fuzz/target.h"

#include <sys/mman.h>
#include <unistd.h>

#include "serried/base/call_text.h"
#include "serried/launch/fd.h"
#include "tools/serried/top/notes.h"
#include "tools/serried/top/pages.h"
#include "tools/serried/top/table.h"

namespace serried::fuzz {
namespace {

top::Page page_of(std::string_view bytes) {
  const launch::Fd file(::memfd_create("serried", MFD_CLOEXEC));
  require(::write(file.get(), bytes.data(), bytes.size()) == ssize_t(bytes.size()), "no memory for the input");
  return top::read_page(file.get(), ::geteuid());
}

top::Row row_of(const top::Page& page, const top::PageRank& rank) {
  top::Row row{.rank = rank.rank, .pid = rank.pid, .state = top::State(rank.waits_for % 4)};
  row.place = {page.group, watch_page::call_text(rank.call), watch_page::part_of_text(rank.call),
               watch_page::bytes_of(rank.call), rank.newest};
  row.waits_seconds = double(rank.waits_since) * 1e-9;
  row.waits_on = {int(rank.waits_phase)};
  return row;
}

}  // namespace

void run_page(std::string_view bytes) {
  const top::Page page = page_of(bytes);
  if (!page.problem.empty()) return;
  top::Snapshot snapshot;
  for (const top::PageRank& rank : page.ranks) snapshot.rows.push_back(row_of(page, rank));
  snapshot.notes = notes_of(snapshot, {{page.group, page.failure}}, {});
  const size_t width = 1 + bytes.size() % 200;
  for (const std::string& line : top::table_of(snapshot, {.width = width, .height = 24})) {
    require(line.size() <= width, "a line that is too wide");
    require(line == top::printable(line), "a line with control characters");
  }
  require(!top::json_of(snapshot).empty(), "no JSON");
}

}  // namespace serried::fuzz
