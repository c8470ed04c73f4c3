// Each call of MPI once.
#include "serried/comm/backends/mpi/moves.h"

#include <algorithm>
#include <numeric>

#include "serried/comm/backends/mpi/library.h"

namespace serried::mpi {
namespace {

struct Span {
  int count;
  MPI_Datatype type;
};

// `origin` is an address, or 0 for a type that is moved with a pointer.
MPI_Datatype make_type(MPI_Aint origin, int64_t bytes, Posted& posted) {
  std::vector<int> lengths;
  std::vector<MPI_Aint> places;
  for (int64_t begin = 0; begin < bytes; begin += posted.piece_bytes) {
    lengths.push_back(int(std::min(posted.piece_bytes, bytes - begin)));
    places.push_back(origin + MPI_Aint(begin));
  }
  MPI_Datatype type = MPI_DATATYPE_NULL;
  require(MPI_Type_create_hindexed(int(lengths.size()), lengths.data(), places.data(), MPI_BYTE, &type),
          "MPI_Type_create_hindexed");
  posted.types.push_back(type);
  require(MPI_Type_commit(&posted.types.back()), "MPI_Type_commit");
  return posted.types.back();
}

Span span_of(int64_t bytes, Posted& posted) {
  if (bytes <= posted.piece_bytes) return {int(bytes), MPI_BYTE};
  return {1, make_type(0, bytes, posted)};
}

void add_parts(const std::vector<Part>& parts, std::vector<int>& counts, std::vector<MPI_Datatype>& types,
               Posted& posted) {
  for (const Part& part : parts) {
    counts.push_back(part.bytes > 0 ? 1 : 0);
    if (part.bytes == 0) {
      types.push_back(MPI_BYTE);
      continue;
    }
    MPI_Aint address = 0;
    require(MPI_Get_address(part.data, &address), "MPI_Get_address");
    types.push_back(make_type(address, part.bytes, posted));
  }
}

const char* at(const void* data, int64_t bytes) {
  return static_cast<const char*>(data) + bytes;
}

char* at(void* data, int64_t bytes) {
  return static_cast<char*>(data) + bytes;
}

/// Calls `post` with the first element and the number of elements of each piece; once where there are none.
template <class Post>
void in_pieces(int64_t count, const Reduction& how, const Posted& posted, const Post& post) {
  const int64_t most = std::max<int64_t>(1, posted.piece_bytes / how.element_bytes);
  int64_t begin = 0;
  do {
    post(begin * how.element_bytes, int(std::min(most, count - begin)));
    begin += most;
  } while (begin < count);
}

}  // namespace

void post_barrier(MPI_Comm comm, Posted& posted) {
  require(MPI_Ibarrier(comm, posted.next()), "MPI_Ibarrier");
}

void post_broadcast(MPI_Comm comm, const Part& part, int root, Posted& posted) {
  const Span span = span_of(part.bytes, posted);
  require(MPI_Ibcast(const_cast<void*>(part.data), span.count, span.type, root, comm, posted.next()), "MPI_Ibcast");
}

void post_all_gather(MPI_Comm comm, const Part& mine, void* all, Posted& posted) {
  const Span span = span_of(mine.bytes, posted);
  require(MPI_Iallgather(mine.data, span.count, span.type, all, span.count, span.type, comm, posted.next()),
          "MPI_Iallgather");
}

void post_exchange(MPI_Comm comm, const std::vector<Part>& sent, const std::vector<Part>& received, Posted& posted) {
  auto& arguments = *posted.arguments.emplace_back(std::make_unique<ExchangeArguments>());
  add_parts(sent, arguments.send_counts, arguments.send_types, posted);
  add_parts(received, arguments.receive_counts, arguments.receive_types, posted);
  arguments.displacements.assign(sent.size(), 0);
  require(MPI_Ialltoallw(MPI_BOTTOM, arguments.send_counts.data(), arguments.displacements.data(),
                         arguments.send_types.data(), MPI_BOTTOM, arguments.receive_counts.data(),
                         arguments.displacements.data(), arguments.receive_types.data(), comm, posted.next()),
          "MPI_Ialltoallw");
}

void post_exchange_of_numbers(MPI_Comm comm, const int64_t* sent, int64_t* received, Posted& posted) {
  require(MPI_Ialltoall(sent, 1, MPI_INT64_T, received, 1, MPI_INT64_T, comm, posted.next()), "MPI_Ialltoall");
}

void post_all_reduce(MPI_Comm comm, const void* in, void* out, int64_t count, const Reduction& how, Posted& posted) {
  in_pieces(count, how, posted, [&](int64_t begin, int length) {
    const void* from = in == out ? MPI_IN_PLACE : at(in, begin);
    require(MPI_Iallreduce(from, at(out, begin), length, how.type, how.op, comm, posted.next()), "MPI_Iallreduce");
  });
}

void post_reduce(MPI_Comm comm, const void* in, void* out, int64_t count, int root, const Reduction& how,
                 Posted& posted) {
  int rank = 0;
  require(MPI_Comm_rank(comm, &rank), "MPI_Comm_rank");
  in_pieces(count, how, posted, [&](int64_t begin, int length) {
    const void* from = rank == root && in == out ? MPI_IN_PLACE : at(in, begin);
    void* to = rank == root ? at(out, begin) : nullptr;
    require(MPI_Ireduce(from, to, length, how.type, how.op, root, comm, posted.next()), "MPI_Ireduce");
  });
}

void post_reduce_scatter(MPI_Comm comm, const void* in, void* out, const std::vector<int64_t>& counts,
                         const Reduction& how, Posted& posted) {
  const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t(0));
  if (total * how.element_bytes <= posted.piece_bytes) {
    auto& arguments = *posted.arguments.emplace_back(std::make_unique<ExchangeArguments>());
    arguments.receive_counts.assign(counts.begin(), counts.end());
    require(MPI_Ireduce_scatter(in, out, arguments.receive_counts.data(), how.type, how.op, comm, posted.next()),
            "MPI_Ireduce_scatter");
    return;
  }
  int64_t begin = 0;
  for (size_t root = 0; root < counts.size(); ++root) {
    post_reduce(comm, at(in, begin), out, counts[root], int(root), how, posted);
    begin += counts[root] * how.element_bytes;
  }
}

void post_send(MPI_Comm comm, const Part& part, int peer, int tag, Posted& posted) {
  const Span span = span_of(part.bytes, posted);
  require(MPI_Isend(part.data, span.count, span.type, peer, tag, comm, posted.next()), "MPI_Isend");
}

void post_receive(MPI_Comm comm, const Part& part, int peer, int tag, Posted& posted) {
  const Span span = span_of(part.bytes, posted);
  const int source = peer < 0 ? MPI_ANY_SOURCE : peer;
  require(MPI_Irecv(const_cast<void*>(part.data), span.count, span.type, source, tag, comm, posted.next()),
          "MPI_Irecv");
}

}  // namespace serried::mpi
