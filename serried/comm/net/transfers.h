// How a wire begins and ends a Transfer, and what it says.
#pragma once

#include <string>

#include "serried/comm/net/wire.h"

namespace serried::net {

void begin(Transfer& transfer, int peer);

/// `state` is written last: who sees it sees the rest.
void end(Transfer& transfer, Transfer::State state, size_t bytes, std::string error = {});

void fail(Transfer& transfer, std::string error);

/// Begins a transfer, or fails it at once where `tag` has more than kTagBits bits; whether it began.
bool begin_tagged(Transfer& transfer, int peer, uint64_t tag);

/// "rank 3 is lost: connection reset"
std::string lost_text(int peer, const std::string& why);

/// "there is no rank 3 among 2"
std::string no_rank_text(int peer, int num_peers);

/// "a message of 2000 bytes came from rank 3 where 1000 were expected (tag 7)"
std::string truncated_text(int peer, uint64_t tag, size_t came, size_t expected);

}  // namespace serried::net
