// Texts of numbers, groups and meshes.
#include "serried/graph/text/plain_value.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <sstream>

#include "serried/graph/graph.h"
#include "serried/graph/text/literal.h"

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

std::string plain_text(const at::Generator& generator) {
  return generator.defined() ? c10::str("generator at ", static_cast<const void*>(generator.unsafeGetGeneratorImpl()))
                             : "none";
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

std::string text_in_list(std::string_view text) {
  return quoted_text(text);
}

bool Identities::operator==(const Identities& other) const {
  const auto same = [](const auto& mine, const auto& theirs, const auto& are_same) {
    return std::equal(mine.begin(), mine.end(), theirs.begin(), theirs.end(), are_same);
  };
  return same(objects, other.objects,
              [](const auto& a, const auto& b) { return !a.owner_before(b) && !b.owner_before(a); }) &&
         same(tensors, other.tensors, [](const auto& a, const auto& b) { return a.address() == b.address(); }) &&
         same(generators, other.generators,
              [](const auto& a, const auto& b) { return a._unsafe_get_target() == b._unsafe_get_target(); });
}

}  // namespace serried::graph
