// One message at a time in each direction of each pair of ranks.
#include "serried/comm/backends/hierarchical/wire_mail.h"

#include <cstring>

#include <c10/util/StringUtil.h>

namespace serried::hierarchical {

using net::Transfer;
using shm::MessageHeader;

WireMail::WireMail(Links& links, const Topology& topology, int rank)
    : links_(links),
      topology_(topology),
      rank_(rank),
      outgoing_(size_t(topology.num_ranks())),
      incoming_(size_t(topology.num_ranks())),
      losses_(size_t(topology.num_ranks())) {}

WireMail::~WireMail() {
  stop();
}

bool WireMail::reaches(int peer) const {
  return topology_.host_of(peer) != topology_.host_of(rank_);
}

std::string WireMail::loss(int peer) const {
  return losses_[size_t(peer)];
}

MessageHeader WireMail::header_of(const Message& message) const {
  MessageHeader header;
  std::memcpy(&header, message.envelope.data(), sizeof(header));
  return header;
}

/// Whether it has ended well; a peer that it failed for is lost.
bool WireMail::came(const Transfer& transfer, int peer) {
  if (!transfer.ended()) return false;
  if (transfer.state == Transfer::State::done) return true;
  losses_[size_t(peer)] = transfer.error.empty() ? "a message was cancelled" : transfer.error;
  return false;
}

bool WireMail::went_on(Message& message, int peer) {
  if (message.payload->go_on()) return true;
  if (!message.payload->error().empty()) losses_[size_t(peer)] = message.payload->error();
  return false;
}

void WireMail::begin(Message& out, const shm::Transfer& transfer) {
  const MessageHeader header{.bytes = transfer.bytes, .tag = transfer.tag, .dtype = transfer.dtype};
  const int64_t enclosed = transfer.bytes <= kMostEnclosed ? transfer.bytes : 0;
  out.is_open = true;
  out.envelope.resize(sizeof(header) + size_t(enclosed));
  std::memcpy(out.envelope.data(), &header, sizeof(header));
  if (enclosed > 0) std::memcpy(out.envelope.data() + sizeof(header), transfer.data, size_t(enclosed));
  out.envelope_transfer = {};
  out.ready_transfer = {};
  if (enclosed < transfer.bytes) {
    links_.wire().receive(out.ready_transfer, transfer.peer, make_tag(Purpose::ready), &out.ready, sizeof(out.ready));
  }
  links_.wire().send(out.envelope_transfer, transfer.peer, make_tag(Purpose::envelope), out.envelope.data(),
                     out.envelope.size());
}

bool WireMail::push(shm::Transfer& transfer) {
  if (stopped_ || !loss(transfer.peer).empty()) return false;
  Message& out = outgoing_[size_t(transfer.peer)];
  if (!out.is_open) begin(out, transfer);
  if (!came(out.envelope_transfer, transfer.peer)) return false;
  if (is_large(out)) {
    if (!came(out.ready_transfer, transfer.peer)) return false;
    if (!out.payload) {
      out.payload.emplace(links_.wire(), Stream::Direction::send, transfer.peer, make_tag(Purpose::payload),
                          transfer.data, transfer.bytes);
    }
    if (!went_on(out, transfer.peer)) return false;
  }
  out.payload.reset();
  out.is_open = false;
  return true;
}

std::optional<MessageHeader> WireMail::next(int source) {
  if (stopped_ || !loss(source).empty()) return std::nullopt;
  Message& in = incoming_[size_t(source)];
  if (!in.is_open) {
    in.is_open = true;
    in.envelope.resize(sizeof(MessageHeader) + kMostEnclosed);
    in.envelope_transfer = {};
    in.ready_transfer = {};
    links_.wire().receive(in.envelope_transfer, source, make_tag(Purpose::envelope), in.envelope.data(),
                          in.envelope.size());
  }
  if (!came(in.envelope_transfer, source)) return std::nullopt;
  const size_t came_with = in.envelope_transfer.bytes;
  const bool has_header = came_with >= sizeof(MessageHeader);
  const MessageHeader header = has_header ? header_of(in) : MessageHeader{};
  const size_t enclosed = header.bytes > kMostEnclosed ? 0 : size_t(header.bytes);
  if (has_header && header.bytes >= 0 && came_with == sizeof(MessageHeader) + enclosed) return header;
  losses_[size_t(source)] = c10::str("it sends an envelope of ", came_with, " bytes");
  return std::nullopt;
}

bool WireMail::pull(int source, char* to) {
  if (stopped_ || !loss(source).empty()) return false;
  Message& in = incoming_[size_t(source)];
  const int64_t bytes = header_of(in).bytes;
  if (!is_large(in)) {
    std::memcpy(to, in.envelope.data() + sizeof(MessageHeader), size_t(bytes));
    in.is_open = false;
    return true;
  }
  if (!in.payload) {
    in.payload.emplace(links_.wire(), Stream::Direction::receive, source, make_tag(Purpose::payload), to, bytes);
    in.payload->go_on();  // before the peer sends
    links_.wire().send(in.ready_transfer, source, make_tag(Purpose::ready), &in.ready, sizeof(in.ready));
  }
  if (!went_on(in, source) || !came(in.ready_transfer, source)) return false;
  in.payload.reset();
  in.is_open = false;
  return true;
}

void WireMail::cancel(Message& message) {
  message.payload.reset();
  for (Transfer* transfer : {&message.envelope_transfer, &message.ready_transfer}) {
    if (!transfer->ended()) links_.wire().cancel(*transfer);
  }
}

void WireMail::stop() {
  stopped_ = true;
  for (Message& message : outgoing_) cancel(message);
  for (Message& message : incoming_) cancel(message);
}

}  // namespace serried::hierarchical
