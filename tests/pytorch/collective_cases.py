"""Every collective of torch.distributed, in many dtypes, ops and shapes; and calls that both backends refuse before anything is sent."""

import torch
import torch.distributed as dist
from cases import FLOATS, INTEGERS, RANKS, case, done, sample, strided
from torch.distributed import ReduceOp


@case(dtype=FLOATS + INTEGERS, op=[ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX], shape=[(), (0,), (7,), (50, 301)], wait=[True, False])
def all_reduce(group, dtype, op, shape, wait):
    x = sample(shape, dtype)
    if op == ReduceOp.PRODUCT:
        x = x.clamp(1, 2)
    done(dist.all_reduce(x, op, group=group, async_op=not wait))
    return x


@case(dtype=INTEGERS, op=[ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR])
def all_reduce_of_bits(group, dtype, op):
    x = sample((33,), dtype)
    dist.all_reduce(x, op, group=group)
    return x


@case(dtype=[torch.complex64, torch.complex128])
def all_reduce_of_complex(group, dtype):
    x = torch.complex(sample((9,), torch.float64), sample((9,), torch.float64, 1)).to(dtype)
    dist.all_reduce(x, group=group)
    return x


# Gloo adds up the memory of such a tensor as if there were no strides.
@case(wait=[True, False])
def all_reduce_of_strides(group, wait):
    x = strided((5, 6))
    if dist.get_backend(group) == "gloo":
        x = x.contiguous()
    done(dist.all_reduce(x, group=group, async_op=not wait))
    return x


