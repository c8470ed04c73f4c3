// c10d's calls as questions; what the launcher refuses as errors that name the key.
#include "serried/comm/rendezvous/launcher_store.h"

#include <charconv>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/channel/rank_line.h"
#include "serried/base/error.h"

namespace serried::detail {
namespace {

using std::chrono::milliseconds;
using Bytes = std::vector<uint8_t>;
using Message = channel::Message;

std::string text_of(const Bytes& bytes) {
  return {bytes.begin(), bytes.end()};
}

Bytes bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

// Clocks count nanoseconds in 63 bits; c10d's 0 is no limit.
LauncherLine::Clock::time_point deadline_of(milliseconds timeout) {
  constexpr milliseconds kLongest = std::chrono::hours(24 * 365);
  if (timeout == c10d::Store::kNoTimeout || timeout > kLongest) return LauncherLine::Clock::time_point::max();
  return LauncherLine::Clock::now() + timeout;
}

// The keys of a question, as it is told where they do not come.
std::string keys_text(const Message& question) {
  constexpr size_t kMost = 3;
  const size_t step = question[0] == "multi_set" ? 2 : 1;
  const bool many = question[0] == "wait" || question[0] == "multi_get" || question[0] == "multi_set";
  const size_t end = many ? question.size() : std::min<size_t>(question.size(), 2);
  std::string text;
  size_t count = 0;
  for (size_t i = 1; i < end; i += step) {
    if (count++ < kMost) text += c10::str(text.empty() ? "\"" : ", \"", question[i].substr(0, 200), "\"");
  }
  if (count > kMost) text += c10::str(" and ", count - kMost, " more");
  return c10::str(count == 1 ? "the key " : "the keys ", text);
}

bool waits(const Message& question) {
  return question[0] == "wait" || question[0] == "get" || question[0] == "multi_get" || question[0] == "pop";
}

[[noreturn]] void raise_late(const Message& question, milliseconds timeout, const std::string& leader_away) {
  if (!leader_away.empty()) {
    raise<c10::DistStoreError>(
        {"store",
         c10::str(keys_text(question), ": no answer within ", timeout.count(), " ms, since the leader of the job at ",
                  leader_away, ", which keeps the store, is lost, and no other has taken its place"),
         "start the launcher that led the job there again, with the same command line"});
  }
  if (waits(question)) {
    raise<c10::DistStoreError>(
        {"store",
         c10::str(keys_text(question), " did not come to the store of serried run within ", timeout.count(), " ms"),
         "look at what the rank that writes it is doing, or pass a longer timeout"});
  }
  raise<c10::DistStoreError>(
      {"store", c10::str("serried run, which keeps the store, has not answered for ", timeout.count(), " ms"),
       "see whether it is stopped, on this host or on that of node 0"});
}

[[noreturn]] void raise_refused(const Message& question, const Message& answer) {
  const std::string why = answer.size() > 1 ? answer[1] : "";
  if (answer[0] == "full") {
    raise<c10::DistStoreError>({"store", c10::str("the store of serried run takes no more: ", why),
                                "send data through a group, or a file; the store is for names and addresses"});
  }
  if (answer[0] == "over") {
    raise<c10::DistStoreError>({"store", c10::str(keys_text(question), " belongs to ranks that are others by now"),
                                "make the groups anew with the ranks that there are: see serried::Elastic"});
  }
  raise<c10::DistStoreError>({"store", c10::str("cannot ", question[0], " ", keys_text(question), ": ", why),
                              "use keys of values, of numbers and of queues apart"});
}

// Before it is sent: the launcher closes the line of who sends more.
void check_size(const Message& question) {
  size_t size = 0;
  for (const std::string& field : question) size += field.size();
  if (size <= channel::kMostBytesOfAValue) return;
  raise<c10::DistStoreError>({"store",
                              c10::str("the store of serried run takes at most ", channel::kMostBytesOfAValue,
                                       " bytes at once, and ", keys_text(question), " would bring ", size),
                              "send data through a group, or a file; the store is for names and addresses"});
}

int64_t number_of(const Message& answer) {
  int64_t number = 0;
  const std::string text = answer.size() == 2 ? answer[1] : "";
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  TORCH_INTERNAL_ASSERT(error == std::errc() && end == text.data() + text.size(), "the launcher answers \"", text,
                        "\"");
  return number;
}

Bytes value_of(const Message& answer) {
  TORCH_INTERNAL_ASSERT(answer.size() == 2, "the launcher answers with ", answer.size(), " fields");
  return bytes_of(answer[1]);
}

Message about(const std::string& op, const std::vector<std::string>& keys) {
  Message question = {op};
  question.insert(question.end(), keys.begin(), keys.end());
  return question;
}

}  // namespace

LauncherStore::LauncherStore(std::shared_ptr<LauncherLine> line, std::string towards)
    : line_(std::move(line)), towards_(std::move(towards)), ended_(std::make_shared<std::atomic<bool>>(false)) {}

void LauncherStore::end_waits() {
  ended_->store(true);
  line_->tell_ended(*ended_);
}

c10::intrusive_ptr<c10d::Store> LauncherStore::clone() {
  auto copy = c10::make_intrusive<LauncherStore>(line_, towards_);
  copy->setTimeout(timeout_);
  copy->ended_ = ended_;
  return copy;
}

Message LauncherStore::ask(const Message& question, milliseconds timeout) const {
  check_size(question);
  const std::optional<Message> answer = line_->ask(question, deadline_of(timeout), ended_.get());
  if (!answer) raise_late(question, timeout, line_->leader_away());
  const bool fine = (*answer)[0] == "ok" || (*answer)[0] == "none";
  if (!fine) raise_refused(question, *answer);
  return *answer;
}

void LauncherStore::set(const std::string& key, const Bytes& value) {
  ask({"set", key, text_of(value)});
}

Bytes LauncherStore::compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) {
  return value_of(ask({"compare_set", key, text_of(expected), text_of(desired)}));
}

