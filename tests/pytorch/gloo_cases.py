"""The tests of PyTorch's test_c10d_gloo that need no GPU, in our words and under their names: what gloo gives, serried gives.

Their checks of arguments, which match gloo's texts, are the refusals of collective_cases.py; that several tensors per rank are refused is said below.
"""

import copy
import datetime
import itertools

import torch
import torch.distributed as dist
from cases import RANKS, case, sample
from torch import nn
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel

CPU = torch.device("cpu")
MANY = 1000


def options_of(kind, **values):
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def rooted(kind, root):
    return options_of(kind, rootRank=root, **({"rootTensor": 0} if hasattr(kind(), "rootTensor") else {}))


def results(works):
    """What the futures of many calls that are under way give."""
    futures = [work.get_future() for work in works]
    return [future.wait() for future in futures]


def small(i=0):
    return torch.tensor([i * RANKS + dist.get_rank()])


# ---- ProcessGroupGlooTest.


@case()
def test_empty_tensors(group):
    return group.broadcast([torch.zeros(0)]).get_future().wait()


@case(root=range(RANKS))
def test_broadcast_basics(group, root):
    return results([group.broadcast([small()], rooted(dist.BroadcastOptions, root)), group.broadcast(small(1), root=root)])


@case()
def test_broadcast_stress(group):
    return results([group.broadcast(small(i), root=i % RANKS) for i in range(MANY)])


@case(op=[ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG])
def test_allreduce_basics(group, op):
    x, y = torch.tensor([dist.get_rank() + 1.0]), torch.tensor([dist.get_rank() + 2.0])
    return results([group.allreduce([x], options_of(dist.AllreduceOptions, reduceOp=op)), group.allreduce(y)])


@case()
def test_allreduce_basics_of_large_halves(group):
    # So large that a sum in fp16 of a part of the ranks may not overflow.
    x = (torch.rand(10, 1, generator=torch.Generator().manual_seed(dist.get_rank())) * 2 - 1) * 65504 / RANKS
    return group.allreduce(x.half()).get_future().wait()


@case()
def test_allreduce_stress(group):
    return results([group.allreduce(small(i)) for i in range(MANY)])


