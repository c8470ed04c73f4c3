// The store of a job as a value, and a node's way to it: what is answered to whom, and what is forgotten.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "serried/launch/keys.h"
#include "serried/launch/relay.h"

namespace serried::testing {
namespace {

using launch::Keys;
using launch::Message;
using launch::Relay;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

const Keys::Asker kAsker{0, 1};

// The one answer to a question that need not wait.
Message ask(Keys& keys, Message question) {
  question.insert(question.begin(), "0");
  keys.ask(kAsker, question);
  const std::vector<Keys::Answer> answers = keys.take_answers();
  EXPECT_EQ(answers.size(), 1) << question[1];
  return answers.empty() ? Message() : answers[0].second;
}

TEST(Keys, AnswerAsC10dsStores) {
  Keys keys;
  EXPECT_EQ(ask(keys, {"set", "a", "1"}), Message({"ok"}));
  EXPECT_EQ(ask(keys, {"get", "a"}), Message({"ok", "1"}));
  EXPECT_EQ(ask(keys, {"add", "n", "3"}), Message({"ok", "3"}));
  EXPECT_EQ(ask(keys, {"add", "n", "-4"}), Message({"ok", "-1"}));
  EXPECT_EQ(ask(keys, {"get", "n"}), Message({"ok", "-1"}));
  EXPECT_EQ(ask(keys, {"compare_set", "a", "1", "2"}), Message({"ok", "2"}));
  EXPECT_EQ(ask(keys, {"compare_set", "a", "1", "3"}), Message({"ok", "2"}));
  EXPECT_EQ(ask(keys, {"compare_set", "new", "", "first"}), Message({"ok", "first"}));
  EXPECT_EQ(ask(keys, {"compare_set", "none", "old", "x"}), Message({"ok", "old"}));
  EXPECT_EQ(ask(keys, {"check", "a", "n"}), Message({"ok", "1"}));
  EXPECT_EQ(ask(keys, {"check", "a", "none"}), Message({"ok", "0"}));
  EXPECT_EQ(ask(keys, {"append", "a", "34"}), Message({"ok"}));
  EXPECT_EQ(ask(keys, {"append", "b", "5"}), Message({"ok"}));
  EXPECT_EQ(ask(keys, {"multi_get", "b", "a"}), Message({"ok", "5", "234"}));
  EXPECT_EQ(ask(keys, {"multi_set", "x", "6", "y", "7"}), Message({"ok"}));
  EXPECT_EQ(ask(keys, {"count"}), Message({"ok", "6"}));
  EXPECT_EQ(ask(keys, {"list"}), Message({"ok", "a", "b", "n", "new", "x", "y"}));
  EXPECT_EQ(ask(keys, {"delete", "a"}), Message({"ok", "1"}));
  EXPECT_EQ(ask(keys, {"delete", "a"}), Message({"ok", "0"}));
}

TEST(Keys, QueuesKeepTheirOrderAndTellWhenTheyAreEmpty) {
  Keys keys;
  EXPECT_EQ(ask(keys, {"pop", "q", "0"}), Message({"none"}));
  ask(keys, {"push", "q", "first"});
  ask(keys, {"push", "q", ""});
  EXPECT_EQ(ask(keys, {"length", "q"}), Message({"ok", "2"}));
  EXPECT_EQ(ask(keys, {"pop", "q", "1"}), Message({"ok", "first"}));
  EXPECT_EQ(ask(keys, {"pop", "q", "0"}), Message({"ok", ""}));
  EXPECT_EQ(ask(keys, {"length", "q"}), Message({"ok", "0"}));
  EXPECT_EQ(ask(keys, {"check", "q"}), Message({"ok", "0"}));
  EXPECT_EQ(keys.num_bytes(), 0);
}

TEST(Keys, WhoWaitsIsAnsweredWhenTheLastKeyIsThere) {
  Keys keys;
  keys.ask({0, 1}, {"0", "wait", "a", "b"});
  keys.ask({1, 1}, {"0", "get", "b"});
  keys.ask({1, 2}, {"0", "pop", "q", "1"});
  keys.ask({2, 1}, {"0", "pop", "q", "1"});
  EXPECT_THAT(keys.take_answers(), IsEmpty());
  keys.ask({0, 2}, {"0", "set", "b", "B"});
  EXPECT_THAT(keys.take_answers(),
              ElementsAre(Pair(Keys::Asker{0, 2}, Message{"ok"}), Pair(Keys::Asker{1, 1}, Message{"ok", "B"})));
  // One thing in the queue is for one of those who wait, the first.
  keys.ask({0, 3}, {"0", "push", "q", "x"});
  EXPECT_THAT(keys.take_answers(),
              ElementsAre(Pair(Keys::Asker{0, 3}, Message{"ok"}), Pair(Keys::Asker{1, 2}, Message{"ok", "x"})));
  keys.ask({0, 4}, {"0", "set", "a", "A"});
  EXPECT_THAT(keys.take_answers(),
              ElementsAre(Pair(Keys::Asker{0, 4}, Message{"ok"}), Pair(Keys::Asker{0, 1}, Message{"ok"})));
  EXPECT_EQ(keys.num_waiting(), 1);
}

TEST(Keys, AKeyThatIsDeletedMeanwhileIsMissed) {
  Keys keys;
  ask(keys, {"set", "a", "1"});
  keys.ask({0, 5}, {"0", "wait", "a", "b"});
  ask(keys, {"delete", "a"});
  ask(keys, {"set", "b", "1"});
  EXPECT_EQ(keys.num_waiting(), 1);
  keys.ask({0, 6}, {"0", "set", "a", "1"});
  EXPECT_EQ(keys.take_answers().size(), 2);
}

TEST(Keys, WhoForgetsOrIsGoneGetsNoAnswer) {
  Keys keys;
  keys.ask({0, 1}, {"0", "wait", "a"});
  keys.ask({1, 1}, {"0", "wait", "a"});
  keys.ask({1, 2}, {"0", "get", "b"});
  keys.ask({2, 1}, {"0", "wait", "a"});
  keys.forget({0, 1});
  keys.forget({0, 1});
  keys.forget_node(1);
  EXPECT_EQ(keys.num_waiting(), 1);
  keys.ask({2, 2}, {"0", "set", "a", "1"});
  EXPECT_THAT(keys.take_answers(),
              ElementsAre(Pair(Keys::Asker{2, 2}, Message{"ok"}), Pair(Keys::Asker{2, 1}, Message{"ok"})));
}

TEST(Keys, ProgramsThatFollowEachOtherHaveKeysOfTheirOwn) {
  Keys keys;
  keys.ask(kAsker, {"0", "set", "a", "first"});
  keys.ask(kAsker, {"1", "check", "a"});
  keys.ask(kAsker, {"1", "add", "a", "1"});
  keys.ask(kAsker, {"0", "get", "a"});
  keys.ask(kAsker, {"1", "list"});
  EXPECT_THAT(keys.take_answers(), ElementsAre(Pair(kAsker, Message{"ok"}), Pair(kAsker, Message{"ok", "0"}),
                                               Pair(kAsker, Message{"ok", "1"}), Pair(kAsker, Message{"ok", "first"}),
                                               Pair(kAsker, Message{"ok", "a"})));
}

TEST(Keys, TakeNoMoreThanTheirLimits) {
  Keys keys({.most_bytes_of_a_value = 100, .most_bytes = 1000});
  EXPECT_THAT(ask(keys, {"set", "long", std::string(100, 'x')}),
              ElementsAre("full", "the value of \"long\" would be longer than 100 bytes"));
  EXPECT_EQ(ask(keys, {"check", "long"}), Message({"ok", "0"}));
  int taken = 0;
  Message answer;
  while ((answer = ask(keys, {"push", "q", std::string(50, 'x')})) == Message{"ok"} && taken < 100) ++taken;
  EXPECT_THAT(answer, ElementsAre("full", "all values together would be more than 1000 bytes"));
  EXPECT_GT(taken, 5);
  EXPECT_LE(keys.num_bytes(), 1000);
  EXPECT_THAT(ask(keys, {"multi_set", "a", std::string(80, 'x'), "b", std::string(80, 'x')})[0], "full");
  EXPECT_EQ(ask(keys, {"check", "a"}), Message({"ok", "0"}));
  while (taken-- > 0) EXPECT_EQ(ask(keys, {"pop", "q", "0"})[0], "ok");
  EXPECT_EQ(ask(keys, {"set", "a", std::string(80, 'x')}), Message({"ok"}));
}

TEST(Keys, RefuseWhatMakesNoSense) {
  Keys keys;
  ask(keys, {"set", "text", "abc"});
  ask(keys, {"set", "most", "9223372036854775807"});
  ask(keys, {"push", "queue", "abc"});
  EXPECT_THAT(ask(keys, {"add", "text", "1"}), ElementsAre("bad", "it holds no number to add 1 to"));
  EXPECT_EQ(ask(keys, {"add", "most", "1"})[0], "bad");
  EXPECT_EQ(ask(keys, {"add", "n", "one"})[0], "bad");
  EXPECT_EQ(ask(keys, {"get", "queue"})[0], "bad");
  EXPECT_EQ(ask(keys, {"pop", "text", "1"})[0], "bad");
  for (const Message& question :
       {Message{"set", "a"}, Message{"fly", "a"}, Message{"multi_set", "a"}, Message{"pop", "q"}}) {
    EXPECT_THAT(ask(keys, question), ElementsAre("bad", "the question makes no sense")) << question[0];
  }
}

TEST(Keys, OfGenerationsThatHaveEndedAreGone) {
  Keys keys;
  ask(keys, {"set", "generation/0/a", "1"});
  ask(keys, {"set", "generation/1/a", "1"});
  ask(keys, {"set", "other", "1"});
  keys.ask({3, 1}, {"0", "wait", "generation/0/b"});
  keys.ask({3, 2}, {"0", "wait", "generation/1/b"});
  keys.end_generations_before(1);
  EXPECT_THAT(keys.take_answers(), ElementsAre(Pair(Keys::Asker{3, 1}, Message{"over"})));
  EXPECT_EQ(ask(keys, {"list"}), Message({"ok", "generation/1/a", "other"}));
  EXPECT_EQ(ask(keys, {"set", "generation/0/late", "1"}), Message({"over"}));
  EXPECT_EQ(ask(keys, {"check", "generation/1/a", "generation/0/a"}), Message({"over"}));
  EXPECT_EQ(ask(keys, {"set", "generation/x/a", "1"}), Message({"ok"}));
  keys.clear();
  EXPECT_EQ(ask(keys, {"count"}), Message({"ok", "0"}));
  EXPECT_EQ(keys.num_waiting(), 0);
  EXPECT_EQ(ask(keys, {"set", "generation/0/a", "1"}), Message({"ok"}));
}

// Against a table that is asked again and again, as c10d's FileStore is.
TEST(Keys, AnswerEachQuestionOnceWhateverTheOrder) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto key = [&] { return std::string(1, "abcd"[random() % 4]); };
    Keys keys;
    std::map<std::string, std::string> values;
    std::map<uint64_t, std::vector<std::string>> waiting;
    for (uint64_t number = 1; number < 60; ++number) {
      const unsigned what = random() % 4;
      std::set<uint64_t> expected;
      if (what == 0) {
        values[key()] = "v";
        keys.ask({0, number}, {"0", "multi_set", values.begin()->first, "v", values.rbegin()->first, "v"});
        for (const auto& [k, v] : values) keys.ask({1, number * 10 + k[0] % 8}, {"0", "set", k, v});
        expected.insert(number);
      } else if (what == 1 && !values.empty()) {
        keys.ask({0, number}, {"0", "delete", values.begin()->first});
        values.erase(values.begin());
        expected.insert(number);
      } else if (what == 2 && !waiting.empty()) {
        keys.forget({0, waiting.begin()->first});
        waiting.erase(waiting.begin());
      } else {
        waiting[number] = {key(), key()};
        keys.ask({0, number}, {"0", "wait", waiting[number][0], waiting[number][1]});
      }
      std::erase_if(waiting, [&](const auto& entry) {
        const bool there = values.contains(entry.second[0]) && values.contains(entry.second[1]);
        if (there) expected.insert(entry.first);
        return there;
      });
      std::multiset<uint64_t> answered;
      for (const auto& [who, answer] : keys.take_answers()) {
        if (who.node == 0) answered.insert(who.number);
      }
      ASSERT_EQ(answered, std::multiset<uint64_t>(expected.begin(), expected.end())) << "seed " << seed;
    }
    EXPECT_EQ(keys.num_waiting(), waiting.size());
  }
}

