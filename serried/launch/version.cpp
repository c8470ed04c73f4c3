// The build says which versions these are: the launcher itself loads no LibTorch.
#include "serried/launch/version.h"

namespace serried::launch {

std::string version_text() {
  return "serried " SERRIED_VERSION " for LibTorch " SERRIED_TORCH_VERSION;
}

}  // namespace serried::launch
