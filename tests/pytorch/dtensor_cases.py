"""DTensor and tensor parallel with what the wheel has for PyTorch's own tests of them: its ops, its converter of their inputs, its models.

Every case compares with the same program on one process as well; what gloo does not pass serried need not either.
"""

import copy
import itertools

import torch
import torch.distributed as dist
from cases import RANKS, Refused, case, sample
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed._tensor.common_dtensor import DTensorConverter, MLPModule, MLPStacked, ModelArgs, Transformer
from torch.utils._pytree import tree_leaves

# Samples of an op, and placements of the inputs of a sample: the first ones.
MOST_SAMPLES, MOST_PLACEMENTS = 4, 8
# What is drawn or never written differs between any two runs.
RANDOM = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "rand_like", "randn", "randn_like", "randint", "randint_like",
          "uniform", "normal", "bernoulli", "multinomial", "exponential", "cauchy", "geometric", "log_normal", "nn.functional.rrelu"}  # fmt: skip


def mesh_of(group):
    return DeviceMesh.from_group(group, "cpu")


def full(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


# ---- Ops: once through PyTorch's list of them.

# Those on sparse matrices have no part that a rank could hold.
OPS = {
    f"{op.name} {op.variant_test_name}".strip(): op for op in op_db if torch.float32 in op.supported_dtypes("cpu") and not op.name.startswith("sparse.")
}


def is_random(name):
    return name.split()[0] in RANDOM or "dropout" in name


def outcome_of_op(op, args, kwargs, name):
    try:
        results = [full(result) for result in tree_leaves(op(*args, **kwargs)) if isinstance(result, torch.Tensor)]
    except Exception as error:  # noqa: BLE001
        return Refused(type(error).__name__)
    return [list(result.shape) for result in results] if is_random(name) else results


@case(name=sorted(OPS))
def op(group, name):
    mesh, op = mesh_of(group), OPS[name]
    torch.manual_seed(0)
    outcomes = []
    for sampled in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), MOST_SAMPLES):
        args = (sampled.input, *sampled.args)
        torch.manual_seed(0)
        for d_args, d_kwargs in itertools.islice(DTensorConverter(mesh, copy.deepcopy(args), sampled.kwargs), MOST_PLACEMENTS):
            outcomes.append(outcome_of_op(op, d_args, d_kwargs, name))
    return outcomes


# ---- Redistribution.


@case(uneven=[False, True])
def redistribute(group, uneven):
    mesh = mesh_of(group)
    torch.manual_seed(0)
    x = torch.randint(-9, 9, (RANKS * 2 + uneven, RANKS * 3 - uneven)).double()
    placements = [Shard(0), Shard(1), Replicate()]
    results = [distribute_tensor(x, mesh, [a]).redistribute(mesh, [b]).full_tensor() for a, b in itertools.product(placements, placements)]
    partial = distribute_tensor(x, mesh, [Shard(0)]).sum(0)
    assert isinstance(partial.placements[0], Partial)
    return results + [partial.full_tensor(), partial.redistribute(mesh, [Shard(0)]).full_tensor()]


@case(op=["sum", "avg", "max", "min", "product"], to=[Replicate(), Shard(0)])
def reduce_partial(group, op, to):
    mesh = mesh_of(group)
    x = DTensor.from_local(sample((RANKS * 2, 3)), mesh, [Partial(op)])
    return x.redistribute(mesh, [to]).full_tensor()


@case(dim=[0, 1])
def redistribute_with_gradients(group, dim):
    mesh = mesh_of(group)
    torch.manual_seed(0)
    x = torch.randn(RANKS + 1, 5).requires_grad_()
    d = distribute_tensor(x.detach(), mesh, [Shard(dim)]).requires_grad_()
    (d.redistribute(mesh, [Replicate()]) ** 3).sum().redistribute(mesh, [Replicate()]).to_local().backward()
    (x**3).sum().backward()
    torch.testing.assert_close(full(d.grad), x.grad)
    return full(d.grad)


# ---- Tensor parallel.