TEST(Relay, AsksOnceForAllThatWaitForTheSame) {
  Relay relay;
  relay.ask(11, {"0", "wait", "a"});
  relay.ask(12, {"0", "wait", "a"});
  relay.ask(13, {"0", "get", "a"});
  relay.ask(14, {"0", "get", "a"});
  EXPECT_THAT(relay.take_messages(),
              ElementsAre(Message{"ask", "1", "0", "wait", "a"}, Message{"ask", "2", "0", "get", "a"},
                          Message{"ask", "3", "0", "get", "a"}));
  relay.hear({"answer", "1", "ok"});
  relay.hear({"answer", "3", "ok", "v"});
  EXPECT_THAT(relay.take_answers(),
              ElementsAre(Pair(11, Message{"ok"}), Pair(12, Message{"ok"}), Pair(14, Message{"ok", "v"})));
  // Who waits from now on asks anew.
  relay.ask(15, {"0", "wait", "a"});
  EXPECT_THAT(relay.take_messages(), ElementsAre(Message{"ask", "4", "0", "wait", "a"}));
}

TEST(Relay, ForgetsWhenTheLastHasForgotten) {
  Relay relay;
  relay.ask(1, {"0", "wait", "a"});
  relay.ask(2, {"0", "wait", "a"});
  relay.take_messages();
  relay.forget(1);
  relay.forget(7);
  EXPECT_THAT(relay.take_messages(), IsEmpty());
  relay.forget(2);
  EXPECT_THAT(relay.take_messages(), ElementsAre(Message{"forget", "1"}));
  relay.hear({"answer", "1", "ok"});
  EXPECT_THAT(relay.take_answers(), IsEmpty());
  relay.ask(3, {"0", "wait", "a"});
  EXPECT_THAT(relay.take_messages(), ElementsAre(Message{"ask", "2", "0", "wait", "a"}));
  relay.clear();
  relay.hear({"answer", "2", "ok"});
  EXPECT_THAT(relay.take_answers(), IsEmpty());
}

TEST(Relay, AsksAnotherLeaderWhatHasNoAnswer) {
  Relay relay;
  relay.ask(1, {"0", "wait", "a"});
  relay.ask(2, {"0", "get", "b"});
  relay.ask(3, {"0", "add", "c", "1"});
  relay.take_messages();
  relay.hear({"answer", "2", "ok", "v"});
  relay.ask(4, {"0", "wait", "a"});
  relay.forget(3);
  relay.ask_again();
  EXPECT_THAT(relay.take_messages(), ElementsAre(Message{"ask", "1", "0", "wait", "a"}));
  relay.hear({"answer", "1", "ok"});
  EXPECT_THAT(relay.take_answers(),
              ElementsAre(Pair(2, Message{"ok", "v"}), Pair(1, Message{"ok"}), Pair(4, Message{"ok"})));
}

TEST(Relay, RefusesAnswersWithoutANumber) {
  Relay relay;
  EXPECT_THROW(relay.hear({"answer"}), std::runtime_error);
  EXPECT_THROW(relay.hear({"answer", "-1", "ok"}), std::runtime_error);
  EXPECT_THROW(launch::question_number({"ask", "1x"}), std::runtime_error);
}

}  // namespace
}  // namespace serried::testing
