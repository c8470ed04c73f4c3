// A line with the digest, then LibTorch's archive, which would take most damage for data and asks for memory by sizes
// that it has not checked.
#include "serried/graph/text/archive.h"

#include <c10/util/Exception.h>
#include <openssl/evp.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <array>
#include <istream>
#include <iterator>
#include <ostream>
#include <string_view>

namespace serried::graph {
namespace {

constexpr std::string_view kHead = "serried archive 1 ";

std::string digest_of(const std::vector<char>& data) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest;
  unsigned int length = 0;
  const int made = EVP_Digest(data.data(), data.size(), digest.data(), &length, EVP_sha256(), nullptr);
  TORCH_INTERNAL_ASSERT(made == 1, "libcrypto has no SHA-256");
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (unsigned int i = 0; i < length; ++i) text += {kDigits[digest[i] >> 4], kDigits[digest[i] & 15]};
  return text;
}

}  // namespace

void pack(const Archive& archive, std::ostream& out) {
  const std::vector<char> data = torch::jit::pickle_save(c10::ivalue::Tuple::create(
      archive.text, c10::List<int64_t>(archive.ids), c10::List<at::Tensor>(archive.tensors)));
  out << kHead << digest_of(data) << '\n';
  out.write(data.data(), std::streamsize(data.size()));
}

std::optional<Archive> unpack(std::istream& in) {
  std::string head;
  std::getline(in, head);
  const std::vector<char> data{std::istreambuf_iterator<char>(in), {}};
  if (head != std::string(kHead) + digest_of(data)) return std::nullopt;
  const c10::IValue content = torch::jit::pickle_load(data);
  const auto& parts = content.toTupleRef().elements();
  return Archive{parts.at(0).toStringRef(), parts.at(1).toIntVector(), parts.at(2).toTensorVector()};
}

}  // namespace serried::graph
