"""The collections of one hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smdist.config.collection import Collection
from smdist.config.observable import Observable
from smdist.config.readers import read_text
from smdist.errors import ConfigurationError

if TYPE_CHECKING:
    from smdist.config.framework import Framework
    from smdist.config.reduction_config import ReductionConfig
    from smdist.config.save_config import SaveConfig

__all__ = ["CollectionManager"]


class CollectionManager(Observable):
    """Name -> collection, the built-in ones of the framework first.

    Everything handed out follows the hook's own configuration until it is changed, and a change of
    any of it, the hook's included, reaches whoever watches the manager.
    """

    def __init__(
        self,
        framework: Framework,
        save_config: SaveConfig,
        reduction_config: ReductionConfig,
        collection_type: type[Collection] = Collection,
    ) -> None:
        super().__init__()
        self.framework = framework
        self.save_config = save_config
        self.reduction_config = reduction_config
        self._type = collection_type
        self._collections: dict[str, Collection] = {}
        self._manual: set[str] = set()
        for name, patterns in framework.collections.items():
            self.add(collection_type(name, include_regex=patterns))

    def get(self, name: str, create: bool = True) -> Collection:
        """The collection of that name, created empty if it is missing."""
        name = read_text("name of a collection", name)
        if name not in self._collections:
            if not create:
                raise ConfigurationError(f"no collection {name!r}; add it with add_collection()")
            self.add(self._type(name))
        return self._collections[name]

    def get_manual(self, name: str) -> Collection:
        """As `get`, for a collection that tensors are put into by hand: it need match nothing."""
        self._manual.add(name)
        return self.get(name)

    def add(self, collection: Collection | str) -> None:
        """Take a collection in, in place of any of the same name.

        One that replaces a built-in collection and selects nothing by itself keeps the built-in
        regular expressions.
        """
        if isinstance(collection, str):
            self.get(collection)
            return
        if not isinstance(collection, Collection):
            raise ConfigurationError(
                f"{collection!r} is no Collection; build one with Collection()"
            )
        former = self._collections.get(collection.name)
        if former is not None and former is not collection:
            former.unwatch(self)
        if collection.selects_nothing:
            collection.include(self.framework.collections.get(collection.name, ()))
        collection.follow(self.save_config, self.reduction_config)
        collection.watch(self)
        self._collections[collection.name] = collection
        self.changed()

    def get_collections(self) -> dict[str, Collection]:
        return dict(self._collections)

    def is_manual(self, name: str) -> bool:
        return name in self._manual

    def __contains__(self, name: object) -> bool:
        return name in self._collections
