// How a parameter is used, beyond how it lies: what strategies leave on it for the ops that consume it.
#pragma once

#include <memory>

namespace serried {

namespace detail {
struct UseLayouts;
struct GatherOnUse;
}  // namespace detail

/// Never changed once a tensor has it. Views and results of ops do not inherit it.
struct ParameterUse {
  std::shared_ptr<const detail::UseLayouts> layouts;  // of what meets the parameter, and of what comes out; or null
  std::shared_ptr<detail::GatherOnUse> gather;        // the parameter is whole only while an op needs it; or null
};
using UsePtr = std::shared_ptr<const ParameterUse>;

}  // namespace serried
