"""Which rank a process is by `TF_CONFIG`, TensorFlow's description of a cluster. Pure.

    {"cluster": {"chief": ["host0:1"], "worker": ["host1:1", "host1:2"]},
     "task": {"type": "worker", "index": 0}}

The chief comes first, then the workers by index; other kinds of task train nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from smdist.errors import ConfigurationError, NoRank

__all__ = ["tf_task"]

_TRAINING = ("chief", "master", "worker")


def tf_task(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    """Return rank, world size, local rank and local world size, or None without a cluster.

    Raises NoRank for a task that does not train.
    """
    text = environ.get("TF_CONFIG", "").strip()
    if not text:
        return None
    try:
        document = json.loads(text)
        cluster: dict[str, Any] = document.get("cluster") or {}
        addresses = [(kind, i, str(a)) for kind in _TRAINING for i, a in _of(cluster, kind)]
        if not addresses:
            return None
        task = document["task"]
        kind, index = str(task["type"]), int(task["index"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"TF_CONFIG={text!r} cannot be read: {error!r}; set SMDIST_RANK and SMDIST_WORLD_SIZE"
        ) from error
    if kind not in _TRAINING:
        raise NoRank(
            f"a task of type {kind!r} (TF_CONFIG) trains nothing, and is no worker; should it be one, "
            "set SMDIST_RANK and SMDIST_WORLD_SIZE"
        )
    places = [(known, i) for known, i, _ in addresses]
    if (kind, index) not in places:
        raise ConfigurationError(
            f"task {kind} {index} of TF_CONFIG is none of the {len(places)} that train; "
            "set SMDIST_RANK and SMDIST_WORLD_SIZE"
        )
    rank = places.index((kind, index))
    hosts = [address.rpartition(":")[0] or address for *_, address in addresses]
    beside = hosts[rank]
    return rank, len(hosts), hosts[:rank].count(beside), hosts.count(beside)


def _of(cluster: Mapping[str, Any], kind: str) -> list[tuple[int, Any]]:
    given = cluster.get(kind, ())
    if isinstance(given, Mapping):  # a sparse cluster names its tasks by index
        return sorted((int(index), address) for index, address in given.items())
    return list(enumerate(given))
