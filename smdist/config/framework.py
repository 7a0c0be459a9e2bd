"""What is specific to a framework: built-in collections, those always saved, default interval."""

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
    """The properties of a framework.

    collections:   built-in collection -> its regular expressions
    always:        collections that are saved in every configuration
    training_only: collections whose tensors are skipped in EVAL and PREDICT
    separate:      collections whose tensors are in no other built-in collection, even if a regex
                   matches (the momentum of a weight has "weight" in its name)
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
            Keys.METRICS: (),  # other values that Keras reports: the hook adds their names
            Keys.INPUTS: (r"^inputs(_\d+)?$",),
            Keys.OUTPUTS: (r"^(labels|predictions)(_\d+)?$",),
            Keys.LAYERS: (r"/(inputs|outputs)(_\d+)?$",),
            Keys.SM_METRICS: (),
            Keys.OPTIMIZER_VARIABLES: ("^optimizer/",),
        }
    ),
    always=(Keys.METRICS, Keys.LOSSES, Keys.SM_METRICS),
)

# In a graph the script chooses the names, so the hook adds exact tensor names.
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
