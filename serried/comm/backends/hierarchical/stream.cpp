// A window of chunks that moves on as the oldest ends.
#include "serried/comm/backends/hierarchical/stream.h"

#include <algorithm>

#include <c10/util/StringUtil.h>

#include "serried/comm/backends/hierarchical/tags.h"

namespace serried::hierarchical {

using net::Transfer;

Stream::Stream(net::Wire& wire, Direction direction, int peer, uint64_t tag, char* data, int64_t bytes)
    : wire_(wire), direction_(direction), peer_(peer), tag_(tag), data_(data), bytes_(bytes) {}

Stream::~Stream() {
  for (Transfer& chunk : chunks_) {
    if (!chunk.ended()) wire_.cancel(chunk);
  }
  if (!receipt_transfer_.ended()) wire_.cancel(receipt_transfer_);
}

int64_t Stream::length_at(int64_t begin) const {
  return std::min(kChunkBytes, bytes_ - begin);
}

bool Stream::go_on() {
  if (bytes_ == 0) return true;
  if (direction_ == Direction::send && !has_receipt_) begin_receipt();
  while (error_.empty()) {
    if (started_ < bytes_ && started_ - done_ < kUnderWay * kChunkBytes) {
      start_next();
      continue;
    }
    if (done_ == bytes_) return receipt_is_through();
    if (!chunks_[size_t(done_ / kChunkBytes % kUnderWay)].ended()) return false;
    end_oldest();
  }
  return false;
}

void Stream::start_next() {
  Transfer& chunk = chunks_[size_t(started_ / kChunkBytes % kUnderWay)];
  const int64_t length = length_at(started_);
  chunk = {};
  if (direction_ == Direction::send)
    wire_.send(chunk, peer_, tag_, data_ + started_, size_t(length));
  else
    wire_.receive(chunk, peer_, tag_, data_ + started_, size_t(length));
  started_ += length;
}

void Stream::begin_receipt() {
  has_receipt_ = true;
  const uint64_t tag = with_purpose(Purpose::receipt, tag_);
  if (direction_ == Direction::send)
    wire_.receive(receipt_transfer_, peer_, tag, &receipt_, sizeof(receipt_));
  else
    wire_.send(receipt_transfer_, peer_, tag, &receipt_, sizeof(receipt_));
}

bool Stream::receipt_is_through() {
  if (!has_receipt_) begin_receipt();
  if (!receipt_transfer_.ended()) return false;
  if (receipt_transfer_.state == Transfer::State::done) return true;
  error_ = receipt_transfer_.error.empty() ? "a message was cancelled" : receipt_transfer_.error;
  return false;
}

void Stream::end_oldest() {
  const Transfer& chunk = chunks_[size_t(done_ / kChunkBytes % kUnderWay)];
  const int64_t length = length_at(done_);
  if (chunk.state != Transfer::State::done) {
    error_ = chunk.error.empty() ? "a message was cancelled" : chunk.error;
  } else if (direction_ == Direction::receive && int64_t(chunk.bytes) != length) {
    error_ = c10::str("a message of ", chunk.bytes, " bytes came where ", length, " were expected");
  } else {
    done_ += length;
  }
}

}  // namespace serried::hierarchical
