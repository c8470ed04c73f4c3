// Compares the calls of all ranks and learns from them how many rows come from where.
#include "serried/parallel/expert_parallel/traffic.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "serried/base/error.h"
#include "serried/comm/collectives/piece_sizes.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/making/placing.h"

namespace serried::detail {
namespace {

using Record = SizeExchange::Record;
using Table = SizeExchange::Table;

struct Column {
  static constexpr size_t num_experts = 0, num_local = 1, width = 2, dtype = 3, slots = 4, wants_gradient = 5;
  static constexpr size_t trains = 6, counts = 7;
};

// Records are of one length, also where the numbers of experts differ: that is for us to tell.
constexpr size_t kShortest = 64;

Record record_of(const ExpertCall& call, const at::Tensor& counts) {
  Record record(Column::counts);
  record[Column::num_experts] = call.num_experts;
  record[Column::num_local] = call.num_local;
  record[Column::width] = call.width;
  record[Column::dtype] = int64_t(call.dtype);
  record[Column::slots] = call.slots.value_or(-1);
  record[Column::wants_gradient] = call.wants_gradient;
  record[Column::trains] = call.trains;
  if (!call.slots) {
    const at::Tensor host = counts.cpu().contiguous();
    record.insert(record.end(), host.const_data_ptr<int64_t>(), host.const_data_ptr<int64_t>() + host.numel());
  }
  record.resize(std::max(kShortest, std::bit_ceil(record.size())));
  return record;
}

std::string name_of(const ExpertCall& call, size_t rank) {
  return c10::str("rank ", call.mesh.rank_list()[rank]);
}

std::string row_text(const Record& record) {
  return c10::str(watch::dtype_name(at::ScalarType(record[Column::dtype])), "[", record[Column::width], "]");
}

void check_pair(const ExpertCall& call, const Table& table, size_t rank) {
  const Record &first = table[0], &other = table[rank];
  const std::string names[] = {name_of(call, 0), name_of(call, rank)};
  if (first[Column::num_experts] != other[Column::num_experts]) {
    raise<c10::ValueError>({call.where,
                            c10::str(names[0], " routes to ", first[Column::num_experts], " experts and ", names[1],
                                     " to ", other[Column::num_experts]),
                            "pass logits of all experts on every rank"});
  }
  if (first[Column::num_local] != other[Column::num_local]) {
    raise<c10::ValueError>({call.where,
                            c10::str(names[0], " has ", first[Column::num_local], " experts and ", names[1], " has ",
                                     other[Column::num_local]),
                            "give every rank of the mesh as many experts"});
  }
  if (first[Column::width] != other[Column::width] || first[Column::dtype] != other[Column::dtype]) {
    raise<c10::ValueError>(
        {call.where,
         c10::str("tokens are ", row_text(first), " on ", names[0], " and ", row_text(other), " on ", names[1]),
         "pass tokens of one dtype and width on every rank"});
  }
  if ((first[Column::slots] < 0) != (other[Column::slots] < 0)) {
    raise<c10::ValueError>({call.where,
                            c10::str(names[first[Column::slots] < 0], " passes a capacity and ",
                                     names[first[Column::slots] >= 0], " none"),
                            "pass the same capacity on every rank, or none on any"});
  }
}

void check_experts(const ExpertCall& call) {
  const int64_t ranks = call.mesh.size();
  if (call.num_local > 0 && call.num_local * ranks == call.num_experts) return;
  raise<c10::ValueError>({call.where,
                          c10::str("tokens are routed to ", call.num_experts, " experts, and ", call.mesh.to_string(),
                                   " holds ", ranks, " x ", call.num_local),
                          "let logits have a column for each expert of each rank: ranks x experts of one rank"});
}

bool any(const Table& table, size_t column) {
  return std::any_of(table.begin(), table.end(), [&](const Record& record) { return record[column] != 0; });
}

bool have_equal_slots(const Table& table) {
  return std::all_of(table.begin(), table.end(),
                     [&](const Record& record) { return record[Column::slots] == table[0][Column::slots]; });
}

// What a rank sends to the experts of rank `to`, in their order.
std::vector<int64_t> rows_for(const ExpertCall& call, const Record& record, int64_t to) {
  if (call.slots) return std::vector<int64_t>(size_t(call.num_local), record[Column::slots]);
  const auto first = record.begin() + int64_t(Column::counts) + to * call.num_local;
  return std::vector<int64_t>(first, first + call.num_local);
}

int64_t sum_of_rows(const std::vector<int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t(0));
}

Traffic traffic_of(const ExpertCall& call, const Table& table) {
  Traffic traffic;
  const int64_t me = call.mesh.get_local_rank();
  for (size_t rank = 0; rank < table.size(); ++rank) {
    traffic.arriving.push_back(rows_for(call, table[rank], me));
    traffic.arriving_sizes.push_back(sum_of_rows(traffic.arriving.back()));
    traffic.sent_sizes.push_back(sum_of_rows(rows_for(call, table[size_t(me)], int64_t(rank))));
  }
  if (table.size() == 1) return traffic;
  traffic.tokens_need_gradient = any(table, Column::wants_gradient);
  traffic.results_need_gradient = traffic.tokens_need_gradient || any(table, Column::trains);
  return traffic;
}

}  // namespace

DeviceMesh checked_expert_mesh(const char* where, const std::optional<DeviceMesh>& mesh) {
  if (!mesh) return DeviceMesh::from_group(require_current_process_group(where));
  check_in_mesh(where, *mesh);
  if (mesh->ndim() == 1) return *mesh;
  raise<c10::ValueError>(
      {where, c10::str(mesh->to_string(), " has ", mesh->ndim(), " axes"),
       "pass the one that experts are cut over, mesh[\"ep\"], or all of them as one, mesh.flatten()"});
}

Traffic agree_on_traffic(const ExpertCall& call, const at::Tensor& counts) {
  const Record mine = record_of(call, counts);
  if (call.mesh.size() == 1) {
    check_experts(call);
    return traffic_of(call, {mine});
  }
  const at::Device device = counts.device();
  const SizeExchange exchange(call.where, device, call.mesh.get_group(), mine, {}, /*now=*/true);
  const Table table = exchange.get();
  for (size_t rank = 1; rank < table.size(); ++rank) check_pair(call, table, rank);
  check_experts(call);
  if (!have_equal_slots(table)) exchange.check_recordable();
  Traffic traffic = traffic_of(call, table);
  traffic.sizes_of_all = hash_of(table);
  return traffic;
}

}  // namespace serried::detail
