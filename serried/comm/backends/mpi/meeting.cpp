// Texts through the store come before every call of MPI that waits for others.
#include "serried/comm/backends/mpi/meeting.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <vector>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/mpi/library.h"

namespace serried::mpi {
namespace {

constexpr const char* kFix = "start all ranks with one mpirun -n 4 ./train";

// What keeps this rank from beginning MPI with `num_ranks` others; empty where nothing does.
std::string why_not_begin(int num_ranks) {
  const int launched = launched_ranks();
  if (has_begun() || launched < 0 || launched == num_ranks) return "";
  if (launched < num_ranks) {
    return c10::str("the group has ", num_ranks, " ranks, but mpirun has started ", launched);
  }
  return c10::str("MPI begins with all ranks of the job, and the group has ", num_ranks, " of ", launched,
                  ": make a group of all of them before");
}

// One rank that cannot begin keeps all from beginning: they would wait for it without end.
void agree_to_begin(const detail::StoreRanks& ranks) {
  const std::vector<std::string> all =
      detail::exchange(ranks, "new_group", "mpi/begins", why_not_begin(ranks.world_size));
  for (size_t r = 0; r < all.size(); ++r) {
    if (!all[r].empty()) raise<c10::DistBackendError>({"new_group", c10::str("rank ", r, ": ", all[r]), kFix});
  }
}

struct Member {
  int rank = -1;
  int size = -1;
  std::string job;
};

Member parse(const std::string& text) {
  Member member;
  std::istringstream words(text);
  words >> member.rank >> member.size;
  std::getline(words, member.job);
  return member;
}

std::vector<int> places_of(const std::vector<Member>& members) {
  std::vector<int> places;
  std::map<int, size_t> seen;
  for (size_t r = 0; r < members.size(); ++r) {
    const Member& member = members[r];
    if (member.job != members[0].job || member.size != members[0].size) {
      raise<c10::DistBackendError>({"new_group",
                                    c10::str("ranks 0 and ", r, " are of different MPI jobs: ", members[0].size,
                                             " ranks of job", members[0].job, ", ", member.size, " of job", member.job),
                                    kFix});
    }
    const auto [first, is_new] = seen.emplace(member.rank, r);
    if (!is_new || member.rank < 0 || member.rank >= member.size) {
      raise<c10::DistBackendError>({"new_group",
                                    c10::str("ranks ", first->second, " and ", r, " of the group are both rank ",
                                             member.rank, " of ", member.size, " in MPI_COMM_WORLD"),
                                    kFix});
    }
    places.push_back(member.rank);
  }
  return places;
}

MPI_Comm make_communicator(const std::vector<int>& places) {
  const std::lock_guard<std::mutex> turn(turns());
  MPI_Group world = MPI_GROUP_NULL, members = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  require(MPI_Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  require(MPI_Group_incl(world, int(places.size()), places.data(), &members), "MPI_Group_incl");
  // Only members call, as split_group has it.
  require(MPI_Comm_create_group(MPI_COMM_WORLD, members, 0, &comm), "MPI_Comm_create_group");
  require(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&members);
  MPI_Group_free(&world);
  return comm;
}

}  // namespace

MPI_Comm meet(const detail::StoreRanks& ranks) {
  agree_to_begin(ranks);
  const Place place = begin();
  const std::vector<std::string> texts =
      detail::exchange(ranks, "new_group", "mpi/places", c10::str(place.rank, " ", place.size, " ", job_name()));
  std::vector<Member> members;
  for (const std::string& text : texts) members.push_back(parse(text));
  return make_communicator(places_of(members));
}

}  // namespace serried::mpi
