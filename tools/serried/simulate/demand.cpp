// Bytes to times, by the numbers of the machine.
#include "tools/serried/simulate/demand.h"

#include <algorithm>

namespace serried::simulation {
namespace {

class StepTimes {
 public:
  StepTimes(const Machine& machine, const std::vector<size_t>& hosts) : machine_(machine), hosts_(hosts) {}

  Demand demand_of(const Step& step) const {
    Demand demand;
    const Traffic traffic(step);
    for (size_t i = 0; i < hosts_.size(); ++i) hold_host(step, traffic, i, demand);
    if (machine_.uplink) hold_uplinks(traffic, demand);
    std::erase_if(demand.holds, [](const Demand::Hold& hold) { return hold.time == 0; });
    if (step.pipeline) {
      go_through(step, demand);
      return demand;
    }
    demand.after =
        sum_of(product_of(hop(), step.net_hops),
               sum_of(product_of(time_of_us(machine_.memory.alpha_us.value), step.memory_hops), adding(step.added)));
    demand.least = demand.after;
    return demand;
  }

 private:
  void hold_host(const Step& step, const Traffic& traffic, size_t i, Demand& demand) const {
    const size_t host = hosts_[i];
    demand.holds.push_back({Part::memory, host, bytes_at(step.copied[i], machine_.memory.beta_ns_per_byte)});
    const int64_t messages = step.messages.empty() ? 0 : step.messages[i];
    const Time posting = product_of(time_of_us(machine_.nic_out.message_us.value), messages);
    demand.holds.push_back(
        {Part::nic_out, host, sum_of(posting, bytes_at(traffic.out_of(i, i + 1), machine_.nic_out.beta_ns_per_byte))});
    demand.holds.push_back({Part::nic_in, host, bytes_at(traffic.into(i, i + 1), machine_.nic_in.beta_ns_per_byte)});
  }

  size_t uplink_of(size_t i) const { return hosts_[i] / size_t(machine_.uplink->hosts); }

  // Hosts of one uplink follow each other.
  void hold_uplinks(const Traffic& traffic, Demand& demand) const {
    const double share = machine_.uplink->oversubscription / double(machine_.uplink->hosts);
    const Fitted out = Fitted::exactly(machine_.nic_out.beta_ns_per_byte.value * share);
    const Fitted in = Fitted::exactly(machine_.nic_in.beta_ns_per_byte.value * share);
    for (size_t begin = 0; begin < hosts_.size();) {
      size_t end = begin + 1;
      while (end < hosts_.size() && uplink_of(end) == uplink_of(begin)) ++end;
      demand.holds.push_back({Part::uplink_out, uplink_of(begin), bytes_at(traffic.out_of(begin, end), out)});
      demand.holds.push_back({Part::uplink_in, uplink_of(begin), bytes_at(traffic.into(begin, end), in)});
      begin = end;
    }
  }

  static Time bytes_at(int64_t bytes, const Fitted& ns_per_byte) {
    return time_of_ns(double(bytes) * ns_per_byte.value);
  }

  Time adding(int64_t bytes) const { return bytes_at(bytes, machine_.memory.gamma_ns_per_byte); }

  Time hop() const {
    const bool climbs = machine_.uplink && !hosts_.empty() && uplink_of(0) != uplink_of(hosts_.size() - 1);
    const double more = climbs ? machine_.uplink->alpha_us.value : 0;
    return time_of_us(machine_.nic_out.alpha_us.value + machine_.nic_in.alpha_us.value + more);
  }

  Time of_chunk(int64_t bytes) const {
    return std::max(bytes_at(bytes, machine_.nic_out.beta_ns_per_byte),
                    bytes_at(bytes, machine_.nic_in.beta_ns_per_byte));
  }

  /// A chunk is on its way to the last host and back for a `round`; so many are at once, and no more.
  void go_through(const Step& step, Demand& demand) const {
    const Pipeline& pipeline = *step.pipeline;
    const int64_t hops = int64_t(hosts_.size()) - 1;
    const Time up = of_chunk(pipeline.up_bytes), down = of_chunk(pipeline.down_bytes);
    const Time add = sum_of(adding(step.added / pipeline.chunks), time_of_us(machine_.memory.alpha_us.value));
    // A part goes on as soon as it is there, though the rest of its chunk is on its way.
    const Time there = product_of(sum_of(up / pipeline.lanes, hop()), hops);
    const Time back = product_of(sum_of(down / pipeline.lanes, hop()), pipeline.hops_back);
    const Time round = sum_of(sum_of(up - up / pipeline.lanes, sum_of(there, back)),
                              sum_of(product_of(add, hops + 1), time_of_us(machine_.memory.alpha_us.value)));
    const bool has_both_ways = hops > 1 && pipeline.hops_back == hops;
    const Time passing = has_both_ways ? sum_of(up, down) : std::max(up, down);
    const Time period = std::max({passing, add, round / pipeline.ahead});
    demand.least = sum_of(round, product_of(period, pipeline.chunks - 1));
    demand.after = round - up;
  }

  const Machine& machine_;
  const std::vector<size_t>& hosts_;
};

}  // namespace

std::vector<Demand> demands_of(const Machine& machine, const Call& call, const std::vector<size_t>& hosts,
                               const HostSizes& sizes) {
  const StepTimes times(machine, hosts);
  std::vector<Demand> demands;
  for (const Step& step : steps_of(call, sizes)) demands.push_back(times.demand_of(step));
  return demands;
}

Time time_alone(const std::vector<Demand>& demands) {
  Time total = 0;
  for (const Demand& demand : demands) {
    Time held = 0;
    for (const Demand::Hold& hold : demand.holds) held = std::max(held, hold.time);
    total = sum_of(total, std::max(demand.least, sum_of(held, demand.after)));
  }
  return total;
}

}  // namespace serried::simulation
