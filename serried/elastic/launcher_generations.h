// Where the tables of this process come from.
#pragma once

#include <memory>

#include "serried/elastic/generations.h"

namespace serried::detail {

/// What serried run --keep-going tells, or one table where nobody keeps ranks alive.
std::shared_ptr<Generations> generations_of_process();

}  // namespace serried::detail
