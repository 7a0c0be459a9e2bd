"""The collections of one hook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from smdist.config.collection import Collection
from smdist.config.readers import read_text
from smdist.config.settings import Observable
from smdist.errors import ConfigurationError

if TYPE_CHECKING:
    from smdist.config.framework import Framework
    from smdist.config.reduction_config import ReductionConfig
    from smdist.config.save_config import SaveConfig

__all__ = ["CollectionManager"]


class CollectionManager(Observable):
    """Name -> collection, starting with the built-in ones of the framework.

    Collections use the hook's configuration for every setting that is not set on them. Any change
    of a collection or of the hook's configuration calls `changed()` of the manager's listeners.
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
        save_config.watch(self)
        reduction_config.watch(self)
        for name, patterns in framework.collections.items():
            self.add(collection_type(name, include_regex=patterns))

    def get(self, name: str, create: bool = True) -> Collection:
        """Return the collection of that name; create an empty one if it is missing."""
        name = read_text("name of a collection", name)
        if name not in self._collections:
            if not create:
                raise ConfigurationError(f"no collection {name!r}; add it with add_collection()")
            self.add(self._type(name))
        return self._collections[name]

    def get_manual(self, name: str) -> Collection:
        """Return a collection whose tensors the script saves itself: it may select nothing."""
        self._manual.add(name)
        return self.get(name)

    def add(self, collection: Collection | str) -> None:
        """Add a collection, or replace the one of the same name.

        A collection that replaces a built-in one and selects nothing gets the built-in regular
        expressions.
        """
        if isinstance(collection, str):
            self.get(collection)
            return
        if not isinstance(collection, Collection):
            raise ConfigurationError(
                f"{collection!r} is not a Collection; create one with Collection()"
            )
        former = self._collections.get(collection.name)
        if former is not None and former is not collection:
            former.unwatch(self)
        if collection.selects_nothing:
            collection.include(self.framework.collections.get(collection.name, ()))
        collection.attach(self.save_config, self.reduction_config)
        collection.watch(self)
        self._collections[collection.name] = collection
        self.changed()

    def get_collections(self) -> dict[str, Collection]:
        return dict(self._collections)

    def is_manual(self, name: str) -> bool:
        return name in self._manual

    def __contains__(self, name: object) -> bool:
        return name in self._collections
