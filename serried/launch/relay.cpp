// Only waits are merged: whoever reads a value must get what it is when he asks.
#include "serried/launch/relay.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace serried::launch {

uint64_t question_number(const Message& message) {
  uint64_t number = 0;
  if (message.size() < 2) throw std::runtime_error("a question without a number");
  const std::string& text = message[1];
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) throw std::runtime_error("no number of a question");
  return number;
}

void Relay::ask(uint64_t number, const Message& question) {
  const bool merges = question.size() > 1 && question[1] == "wait";
  if (const auto found = merges ? waits_.find(question) : waits_.end(); found != waits_.end()) {
    asked_.at(found->second).numbers.push_back(number);
    our_number_[number] = found->second;
    return;
  }
  const uint64_t ours = next_++;
  asked_[ours] = {.question = question, .numbers = {number}};
  if (merges) waits_[question] = ours;
  our_number_[number] = ours;
  send(ours, question);
}

void Relay::send(uint64_t ours, const Message& question) {
  Message message = {"ask", std::to_string(ours)};
  message.insert(message.end(), question.begin(), question.end());
  messages_.push_back(std::move(message));
}

void Relay::forget(uint64_t number) {
  const auto found = our_number_.find(number);
  if (found == our_number_.end()) return;
  const uint64_t ours = found->second;
  our_number_.erase(found);
  Asked& asked = asked_.at(ours);
  std::erase(asked.numbers, number);
  if (!asked.numbers.empty()) return;
  forget_wait(ours, asked.question);
  asked_.erase(ours);
  messages_.push_back({"forget", std::to_string(ours)});
}

void Relay::hear(const Message& message) {
  const uint64_t ours = question_number(message);
  const auto found = asked_.find(ours);
  if (found == asked_.end()) return;  // forgotten meanwhile
  const Message answer(message.begin() + 2, message.end());
  for (const uint64_t number : found->second.numbers) {
    our_number_.erase(number);
    answers_.emplace_back(number, answer);
  }
  forget_wait(ours, found->second.question);
  asked_.erase(found);
}

void Relay::forget_wait(uint64_t ours, const Message& question) {
  const auto found = waits_.find(question);
  if (found != waits_.end() && found->second == ours) waits_.erase(found);
}

void Relay::ask_again() {
  messages_.clear();
  for (const auto& [ours, asked] : asked_) send(ours, asked.question);
}

void Relay::clear() {
  asked_.clear();
  our_number_.clear();
  waits_.clear();
  messages_.clear();
  answers_.clear();
}

}  // namespace serried::launch
