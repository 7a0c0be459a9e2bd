"""What a framework brings along: its built-in collections, what it always saves, its interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from smdist.config.collection import CollectionKeys as Keys

__all__ = ["PYTORCH", "TENSORFLOW", "TENSORFLOW_GRAPH", "Framework"]


def _frozen(table: Mapping[str, tuple[str, ...]]) -> Mapping[str, tuple[str, ...]]:
    everywhere = {Keys.ALL: (".*",), Keys.DEFAULT: ()}
    return MappingProxyType({**everywhere, **table})


@dataclass(frozen=True)
class Framework:
    """`collections` maps each built-in collection to its regular expressions.

    always:        collections saved whatever the configuration says
    training_only: tensors of these are skipped in EVAL and PREDICT
    separate:      tensors of these are in no other built-in collection, though a regex may say so
                   (the momentum of a weight has "weight" in its name)
    """

    name: str
    collections: Mapping[str, tuple[str, ...]]
    always: tuple[str, ...]
    save_interval: int = 500
    training_only: frozenset[str] = field(
        default=frozenset({Keys.GRADIENTS, Keys.OPTIMIZER_VARIABLES})
    )
    separate: frozenset[str] = field(default=frozenset({Keys.OPTIMIZER_VARIABLES}))


PYTORCH = Framework(
    name="pytorch",
    collections=_frozen(
        {
            Keys.WEIGHTS: ("^(?!gradient).*weight",),
            Keys.BIASES: ("^(?!gradient).*bias",),
            Keys.GRADIENTS: ("^gradient",),
            Keys.LOSSES: ("[Ll]oss_(?!input).*output",),
            Keys.OUTPUTS: (r"^(?!.*[Ll]oss_).*_output_\d+$",),
            Keys.OPTIMIZER_VARIABLES: ("^optimizer/",),
        }
    ),
    always=(Keys.LOSSES,),
)

TENSORFLOW = Framework(
    name="tensorflow",
    collections=_frozen(
        {
            Keys.WEIGHTS: (r"^[^:]*/weights/(?!.*bias)",),
            Keys.BIASES: (r"^[^:]*/weights/.*bias",),
            Keys.GRADIENTS: ("^gradients/",),
            Keys.LOSSES: (r"^(val_)?loss$",),
            Keys.METRICS: (),  # what Keras reports besides: the hook knows when it sees it
            Keys.INPUTS: (r"^inputs(_\d+)?$",),
            Keys.OUTPUTS: (r"^(labels|predictions)(_\d+)?$",),
            Keys.LAYERS: (r"/(inputs|outputs)(_\d+)?$",),
            Keys.SM_METRICS: (),
            Keys.OPTIMIZER_VARIABLES: ("^optimizer/",),
        }
    ),
    always=(Keys.METRICS, Keys.LOSSES, Keys.SM_METRICS),
)

# In a graph names are the script's: the hook knows what is what, and names it exactly.
TENSORFLOW_GRAPH = Framework(
    name="tensorflow",
    collections=_frozen(
        {
            name: ()
            for name in TENSORFLOW.collections
            if name not in (Keys.ALL, Keys.DEFAULT, Keys.INPUTS, Keys.OUTPUTS, Keys.LAYERS)
        }
    ),
    always=(Keys.LOSSES, Keys.METRICS, Keys.SM_METRICS),
)
