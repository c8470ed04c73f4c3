// One parser for both forms; a mistake is told with the place where it stands.
#include "serried/launch/hostfile.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <string_view>

#include "serried/launch/error.h"

namespace serried::launch {
namespace {

constexpr int kMostRanks = 1 << 16;
constexpr std::string_view kSlots = "slots=";
constexpr std::string_view kBlanks = " \t\r";

/// A word and where it begins: what comes before the column is the caller's to say.
struct Word {
  std::string_view text;
  size_t column;  // from 1
};

struct Place {
  std::string before;  // "hosts.txt:3:", "--hosts, column "

  [[noreturn]] void refuse(size_t column, const std::string& what, const std::string& fix) const {
    throw LaunchError(kExitUsage, before + std::to_string(column) + ": " + what, fix);
  }
};

int number_of_ranks_in(const Word& word, const Place& place) {
  int number = 0;
  const char* end = word.text.data() + word.text.size();
  const auto [stop, error] = std::from_chars(word.text.data(), end, number);
  if (error == std::errc() && stop == end && number >= 1 && number <= kMostRanks) return number;
  place.refuse(word.column, "\"" + std::string(word.text) + "\" is no number of ranks",
               "write 1 or more, for example node1:4");
}

// A name that begins with a dash would be an option of ssh.
void check_name(const Word& word, const Place& place) {
  const auto is_allowed = [](char c) {
    return std::isalnum(static_cast<unsigned char>(c)) || (c != 0 && std::strchr("._-@:%", c));
  };
  if (word.text.empty()) place.refuse(word.column, "there is no name", "write host or host:ranks, for example node1:4");
  const auto bad = std::find_if_not(word.text.begin(), word.text.end(), is_allowed);
  const bool dashed = word.text[0] == '-' || word.text.find("@-") != word.text.npos;
  if (bad == word.text.end() && !dashed) return;
  const size_t at = dashed ? 0 : static_cast<size_t>(bad - word.text.begin());
  place.refuse(word.column + at, "\"" + std::string(word.text) + "\" is no name of a host",
               "write host or host:ranks, for example node1:4");
}

// "a", "a:4", "[fe80::1]:4".
Host host_in(const Word& word, const Place& place) {
  std::string_view name = word.text;
  std::string_view rest;
  size_t name_at = word.column;
  if (const size_t end = name.find(']'); name.starts_with('[') && end != name.npos) {
    rest = name.substr(end + 1);
    name = name.substr(1, end - 1);
    ++name_at;
    if (!rest.empty() && rest[0] != ':')
      place.refuse(word.column + end + 1, "after ] comes :ranks or nothing", "[fe80::1]:4");
  } else if (const size_t colon = name.find(':'); colon != name.npos) {
    rest = name.substr(colon);
    name = name.substr(0, colon);
  }
  check_name({name, name_at}, place);
  const size_t at = word.column + static_cast<size_t>(rest.data() - word.text.data()) + 1;
  return {.name = std::string(name), .num_ranks = rest.empty() ? 0 : number_of_ranks_in({rest.substr(1), at}, place)};
}

void add(std::vector<Host>& hosts, const Host& host, const Word& word, const Place& place) {
  const bool known = std::any_of(hosts.begin(), hosts.end(), [&](const Host& h) { return h.name == host.name; });
  if (known) place.refuse(word.column, host.name + " is there twice", "name it once, with all of its ranks");
  hosts.push_back(host);
}

std::vector<Word> words_of(std::string_view line) {
  std::vector<Word> words;
  for (size_t at = line.find_first_not_of(kBlanks); at < line.size(); at = line.find_first_not_of(kBlanks, at)) {
    const size_t end = std::min(line.find_first_of(kBlanks, at), line.size());
    words.push_back({line.substr(at, end - at), at + 1});
    at = end;
  }
  return words;
}

void add_line(std::vector<Host>& hosts, std::string_view line, const Place& place) {
  const std::vector<Word> words = words_of(line.substr(0, line.find('#')));
  if (words.empty()) return;
  Host host = host_in(words[0], place);
  if (words.size() > 1) {
    const Word& word = words[1];
    const bool is_slots = word.text.starts_with(kSlots) && host.num_ranks == 0;
    if (!is_slots)
      place.refuse(word.column, "\"" + std::string(word.text) + "\" says nothing here",
                   "write host, host:4 or host slots=4");
    host.num_ranks = number_of_ranks_in({word.text.substr(kSlots.size()), word.column + kSlots.size()}, place);
  }
  if (words.size() > 2) {
    place.refuse(words[2].column, "\"" + std::string(words[2].text) + "\" says nothing here",
                 "write one host per line");
  }
  add(hosts, host, words[0], place);
}

}  // namespace

std::vector<Host> parse_hosts(const std::string& text) {
  const Place place{"--hosts, column "};
  std::vector<Host> hosts;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const Word word{std::string_view(text).substr(at, end - at), at + 1};
    add(hosts, host_in(word, place), word, place);
    at = end + 1;
  }
  return hosts;
}

std::vector<Host> read_hostfile(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    throw LaunchError(kExitUsage, "--hostfile " + path + " cannot be read: " + std::strerror(errno), "check the path");
  }
  std::vector<Host> hosts;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    add_line(hosts, line, {path + ":" + std::to_string(++number) + ":"});
  }
  if (hosts.empty())
    throw LaunchError(kExitUsage, path + " names no host", "write one host per line, for example node1:4");
  return hosts;
}

}  // namespace serried::launch
