// Steps that take turns on all ranks, so that the drift of the machine's speed falls on each of them alike.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried::bench {

using Step = std::function<void()>;

/// A step, and how long each of its calls took on the slowest rank, in microseconds.
struct Contender {
  std::string name;
  Step step;
  std::vector<double> times = {};
};

struct TurnOptions {
  int warm_up = 3;  // calls
  int rounds = 8;
  double block_us = 120e3;  // of steps in a row: short beside the drift of the machine's speed
};

template <class Fn>
double us_of(Fn&& fn) {
  const auto begin = std::chrono::steady_clock::now();
  fn();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

/// The slowest rank's values: a step lasts as long as its last rank.
std::vector<double> slowest(const std::vector<double>& values, const Group& group);

/// A busy neighbour slows whole stretches by half, more than what is measured.
double lower_quartile(std::vector<double> values);

/// Blocks of steps, one contender after the other, in an order that changes from round to round.
void take_turns(std::vector<Contender>& contenders, const Group& group, TurnOptions options = {});

}  // namespace serried::bench
