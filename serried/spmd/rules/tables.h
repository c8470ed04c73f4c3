// The rule tables, one per family of ops.
#pragma once

#include "serried/spmd/registry.h"

namespace serried::spmd {

RuleTable pointwise_rules();
RuleTable contraction_rules();
RuleTable linalg_rules();
RuleTable norm_rules();
RuleTable attention_rules();
RuleTable conv_rules();
RuleTable pooling_rules();
RuleTable loss_rules();
RuleTable optim_rules();
RuleTable view_rules();
RuleTable reduction_rules();
RuleTable index_rules();
RuleTable shape_rules();
RuleTable sort_rules();
RuleTable like_rules();
RuleTable fft_rules();

}  // namespace serried::spmd
