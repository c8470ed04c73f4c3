// A table of values and queues; a question that has to wait hangs on the first key that it misses.
#include "serried/launch/keys.h"

#include <algorithm>
#include <charconv>
#include <string_view>

namespace serried::launch {
namespace {

using channel::Message;

constexpr size_t kOverhead = 64;  // of an entry, about

size_t bytes_of(const std::string& key, const std::string& value) {
  return key.size() + value.size() + kOverhead;
}

std::string mib_text(size_t bytes) {
  return bytes >= 1 << 20 ? std::to_string(bytes >> 20) + " MiB" : std::to_string(bytes) + " bytes";
}

bool has_shape(const std::string& op, size_t num_arguments) {
  if (op == "get" || op == "delete" || op == "length") return num_arguments == 1;
  if (op == "set" || op == "add" || op == "append" || op == "push" || op == "pop") return num_arguments == 2;
  if (op == "compare_set") return num_arguments == 3;
  if (op == "multi_set") return num_arguments % 2 == 0;
  if (op == "count" || op == "list") return num_arguments == 0;
  return op == "wait" || op == "check" || op == "multi_get";
}

bool to_number(const std::string& text, int64_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size();
}

std::string name_of(const std::string& full_key) {
  return full_key.substr(full_key.find('/') + 1);
}

}  // namespace

void Keys::ask(Asker who, const Message& question) {
  const bool makes_sense = question.size() >= 2 && question[0].find('/') == std::string::npos &&
                           has_shape(question[1], question.size() - 2) && !waiting_.contains(who);
  if (!makes_sense) return answer(who, {"bad", "the question makes no sense"});
  const std::string& space = question[0];
  const std::string& op = question[1];
  const size_t step = op == "multi_set" ? 2 : 1;
  const bool one_key = op != "wait" && op != "check" && op != "multi_get" && op != "multi_set";
  std::vector<std::string> keys;
  for (size_t i = 2; i < question.size() && (keys.empty() || !one_key); i += step) {
    keys.push_back(space + "/" + question[i]);
    if (is_over(keys.back())) return answer(who, {"over"});
  }
  if (op == "count" || op == "list" || op == "check") return look(who, op, question);
  if (op == "multi_set") return set_all(who, space, question);
  const bool may_wait = op == "wait" || op == "get" || op == "multi_get" || (op == "pop" && question[3] == "1");
  if (may_wait) return ask_for_later(who, {.op = op, .keys = std::move(keys)});
  change(who, op, keys[0], question);
}

void Keys::change(Asker who, const std::string& op, const std::string& key, const Message& question) {
  if (op == "set") return put(who, key, question[3], {"ok"});
  if (op == "add") return add(who, key, question[3]);
  if (op == "compare_set") return compare_set(who, key, question[3], question[4]);
  if (op == "append") {
    const auto found = values_.find(key);
    return put(who, key, (found == values_.end() ? "" : found->second) + question[3], {"ok"});
  }
  if (op == "push") return push(who, key, question[3]);
  if (op == "pop") return has(key) ? ask_for_later(who, {.op = op, .keys = {key}}) : answer(who, {"none"});
  if (op == "delete") return answer(who, {"ok", erase(key) ? "1" : "0"});
  const auto queue = queues_.find(key);
  answer(who, {"ok", std::to_string(queue == queues_.end() ? 0 : queue->second.size())});
}

void Keys::look(Asker who, const std::string& op, const Message& question) {
  const std::string prefix = question[0] + "/";
  if (op == "check") {
    const bool all =
        std::all_of(question.begin() + 2, question.end(), [&](const std::string& key) { return has(prefix + key); });
    return answer(who, {"ok", all ? "1" : "0"});
  }
  Message names = {"ok"};
  size_t bytes = 0;
  const auto note = [&](const auto& table) {
    for (auto at = table.lower_bound(prefix); at != table.end() && at->first.starts_with(prefix); ++at) {
      names.push_back(name_of(at->first));
      bytes += names.back().size() + 4;
    }
  };
  note(values_);
  note(queues_);
  if (op == "count") return answer(who, {"ok", std::to_string(names.size() - 1)});
  if (bytes > limits_.most_bytes_of_a_value) return answer(who, {"full", "the list of all keys is too long to send"});
  answer(who, std::move(names));
}

void Keys::ask_for_later(Asker who, Waiting question) {
  waiting_.emplace(who, std::move(question));
  try_again(who);
}

// From where the last look ended; if all are there then, once more from the front: keys may have been deleted.
bool Keys::find_missing(Waiting& question) const {
  while (question.next < question.keys.size() && has(question.keys[question.next])) ++question.next;
  if (question.next < question.keys.size()) return true;
  question.next = 0;
  while (question.next < question.keys.size() && has(question.keys[question.next])) ++question.next;
  return question.next < question.keys.size();
}

void Keys::try_again(Asker who) {
  const auto found = waiting_.find(who);
  if (found == waiting_.end()) return;  // forgotten
  if (find_missing(found->second)) return waiting_for_[found->second.keys[found->second.next]].push_back(who);
  const Waiting question = std::move(found->second);
  waiting_.erase(found);
  give(who, question);
}

void Keys::give(Asker who, const Waiting& question) {
  if (question.op == "wait") return answer(who, {"ok"});
  Message result = {"ok"};
  if (question.op == "pop") {
    const auto queue = queues_.find(question.keys[0]);
    if (queue == queues_.end()) return answer(who, {"bad", "it holds a value and no queue"});
    result.push_back(queue->second.front());
    num_bytes_ -= bytes_of(question.keys[0], result.back());
    queue->second.pop_front();
    if (queue->second.empty()) queues_.erase(queue);
    return answer(who, std::move(result));
  }
  size_t bytes = 0;
  for (const std::string& key : question.keys) {
    const auto value = values_.find(key);
    if (value == values_.end()) return answer(who, {"bad", "it holds a queue and no value"});
    result.push_back(value->second);
    bytes += value->second.size() + 4;
  }
  if (question.keys.size() > 1 && bytes > limits_.most_bytes_of_a_value) {
    return answer(who, {"full", "the values of " + std::to_string(question.keys.size()) +
                                    " keys together are too long to send: " + mib_text(bytes)});
  }
  answer(who, std::move(result));
}

std::string Keys::why_no_room(const std::string& key, size_t old_bytes, size_t new_bytes) const {
  if (new_bytes > limits_.most_bytes_of_a_value + kOverhead) {
    return "the value of \"" + name_of(key).substr(0, 100) + "\" would be longer than " +
           mib_text(limits_.most_bytes_of_a_value);
  }
  if (num_bytes_ - old_bytes + new_bytes <= limits_.most_bytes) return "";
  return "all values together would be more than " + mib_text(limits_.most_bytes);
}

void Keys::put(Asker who, const std::string& key, std::string value, Message reply) {
  const auto found = values_.find(key);
  const size_t old_bytes = found == values_.end() ? 0 : bytes_of(key, found->second);
  const size_t new_bytes = bytes_of(key, value);
  if (const std::string why = why_no_room(key, old_bytes, new_bytes); !why.empty()) return answer(who, {"full", why});
  num_bytes_ += new_bytes - old_bytes;
  values_.insert_or_assign(key, std::move(value));
  answer(who, std::move(reply));
  wake(key);
}

void Keys::set_all(Asker who, const std::string& space, const Message& question) {
  size_t bytes = 0;
  for (size_t i = 2; i < question.size(); i += 2) {
    const std::string key = space + "/" + question[i];
    const std::string why = why_no_room(key, 0, bytes_of(key, question[i + 1]));
    if (!why.empty()) return answer(who, {"full", why});
    bytes += bytes_of(key, question[i + 1]);
  }
  // All or none; what they replace is counted as if it stayed.
  if (num_bytes_ + bytes > limits_.most_bytes) {
    return answer(who, {"full", "all values together would be more than " + mib_text(limits_.most_bytes)});
  }
  const size_t before = answers_.size();
  for (size_t i = 2; i < question.size(); i += 2) put(who, space + "/" + question[i], question[i + 1], {"ok"});
  // One answer to all of them.
  const auto mine = std::remove_if(answers_.begin() + static_cast<std::ptrdiff_t>(before), answers_.end(),
                                   [&](const Answer& answer) { return answer.first == who; });
  answers_.erase(mine, answers_.end());
  answer(who, {"ok"});
}

void Keys::add(Asker who, const std::string& key, const std::string& number) {
  int64_t sum = 0;
  int64_t more = 0;
  if (!to_number(number, more)) return answer(who, {"bad", number + " is no number"});
  const auto found = values_.find(key);
  const bool counts = found == values_.end() || to_number(found->second, sum);
  if (!counts || __builtin_add_overflow(sum, more, &sum)) {
    return answer(who, {"bad", "it holds no number to add " + number + " to"});
  }
  put(who, key, std::to_string(sum), {"ok", std::to_string(sum)});
}

// As c10d's stores: where there is nothing, an empty `expected` lets the value in, and any other comes back.
void Keys::compare_set(Asker who, const std::string& key, const std::string& expected, const std::string& desired) {
  const auto found = values_.find(key);
  const bool fits = found == values_.end() ? expected.empty() : found->second == expected;
  if (fits) return put(who, key, desired, {"ok", desired});
  answer(who, {"ok", found == values_.end() ? expected : found->second});
}

void Keys::push(Asker who, const std::string& key, const std::string& value) {
  const size_t bytes = bytes_of(key, value);
  if (const std::string why = why_no_room(key, 0, bytes); !why.empty()) return answer(who, {"full", why});
  num_bytes_ += bytes;
  queues_[key].push_back(value);
  answer(who, {"ok"});
  wake(key);
}

bool Keys::erase(const std::string& key) {
  const auto value = values_.find(key);
  const auto queue = queues_.find(key);
  const bool there = value != values_.end() || queue != queues_.end();
  if (value != values_.end()) {
    num_bytes_ -= bytes_of(key, value->second);
    values_.erase(value);
  }
  if (queue != queues_.end()) {
    for (const std::string& item : queue->second) num_bytes_ -= bytes_of(key, item);
    queues_.erase(queue);
  }
  return there;
}

void Keys::wake(const std::string& key) {
  const auto found = waiting_for_.find(key);
  if (found == waiting_for_.end()) return;
  const std::vector<Asker> askers = std::move(found->second);
  waiting_for_.erase(found);
  for (const Asker& who : askers) try_again(who);
}

void Keys::forget(Asker who) {
  const auto found = waiting_.find(who);
  if (found == waiting_.end()) return;
  const auto line = waiting_for_.find(found->second.keys[found->second.next]);
  std::erase(line->second, who);
  if (line->second.empty()) waiting_for_.erase(line);
  waiting_.erase(found);
}

void Keys::forget_node(int node) {
  for (auto at = waiting_.lower_bound({node, 0}); at != waiting_.end() && at->first.node == node;) {
    const Asker who = at->first;
    ++at;
    forget(who);
  }
  std::erase_if(answers_, [&](const Answer& answer) { return answer.first.node == node; });
}

void Keys::clear() {
  *this = Keys(limits_);
}

bool Keys::is_over(const std::string& key) const {
  constexpr std::string_view kPrefix = "generation/";
  const std::string_view name = std::string_view(key).substr(key.find('/') + 1);
  if (first_generation_ == 0 || !name.starts_with(kPrefix)) return false;
  const std::string_view rest = name.substr(kPrefix.size());
  int generation = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), generation);
  return error == std::errc() && end != rest.data() + rest.size() && *end == '/' && generation < first_generation_;
}

void Keys::end_generations_before(int generation) {
  first_generation_ = std::max(first_generation_, generation);
  std::vector<std::string> ended;
  for (const auto& [key, value] : values_) {
    if (is_over(key)) ended.push_back(key);
  }
  for (const auto& [key, queue] : queues_) {
    if (is_over(key)) ended.push_back(key);
  }
  for (const std::string& key : ended) erase(key);
  std::vector<Asker> told;
  for (const auto& [who, question] : waiting_) {
    if (std::any_of(question.keys.begin(), question.keys.end(), [&](const auto& key) { return is_over(key); })) {
      told.push_back(who);
    }
  }
  for (const Asker& who : told) {
    forget(who);
    answer(who, {"over"});
  }
}

}  // namespace serried::launch
