"""FSDP2, DDP and distributed checkpoints with what the wheel has for PyTorch's own tests of them: its models, its check of parity, its mixin for state dicts.

The reference is the whole model with the gradients of all ranks, as in those tests.
"""

import copy
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cases import RANKS, case
from dtensor_cases import HIDDEN, full, mesh_of
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_fsdp import MLP, DoubleLinear, MLPStack, check_sharded_parity
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._tensor.common_dtensor import MLPModule, ModelArgs, Transformer
from torch.testing._internal.distributed.common_state_dict import VerifyStateDictMixin


class Check(VerifyStateDictMixin, TestCase):
    def runTest(self):
        pass


def own_input(step, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step * 100 + dist.get_rank()))


def all_reduce_gradients(net, group):
    for parameter in net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad.div_(RANKS)


def train_both(whole, sharded, group, inputs, steps=3):
    """Steps of both on this rank's inputs; the sharded one has the parameters and gradients of the whole one each time."""
    optimizers = [torch.optim.Adam(net.parameters(), lr=1e-2) for net in (whole, sharded)]
    trained = []
    for step in range(steps):
        losses = []
        for net, optimizer in zip((whole, sharded), optimizers):
            optimizer.zero_grad()
            loss = sum(output.square().sum() for output in tuple_of(net(inputs(step))))
            loss.backward()
            if net is whole:
                all_reduce_gradients(whole, group)
            losses.append(loss.detach())
        check_sharded_parity(Check(), whole, sharded)
        for optimizer in optimizers:
            optimizer.step()
        check_sharded_parity(Check(), whole, sharded)
        torch.testing.assert_close(losses[0], losses[1])
        trained.append(losses[1])
    return trained + [full(parameter) for parameter in sharded.parameters()]


def tuple_of(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


def shard_all(net, blocks, **options):
    for block in blocks:
        fully_shard(block, **options)
    return fully_shard(net, **options)


def seeded(make):
    torch.manual_seed(0)
    return make()


@case(reshard=[True, False], blocks=[False, True])
def sharded_mlps(group, reshard, blocks):
    # Of a size that no number of ranks divides.
    whole = seeded(lambda: torch.nn.Sequential(MLP(5), MLP(5, bias=False), MLP(5, dim_multiplier=3)))
    sharded = copy.deepcopy(whole)
    shard_all(sharded, sharded if blocks else [], mesh=mesh_of(group), reshard_after_forward=reshard)
    return train_both(whole, sharded, group, lambda step: own_input(step, 3, 5))


@case(second=[False, True])
def outputs_and_parts_without_use(group, second):
    whole = seeded(lambda: DoubleLinear(6, use_second_linear=second))
    sharded = copy.deepcopy(whole)
    shard_all(sharded, [sharded.lin1, sharded.lin2], mesh=mesh_of(group))
    return train_both(whole, sharded, group, lambda step: own_input(step, 2, 6))


@case(tied=[False, True], checkpointed=[False, True])
def sharded_transformer(group, tied, checkpointed):
    shapes = ModelArgs(n_layers=2, vocab_size=7, max_seq_len=5, dim=8, n_heads=2, dropout_p=0.0, weight_tying=tied, checkpoint_activations=checkpointed)
    whole = seeded(lambda: Transformer(shapes))
    sharded = copy.deepcopy(whole)
    shard_all(sharded, sharded.layers, mesh=mesh_of(group))
    return train_both(whole, sharded, group, lambda step: own_input(step, 2, 5).mul(9).long().remainder(7))


@case(kept=[False, True])
def gradients_of_several_batches(group, kept):
    whole = seeded(lambda: torch.nn.Sequential(MLP(6), MLP(6)))
    sharded = copy.deepcopy(whole)
    shard_all(sharded, sharded, mesh=mesh_of(group), reshard_after_forward=not kept)
    for batch in range(3):
        is_last = batch == 2
        sharded.set_requires_gradient_sync(is_last)
        sharded.set_is_last_backward(is_last)
        if kept:
            sharded.set_reshard_after_backward(is_last)
        for net in (whole, sharded):
            net(own_input(batch, 2, 6)).sum().backward()
    all_reduce_gradients(whole, group)
    check_sharded_parity(Check(), whole, sharded)
    return [full(parameter.grad) for parameter in sharded.parameters()]


@case(norm=[1, 2, float("inf")])
def clipped_gradients(group, norm):
    # So long that every rank has a part: the greatest of nothing is an error of PyTorch's.
    whole = seeded(lambda: torch.nn.Sequential(MLP(8), MLP(8)))
    sharded = copy.deepcopy(whole)
    shard_all(sharded, sharded, mesh=mesh_of(group))
    norms = []
    for net in (whole, sharded):
        (net(own_input(0, 2, 8)) * 9).square().sum().backward()
        if net is whole:
            all_reduce_gradients(whole, group)
        norms.append(full(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5, norm_type=norm)))
    torch.testing.assert_close(norms[0], norms[1])
    check_sharded_parity(Check(), whole, sharded)
    return norms


@case(reduced=[None, torch.float32, torch.bfloat16])
def mixed_precision(group, reduced):
    net = seeded(lambda: torch.nn.Sequential(MLP(6), MLP(6)))
    whole = copy.deepcopy(net).bfloat16()
    shard_all(net, net, mesh=mesh_of(group), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced))
    outputs = [each(own_input(0, 2, 6).bfloat16()) for each in (whole, net)]
    for output in outputs:
        output.sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        expected = theirs.grad.float()
        dist.all_reduce(expected, group=group)
        # Where ranks add in bf16, each may round after each.
        rtol, atol = (1e-5, 1e-6) if reduced == torch.float32 else (2e-2, 2e-2 * expected.abs().max().item() / RANKS)
        torch.testing.assert_close(full(ours.grad), expected / RANKS, rtol=rtol, atol=atol)
    return outputs[1].detach()


