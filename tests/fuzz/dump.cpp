// A dump as `serried debug show` reads and shows it, and as the launcher looks for ranks that wait.
#include "tests/fuzz/target.h"

#include "serried/base/text.h"
#include "serried/launch/seen_json.h"
#include "serried/launch/waiting.h"
#include "tools/serried/debug/page.h"

namespace serried::fuzz {

void run_dump(std::string_view bytes) {
  launch::HostSeen seen;
  if (!succeeds<std::runtime_error>([&] { seen = launch::host_seen_from(std::string(bytes)); })) return;
  require(launch::host_seen_from(launch::to_json(seen)) == seen, "a dump that changes when it is written");
  std::string page = debug::page_of({seen, seen}, {});
  for (char& letter : page) letter = letter == '\n' ? ' ' : letter;
  require(page == detail::printable(page), "a page with control characters");
  for (const launch::Stall& stall : launch::find_stalls({seen, seen}, launch::Seconds(0))) {
    require(stall.text == detail::printable(stall.text), "a line with control characters");
  }
}

}  // namespace serried::fuzz
