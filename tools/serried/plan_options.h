// Options of the demo GPT, the same for what counts it and what simulates it.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/serried/plan_gpt.h"

namespace serried::tools {

inline void add_model_options(CLI::App& app, PlanWords& words) {
  app.add_option("--dp", words.dp, "Data parallel copies; default: what --ranks leaves");
  app.add_option("--fsdp", words.fsdp, "Ranks that fully_shard cuts a copy over; with --dp, which then replicates it");
  app.add_option("--tp,--tensor-parallel", words.tp, "Ranks that every block is cut over")->capture_default_str();
  app.add_option("--layers", words.layers, "Blocks of the model")->capture_default_str();
  app.add_option("--width", words.width, "Of the model")->capture_default_str();
  app.add_option("--heads", words.heads, "Of attention")->capture_default_str();
  app.add_option("--context", words.context, "Letters of a sequence")->capture_default_str();
  app.add_option("--vocabulary", words.vocabulary, "Letters that there are")->capture_default_str();
  app.add_option("--batch", words.batch, "Sequences per data-parallel rank")->capture_default_str();
}

}  // namespace serried::tools