@case(op=[ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
def test_allreduce_coalesced_basics(group, op):
    rank = dist.get_rank()
    tensors = [torch.tensor([rank + 1.0]), torch.tensor([(rank + 1.0) ** 2])]
    return group.allreduce_coalesced(tensors, options_of(dist.AllreduceCoalescedOptions, reduceOp=op)).get_future().wait()


@case()
def test_allreduce_coalesced_stress(group):
    return results([group.allreduce_coalesced([small(i), small(i)]) for i in range(MANY)])


@case()
def test_allreduce_coalesced_async(group):
    futures = [dist.all_reduce_coalesced([small(i), small(i + 1)], group=group, async_op=True) for i in range(2)]
    torch.futures.wait_all(futures)
    return [future.wait() for future in futures]


@case(dense_dims=[0, 1], density=[1, 5])
def test_sparse_allreduce_basics(group, dense_dims, density):
    indices = torch.arange(density * (dist.get_rank() + 1)).remainder(4).unsqueeze(0)
    values = sample((indices.shape[1], 3) if dense_dims else (indices.shape[1],))
    x = torch.sparse_coo_tensor(indices, values, (4, 3) if dense_dims else (4,))
    (result,) = group.allreduce([x]).get_future().wait()
    return [result.coalesce().to_dense(), x.coalesce().to_dense()]


@case()
def test_allgather_into_tensor_coalesced(group):
    outputs = [torch.empty(size * RANKS, size) for size in (5, 10, 15)]
    group.allgather_into_tensor_coalesced(outputs, [sample((size, size)) for size in (5, 10, 15)]).wait()
    return outputs


@case()
def test_reduce_scatter(group):
    output = torch.empty(dist.get_rank())
    dist.reduce_scatter(output, [sample((peer,), salt=peer) for peer in range(RANKS)], group=group, async_op=True).wait()
    return output


@case()
def test_reduce_scatter_tensor(group):
    output = torch.empty(20, 20)
    dist.reduce_scatter_tensor(output, sample((20 * RANKS, 20)), group=group, async_op=True).wait()
    return output


@case()
def test_reduce_scatter_tensor_coalesced(group):
    outputs = [torch.empty(size, size) for size in (5, 10, 15)]
    group.reduce_scatter_tensor_coalesced(outputs, [sample((size * RANKS, size)) for size in (5, 10, 15)]).wait()
    return outputs


def scatters(group, i):
    inputs = [torch.tensor([i + dist.get_rank() + peer]) for peer in range(RANKS)]
    for root in range(RANKS):
        lists = [inputs] if root == dist.get_rank() else []
        yield group.scatter([torch.tensor([-1])], lists, rooted(dist.ScatterOptions, root))


def gathers(group, i, made=lambda x: x):
    for root in range(RANKS):
        lists = [[made(torch.tensor([-1])) for _ in range(RANKS)]] if root == dist.get_rank() else []
        yield group.gather(lists, [made(small(i))], rooted(dist.GatherOptions, root))


@case()
def test_scatter_basics(group):
    return results(list(scatters(group, 0)))


@case()
def test_scatter_stress(group):
    return results([work for i in range(MANY) for work in scatters(group, i)])


@case()
def test_set_gloo_pg_timeout(group):
    backend = group._get_backend(CPU)
    before = backend.options._timeout
    backend._set_default_timeout(datetime.timedelta(seconds=23))
    during = backend.options._timeout
    backend._set_default_timeout(before)
    return [str(before), str(during)]


def column(x):
    return x.expand(2, 2).contiguous()[:, 0]


@case()
def test_gather_basics(group):
    return results(list(gathers(group, 0)))


@case()
def test_gather_noncontiguous_input(group):
    return results(list(gathers(group, 0, column)))


@case()
def test_gather_stress(group):
    return results([work for i in range(MANY) for work in gathers(group, i)])


def gathered(group, i, made=lambda x: x):
    return group.allgather([[made(torch.tensor([-1])) for _ in range(RANKS)]], [made(small(i))])


@case()
def test_allgather_basics(group):
    return results([gathered(group, 3)])


@case()
def test_allgather_noncontiguous_input(group):
    return results([gathered(group, 3, column)])


@case()
def test_allgather_inference_mode(group):
    with torch.inference_mode():
        return results([gathered(group, 3)])


@case()
def test_allgather_stress(group):
    return results([gathered(group, i) for i in range(MANY)])


@case()
def test_allgather_coalesced_async(group):
    lists = [[[torch.zeros(1), torch.zeros(2)] for _ in range(RANKS)] for _ in range(2)]
    futures = [dist.all_gather_coalesced(each, [small(i).float(), sample((2,), salt=i)], group=group, async_op=True) for i, each in enumerate(lists)]
    torch.futures.wait_all(futures)
    return lists


@case(root=range(RANKS), op=[ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG])
def test_reduce_basics(group, root, op):
    x = torch.tensor([dist.get_rank() + 1.0])
    group.reduce([x], options_of(dist.ReduceOptions, rootRank=root, reduceOp=op)).wait()
    return x if dist.get_rank() == root else None


@case()
def test_reduce_stress(group):
    works = [group.reduce([small(i)], rooted(dist.ReduceOptions, root)) for i in range(MANY) for root in range(RANKS)]
    return [result for i, result in enumerate(results(works)) if i % RANKS == dist.get_rank()]


@case()
def test_send_recv_all_to_all(group):
    peers = [peer for peer in range(RANKS) if peer != dist.get_rank()]
    received = {peer: torch.tensor([-1]) for peer in peers}
    works = [group.send([small()], peer, 0) for peer in peers] + [group.recv([received[peer]], peer, 0) for peer in peers]
    for work in works:
        work.wait()
    return [list(received.values()), all(work.is_completed() for work in works)]


@case()
def test_barrier_implies_wait(group):
    tensors = [torch.full((100, 100), float(i)) for i in range(16)]
    for x in tensors:
        group.allreduce(x)
    group.barrier().get_future().wait()
    return tensors


# ---- DistributedDataParallelTest, ReducerTest.


class Branches(nn.Module):
    """A part that all ranks use, one for each of two kinds of ranks, and one that nobody does."""

    def __init__(self):
        super().__init__()
        self.first, self.even, self.odd, self.unused = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x, rank=0):
        return (self.even if rank % 2 == 0 else self.odd)(torch.relu(self.first(x)))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(10, 3, sparse=True), nn.Linear(3, 5)

    def forward(self, ids):
        return self.head(self.table(ids))


def made(kind):
    torch.manual_seed(0)
    return kind()


def gradients(net):
    grads = [parameter.grad for parameter in net.parameters()]
    return [grad.coalesce().to_dense() if grad is not None and grad.is_sparse else grad for grad in grads]


@case(as_views=[False, True])
def test_gloo_backend_cpu_module(group, as_views):
    net = DistributedDataParallel(made(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))), process_group=group, gradient_as_bucket_view=as_views)
    for step in range(3):
        net(sample((2, 4), salt=step)).sum().backward()
    return gradients(net)


