// Every collective, of uneven sizes, beside what ranks of one host get.
#pragma once

#include <string>

#include "serried/comm/groups/group.h"

namespace serried::testing {

/// The calls that gave this rank other bits; empty: there are none. Every rank calls it.
std::string calls_with_other_bits(const Group& group);

}  // namespace serried::testing
