// A link that loses, delays, mixes up and slows down what goes over it, for kernels that have no netem: takes frames
// off one device and puts them on another. `bad_wire FIRST SECOND LOSS_% REORDER_% DELAY_MS MBIT`, 0 for no limit.
#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Frame = std::vector<char>;

// Of traffic that a link keeps before it drops.
constexpr std::chrono::milliseconds kBacklog{250};

struct Fate {
  double loss = 0;     // of 1
  double reorder = 0;  // of 1: these are not delayed
  Clock::duration delay{};
  double bytes_per_second = 0;
};

void need(bool works, const char* what) {
  if (works) return;
  std::perror(what);
  std::exit(1);
}

/// All frames of a device, with what the sender left to it to do: checksums, and cutting into segments.
int open_device(const char* name) {
  const int device = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));
  need(device >= 0, "socket");
  const int yes = 1;
  need(setsockopt(device, SOL_PACKET, PACKET_VNET_HDR, &yes, sizeof(yes)) == 0, "PACKET_VNET_HDR");
  sockaddr_ll place{};
  place.sll_family = AF_PACKET;
  place.sll_protocol = htons(ETH_P_ALL);
  place.sll_ifindex = int(if_nametoindex(name));
  need(place.sll_ifindex > 0 && bind(device, reinterpret_cast<sockaddr*>(&place), sizeof(place)) == 0, name);
  packet_mreq all{};
  all.mr_ifindex = place.sll_ifindex;
  all.mr_type = PACKET_MR_PROMISC;
  need(setsockopt(device, SOL_PACKET, PACKET_ADD_MEMBERSHIP, &all, sizeof(all)) == 0, "PACKET_ADD_MEMBERSHIP");
  return device;
}

/// One direction.
class Link {
 public:
  Link(int from, int to, const Fate& fate) : from_(from), to_(to), fate_(fate) {}

  void take() {
    sockaddr_ll sender{};
    socklen_t length = sizeof(sender);
    const ssize_t bytes =
        recvfrom(from_, buffer_.data(), buffer_.size(), MSG_DONTWAIT, reinterpret_cast<sockaddr*>(&sender), &length);
    if (bytes <= 0 || sender.sll_pkttype == PACKET_OUTGOING) return;
    if (chance_(random_) < fate_.loss) return;
    Clock::time_point due = Clock::now();
    if (fate_.bytes_per_second > 0) {
      if (free_at_ - due > kBacklog) return;
      const std::chrono::duration<double> taken(double(bytes) / fate_.bytes_per_second);
      due = free_at_ = std::max(due, free_at_) + std::chrono::duration_cast<Clock::duration>(taken);
    }
    if (chance_(random_) >= fate_.reorder) due += fate_.delay;
    frames_.emplace(due, Frame(buffer_.begin(), buffer_.begin() + bytes));
  }

  /// What is due goes; how long until the next one is, in milliseconds, -1 for never.
  int give() {
    while (!frames_.empty() && frames_.begin()->first <= Clock::now()) {
      const Frame& frame = frames_.begin()->second;
      // A host that is gone, or takes nothing now: a wire drops.
      static_cast<void>(!send(to_, frame.data(), frame.size(), MSG_DONTWAIT));
      frames_.erase(frames_.begin());
    }
    if (frames_.empty()) return -1;
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(frames_.begin()->first - Clock::now());
    return std::max(0, int(wait.count()));
  }

 private:
  const int from_, to_;
  const Fate fate_;
  Clock::time_point free_at_{};
  std::multimap<Clock::time_point, Frame> frames_;
  std::array<char, 80 << 10> buffer_{};
  std::mt19937 random_{7};
  std::uniform_real_distribution<double> chance_{0, 1};
};

}  // namespace

int main(int argc, char** argv) {
  need(argc == 7, "usage: bad_wire FIRST SECOND LOSS_% REORDER_% DELAY_MS MBIT");
  Fate fate{.loss = std::atof(argv[3]) / 100, .reorder = std::atof(argv[4]) / 100};
  fate.delay = std::chrono::microseconds(int64_t(std::atof(argv[5]) * 1000));
  fate.bytes_per_second = std::atof(argv[6]) * 125e3;
  const int first = open_device(argv[1]), second = open_device(argv[2]);
  static Link there(first, second, fate), back(second, first, fate);
  std::puts("ready");
  std::fflush(stdout);
  while (true) {
    const int waits[] = {there.give(), back.give()};
    const int wait = waits[0] < 0 ? waits[1] : waits[1] < 0 ? waits[0] : std::min(waits[0], waits[1]);
    pollfd entries[] = {{.fd = first, .events = POLLIN, .revents = 0}, {.fd = second, .events = POLLIN, .revents = 0}};
    poll(entries, 2, wait);
    if (entries[0].revents != 0) there.take();
    if (entries[1].revents != 0) back.take();
  }
}
