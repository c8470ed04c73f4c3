// The rule tables of elementwise ops, products, linear algebra, norms, attention, windows, losses and optimizers.
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

}  // namespace serried::spmd
