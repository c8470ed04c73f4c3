// The kinds of calls that faults are put into, by name: for the ranks that make them and the tests that start those.
#pragma once

namespace serried::testing {

inline constexpr const char* kFaultCalls[] = {
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send_recv",
    "rendezvous",
    "split",
    "mesh",
    "redistribute",
    "ddp_making",
    "ddp_forward",
    "ddp_backward",
    "zero_step",
    "norm",
    "joining",
    "capture",
    "fsdp_gather",
    "fsdp_backward",
    "moe_forward",
    "moe_backward",
    "pipeline_step",
    "attention_gather",
    "attention_heads",
    "attention_ring",
    "checkpoint_save",
    "checkpoint_async",
};

}  // namespace serried::testing