@case(as_views=[False, True], static=[False, True])
def test_global_local_unused_params_grad(group, as_views, static):
    # Where the graph is static, all ranks use the same part.
    net = DistributedDataParallel(
        made(Branches), process_group=group, find_unused_parameters=True, gradient_as_bucket_view=as_views, static_graph=static
    )
    net(sample((2, 4)), 0 if static else dist.get_rank()).sum().backward()
    return gradients(net)


@case(unused=[False, True])
def test_ignored_output(group, unused):
    net = made(Branches) if unused else made(lambda: nn.Linear(4, 4))
    net = DistributedDataParallel(net, process_group=group, find_unused_parameters=unused)
    for _ in range(4):
        net(sample((2, 4)))
    for _ in range(4):
        net(sample((2, 4))).sum().backward()
    return gradients(net)


def mean_of_all(group, bucket):
    return group.allreduce([bucket.buffer()]).get_future().then(lambda future: future.wait()[0] / RANKS)


@case(as_views=[False, True], hook=[None, mean_of_all])
def test_sparse_gradients(group, as_views, hook):
    net = DistributedDataParallel(made(Words), process_group=group, gradient_as_bucket_view=as_views)
    if hook is not None:
        net.register_comm_hook(group, hook)
    net(sample((4, 2)).long().abs()).sum().backward()
    return gradients(net)


