// What has to fit before anything runs, on all ranks alike.
#include "serried/parallel/pipeline/pipeline.h"

#include "serried/base/error.h"
#include "serried/comm/collectives/objects.h"
#include "serried/parallel/pipeline/group_use.h"
#include "serried/parallel/pipeline/runner.h"

namespace serried {
namespace {

[[noreturn]] void refuse_pipeline(const std::string& what, const std::string& fix) {
  raise<c10::ValueError>({"Pipeline", what, fix});
}

std::string given_text(size_t num_modules) {
  return std::to_string(num_modules) + (num_modules == 1 ? " module was given" : " modules were given");
}

PipelineTable table_of(size_t num_stages, const PipelineOptions& options) {
  if (options.table) return *options.table;
  if (options.microbatches < 1) {
    refuse_pipeline("microbatches is " + std::to_string(options.microbatches), "pass 1 or more");
  }
  const std::optional<int64_t> fixed = stages_per_rank_of(options.schedule);
  if (fixed && *fixed != int64_t(num_stages)) {
    refuse_pipeline(c10::str(to_string(options.schedule), " has ", *fixed, *fixed == 1 ? " stage" : " stages",
                             " per rank, and ", given_text(num_stages)),
                    *fixed == 1 ? "pass one module, or a schedule with several stages per rank: Interleaved, LoopedBFS"
                                : "pass a vector of two AnyModules: of p ranks, rank r has stages r and 2p - 1 - r");
  }
  return pipeline_table(options.schedule, {.ranks = options.group->getSize(),
                                           .stages_per_rank = int64_t(num_stages),
                                           .microbatches = options.microbatches});
}

void check_table(const PipelineTable& table, const PipelineOptions& options) {
  const int64_t size = options.group->getSize();
  if (table.ranks() != size) {
    refuse_pipeline(c10::str("the table has ", table.ranks(), " rows, and the group ", size, " ranks"),
                    "give every rank of the group a row");
  }
  if (options.microbatches != 0 && options.microbatches != table.microbatches()) {
    refuse_pipeline(
        c10::str("the table has ", table.microbatches(), " micro-batches, and microbatches is ", options.microbatches),
        c10::str("pass ", table.microbatches(), ", or none"));
  }
}

void check_stages(const std::vector<PipelineStage>& stages, const PipelineTable& table, int rank) {
  const std::vector<int64_t> indices = table.stages_of(rank);
  if (indices.size() != stages.size()) {
    refuse_pipeline(c10::str("rank ", rank, " has ", indices.size(), indices.size() == 1 ? " stage" : " stages",
                             " in the table, and ", given_text(stages.size())),
                    "pass one module for each stage of the rank, in ascending order");
  }
  for (size_t i = 0; i < stages.size(); ++i) {
    if (!stages[i].module()->parameters().empty()) continue;
    refuse_pipeline(c10::str("stage ", indices[i], " (", stages[i].module()->name(), ") has no parameters"),
                    "put it into the stage before or after it");
  }
}

std::string tied_text(const std::vector<PipelineTie>& ties) {
  std::string text = ties.empty() ? "nothing tied" : "tied:";
  for (const auto& [first, second] : ties) {
    text += c10::str(" {", first.stage, " \"", first.name, "\", ", second.stage, " \"", second.name, "\"}");
  }
  return text;
}

// What all ranks have to agree on.
std::string agreed_text(const PipelineTable& table, const PipelineOptions& options) {
  std::string text = c10::str(table.stages(), " stages, ", table.microbatches(), " micro-batches, ",
                              options.table ? "a table of its own" : to_string(options.schedule), ", gradients of the ",
                              options.scale_gradients ? "mean" : "sum", ", ", tied_text(options.tied),
                              options.trace ? ", .trace" : "");
  return text + "\n" + table.to_csv();
}

struct Prepared {
  std::optional<PipelineTable> table;
  std::string agreed;
  std::string error;
  std::exception_ptr raised;
};

Prepared prepare(const std::vector<PipelineStage>& stages, const PipelineOptions& options) {
  Prepared prepared;
  try {
    if (const std::string failed = detail::failed_step_on(options.group); !failed.empty()) {
      refuse_pipeline("a step on this group has failed " + failed + ": it may hold messages of that step",
                      "make a new group for the new Pipeline, on every rank");
    }
    prepared.table = table_of(stages.size(), options);
    prepared.agreed = agreed_text(*prepared.table, options);
    check_table(*prepared.table, options);
    check_stages(stages, *prepared.table, options.group->getRank());
    simulate(*prepared.table);  // ValueError with the cycle
  } catch (const c10::Error& error) {
    prepared.error = error.what_without_backtrace();
    prepared.raised = std::current_exception();
  }
  return prepared;
}

// A rank that goes on alone would wait for the others: all of them raise what one finds.
void check_all_ranks(const Prepared& own, const Group& group) {
  const std::vector<std::string> errors = all_gather_object(own.error, group);
  const std::vector<std::string> texts = all_gather_object(own.agreed, group);
  if (own.raised) std::rethrow_exception(own.raised);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank].empty()) continue;
    refuse_pipeline("rank " + std::to_string(rank) + " of the pipeline cannot begin: " + errors[rank],
                    "give that rank what fits");
  }
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    if (texts[rank] == texts[0]) continue;
    const auto head = [](const std::string& text) { return text.substr(0, text.find('\n')); };
    refuse_pipeline(
        c10::str("ranks run different pipelines: rank 0 ", head(texts[0]), "; rank ", rank, " ", head(texts[rank])),
        "pass the same schedule, table, micro-batches, ties, scale_gradients and trace on every rank");
  }
}

}  // namespace

Pipeline::Pipeline(std::vector<PipelineStage> stages, PipelineOptions options) {
  if (!options.group) options.group = require_current_process_group("Pipeline");
  Prepared prepared = prepare(stages, options);
  check_all_ranks(prepared, options.group);
  options.table = std::move(prepared.table);
  runner_ = std::make_unique<detail::Runner>(std::move(stages), std::move(options));
}

Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;
Pipeline& Pipeline::operator=(Pipeline&&) noexcept = default;

std::vector<at::Tensor> Pipeline::step(const at::Tensor& input, const at::Tensor& target) {
  return runner_->step(input, target);
}

std::vector<at::Tensor> Pipeline::eval(const at::Tensor& input) {
  return runner_->eval(input);
}

const std::vector<at::Tensor>& Pipeline::outputs() const {
  if (!runner_->options().keep_outputs) {
    refuse_pipeline("outputs of steps are not kept", "pass .keep_outputs = true, or call eval()");
  }
  return runner_->outputs();
}

PipelineTrace Pipeline::trace() const {
  return runner_->trace();
}

const PipelineTable& Pipeline::table() const {
  return runner_->table();
}

std::vector<at::Tensor> Pipeline::parameters() const {
  return runner_->parameters();
}

int64_t Pipeline::peak_in_flight() const {
  return runner_->peak_in_flight();
}

}  // namespace serried
