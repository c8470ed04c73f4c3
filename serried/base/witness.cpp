// The one slot of each thread.
#include "serried/base/witness.h"

namespace serried {

constinit thread_local WitnessListener* detail::current_listener = nullptr;

}  // namespace serried
