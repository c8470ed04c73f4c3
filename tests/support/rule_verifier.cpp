// Runs one call as the ranks of a small mesh would, each on its local tensors, and compares what they have together.
#include "tests/support/rule_verifier.h"

#include <torch/torch.h>

#include <algorithm>
#include <numeric>

#include "serried/spmd/fixups.h"
#include "tests/support/sample_call.h"

namespace serried::testing {
namespace {

using spmd::Bound;
using spmd::Row;
using torch::jit::Stack;
using Tensors = std::vector<at::Tensor>;

c10::IValue cloned(const c10::IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(value.toTensor().clone()) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.clone());
    return list;
  }
  return value;
}

Stack cloned(const Stack& stack) {
  Stack result;
  for (const c10::IValue& value : stack) result.push_back(cloned(value));
  return result;
}

// The results as one list of tensors per output.
std::vector<Tensors> results_of(const Stack& stack) {
  std::vector<Tensors> results;
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      results.push_back({value.toTensor()});
    } else {
      results.push_back(value.isTensorList() ? value.toTensorVector() : Tensors());
    }
  }
  return results;
}

class Verifier {
 public:
  Verifier(const c10::OperatorHandle& op, const Stack& arguments, const spmd::Rule& rule, const VerifyOptions& options)
      : op_(op),
        sample_(op.schema(), arguments),
        call_(sample_.call()),
        bound_(spmd::bind(rule, call_)),
        rows_(spmd::rows(bound_)),
        options_(options) {
    for (const spmd::TensorArg& tensor : call_.tensors()) whole_.push_back(whole(tensor));
    Stack stack = cloned(sample_.arguments);
    op_.callBoxed(stack);
    expected_ = results_of(cloned(stack));
  }

  Verdict run() {
    verdict_.rules = 1;
    TORCH_CHECK(bound_.outputs.size() <= expected_.size(), "the rule has ", bound_.outputs.size(), " outputs, the op ",
                expected_.size());
    for (const Row& row : rows_) check_row(row);
    check_pairs();
    return std::move(verdict_);
  }

 private:
  at::Tensor whole(const spmd::TensorArg& tensor) const {
    const c10::IValue& value = sample_.arguments[size_t(tensor.argument)];
    return tensor.list_index < 0 ? value.toTensor() : value.toListRef()[size_t(tensor.list_index)].toTensor();
  }

  bool must_divide(const Row& row) const {
    return bound_.factors[size_t(row.factor)].must_divide || bound_.rule.has("even");
  }

  // Parts without elements are the dispatcher's business, not the rule's.
  bool can_cut(const Row& row, int64_t ranks) const {
    if (row.factor < 0) return true;
    const int64_t size = bound_.factors[size_t(row.factor)].size;
    if (must_divide(row)) return size % ranks == 0;
    return (ranks - 1) * ((size + ranks - 1) / ranks) < size;
  }

  bool can_split_inputs(const Row& row) const {
    for (size_t i = 0; i < whole_.size(); ++i) {
      if (!can_split(whole_[i], row.inputs[i])) return false;
    }
    return true;
  }

  void check_row(const Row& row) {
    std::vector<int64_t> worlds;
    for (const int64_t ranks : {2, 3}) {
      if (can_cut(row, ranks)) worlds.push_back(ranks);
    }
    for (int64_t ranks = 5; worlds.empty() && ranks <= 7; ranks += 2) {
      if (can_cut(row, ranks)) worlds.push_back(ranks);
    }
    if (worlds.empty() || !can_split_inputs(row)) {
      ++verdict_.unchecked;
      return;
    }
    ++verdict_.rows;
    for (const int64_t ranks : worlds) check({row}, {ranks});
  }

  void check_pairs() {
    if (options_.max_pairs == 0 || bound_.rule.has("pick") || rows_.size() < 2) return;
    const size_t num_pairs = rows_.size() * rows_.size();
    size_t step = std::max<size_t>(1, num_pairs / size_t(options_.max_pairs));
    while (std::gcd(step, rows_.size()) != 1) ++step;  // or only some columns of the square are met
    for (size_t k = rows_.size() + 1; k < num_pairs; k += step) {
      const Row& first = rows_[k / rows_.size()];
      const Row second = after(first, rows_[k % rows_.size()]);
      if (!can_pair(first, second)) continue;
      ++verdict_.pairs;
      check({first, second}, {2, 2});
    }
  }

