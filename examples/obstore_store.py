"""Checkpoints in the stores that obstore reaches (pip install obstore): Azure, Google's own API, ...

    register("az")
    tilestone.save(state, "az://container/run7/step-1200")

from then on, in each rank's process, wherever a path is taken. Credentials are found as obstore finds
them. A process that was forked after it has used a store can't use one: obstore's threads are gone.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import LocalStore, ObjectStore, from_url

import tilestone


def register(scheme: str, **configuration: Any) -> None:
    """For URLs that obstore knows: "az", "gs", "abfss", ... The configuration is that of its stores."""
    # A put must end within 10 seconds: 3 + 1 until its last try begins, and 6 for that.
    puts = {
        **configuration,
        "client_options": {**configuration.get("client_options", {}), "timeout": "6s"},
        "retry_config": {
            "retry_timeout": timedelta(seconds=3),
            "backoff": {"max_backoff": timedelta(seconds=1)},
        },
    }

    def opened(url: str) -> tilestone.Store:
        place, _, prefix = url.partition("://")[2].partition("/")
        root = f"{scheme}://{place}"
        return store_at(from_url(root, **configuration), prefix, from_url(root, **puts))

    tilestone.register_store(scheme, opened)


def store_at(
    store: ObjectStore, prefix: str = "", puts: ObjectStore | None = None
) -> tilestone.Store:
    """A prefix of one of obstore's stores. `puts`: the same with a limit for a put."""
    functions = _Functions(store, prefix.strip("/"), puts or store)
    return tilestone.Store(
        stat=functions.stat,
        listing=functions.listing,
        get=functions.get,
        put=functions.put,
        create=functions.create,
        remove=functions.remove,
        has_tags=not isinstance(store, LocalStore),  # it creates, but does not compare
    )


class _Functions:
    def __init__(self, store: ObjectStore, prefix: str, puts: ObjectStore) -> None:
        self._store, self._puts = store, puts
        self._root = f"{prefix}/" if prefix else ""

    def stat(self, name: str) -> tuple[int, float | None, str] | None:
        try:
            found = obstore.head(self._store, self._root + name)
        except FileNotFoundError:
            return None
        tag = json.dumps([found["e_tag"], found["version"]]) if found["e_tag"] else ""
        return found["size"], found["last_modified"].timestamp(), tag

    def listing(
        self, prefix: str, deep: bool
    ) -> tuple[list[tuple[str, int, float | None]], list[str]]:
        beginning = self._root + prefix
        folder = beginning.rpartition("/")[0] or None  # obstore lists whole components
        if deep:
            objects, folders = obstore.list(self._store, folder).collect(), []
        else:
            found = obstore.list_with_delimiter(self._store, folder)
            objects, folders = found["objects"], found["common_prefixes"]
        files = [
            (each["path"][len(self._root) :], each["size"], each["last_modified"].timestamp())
            for each in objects
            if each["path"].startswith(beginning)
        ]
        return files, [each[len(self._root) :] for each in folders if each.startswith(beginning)]

    def get(self, name: str, offset: int, size: int, tag: str) -> obstore.Bytes:
        options: dict[str, Any] = {"range": (offset, offset + size)}
        if tag:
            options["if_match"] = json.loads(tag)[0]
        try:
            return obstore.get(self._store, self._root + name, options=options).bytes()
        except PreconditionError as error:
            raise FileNotFoundError(f"{name} was replaced while it was read") from error

    def put(self, name: str, data: bytes, tag: str | None) -> bool:
        mode: Any = "create" if tag == "" else "overwrite"
        if tag:  # Google's store asks for the version, others for the ETag
            named = zip(("e_tag", "version"), json.loads(tag), strict=True)
            mode = {name: value for name, value in named if value}
        try:
            obstore.put(self._puts, self._root + name, data, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    def create(self, name: str) -> obstore.WritableFile:
        return obstore.open_writer(self._store, self._root + name, buffer_size=8 << 20)

    def remove(self, names: list[str]) -> None:
        for name in names:
            try:
                obstore.delete(self._store, self._root + name)
            except FileNotFoundError:
                pass