def own_future(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future.then(lambda done: torch.ones_like(done.value()) * 2)


@case()
def test_ddp_comm_hook_future_passing_cpu(group):
    net = DistributedDataParallel(made(lambda: nn.Linear(4, 4)), process_group=group)
    net.register_comm_hook(None, own_future)
    net(sample((2, 4))).sum().backward()
    return gradients(net)


def text_of(function):
    try:
        return function()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


@case()
def test_ddp_invalid_comm_hooks(group):
    net = DistributedDataParallel(made(lambda: nn.Linear(4, 4)), process_group=group)

    def for_an_int(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        return torch.futures.Future()

    def to_an_int(state: object, bucket: dist.GradBucket) -> int:
        return 1

    texts = [text_of(lambda hook=hook: net.register_comm_hook(None, hook)) for hook in (1, for_an_int, to_an_int, own_future, own_future)]
    other = DistributedDataParallel(made(lambda: nn.Linear(4, 4)), process_group=group)
    other.register_comm_hook(None, lambda state, bucket: 1)
    return texts + [text_of(lambda: other(sample((2, 4))).sum().backward())]


def reducer_of(group, net, **more):
    """DDP's Reducer on its own, with a bucket for each dtype."""
    parameters = list(net.parameters())
    buckets = [list(indices) for _, indices in itertools.groupby(range(len(parameters)), key=lambda i: parameters[i].dtype)]
    return dist.Reducer(parameters, buckets, [dist._DEFAULT_FIRST_BUCKET_BYTES] * len(buckets), group, **more)


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.last = nn.Linear(4, 4).double(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, all_of_it=True):
        x = self.narrow(self.wide(x.double()).float())
        return self.last(x) if all_of_it else x


@case()
def test_multi_dtype_single_bucket(group):
    parameters = list(made(TwoDtypes).parameters())
    return text_of(lambda: dist.Reducer(parameters, [list(range(len(parameters)))], [dist._DEFAULT_FIRST_BUCKET_BYTES], group)).split(":")[0]


@case(unused=[False, True], steps=[1, 3])
def test_forward_backward(group, unused, steps):
    net = made(TwoDtypes)
    reducer = reducer_of(group, net, find_unused_parameters=unused)
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        reducer.prepare_for_forward()
        loss = net(sample((3, 4), salt=step), all_of_it=not unused or step > 0).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        optimizer.step()
    return gradients(net) + [copy.deepcopy(list(net.parameters()))]


# ---- CommTest, ProcessGroupWithDispatchedCollectivesTests, LargeCommTest.


@case(root=range(RANKS))
def test_broadcast_coalesced_gloo_cpu(group, root):
    tensors = [chunk for dtype in (torch.float32, torch.float64, torch.float32) for chunk in sample((60,), dtype).chunk(5)]
    dist._broadcast_coalesced(group, tensors, buffer_size=256, src=root)
    return tensors


@case()
def test_bool_tensors(group):
    own = torch.tensor([dist.get_rank() == 0, True, False])
    outputs = [torch.zeros(3, dtype=torch.bool) for _ in range(RANKS)]
    dist.all_gather(outputs, own, group=group)
    dist.broadcast(own, 1, group=group)
    return [outputs, own]


@case(timeout=[None, datetime.timedelta(seconds=20)])
def test_monitored_barrier(group, timeout):
    group.monitored_barrier(timeout or datetime.timedelta(seconds=30), wait_all_ranks=timeout is not None)


# A name would be given again once its group is gone, and with it what the store has of it.
KEPT = []


@case()
def test_new_group_local_sync(group):
    """Groups that only their ranks know of, two of the same ranks."""
    rank = dist.get_rank()
    ranks = [0, RANKS - 1] if rank in (0, RANKS - 1) else [rank]
    parts = [dist.new_group(ranks, backend=dist.get_backend(group), use_local_synchronization=True) for _ in range(2)]
    x = torch.tensor([rank + 1.0])
    for part in parts:
        dist.all_reduce(x, group=part)
    KEPT.extend(parts)
    return [x, dist.get_process_group_ranks(group)]


# ---- What gloo takes for the GPUs of one process, several tensors in a call, serried refuses and says how it is done.


def refused_by_serried():
    pair = [small(), small(1)]
    return {
        "broadcast": lambda g: g.broadcast(pair, rooted(dist.BroadcastOptions, 0)),
        "all_reduce": lambda g: g.allreduce(pair, dist.AllreduceOptions()),
        "all_gather": lambda g: g.allgather([[small() for _ in range(RANKS * 2)] for _ in range(2)], pair),
        "sparse all_reduce": lambda g: g.allreduce([x.to_sparse() for x in pair], dist.AllreduceOptions()),
    }


def wrong_refusals(group):
    """Names of those of which the text does not say that every rank passes one tensor."""
    texts = {name: text_of(lambda call=call: call(group)) for name, call in refused_by_serried().items()}
    return [f"{name}: {text}" for name, text in texts.items() if "got 2 tensors, and every rank passes one" not in str(text)]
