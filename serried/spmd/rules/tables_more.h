// The rule tables of views, reductions, indexing, shapes, sorting, factories and transforms.
#pragma once

#include "serried/spmd/registry.h"

namespace serried::spmd {

RuleTable view_rules();
RuleTable reduction_rules();
RuleTable index_rules();
RuleTable shape_rules();
RuleTable sort_rules();
RuleTable like_rules();
RuleTable fft_rules();

}  // namespace serried::spmd