  bool can_pair(const Row& first, const Row& second) const {
    if (!can_cut(first, 2) || !can_cut(second, 2) || !can_split_inputs(first) || !can_split_inputs(second))
      return false;
    if (first.factor >= 0 && first.factor == second.factor) {
      const int64_t size = bound_.factors[size_t(first.factor)].size;
      if (must_divide(first) ? size % 4 != 0 : size / 2 < 2) return false;
    }
    for (size_t o = 0; o < first.outputs.size(); ++o) {
      if (!mixes(first.outputs[o], second.outputs[o])) return false;
    }
    for (size_t i = 0; i < first.inputs.size(); ++i) {
      if (!mixes(first.inputs[i], second.inputs[i])) return false;
    }
    return true;
  }

  // Only sums and averages may be pending on one tensor together.
  static bool mixes(const Placement& a, const Placement& b) {
    if (!a.is_partial() || !b.is_partial() || a == b) return true;
    const auto adds = [](const Placement& p) { return p.is_partial(ReduceKind::sum) || p.is_partial(ReduceKind::avg); };
    return adds(a) && adds(b);
  }

  // A row on the second axis: what the first one cut is smaller, so a strided cut has fewer pieces.
  Row after(const Row& first, const Row& row) const {
    Row result = row;
    const auto adjust = [&](Placement& placement, const spmd::BoundTensor& tensor) {
      if (!placement.is_strided()) return;
      const spmd::DimFactors& factors = tensor.dims[size_t(placement.dim())];
      const auto own = std::find(factors.begin(), factors.end(), row.factor);
      if (std::find(factors.begin(), own, first.factor) == own) return;
      placement = StridedShard(placement.dim(), placement.split_factor() / 2);
    };
    for (size_t i = 0; i < result.inputs.size(); ++i) adjust(result.inputs[i], bound_.inputs[i]);
    for (size_t o = 0; o < result.outputs.size(); ++o) adjust(result.outputs[o], bound_.outputs[o]);
    return result;
  }

  spmd::Plan plan_of(const std::vector<Row>& rows) const {
    spmd::Plan plan;
    plan.rule = std::string(bound_.rule.text);
    plan.inputs.resize(whole_.size());
    plan.outputs.resize(bound_.outputs.size());
    plan.fixups.assign(bound_.rule.fixups.begin(), bound_.rule.fixups.end());
    for (size_t o = 0; o < plan.outputs.size(); ++o) {
      plan.outputs[o].list = bound_.outputs[o].list;
      plan.outputs[o].sizes.assign(bound_.outputs[o].dims.size(), -1);
    }
    for (const Row& row : rows) {
      for (size_t i = 0; i < whole_.size(); ++i) plan.inputs[i].push_back(row.inputs[i]);
      for (size_t o = 0; o < plan.outputs.size(); ++o) {
        const Placement& placement = row.outputs[o];
        plan.outputs[o].placements.push_back(placement);
        if (!placement.is_shard()) continue;
        plan.outputs[o].sizes[size_t(placement.dim())] = spmd::output_size(bound_, o, size_t(placement.dim()));
      }
    }
    return plan;
  }

  // What each rank, in row-major order, holds of each input.
  std::vector<Tensors> local_inputs(const std::vector<Row>& rows, const Sizes& mesh) const {
    std::vector<Tensors> ranks(1, whole_);
    for (size_t axis = 0; axis < rows.size(); ++axis) {
      std::vector<Tensors> next;
      for (const Tensors& held : ranks) {
        std::vector<Tensors> parts(size_t(mesh[axis]), Tensors(held.size()));
        for (size_t i = 0; i < held.size(); ++i) {
          const Tensors scattered = scatter(held[i], rows[axis].inputs[i], mesh[axis], options_.split);
          for (size_t r = 0; r < parts.size(); ++r) parts[r][i] = scattered[r];
        }
        next.insert(next.end(), parts.begin(), parts.end());
      }
      ranks = std::move(next);
    }
    return ranks;
  }