@case(op=[ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
def all_reduce_coalesced(group, op):
    xs = [sample((size,), salt=size).clamp(1, 2) for size in (1, 5, 0, 40)]
    dist.all_reduce_coalesced(xs, op, group=group)
    return xs


@case(density=[0, 1, 4])
def all_reduce_of_sparse(group, density):
    rank = dist.get_rank()
    indices = torch.arange(density * (rank + 1)).remainder(6).unsqueeze(0)
    x = torch.sparse_coo_tensor(indices, sample((indices.shape[1], 2)), (6, 2))
    dist.all_reduce(x, group=group)
    return x.coalesce().to_dense()


@case(root=range(RANKS), dtype=FLOATS + INTEGERS + [torch.bool], shape=[(1,), (3, 4), (40_000,)])
def broadcast(group, root, dtype, shape):
    x = sample(shape, dtype)
    dist.broadcast(x, root, group=group)
    return x


@case(root=range(RANKS), op=[ReduceOp.SUM, ReduceOp.MAX])
def reduce(group, root, op):
    x = sample((17,))
    dist.reduce(x, root, op, group=group)
    return x if dist.get_rank() == root else None


@case(dtype=FLOATS + INTEGERS + [torch.bool], shape=[(1,), (4, 3), (30_000,)], wait=[True, False])
def all_gather(group, dtype, shape, wait):
    outputs = [torch.zeros(shape, dtype=dtype) for _ in range(RANKS)]
    done(dist.all_gather(outputs, sample(shape, dtype), group=group, async_op=not wait))
    return outputs


@case()
def all_gather_of_strides(group):
    outputs = [torch.zeros(8, 3).t()[:, ::2] for _ in range(RANKS)]
    dist.all_gather(outputs, strided((3, 4)), group=group)
    return outputs


@case(dtype=FLOATS, stacked=[True, False])
def all_gather_into_tensor(group, dtype, stacked):
    output = torch.zeros((RANKS, 5, 2) if stacked else (RANKS * 5, 2), dtype=dtype)
    dist.all_gather_into_tensor(output, sample((5, 2), dtype), group=group)
    return output


@case(root=range(RANKS), shape=[(1,), (3, 4), (30_000,)])
def gather(group, root, shape):
    outputs = [torch.zeros(shape) for _ in range(RANKS)] if dist.get_rank() == root else None
    dist.gather(sample(shape), outputs, root, group=group)
    return outputs


@case(root=range(RANKS), shape=[(1,), (3, 4), (30_000,)])
def scatter(group, root, shape):
    x = torch.zeros(shape)
    dist.scatter(x, [sample(shape, salt=peer) for peer in range(RANKS)] if dist.get_rank() == root else None, root, group=group)
    return x


@case(op=[ReduceOp.SUM, ReduceOp.MAX], wait=[True, False])
def reduce_scatter_tensor(group, op, wait):
    x = torch.zeros(6, 2)
    done(dist.reduce_scatter_tensor(x, sample((RANKS * 6, 2)), op, group=group, async_op=not wait))
    return x


@case(op=[ReduceOp.SUM, ReduceOp.MIN])
def reduce_scatter(group, op):
    x = torch.zeros(6)
    dist.reduce_scatter(x, [sample((6,), salt=peer) for peer in range(RANKS)], op, group=group)
    return x


@case(even=[True, False])
def all_to_all_single(group, even):
    rank = dist.get_rank()
    sizes = [2] * RANKS if even else [rank + 1] * RANKS
    output_sizes = [2] * RANKS if even else [peer + 1 for peer in range(RANKS)]
    output = torch.zeros(sum(output_sizes), 3)
    dist.all_to_all_single(output, sample((sum(sizes), 3)), None if even else output_sizes, None if even else sizes, group=group)
    return output


@case(tag=[0, 7], size=[1, 50_000])
def ring(group, tag, size):
    rank = dist.get_rank()
    x, y = sample((size,)), torch.zeros(size)
    works = [dist.isend(x, (rank + 1) % RANKS, group=group, tag=tag), dist.irecv(y, (rank - 1) % RANKS, group=group, tag=tag)]
    for work in works:
        work.wait()
    return y


@case()
def receive_from_any(group):
    rank = dist.get_rank()
    if rank != 0:
        dist.send(torch.full((3,), float(rank)), 0, group=group)
        return None
    received = [torch.zeros(3) for _ in range(RANKS - 1)]
    sources = sorted(dist.recv(x, group=group) for x in received)
    return [torch.tensor(sources), torch.stack(received).sort(0).values]


@case()
def objects(group):
    rank = dist.get_rank()
    everything = [None] * RANKS
    dist.all_gather_object(everything, {"rank": rank, "text": "x" * (rank * 1000)}, group=group)
    sent = [{"from": rank}, [1, 2, rank]]
    dist.broadcast_object_list(sent, RANKS - 1, group=group)
    return [str(everything), str(sent)]


@case(count=[1, 200])
def futures(group, count):
    works = [dist.all_reduce(torch.full((i + 1,), float(i)), group=group, async_op=True) for i in range(count)]
    return [work.get_future().then(lambda future: future.value()[0] * 2).wait() for work in works]


@case()
def batch_of_peers(group):
    rank = dist.get_rank()
    received = [torch.zeros(4) for _ in range(RANKS)]
    calls = [dist.P2POp(dist.isend, sample((4,), salt=peer), peer, group) for peer in range(RANKS) if peer != rank]
    calls += [dist.P2POp(dist.irecv, received[peer], peer, group) for peer in range(RANKS) if peer != rank]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return received


@case()
def functional(group):
    import torch.distributed._functional_collectives as funcol

    x = sample((RANKS * 2, 3))
    results = [
        funcol.all_reduce(x, "sum", group),
        funcol.all_gather_single(x, 0, group),
        funcol.reduce_scatter_single(x, "sum", 0, group),
        funcol.all_to_all_single(x, None, None, group),
    ]
    return [funcol.wait_tensor(result) for result in results]


# ---- What is refused is refused by both, before anything is sent.


# Not among them is what serried does and gloo refuses: coalesced calls of several dtypes, pieces whose sizes differ by rank.
def refusals():
    t, d, two = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
    sparse, me, next_rank = two.to_sparse(), dist.get_rank(), (dist.get_rank() + 1) % RANKS

    def rooted(kind, root, tensor=0):
        options = kind()
        options.rootRank = root
        if hasattr(options, "rootTensor"):
            options.rootTensor = tensor
        return options

    def reducing(op):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        return options

    def coalesced(tensors):
        return lambda g: g.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())

    return {
        "broadcast from a rank that is not there": lambda g: g.broadcast([t], rooted(dist.BroadcastOptions, RANKS)),
        "broadcast of a tensor that is not there": lambda g: g.broadcast([t], rooted(dist.BroadcastOptions, 0, 1)),
        "broadcast of nothing": lambda g: g.broadcast([], rooted(dist.BroadcastOptions, 0)),
        "broadcast of two dtypes": lambda g: g.broadcast([t, d], rooted(dist.BroadcastOptions, 0)),
        "all_reduce of nothing": lambda g: g.allreduce([], dist.AllreduceOptions()),
        "all_reduce of two sizes": lambda g: g.allreduce([t, two], dist.AllreduceOptions()),
        "reduce to a rank that is not there": lambda g: g.reduce([t], rooted(dist.ReduceOptions, -1)),
        "reduce to a tensor that is not there": lambda g: g.reduce([t], rooted(dist.ReduceOptions, 0, 1)),
        "reduce of two tensors": lambda g: g.reduce([t, t], rooted(dist.ReduceOptions, 0)),
        "all_gather of nothing": lambda g: g.allgather([[t] * RANKS], []),
        "all_gather into too few": lambda g: g.allgather([[t] * (RANKS - 1)], [t]),
        "all_gather into too many": lambda g: g.allgather([[t] * (RANKS + 1)], [t]),
        "all_gather into another dtype": lambda g: g.allgather([[d] * RANKS], [t]),
        "all_gather into another size": lambda g: g.allgather([[two] * RANKS], [t]),
        "gather to a rank that is not there": lambda g: g.gather([[t] * RANKS], [t], rooted(dist.GatherOptions, RANKS)),
        "gather into another size": lambda g: g.gather([[two] * RANKS], [t], rooted(dist.GatherOptions, dist.get_rank())),
        "gather into too few": lambda g: g.gather([[t] * (RANKS - 1)], [t], rooted(dist.GatherOptions, dist.get_rank())),
        "scatter from a rank that is not there": lambda g: g.scatter([t], [[t] * RANKS], rooted(dist.ScatterOptions, -1)),
        "scatter of too few": lambda g: g.scatter([t], [[t] * (RANKS - 1)], rooted(dist.ScatterOptions, dist.get_rank())),
        "scatter of another dtype": lambda g: g.scatter([t], [[d] * RANKS], rooted(dist.ScatterOptions, dist.get_rank())),
        "scatter of another size": lambda g: g.scatter([t], [[two] * RANKS], rooted(dist.ScatterOptions, dist.get_rank())),
        "broadcast of a tensor before the first": lambda g: g.broadcast([t], rooted(dist.BroadcastOptions, 0, -1)),
        "broadcast of two sizes": lambda g: g.broadcast([t, two], rooted(dist.BroadcastOptions, 0)),
        "all_reduce of two dtypes": lambda g: g.allreduce([t, d], dist.AllreduceOptions()),
        "all_reduce of a dense and a sparse one": lambda g: g.allreduce([two, sparse], dist.AllreduceOptions()),
        "sparse product": lambda g: g.allreduce([sparse], reducing(ReduceOp.PRODUCT)),
        "sparse minimum": lambda g: g.allreduce([sparse], reducing(ReduceOp.MIN)),
        "sparse maximum": lambda g: g.allreduce([sparse], reducing(ReduceOp.MAX)),
        "all_reduce_coalesced of nothing": coalesced([]),
        "all_reduce_coalesced of a dense and a sparse one": coalesced([two, sparse]),
        "all_reduce_coalesced of sparse ones": coalesced([sparse, sparse.clone()]),
        "all_gather of two lists": lambda g: g.allgather([[t] * RANKS] * 2, [t]),
        "all_gather into some of another dtype": lambda g: g.allgather([[t] * (RANKS - 1) + [d]], [t]),
        "all_gather_coalesced into another size": lambda g: dist.all_gather_coalesced([[two]] * RANKS, [t], g),
        "all_gather_coalesced into another dtype": lambda g: dist.all_gather_coalesced([[d]] * RANKS, [t], g),
        "all_gather_coalesced into too many": lambda g: dist.all_gather_coalesced([[t]] * (RANKS + 1), [t], g),
        "gather of nothing": lambda g: g.gather([], [], rooted(dist.GatherOptions, 0)),
        "gather of two": lambda g: g.gather([], [t, t], rooted(dist.GatherOptions, 0)),
        "gather into no list": lambda g: g.gather([], [t], rooted(dist.GatherOptions, me)),
        "gather into two lists": lambda g: g.gather([[t] * RANKS] * 2, [t], rooted(dist.GatherOptions, me)),
        "gather into too many": lambda g: g.gather([[t] * (RANKS + 1)], [t], rooted(dist.GatherOptions, me)),
        "gather into another dtype": lambda g: g.gather([[d] * RANKS], [t], rooted(dist.GatherOptions, me)),
        "gather into a list that only the root has": lambda g: g.gather([[t] * RANKS], [t], rooted(dist.GatherOptions, next_rank)),
        "scatter into nothing": lambda g: g.scatter([], [], rooted(dist.ScatterOptions, 0)),
        "scatter into two": lambda g: g.scatter([t, t], [], rooted(dist.ScatterOptions, 0)),
        "scatter of no list": lambda g: g.scatter([t], [], rooted(dist.ScatterOptions, me)),
        "scatter of two lists": lambda g: g.scatter([t], [[t] * RANKS] * 2, rooted(dist.ScatterOptions, me)),
        "scatter of too many": lambda g: g.scatter([t], [[t] * (RANKS + 1)], rooted(dist.ScatterOptions, me)),
        "scatter of a list that only the root has": lambda g: g.scatter([t], [[t] * RANKS], rooted(dist.ScatterOptions, next_rank)),
        "send of two tensors": lambda g: g.send([t, t], (dist.get_rank() + 1) % RANKS, 0),
    }
