"""Names of modules and parameters, tensors in nested values, callables that leave no trace."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from smdist.workers.torch_adapter.callbacks import Callback
from smdist.workers.torch_adapter.module_names import ModuleNames, entrance, inner, parameters_of
from smdist.workers.torch_adapter.nested_tensors import MAX_ENTRIES, tensors_in


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(3, 3)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.act(self.fc1(x))
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.head = nn.Linear(3, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(1))


PARAMETERS = [
    "Net_scale",
    "Net_layer1.0.fc1.weight",
    "Net_layer1.0.fc1.bias",
    "Net_layer1.1.fc1.weight",
    "Net_layer1.1.fc1.bias",
    "Net_head.weight",
]
MODULES = [
    "Net",
    "layer1",
    "layer1.0",
    "layer1.0.fc1",
    "layer1.0.act",
    "layer1.1",
    "layer1.1.fc1",
    "layer1.1.act",
    "head",
]


def compiled(module: nn.Module) -> nn.Module:
    found: Any = torch.compile(module, backend="eager")
    assert isinstance(found, nn.Module)
    return found


def names_of(module: nn.Module) -> tuple[list[str], list[str]]:
    name, named = ModuleNames().add_root(module)
    return list(named), [entry.name for entry in parameters_of(entrance(module), name)]


def test_roots_go_by_their_class_and_submodules_by_their_path() -> None:
    assert names_of(Net()) == (MODULES, PARAMETERS)


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        lambda m: compiled(m),
        lambda m: nn.DataParallel(compiled(m)),
        lambda m: compiled(nn.DataParallel(m)),
    ],
)
def test_wrappers_leave_no_trace(wrap: Any) -> None:
    net = Net()
    wrapped = wrap(net)
    assert names_of(wrapped) == (MODULES, PARAMETERS)
    assert inner(wrapped) is net


def test_wrappers_inside_leave_no_trace_either() -> None:
    net = Net()
    net.layer1[0] = compiled(net.layer1[0])
    setattr(net, "head", nn.DataParallel(net.head))  # noqa: B010 (another type)
    names = ModuleNames()
    _, named = names.add_root(net)
    assert list(named) == MODULES
    assert [entry.name for entry in parameters_of(net, "Net")] == PARAMETERS
    # What others call is what is watched, and both have the name.
    assert named["layer1.0"] is net.layer1[0]
    assert names.of(inner(net.layer1[0])) == "layer1.0"


def test_what_is_shared_has_one_name_the_first() -> None:
    net = Net()
    block: Any = net.layer1[0]
    net.head.weight = block.fc1.weight
    net.layer1[1] = net.layer1[0]
    modules, parameters = names_of(net)
    assert parameters == PARAMETERS[:3]
    assert modules == [*MODULES[:5], "head"]


def test_names_are_unique_over_roots() -> None:
    names = ModuleNames()
    first, second, third = Net(), Net(), nn.Linear(2, 2)
    assert names.add_root(first)[0] == "Net"
    name, named = names.add_root(second)
    assert name == "Net_1"
    assert list(named) == ["Net_1", *(f"Net_1.{path}" for path in MODULES[1:])]
    assert names.add_root(third)[0] == "Linear"
    assert names.of(first.head) == "head"
    assert names.of(second.head) == "Net_1.head"
    assert names.of(nn.ReLU()) is None


def test_a_further_root_without_clashes_keeps_its_paths() -> None:
    names = ModuleNames()
    names.add_root(Net())
    assert list(names.add_root(Block())[1]) == ["Block", "fc1", "act"]


def test_losses_go_by_their_class() -> None:
    names = ModuleNames()
    assert names.add_loss(nn.CrossEntropyLoss()) == "CrossEntropyLoss"
    assert names.add_loss(nn.CrossEntropyLoss()) == "CrossEntropyLoss_1"


def test_a_loss_that_is_part_of_a_root_has_one_name() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.MSELoss()

    for loss_first in (True, False):
        names, root = ModuleNames(), WithLoss()
        if loss_first:
            names.add_loss(root.criterion)
            assert list(names.add_root(root)[1]) == ["WithLoss"]
        else:
            names.add_root(root)
            names.add_loss(root.criterion)
        assert names.of(root.criterion) == "MSELoss"


# -- nested values ---------------------------------------------------------------------------------


@dataclass
class Answer:
    loss: torch.Tensor | None
    rest: list[torch.Tensor]


class ModelOutput(OrderedDict[str, Any]):
    """A mapping with attributes, as large libraries return it."""


Pair = namedtuple("Pair", "a b")  # noqa: PYI024


def test_tensors_come_in_order_out_of_anything_nested() -> None:
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    cases: list[tuple[object, list[torch.Tensor]]] = [
        (a, [a]),
        ((a, [b, (c,)], d), [a, b, c, d]),
        ({"x": a, "y": {"z": b}}, [a, b]),
        (Answer(loss=a, rest=[b, c]), [a, b, c]),
        (Answer(loss=None, rest=[b]), [b]),
        (ModelOutput(loss=a, logits=b), [a, b]),
        (Pair(a, b), [a, b]),
        (((a, b), {"mask": c}), [a, b, c]),
        ((None, 1, "text", 2.5, object(), {b}), []),
        (Answer, []),
    ]
    for value, expected in cases:
        found = tensors_in(value).tensors
        assert len(found) == len(expected)
        assert all(x is y for x, y in zip(found, expected, strict=True))


def test_a_value_that_contains_itself_is_looked_at_once() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert len(tensors_in(loop).tensors) == 1


@dataclass
class Node:
    value: torch.Tensor
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)


def test_a_tree_whose_nodes_know_their_parents_has_each_tensor_once() -> None:
    root = Node(torch.zeros(1))
    level = [root]
    for _ in range(4):
        for node in level:
            node.children = [Node(torch.zeros(1), node) for _ in range(3)]
        level = [child for node in level for child in node.children]
    found = tensors_in(root)
    assert len(found.tensors) == len({id(t) for t in found.tensors}) == 1 + 3 + 9 + 27 + 81
    assert not found.truncated


def test_one_thing_in_many_places_is_not_looked_at_in_each() -> None:
    shared: Any = [torch.zeros(1)]
    for _ in range(31):
        shared = [shared, shared]
    assert len(tensors_in(shared).tensors) == 1


class Fresh(Mapping[str, object]):
    """Makes its values when they are asked for."""

    def __getitem__(self, key: str) -> object:
        return [torch.ones(1)]

    def __iter__(self) -> Iterator[str]:
        return iter("abc")

    def __len__(self) -> int:
        return 3


def test_containers_made_on_the_way_are_told_apart() -> None:
    assert len(tensors_in(Fresh()).tensors) == 3


class Broken(Fresh):
    def __getitem__(self, key: str) -> object:
        if key == "b":
            raise RuntimeError("not now")
        return super().__getitem__(key)


def test_what_cannot_be_read_hides_nothing_else() -> None:
    last = torch.ones(2)
    found = tensors_in((Broken(), last))
    assert len(found.tensors) == 2
    assert found.tensors[-1] is last
    assert isinstance(found.error, RuntimeError)


class Counted(list[object]):
    looks = 0

    def __iter__(self) -> Iterator[object]:
        for item in super().__iter__():
            self.looks += 1
            yield item


def test_a_long_sequence_without_tensors_is_not_read_to_its_end() -> None:
    last = torch.ones(1)
    numbers = Counted(range(1_000_000))
    found = tensors_in({"ids": numbers, "x": last})
    assert found.tensors == [last]
    assert found.truncated
    assert numbers.looks <= 2 * MAX_ENTRIES
    nested = [[list(range(300)) for _ in range(300)] for _ in range(300)]
    assert tensors_in((nested, last)).truncated


def test_a_long_sequence_with_tensors_is() -> None:
    many: list[object] = [None] * (MAX_ENTRIES - 1) + [torch.ones(1)] * 1000
    found = tensors_in(many)
    assert len(found.tensors) == 1000
    assert not found.truncated


def test_a_submodule_called_like_the_class_of_its_root() -> None:
    root = Block()
    root.Block = Block()
    root.Block.Block = nn.ReLU()
    name, named = ModuleNames().add_root(root)
    assert name == "Block"
    assert named["Block"] is root
    assert named["Block.Block"] is root.Block
    assert named["Block.Block_1"] is root.Block.Block
    assert {"fc1", "act", "Block.fc1", "Block.act"} < named.keys()
    assert len(named) == 7


def test_a_parameter_called_like_an_output_has_a_name_of_its_own() -> None:
    root = Block()
    for key in ("output_0", "input_12", "output"):
        root.register_parameter(key, nn.Parameter(torch.ones(1)))
    names = [entry.name for entry in parameters_of(root, "Block")]
    assert names[:3] == ["Block_.output_0", "Block_.input_12", "Block_output"]


# -- callables -------------------------------------------------------------------------------------


def test_copies_and_pickles_of_a_callback_do_nothing() -> None:
    called = []
    callback = Callback(lambda *_: called.append(1))
    callback("module", ())
    assert called == [1]
    for clone in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        clone("module", (), {}, None)
    assert called == [1]


def test_a_pickled_model_loads_where_there_is_no_smdist() -> None:
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(Callback(print), with_kwargs=True)
    model.register_forward_hook(Callback(print))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    program = """
import io, sys, torch
sys.modules["smdist"] = None
model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)
sys.stdout.write(str(tuple(model(torch.ones(1, 2)).shape)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=buffer.getvalue(), capture_output=True, check=True
    )
    assert done.stdout == b"(1, 2)"


def test_hooks_do_not_load_the_compiler() -> None:
    program = """
import sys
import smdist.pytorch
sys.exit("torch._dynamo" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