  Stack local_arguments(const Tensors& inputs) const {
    Stack stack = sample_.arguments;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const spmd::TensorArg& tensor = call_.tensor(i);
      if (tensor.list_index < 0) stack[size_t(tensor.argument)] = with_flags(inputs[i], whole_[i]);
    }
    for (size_t a = 0; a < stack.size(); ++a) {
      if (stack[a].isList()) put_list(int(a), inputs, stack[a]);
    }
    return stack;
  }

  // A number standing for a tensor stays one, so that dtypes promote alike.
  static at::Tensor with_flags(const at::Tensor& local, const at::Tensor& whole) {
    const bool is_number = whole.unsafeGetTensorImpl()->is_wrapped_number();
    if (is_number) local.unsafeGetTensorImpl()->set_wrapped_number(true);
    return local;
  }

  void put_list(int argument, const Tensors& inputs, c10::IValue& value) const {
    c10::impl::GenericList list = value.toList().copy();
    for (size_t i = 0; i < inputs.size(); ++i) {
      const spmd::TensorArg& tensor = call_.tensor(i);
      if (tensor.argument == argument && tensor.list_index >= 0) list.set(size_t(tensor.list_index), inputs[i]);
    }
    value = list;
  }

  std::vector<Tensors> run_on(const spmd::Plan& plan, const Position& at, const Tensors& inputs) const {
    const spmd::LocalCall local{call_, plan, at};
    Stack stack = local_arguments(inputs);
    for (const spmd::FixupPattern& pattern : plan.fixups) {
      const spmd::Fixup* fixup = spmd::find_fixup(pattern.name);
      TORCH_CHECK(fixup != nullptr, "no fix-up is called ", std::string(pattern.name));
      if (fixup->before != nullptr) fixup->before(local, pattern, stack);
    }
    const Stack given = stack;
    op_.callBoxed(stack);
    for (const spmd::FixupPattern& pattern : plan.fixups) {
      const spmd::Fixup* fixup = spmd::find_fixup(pattern.name);
      if (fixup->after != nullptr) fixup->after(local, pattern, given, stack);
    }
    return results_of(stack);
  }

  // Element `element` of output `output`, put together axis by axis from the innermost.
  at::Tensor together(const std::vector<std::vector<Tensors>>& results, const std::vector<Row>& rows, const Sizes& mesh,
                      size_t output, size_t element) const {
    Tensors held;
    for (const std::vector<Tensors>& rank : results) held.push_back(rank.at(output).at(element));
    for (size_t axis = rows.size(); axis-- > 0;) {
      Tensors next;
      for (size_t begin = 0; begin < held.size(); begin += size_t(mesh[axis])) {
        const Tensors parts(held.begin() + long(begin), held.begin() + long(begin) + mesh[axis]);
        next.push_back(gather(parts, rows[axis].outputs[output]));
      }
      held = std::move(next);
    }
    return held[0];
  }

  std::string problem(const std::vector<Row>& rows, const Sizes& mesh) const {
    const spmd::Plan plan = plan_of(rows);
    const std::vector<Tensors> inputs = local_inputs(rows, mesh);
    std::vector<std::vector<Tensors>> results;
    for (size_t r = 0; r < inputs.size(); ++r) {
      const c10::DimVector coordinate = coordinate_of(int64_t(r), mesh);
      results.push_back(run_on(plan, {mesh, coordinate}, inputs[r]));
    }
    for (size_t o = 0; o < bound_.outputs.size(); ++o) {
      for (size_t e = 0; e < expected_[o].size(); ++e) {
        const at::Tensor got = together(results, rows, mesh, o, e);
        if (same_values(got, expected_[o][e])) continue;
        if (got.defined() && expected_[o][e].defined() && got.sizes() != expected_[o][e].sizes()) {
          return c10::str("output ", o, " has shape ", got.sizes(), " instead of ", expected_[o][e].sizes());
        }
        return c10::str("output ", o, " differs");
      }
    }
    return {};
  }

  void check(const std::vector<Row>& rows, const Sizes& mesh) {
    std::string what;
    try {
      what = problem(rows, mesh);
    } catch (const c10::Error& error) {
      what = error.what_without_backtrace();
    } catch (const std::exception& error) {
      what = error.what();
    }
    if (what.empty()) return;
    std::string text = c10::str(op_.operator_name(), "  rule: ", std::string(bound_.rule.text), "  row:");
    for (const Row& row : rows) text += " [" + to_string(row) + "]";
    text += c10::str(" on ", c10::IntArrayRef(mesh), " ranks, shapes");
    for (const at::Tensor& tensor : whole_) text += c10::str(" ", tensor.scalar_type(), tensor.sizes());
    verdict_.wrong.push_back(text + ": " + what.substr(0, what.find('\n')));
  }

  const c10::OperatorHandle& op_;
  SampleCall sample_;
  spmd::Call call_;
  Bound bound_;
  std::vector<Row> rows_;
  VerifyOptions options_;
  Tensors whole_;
  std::vector<Tensors> expected_;
  Verdict verdict_;
};

}  // namespace

void Verdict::add(const Verdict& other) {
  rules += other.rules;
  rows += other.rows;
  pairs += other.pairs;
  unchecked += other.unchecked;
  wrong.insert(wrong.end(), other.wrong.begin(), other.wrong.end());
}

Verdict verify_rule(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, const spmd::Rule& rule,
                    const VerifyOptions& options) {
  return Verifier(op, arguments, rule, options).run();
}

}  // namespace serried::testing
