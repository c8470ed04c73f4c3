// Ranks tell each other where their UCX is reached, or why they have none.
#include "serried/comm/net/make_wire.h"

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/agree/own_address.h"
#include "serried/comm/net/gloo/wire.h"
#include "serried/comm/net/load_ucx.h"

namespace serried::net {
namespace {

constexpr std::string_view kHas = "ucx ";
constexpr std::string_view kHasNot = "no ";
constexpr std::string_view kHasNotAsAsked = "not as asked ";

std::string first_line(std::string text) {
  text.resize(std::min(text.size(), text.find('\n')));
  return text;
}

struct Offer {
  std::unique_ptr<Wire> wire;
  std::string text;  // for the other ranks
};

Offer offer_ucx(const std::string& address, int rank, const std::string& engine) {
  std::string why = engine == "gloo" ? "gloo was asked for" : load_ucx().why_not;
  if (why.empty()) {
    try {
      auto wire = reinterpret_cast<WireFactory>(load_ucx().function)(address, rank);
      std::string text = std::string(kHas) + wire->address();
      return {std::move(wire), std::move(text)};
    } catch (const c10::ValueError& error) {
      return {nullptr, std::string(kHasNotAsAsked) + error.msg()};
    } catch (const std::exception& error) {
      why = first_line(error.what());
    }
  }
  return {nullptr, std::string(kHasNot) + why};
}

/// Where a rank was asked for what it cannot have, nobody silently takes another engine.
void raise_if_not_as_asked(const std::vector<std::string>& texts) {
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (!texts[rank].starts_with(kHasNotAsAsked)) continue;
    std::string why = texts[rank].substr(kHasNotAsAsked.size());
    why.resize(std::min(why.size(), why.find("\n  at:")));  // the other rank's
    const std::string where = "[new_group] ", fix = "\n  fix: ";
    if (why.starts_with(where)) why.erase(0, where.size());
    const size_t end = std::min(why.find(fix), why.size());
    raise<c10::ValueError>({"new_group", c10::str("rank ", rank, " has no wire: ", why.substr(0, end)),
                            end < why.size() ? why.substr(end + fix.size()) : ""});
  }
}

}  // namespace

std::string why_no_ucx() {
  const Offer offer = offer_ucx("127.0.0.1", 0, "auto");
  if (offer.wire != nullptr) return "";
  const bool is_as_asked = offer.text.starts_with(kHasNot);
  return first_line(offer.text.substr(is_as_asked ? kHasNot.size() : kHasNotAsAsked.size()));
}

std::unique_ptr<Wire> make_wire(const detail::StoreRanks& ranks, const WireOptions& options) {
  if (options.engine != "auto" && options.engine != "gloo") {
    raise<c10::ValueError>(
        {"new_group", c10::str("the engine of a wire is \"", options.engine, "\""), "pass auto or gloo"});
  }
  const std::string address = options.address.empty() ? detail::own_address(ranks) : options.address;
  Offer offer = offer_ucx(address, ranks.rank, options.engine);
  std::vector<std::string> all = detail::exchange(ranks, "new_group", "ends", offer.text);
  raise_if_not_as_asked(all);
  for (int rank = 0; rank < ranks.world_size; ++rank) {
    std::string& text = all[size_t(rank)];
    if (text.starts_with(kHas)) {
      text.erase(0, kHas.size());
      continue;
    }
    log::line(log::Topic::comm, "wire: gloo, since rank ", rank, " has no ucx: ", text.substr(kHasNot.size()));
    offer.wire.reset();
    return make_gloo_wire(ranks, address);
  }
  log::line(log::Topic::comm, "wire: ucx at ", address);
  offer.wire->connect(std::move(all));
  return std::move(offer.wire);
}

}  // namespace serried::net
