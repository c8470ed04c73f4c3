// What ranks read out of a store: the first line of an input names the key, the rest is what another rank wrote there.
#include "tests/fuzz/target.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "serried/comm/agree/group_status.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/backends/shm/connect.h"
#include "serried/graph/record/notice.h"

namespace serried::fuzz {
namespace {

using namespace std::chrono_literals;
using Bytes = std::vector<uint8_t>;

Bytes to_bytes(std::string_view text) {
  return {text.begin(), text.end()};
}

// Rank 1 is on another host, so that its reports come through the store.
void read_report(std::string_view value) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("host/1", to_bytes("elsewhere"));
  store->set("at/1", to_bytes(value));
  detail::GroupStatus status(store, 0, 2, 1s);
  watch::Record waiting = watch::make_record(watch::Kind::barrier, {});
  waiting.sequence = 3;
  require(!status.missing_text(waiting, 5).empty(), "nothing to say of a rank that is missing");
}

void read_greeting(std::string_view value) {
  succeeds<c10::DistBackendError>([&] {
    const shm::Greeting greeting = shm::parse_greeting("shm", 1, std::string(value));
    require(shm::parse_greeting("shm", 1, greeting.text()) == greeting,
            "a greeting that does not come back from its text");
  });
}

void read_notice(std::string_view value) {
  succeeds<c10::DistBackendError>([&] {
    const graph::Notice notice = graph::parse_notice(1, std::string(value));
    require(graph::parse_notice(1, notice.text()) == notice, "a notice that does not come back from its text");
  });
}

void compare_texts(std::string_view value) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->set("key", to_bytes(value));
  succeeds<c10::ValueError>([&] { detail::agree(*store, "key", "fuzz", "mine"); });
  store->set("texts/1", to_bytes(value));
  const auto texts = detail::exchange({store, 0, 2, 1s}, "fuzz", "texts", "mine");
  require(texts.at(0) == "mine" && texts.at(1) == value, "texts that changed on their way");
}

}  // namespace

void run_store(std::string_view bytes) {
  const size_t end = std::min(bytes.find('\n'), bytes.size());
  const std::string_view key = bytes.substr(0, end);
  const std::string_view value = bytes.substr(std::min(end + 1, bytes.size()));
  if (key == "at") return read_report(value);
  if (key == "greeting") return read_greeting(value);
  if (key == "notice") return read_notice(value);
  compare_texts(value);
}

}  // namespace serried::fuzz
