// Which rank of a job sits where under --keep-going: ranks come and go one by one, and are numbered anew each time.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "serried/launch/plan.h"

namespace serried::launch {

/// The ranks of one table after another. A seat is one process, with a number that is used once; its rank may change.
class Seats {
 public:
  /// Forgets all and begins with `num_local` ranks of each member, in this order.
  struct Node {
    int member;
    int num_local;
  };
  void begin(const std::vector<Node>& nodes);

  /// A process that is to be started, in the next table. The others use Elastic, so it will.
  void add(int member);
  /// It has ended, with 0 or not; the member of a lost node loses all.
  void remove(int seat) { seats_.erase(seat); }
  void remove_member(int member);
  void say_elastic(int seat);

  /// One of a table that another leader made. Its number is below `next`.
  void restore(int member, int number, int rank, bool elastic);
  /// The number of the next process; with an argument, none below it is given out any more.
  int next() const { return next_; }
  void begin_numbers_at(int next) { next_ = std::max(next_, next); }

  /// Gives the ranks of a new table: those that had one keep their order, newcomers follow.
  void number_anew();

  bool has(int member, int seat) const;
  bool empty() const { return seats_.empty(); }
  int num_seats() const { return static_cast<int>(seats_.size()); }
  int num_seats_of(int member) const;
  int rank_of(int seat) const { return seats_.at(seat).rank; }
  /// The rank that has not said that it uses Elastic; -1 if there is none.
  int first_not_elastic() const;
  /// The member's part of the table, by rank. A seat is fresh in the first table that it is in.
  std::vector<Seat> of(int member) const;

 private:
  struct Entry {
    int member;
    int rank = -1;  // none yet
    bool fresh = true;
    bool elastic = false;
  };

  std::map<int, Entry> seats_;
  int next_ = 0;
};

}  // namespace serried::launch