Bytes LauncherStore::get(const std::string& key) {
  return value_of(ask({"get", key}));
}

int64_t LauncherStore::add(const std::string& key, int64_t value) {
  return number_of(ask({"add", key, std::to_string(value)}));
}

bool LauncherStore::deleteKey(const std::string& key) {
  return number_of(ask({"delete", key})) == 1;
}

bool LauncherStore::check(const std::vector<std::string>& keys) {
  return number_of(ask(about("check", keys))) == 1;
}

int64_t LauncherStore::getNumKeys() {
  return number_of(ask({"count"}));
}

void LauncherStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
  ask(about("wait", keys), timeout);
}

void LauncherStore::append(const std::string& key, const Bytes& value) {
  ask({"append", key, text_of(value)});
}

std::vector<Bytes> LauncherStore::multiGet(const std::vector<std::string>& keys) {
  const Message answer = ask(about("multi_get", keys));
  TORCH_INTERNAL_ASSERT(answer.size() == keys.size() + 1, "the launcher answers with ", answer.size(), " fields");
  std::vector<Bytes> values;
  for (size_t i = 1; i < answer.size(); ++i) values.push_back(bytes_of(answer[i]));
  return values;
}

void LauncherStore::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
  if (keys.size() != values.size()) {
    raise<c10::ValueError>(
        {"store", c10::str(keys.size(), " keys and ", values.size(), " values"), "pass one value for each key"});
  }
  Message question = {"multi_set"};
  for (size_t i = 0; i < keys.size(); ++i) {
    question.push_back(keys[i]);
    question.push_back(text_of(values[i]));
  }
  ask(question);
}

void LauncherStore::queuePush(const std::string& key, const Bytes& value) {
  ask({"push", key, text_of(value)});
}

Bytes LauncherStore::queuePop(const std::string& key, bool block) {
  const Message answer = ask({"pop", key, block ? "1" : "0"});
  if (answer[0] != "none") return value_of(answer);
  raise<c10::DistQueueEmptyError>({"store", c10::str("the queue \"", key, "\" is empty"), "pass block = true to wait"});
}

int64_t LauncherStore::queueLen(const std::string& key) {
  return number_of(ask({"length", key}));
}

std::vector<std::string> LauncherStore::listKeys() {
  Message answer = ask({"list"});
  answer.erase(answer.begin());
  return answer;
}

}  // namespace serried::detail
