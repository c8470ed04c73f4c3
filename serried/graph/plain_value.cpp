// Texts of numbers, groups and meshes.
#include "serried/graph/plain_value.h"

#include <array>
#include <charconv>
#include <sstream>

namespace serried::graph {
namespace {

// The shortest text that reads back as the same number.
template <class T>
std::string shortest(T value) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.begin(), text.end(), value).ptr};
}

}  // namespace

std::string plain_text(double value) {
  return shortest(value);
}

std::string plain_text(float value) {
  return shortest(value);
}

std::string plain_text(const at::Scalar& value) {
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}

std::string plain_text(const Group& group) {
  return group ? c10::str(group->getGroupName(), ", rank ", group->getRank(), "/", group->getSize()) : "none";
}

std::string plain_text(const DeviceMesh& mesh) {
  return c10::str(mesh.to_string(), ", number ", mesh.id());
}

std::string plain_text(const Placement& placement) {
  return to_string(placement);
}

}  // namespace serried::graph
