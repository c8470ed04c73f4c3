// Where the other ranks of a group reach this one.
#pragma once

#include <string>

#include "serried/comm/agree/rank_texts.h"

namespace serried::detail {

/// The address of this host that leads to the other ranks, which meet on a store and all call this; "" where the store
/// is not reached by TCP. The host's own name need not resolve, or only to loopback, as Debian has it; so it is the
/// address that this rank reached the store from. One that shares the store's host reached it by loopback: then the
/// address that leads to a rank which did not; loopback where there is none.
std::string own_address(const StoreRanks& ranks);

}  // namespace serried::detail
