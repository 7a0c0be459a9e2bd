"""Rules on boosted trees: features that dominate, deep trees, the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from smdist.identity import ModeKeys
from smdist.rules.builtin.base import BuiltInRule, Judged, Place, number, resolve, where_text
from smdist.rules.builtin.selection import chosen

if TYPE_CHECKING:
    from smdist.rules.evidence import Evidence
    from smdist.rules.findings import Finding

    Array = np.ndarray[Any, np.dtype[Any]]

__all__ = ["CreateXgboostReport", "FeatureImportanceOverweight", "TreeDepth", "depth_of_trees"]


@dataclass(frozen=True)
class FeatureImportanceOverweight(BuiltInRule):
    """Fires when the `nfeatures` heaviest features have more than `threshold` of all importance."""

    threshold: float = 0.8
    nfeatures: int = 3
    tensor_regex: str = ".*feature_importance/weight"
    advice: ClassVar[str] = "check these features for leaks of the label; use more regularisation"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the first step at which few features dominate."""
        found = [
            (name, part.where(part["count"] > 0))
            for name, part in chosen(evidence.rows, None, self.tensor_regex)
        ]
        if not found:
            needs = "the collection feature_importance, one scalar per feature"
            return self.undecided(needs, "no importance of features was saved")
        columns = {
            key: np.concatenate([part[key] for _, part in found])
            for key in ("attempt", "step", "mode", "mode_step", "rank", "count", "sum", "order")
        }
        feature = np.repeat(np.arange(len(found)), [len(part) for _, part in found])
        weight = columns["sum"] / columns["count"]
        keys = [columns[key] for key in ("rank", "mode_step", "mode", "step", "attempt")]
        order = np.lexsort([-weight, *keys])  # the heaviest of each group first
        sorted_keys = [key[order] for key in keys]
        weight, feature = weight[order], feature[order]
        differ = [key[1:] != key[:-1] for key in sorted_keys]
        starts = np.flatnonzero(np.append(True, np.logical_or.reduce(differ))[: len(weight)])
        if not len(starts):
            return self.undecided("scalars of feature_importance", "the saved tensors are empty")
        sizes = np.diff(np.append(starts, len(weight)))
        position = np.arange(len(weight)) - np.repeat(starts, sizes)
        top = np.add.reduceat(np.where(position < self.nfeatures, weight, 0.0), starts)
        with np.errstate(all="ignore"):
            share = top / np.add.reduceat(weight, starts)
        enough = sizes > self.nfeatures
        if not enough.any():
            needs = f"more than {self.nfeatures} features, one scalar each"
            return self.undecided(needs, f"never more than {int(sizes.max())} features were saved")
        over = np.flatnonzero(enough & (share > self.threshold))
        if not len(over):
            return self.quiet(f"no {self.nfeatures} features have most of the importance")
        first = int(over[0])
        rank, mode_step, mode, step, attempt = (int(key[starts[first]]) for key in sorted_keys)
        name = found[int(feature[starts[first]])][0]
        place = Place(first, attempt, ModeKeys(mode), mode_step, step, 0, (rank,))
        text = f"{where_text(name, place)}: {self.nfeatures} features have"
        value = float(share[first])
        return [
            self.fires(
                f"{text} {number(100 * value)} % of all importance",
                place=place,
                tensor=name,
                value=value,
                threshold=self.threshold,
            )
        ]


def depth_of_trees(tree: Array, node: Array, yes: Array, no: Array) -> int:
    """Return the depth of the deepest tree by following the links from each root, node 0.

    Links are node ids, or texts such as "3-7" for node 7 of tree 3. Leaves have none.
    """
    children: dict[tuple[int, int], list[tuple[int, int]]] = {}
    columns = (np.asarray(each).ravel().tolist() for each in (tree, node, yes, no))
    for of_tree, own, *links in zip(*columns, strict=True):
        at = int(of_tree)
        targets = (_link(link) for link in links)
        children[at, int(own)] = [(at, target) for target in targets if target is not None]
    deepest, level = 0, {key for key in children if key[1] == 0}
    for depth in range(len(children)):
        if not level:
            break
        deepest = depth
        level = {child for key in level for child in children[key] if child in children}
    return deepest


def _link(value: Any) -> int | None:
    if isinstance(value, bytes):
        value = value.decode()
    if isinstance(value, str):
        text = value.rpartition("-")[2]
        return int(text) if text.isdigit() else None
    if value is None or not math.isfinite(value) or value <= 0:  # nothing links to a root
        return None
    return int(value)


@dataclass(frozen=True)
class TreeDepth(BuiltInRule):
    """Fires when a tree is deeper than `depth`.

    Nodes are numbered as they are made, so the largest id m bounds the depth: at least log2(m + 1),
    at most m / 2. In between it follows the links, if they were saved.
    """

    depth: int = 4
    advice: ClassVar[str] = "set max_depth, or raise gamma or min_child_weight"

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return the first step with a tree that is too deep."""

        def describe(judged: Judged, place: Place) -> tuple[str, float]:
            deep = int(judged.values[place.row])
            return f"{where_text(judged.name, place)}: a tree is {deep} deep or more", self.depth

        needs = "raw values of trees/Tree, trees/Node, trees/Yes and trees/No"
        judged = (
            self._judge(evidence, name) for name in evidence.rows.names if name == "trees/Node"
        )
        return self.conclude(
            judged, describe, missing=f"the collection trees: {needs}", needs=needs
        )

    def _judge(self, evidence: Evidence, name: str) -> Judged:
        part = evidence.rows.of_tensor(name)
        valid = (part["count"] > 0) & (part["nans"] == 0)
        most = np.where(valid, part["max"], 0.0)
        least = np.floor(np.log2(most + 1))
        fires = valid & (least > self.depth)
        unknown = valid & ~fires & (np.floor(most / 2) > self.depth)

        def decide(row: int) -> tuple[bool, float] | None:
            mode, step = ModeKeys(int(part["mode"][row])), int(part["mode_step"][row])
            rank = int(part["rank"][row])
            raw = [
                evidence.raw(f"trees/{key}", mode, step, rank)
                for key in ("Tree", "Node", "Yes", "No")
            ]
            found = [each for each in raw if each is not None]
            if len(found) < len(raw) or len({each.size for each in found}) > 1:
                return None
            depth = depth_of_trees(*found)
            return depth > self.depth, float(depth)

        return resolve(Judged(name, part, fires, unknown, least, bool(valid.any())), decide)


@dataclass(frozen=True)
class CreateXgboostReport(BuiltInRule):
    """Stands for the report of XGBoost runs. There is none yet, so it is always UNDECIDED."""

    def evaluate(self, evidence: Evidence) -> list[Finding]:
        """Return what a report would need."""
        wanted = ("metrics", "feature_importance", "predictions", "labels", "hyperparameters")
        saved = frozenset().union(*evidence.rows.collections.values())
        missing = [name for name in wanted if name not in saved]
        text = "smdist makes no report for XGBoost yet"
        if missing:
            text += f"; also not saved: {', '.join(missing)}"
        return self.undecided(f"a report; the collections {', '.join(wanted)}", text)