def step_both(whole, parallel, make_input, steps=2):
    """Trains both with the same inputs; what the parallel one comes to, which the whole one has to come to as well."""
    trained = []
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (whole, parallel)]
    for step in range(steps):
        losses = []
        for net, optimizer in zip((whole, parallel), optimizers):
            loss = full_loss(net(make_input(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
        trained.append(losses[1])
    for ours, theirs in zip(parallel.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs.detach(), rtol=1e-4, atol=1e-5)
    return trained + [full(parameter) for parameter in parallel.parameters()]


def full_loss(output):
    output = output.full_tensor() if isinstance(output, DTensor) else output
    return output.square().mean()


def numbers(*shape):
    return lambda step: torch.randn(*shape, generator=torch.Generator().manual_seed(step))


# Hidden features of MLPModule, of which ranks have as many each: what is between its products is no DTensor.
HIDDEN = 16


@case(HIDDEN % RANKS == 0, sequence=[False, True])
def tensor_parallel_mlp(group, sequence):
    torch.manual_seed(0)
    whole = MLPModule("cpu")
    plan = {"net1": ColwiseParallel(input_layouts=Shard(0)), "net2": RowwiseParallel(output_layouts=Shard(0))}
    if not sequence:
        plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    parallel = parallelize_module(copy.deepcopy(whole), mesh_of(group), plan)
    if not sequence:
        return step_both(whole, parallel, numbers(4, 10))
    # The ranks have a part of the batch each.
    x = numbers(RANKS * 2, 10)(0)
    output = parallel(x.chunk(RANKS)[dist.get_rank()])
    torch.testing.assert_close(output, whole(x).chunk(RANKS)[dist.get_rank()])
    return output.detach()


@case(HIDDEN % RANKS == 0)
def tensor_parallel_of_stacked_mlps(group):
    torch.manual_seed(0)
    whole = MLPStacked("cpu", n_layers=3)
    plan = {f"layers.{i}.net1": ColwiseParallel() for i in range(3)} | {f"layers.{i}.net2": RowwiseParallel() for i in range(3)}
    return step_both(whole, parallelize_module(copy.deepcopy(whole), mesh_of(group), plan), numbers(4, 10))


@case(way=["tied", "own head", "own head, cut sequences"])
def transformer(group, way):
    sequence, tied = way.endswith("cut sequences"), way == "tied"
    torch.manual_seed(0)
    shapes = ModelArgs(n_layers=2, vocab_size=RANKS * 4, max_seq_len=RANKS * 4, dim=RANKS * 4, n_heads=RANKS, dropout_p=0.0, weight_tying=tied)
    whole = Transformer(shapes)
    parallel = Transformer.parallelize(copy.deepcopy(whole), mesh_of(group), use_seq_parallel=sequence, local_output_for_attn=True)

    def tokens(step):
        return torch.randint(0, RANKS * 4, (2, RANKS * 2), generator=torch.Generator().manual_seed(step))

    return step_both(whole, parallel, tokens)


@case()
def sequence_parallel_norm(group):
    torch.manual_seed(0)
    whole = torch.nn.LayerNorm(6)
    parallel = parallelize_module(copy.deepcopy(whole), mesh_of(group), SequenceParallel(sequence_dim=0))
    x = torch.randn(RANKS * 2, 6)
    output = full(parallel(distribute_tensor(x, mesh_of(group), [Shard(0)])))
    torch.testing.assert_close(output, whole(x).detach())
    return output


@case()
def loss_of_cut_logits(group):
    mesh = mesh_of(group)
    torch.manual_seed(0)
    x, target = torch.randn(5, RANKS * 3).requires_grad_(), torch.randint(0, RANKS * 3, (5,))
    d = distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = torch.nn.functional.cross_entropy(d, distribute_tensor(target, mesh, [Replicate()]))
        loss.backward()
    expected = torch.nn.functional.cross_entropy(x, target)
    expected.backward()
    torch.testing.assert_close(full(loss), expected.detach())
    torch.testing.assert_close(full(d.grad), x.grad)
    return [full(loss), full(d.grad)]
