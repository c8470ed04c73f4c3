// Rules of sharding: any text is parsed or refused, and what is parsed lies within the text.
#include "tests/fuzz/target.h"

#include "serried/spmd/rule.h"

namespace serried::fuzz {
namespace {

bool lies_within(std::string_view part, std::string_view whole) {
  return part.empty() || (part.data() >= whole.data() && part.data() + part.size() <= whole.data() + whole.size());
}

void check_slot(const spmd::SlotPattern& slot, const spmd::Rule& rule) {
  require(slot.term < rule.num_terms, "a slot of a term that the rule does not have");
  for (const spmd::DimPattern& dim : slot.dims) {
    require(lies_within(dim.letters, rule.text) && lies_within(dim.at, rule.text), "letters outside of the text");
  }
}

}  // namespace

void run_rule(std::string_view bytes) {
  spmd::Rule rule;
  const spmd::ParseError error = spmd::parse(bytes, rule);
  require(error.position <= bytes.size(), "an error outside of the text");
  if (error.what != nullptr) return;
  require(!rule.inputs.empty() && !rule.outputs.empty(), "a rule without inputs or outputs");
  for (const spmd::SlotPattern& slot : rule.inputs) check_slot(slot, rule);
  for (const spmd::SlotPattern& slot : rule.outputs) check_slot(slot, rule);
  for (const spmd::LetterSize& size : rule.sizes) require(size.size >= 0, "a size below 0");
  for (const spmd::FixupPattern& fixup : rule.fixups) {
    require(lies_within(fixup.name, rule.text) && lies_within(fixup.letters, rule.text),
            "a fix-up outside of the text");
  }
}

}  // namespace serried::fuzz