@case(policy=[OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)])
def offloaded(group, policy):
    whole = seeded(lambda: torch.nn.Sequential(MLP(6), MLP(6)))
    sharded = copy.deepcopy(whole)
    shard_all(sharded, sharded, mesh=mesh_of(group), offload_policy=policy)
    return train_both(whole, sharded, group, lambda step: own_input(step, 2, 6))


@case()
def prefetched_and_unsharded_by_hand(group):
    whole = seeded(lambda: torch.nn.Sequential(*[MLP(6) for _ in range(4)]))
    sharded = copy.deepcopy(whole)
    shard_all(sharded, sharded, mesh=mesh_of(group))
    for block, after in zip(sharded, sharded[1:]):
        block.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([block])
    sharded.set_unshard_in_backward(True)
    sharded[0].unshard(async_op=True).wait()
    sharded[0].reshard()
    return train_both(whole, sharded, group, lambda step: own_input(step, 2, 6))


def grid(group, shape, names):
    """A mesh of two dims whose groups are of the backend of `group`."""
    backend = dist.get_backend(group)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={name: backend for name in names})
    assert all(dist.get_backend(mesh.get_group(name)) == backend for name in names)
    return mesh


@case(RANKS == 4, reshard=[True, False])
def replicas_of_shards(group, reshard):
    whole = seeded(lambda: torch.nn.Sequential(MLP(6), MLP(6)))
    sharded = copy.deepcopy(whole)
    mesh = grid(group, (2, 2), ("replicas", "shards"))
    shard_all(sharded, sharded, mesh=mesh, reshard_after_forward=reshard)
    return train_both(whole, sharded, group, lambda step: own_input(step, 2, 6))


@case(RANKS == 4, sequence=[False, True], checkpointed=[False, True])
def sharded_and_tensor_parallel(group, sequence, checkpointed):
    whole = seeded(lambda: MLPStack(8, with_seq_parallel=sequence))
    mesh = grid(group, (2, 2), ("dp", "tp"))
    net = copy.deepcopy(whole).parallelize(mesh["tp"], mesh["dp"], checkpointed, reshard_after_forward=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (whole, net)]
    losses = []
    for step in range(3):
        # The same on ranks that share a batch.
        x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(step * 10 + mesh["dp"].get_local_rank()))
        for each, optimizer in zip((whole, net), optimizers):
            optimizer.zero_grad()
            loss = each(x).sum()
            loss.backward()
            losses.append(full(loss))
        all_reduce_gradients(whole, group)
        for optimizer in optimizers:
            optimizer.step()
    for ours, theirs in zip(net.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(ours), theirs.detach(), rtol=1e-4, atol=1e-5)
    return losses


TENSOR_PARALLEL = ["tp"] if HIDDEN % RANKS == 0 else []


@case(way=["fsdp", "ddp", *TENSOR_PARALLEL])
def state_dicts(group, way):
    """What PyTorch's mixin says of the state dicts of a model and of its optimizer; and both through a distributed checkpoint."""
    whole = seeded(lambda: torch.nn.Sequential(*[MLPModule("cpu") for _ in range(2)]))
    made = copy.deepcopy(whole)
    net = spread(made, way, group)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (whole, net)]
    for each, optimizer in zip((whole, net), optimizers):
        each(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model_states, optimizer_states = get_state_dict(net, optimizers=optimizers[1])
    check = Check()
    check._verify_msd(get_model_state_dict(whole), model_states)
    check._verify_osd(whole, optimizers[0], optimizers[0].state_dict(), optimizer_states)
    return saved_and_loaded(net, optimizers[1], model_states, optimizer_states, group)


def spread(net, way, group):
    if way == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net, process_group=group)
    if way == "tp":
        for block in net:
            parallelize_module(block, mesh_of(group), {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
        return net
    return shard_all(net, net, mesh=mesh_of(group))


def saved_and_loaded(net, optimizer, model_states, optimizer_states, group):
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders, 0, group=group)
    states = {"model": model_states, "optimizer": optimizer_states}
    checkpoint.save(states, checkpoint_id=folders[0], process_group=group)
    before = [full(parameter) for parameter in net.parameters()]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    states = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    checkpoint.load(states, checkpoint_id=folders[0], process_group=group)
    set_state_dict(net, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"], options=StateDictOptions())
    after = [full(parameter) for parameter in net.parameters()]
    torch.testing.assert_close(after, before)
    dist.barrier(group)
    if dist.get_rank() == 0:
        shutil.rmtree(folders[0])
    return after


# ---- DDP, FSDP2 and tensor parallel as they are used.


def trained(net, optimizer, batches):
    losses = []
    for x in batches:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@case(way=["ddp", "ddp static", "ddp unused", "fsdp", *TENSOR_PARALLEL])
def training(group, way):
    net = seeded(lambda: torch.nn.Sequential(*[MLPModule("cpu") for _ in range(3)]))
    if way in ("ddp static", "ddp unused"):
        more = {"static_graph": True} if way == "ddp static" else {"find_unused_parameters": True}
        net = torch.nn.parallel.DistributedDataParallel(net, process_group=group, **more)
    else:
        net = spread(net, way, group)
    batches = torch.Generator().manual_seed(0 if way == "tp" else dist.get_rank())
    losses = trained(net, torch.optim.SGD(net.parameters(), lr=0.1), [torch.randn(4, 10, generator=batches) for _ in range(3)])
    return losses + [full(parameter) for parameter in net.parameters()]
