// Texts of numbers, groups and meshes.
#include "serried/graph/replay/plain_value.h"

#include <array>
#include <charconv>
#include <sstream>

#include "serried/graph/graph.h"

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
  if (value.isBoolean()) return value.toBool() ? "true" : "false";
  if (value.isIntegral(/*includeBool=*/false)) return std::to_string(value.toLong());
  if (value.isFloatingPoint()) {
    const std::string text = plain_text(value.toDouble());
    return text.find_first_of(".en") == std::string::npos ? text + ".0" : text;  // 2.0 is not 2
  }
  std::ostringstream text;
  text.precision(17);
  text << value;
  return text.str();
}

std::string plain_text(const at::Tensor& t) {
  if (!t.defined()) return "none";
  return c10::str(meta_of(t).to_string(), " at ", static_cast<const void*>(t.unsafeGetTensorImpl()));
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
