// Packs and unpacks pieces of the stream, and keeps two per source on their way.
#include "serried/elastic/move_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <deque>
#include <functional>

#include "serried/base/trace.h"
#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/door.h"
#include "serried/comm/collectives/watch.h"

namespace serried::detail {
namespace {

constexpr size_t kUnderWay = 2;  // pieces of one source to or from one rank

// Tensors one behind the other, without a copy of all.
class Stream {
 public:
  Stream(const std::vector<at::Tensor>& bytes, int64_t piece_bytes, at::Device device)
      : bytes_(bytes), piece_bytes_(piece_bytes), device_(device) {
    for (const at::Tensor& each : bytes) size_ += each.numel();
  }

  int64_t num_pieces() const { return (size_ + piece_bytes_ - 1) / piece_bytes_; }

  at::Tensor empty_piece(int64_t number) const {
    const int64_t size = std::min(piece_bytes_, size_ - number * piece_bytes_);
    return at::empty({size}, at::device(device_).dtype(at::kByte));
  }

  at::Tensor pack(int64_t number) const {
    at::Tensor piece = empty_piece(number);
    for_each_part(number, piece,
                  [](const at::Tensor& in_tensor, const at::Tensor& in_piece) { in_piece.copy_(in_tensor); });
    return piece;
  }

  void unpack(int64_t number, const at::Tensor& piece) const {
    for_each_part(number, piece,
                  [](const at::Tensor& in_tensor, const at::Tensor& in_piece) { in_tensor.copy_(in_piece); });
  }

 private:
  void for_each_part(int64_t number, const at::Tensor& piece,
                     const std::function<void(const at::Tensor&, const at::Tensor&)>& visit) const {
    const int64_t begin = number * piece_bytes_, end = begin + piece.numel();
    int64_t at = 0;
    for (const at::Tensor& each : bytes_) {
      const int64_t from = std::max(begin, at), to = std::min(end, at + each.numel());
      if (from < to) visit(each.narrow(0, from - at, to - from), piece.narrow(0, from - begin, to - from));
      at += each.numel();
    }
  }

  const std::vector<at::Tensor>& bytes_;
  const int64_t piece_bytes_;
  const at::Device device_;
  int64_t size_ = 0;
};

void send_pieces(const Stream& stream, const Route& route, size_t source, const Group& group) {
  const size_t most = kUnderWay * route.receivers.size();
  std::deque<Pending> under_way;
  for (int64_t number = int64_t(source); number < stream.num_pieces(); number += int64_t(route.sources.size())) {
    const at::Tensor piece = stream.pack(number);
    for (const int receiver : route.receivers) {
      under_way.push_back(async::send(piece, group, {.peer = receiver}));
      if (under_way.size() <= most) continue;
      under_way.front().wait();
      under_way.pop_front();
    }
  }
  for (const Pending& each : under_way) each.wait();
}

void receive_pieces(const Stream& stream, const Route& route, const Group& group) {
  struct Expected {
    int64_t number;
    at::Tensor piece;
    Pending arrival;
  };
  std::deque<Expected> expected;
  const auto take = [&] {
    expected.front().arrival.wait();
    stream.unpack(expected.front().number, expected.front().piece);
    expected.pop_front();
  };
  for (int64_t number = 0; number < stream.num_pieces(); ++number) {
    const at::Tensor piece = stream.empty_piece(number);
    const int source = route.sources[size_t(number) % route.sources.size()];
    expected.push_back({number, piece, async::recv(piece, group, {.peer = source})});
    if (expected.size() > kUnderWay * route.sources.size()) take();
  }
  while (!expected.empty()) take();
}

}  // namespace

void move_state(const std::vector<at::Tensor>& bytes, const Route& route, const Group& group, int64_t piece_bytes) {
  const watch::PartOf scope("Elastic's state");
  const trace::Span span("move state", trace::kCommunication);
  const at::NoGradGuard no_grad;
  const Stream stream(bytes, piece_bytes, device_of(group));
  const int rank = group->getRank();
  const auto mine = std::find(route.sources.begin(), route.sources.end(), rank);
  if (mine != route.sources.end()) return send_pieces(stream, route, size_t(mine - route.sources.begin()), group);
  if (std::count(route.receivers.begin(), route.receivers.end(), rank) > 0) receive_pieces(stream, route, group);
}

}  // namespace serried::detail
