// Blocking calls; halves so that as many bytes leave a host as in any way between two.
#include "benchmarks/hosts/sockets.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace serried::bench {
namespace {

void need(bool works, const char* what) {
  if (works) return;
  std::perror(what);
  std::exit(1);
}

}  // namespace

SocketPair::SocketPair(int rank, const std::string& address, uint16_t port) : rank_(rank) {
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(port);
  need(inet_pton(AF_INET, address.c_str(), &place.sin_addr) == 1, address.c_str());
  const int end = socket(AF_INET, SOCK_STREAM, 0);
  const int yes = 1;
  if (rank == 0) {
    setsockopt(end, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    need(bind(end, reinterpret_cast<sockaddr*>(&place), sizeof(place)) == 0 && listen(end, 1) == 0, "listen");
    connection_ = accept(end, nullptr, nullptr);
    close(end);
  } else {
    connection_ = end;
    while (connect(end, reinterpret_cast<sockaddr*>(&place), sizeof(place)) != 0) usleep(10'000);
  }
  need(connection_ >= 0, "accept");
  setsockopt(connection_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

SocketPair::~SocketPair() {
  close(connection_);
}

void SocketPair::send(const float* from, int64_t count) const {
  const char* data = reinterpret_cast<const char*>(from);
  for (int64_t left = count * 4; left > 0;) {
    const ssize_t sent = ::send(connection_, data, size_t(left), 0);
    need(sent > 0, "send");
    data += sent;
    left -= sent;
  }
}

void SocketPair::receive(float* to, int64_t count) const {
  need(count == 0 || recv(connection_, to, size_t(count) * 4, MSG_WAITALL) == count * 4, "recv");
}

void SocketPair::add(float* to, int64_t count) const {
  std::array<float, 32 << 10> came;
  for (int64_t begin = 0; begin < count; begin += int64_t(came.size())) {
    const int64_t length = std::min(int64_t(came.size()), count - begin);
    receive(came.data(), length);
    for (int64_t i = 0; i < length; ++i) to[begin + i] += came[size_t(i)];
  }
}

void SocketPair::all_reduce(float* x, int64_t count) {
  const int64_t half = count / 2;
  float* const mine = rank_ == 0 ? x : x + half;
  float* const theirs = rank_ == 0 ? x + half : x;
  const int64_t my_count = rank_ == 0 ? half : count - half, their_count = count - my_count;
  const auto exchange = [&](const auto& send_all, const auto& receive_all) {
    if (count <= 16 << 10) {  // the kernel keeps it: no thread is needed
      send_all();
      return receive_all();
    }
    std::thread sender(send_all);
    receive_all();
    sender.join();
  };
  exchange([&] { send(theirs, their_count); }, [&] { add(mine, my_count); });
  exchange([&] { send(mine, my_count); }, [&] { receive(theirs, their_count); });
}

}  // namespace serried::bench
