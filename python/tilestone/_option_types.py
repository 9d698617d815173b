"""The types of the options that are passed on to `save` and `load` as keywords."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tilestone._calls import LoadReport
    from tilestone._progress import ProgressCallback
    from tilestone._protocols import CommunicatorLike


class PlainSaveOptions(TypedDict, total=False):
    """The options of `tilestone.save` about neither copies nor who takes part."""

    format: str
    dialect: str
    overwrite: bool
    agreement: str
    validate_access: bool
    common_differs: str
    timeout: float | None
    threads: int
    buffer_bytes: int
    files_per_rank: int
    attributes: Mapping[str, str] | None
    tensor_attributes: Mapping[str, Mapping[str, Any]] | None
    progress: bool | ProgressCallback
    tp_replica_names: bool


class ByFilesOptions(TypedDict, total=False):
    """What only saves by files have, and a session does not fix."""

    wait: bool
    torch_rank_local: bool


class SessionSaveOptions(PlainSaveOptions, ByFilesOptions, total=False):
    """The options of a session's saves: those that the session does not fix."""

    replicate: str
    replicate_group: ProcessGroup | Collection[int] | None
    max_copy_bytes: int | None


class Participants(TypedDict, total=False):
    """The options of `tilestone.save` that say who takes part."""

    group: ProcessGroup | None
    comm: CommunicatorLike | None
    coordination: str
    rank: int | None
    world_size: int | None
    token: str | None
    number: int


class AllSaveOptions(SessionSaveOptions, Participants, total=False):
    """All options of `tilestone.save`."""


class PlanCopiesOptions(PlainSaveOptions, ByFilesOptions, Participants, total=False):
    """The options of `tilestone.plan_copies` that are not about copies."""


class SessionLoadOptions(TypedDict, total=False):
    """The options of a session's loads: those of `tilestone.load`, without its group or comm."""

    cast: bool
    allow_classes: Collection[str]
    verify_checksums: bool
    two_phase: str
    cache: str
    not_in_checkpoint: str
    not_requested: str | None
    other_shape: str
    sharded_only: bool
    validate_access: bool
    report: LoadReport | None
    own_rank: int | None
    timeout: float | None
    threads: int
    buffer_bytes: int
    follow_links: bool
    progress: bool | ProgressCallback
