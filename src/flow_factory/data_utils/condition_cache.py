"""Encoded prompts on disk, keyed by everything that their values depend on.

A key covers the prompt, the negative prompt (where negatives are encoded), whether they are, the bytes of condition
media (and then the size of the output), and the identity given at construction: the encoders' weights, dtype, maximum
lengths. So a changed file, encoder or setting is noticed, and two runs share what is equal. Entries live in safetensors
shards that are written atomically; each row carries a checksum.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flow_factory.data_utils.prompt_dataset import PromptRecord, hash_parts
from flow_factory.distributed import Comm
from flow_factory.errors import FlowFactoryError, InputError, RunError
from flow_factory.samples import Condition

logger = logging.getLogger(__name__)

FORMAT = "flow-factory conditions 1"
EncodeFn = Callable[[Sequence[PromptRecord]], Condition]
"""Encodes records in one call into a condition with one row per record."""


@dataclass(frozen=True)
class ShardRow:
    """Where a cached row lies: its shard, its number there, its fields and its checksum."""

    path: Path
    number: int
    fields: tuple[str, ...]
    checksum: int


def condition_key(
    record: PromptRecord, identity: Mapping[str, str], need_negative: bool, size: tuple[int, int] | None = None
) -> str:
    """Hex key of a record's encoded condition (see the module's description for what it covers)."""
    parts: list[str | None] = ["encoded with negatives" if need_negative else "encoded without negatives"]
    for name in sorted(identity):
        parts += [name, identity[name]]
    parts += [record.prompt, record.negative_prompt if need_negative else None]
    for file in record.media:
        parts += [file.slot, file.digest]
    if record.media and size is not None:  # condition media may be brought to the size of the output
        parts.append("x".join(map(str, size)))
    return hash_parts(parts).hex()


class ConditionCache:
    """Cached conditions of one encoder.

    Args:
        folder: The cache folder; entries of this identity live in a subfolder.
        identity: What the values depend on besides the record: encoder, dtype, max_length, ...
        condition_class: The adapter's condition type, to rebuild rows from tensors.
        encode: Encodes records; called without gradients.
        need_negative: Whether `encode` also encodes negative prompts.
        size_of: Height and width of a record's output.
        batch_size: How many records are encoded in one call.
        shard_rows: How many rows a shard holds at most.
        memory_bytes: Decoded rows are kept in memory up to this size; the least recently used leave first.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: Mapping[str, str],
        *,
        condition_class: type[Condition],
        encode: EncodeFn,
        need_negative: bool,
        size_of: Callable[[PromptRecord], tuple[int, int]] | None = None,
        batch_size: int = 8,
        shard_rows: int = 256,
        memory_bytes: int = 1 << 30,
    ) -> None:
        self.identity = dict(identity)
        parts = [text for name in sorted(self.identity) for text in (name, self.identity[name])]
        self.folder = Path(folder).expanduser() / "conditions" / hash_parts(parts).hex()
        self.need_negative = need_negative
        self._size_of = size_of
        self._condition_class = condition_class
        self._encode = encode
        self._batch_size = batch_size
        self._shard_rows = max(shard_rows, batch_size)
        self._index: dict[str, ShardRow] = {}
        self._memory = _RowMemory(memory_bytes)
        self._handles: dict[Path, Any] = {}
        self.encoded_rows = 0
        self.decoded_rows = 0

    def key(self, record: PromptRecord) -> str:
        """The record's key."""
        size = None if self._size_of is None else self._size_of(record)
        return condition_key(record, self.identity, self.need_negative, size)

    def prepare(
        self,
        records: Iterable[PromptRecord],
        comm: Comm | None = None,
        *,
        share: tuple[int, int] | None = None,
        force: bool = False,
    ) -> None:
        """Encodes what is missing, so that every record can be read. Called by all ranks with the same records.

        Batches of missing records are dealt out to the ranks in turn; each rank writes shards of its own; then all
        ranks read the index again.

        Args:
            records: The records that will be asked for.
            comm: The process group; None for one process.
            share: (position, count) of this rank among those that fill the same folder; default: all ranks, for a
                folder that all nodes see.
            force: Drop the entries of this identity first.

        Raises:
            InputError: If a shard is unreadable.
            RunError: On the other ranks, if one rank fails.
        """
        comm = comm or Comm.single()
        position, count = share or (comm.rank, comm.world_size)
        wanted = {self.key(record): record for record in records}
        error: BaseException | None = None
        try:
            if force and position == 0 and self.folder.exists():
                shutil.rmtree(self.folder)
        except OSError as failure:
            error = _unwritable(self.folder, failure)
        comm.raise_together(error)
        missing: list[str] = []
        try:
            self._rescan()
            missing = [key for key in wanted if key not in self._index]
        except InputError as failure:
            error = failure
        comm.raise_together(error)  # also the barrier between reading the index and the first write
        if missing:
            logger.info("encoding %d of %d prompts into %s", len(missing), len(wanted), self.folder)
        # Batches are cut before they are dealt out: what is encoded together does not depend on the number of ranks.
        error = self._fill(self._batches(missing)[position::count], wanted)
        comm.raise_together(error)
        if not missing:
            return
        self._rescan()
        # Only another run that dropped entries meanwhile can leave something out.
        left = [key for key in wanted if key not in self._index]
        comm.raise_together(self._fill(self._batches(left), wanted))
        if left:
            self._rescan()

    def row(self, record: PromptRecord, key: str | None = None) -> Condition:
        """The record's condition, batch dimension 1, on CPU. Decoded once and shared: not to be modified.

        A record that is not in the cache is encoded and kept in memory only.

        Args:
            record: The record.
            key: Its key, where it is known already.

        Raises:
            InputError: If the shard that holds it is corrupted.
        """
        key = self.key(record) if key is None else key
        row = self._memory.get(key)
        if row is None:
            row = self._read(key) if key in self._index else self.encode([record])[0]
            self._memory.put(key, row)
        return row

    def encode(self, records: Sequence[PromptRecord]) -> list[Condition]:
        """Encodes records in one call; returns rows on CPU."""
        with torch.no_grad():
            condition = self._encode(records).to("cpu")
        if condition.batch_size != len(records):
            raise ValueError(f"encode returned {condition.batch_size} rows for {len(records)} prompts.")
        self.encoded_rows += len(records)
        return [condition.row(i) for i in range(len(records))]

    def close(self) -> None:
        """Lets go of open shards and of decoded rows."""
        self._handles.clear()
        self._memory.clear()

    def __getstate__(self) -> dict[str, Any]:
        # A loader's worker opens shards of its own.
        return {**self.__dict__, "_handles": {}, "_memory": _RowMemory(self._memory.limit)}

    def _batches(self, keys: Sequence[str]) -> list[Sequence[str]]:
        return [keys[i : i + self._batch_size] for i in range(0, len(keys), self._batch_size)]

    def _fill(self, batches: Sequence[Sequence[str]], wanted: Mapping[str, PromptRecord]) -> BaseException | None:
        """Encodes batches of keys into shards; returns the error that stopped it, for the other ranks to hear of."""
        try:
            pending: dict[str, Condition] = {}
            for batch in batches:
                pending.update(zip(batch, self.encode([wanted[key] for key in batch]), strict=True))
                if len(pending) + self._batch_size > self._shard_rows:
                    self._write(pending)
                    pending = {}
            if pending:
                self._write(pending)
        except Exception as failure:
            return failure
        return None

    def _write(self, rows: Mapping[str, Condition]) -> None:
        try:
            self._write_shard(rows)
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def _write_shard(self, rows: Mapping[str, Condition]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        note = self.folder / "identity.json"
        if not note.exists():
            _replace_file(
                note, lambda path: path.write_text(json.dumps(self.identity, indent=2, sort_keys=True) + "\n")
            )
        tensors: dict[str, Tensor] = {}
        entries = []
        for number, (key, row) in enumerate(rows.items()):
            fields = {name: tensor.contiguous() for name, tensor in row.tensors().items()}
            # Cloned: rows are views of one encoded batch, and safetensors refuses tensors that share memory.
            tensors.update({f"{number}.{name}": tensor.clone() for name, tensor in fields.items()})
            entries.append({"key": key, "fields": list(fields), "checksum": _checksum(fields)})
        name = hash_parts(list(rows)).hex() + ".safetensors"
        metadata = {"format": FORMAT, "rows": json.dumps(entries)}
        _replace_file(self.folder / name, lambda path: save_file(tensors, path, metadata=metadata))

    def _rescan(self) -> None:
        self._handles.clear()
        self._index.clear()
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError("it has no index")
                entries = json.loads(metadata["rows"])
                for number, entry in enumerate(entries):
                    self._index[entry["key"]] = ShardRow(path, number, tuple(entry["fields"]), entry["checksum"])
            except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
                raise _corrupted(path, error) from error

    def _read(self, key: str) -> Condition:
        where = self._index[key]
        try:
            if where.path not in self._handles:
                self._handles[where.path] = safe_open(where.path, framework="pt")
            file = self._handles[where.path]
            tensors = {name: file.get_tensor(f"{where.number}.{name}") for name in where.fields}
        except (SafetensorError, OSError) as error:
            raise _corrupted(where.path, error) from error
        if _checksum(tensors) != where.checksum:
            raise _corrupted(where.path, ValueError(f"the checksum of row {where.number} does not fit"))
        self.decoded_rows += 1
        return self._condition_class.from_tensors(tensors)


class _RowMemory:
    """Decoded rows, least recently used out first, up to a number of bytes (the newest row always stays)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rows: OrderedDict[str, tuple[Condition, int]] = OrderedDict()
        self._size = 0

    def get(self, key: str) -> Condition | None:
        if key not in self._rows:
            return None
        self._rows.move_to_end(key)
        return self._rows[key][0]

    def put(self, key: str, row: Condition) -> None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in row.tensors().values())
        self._rows[key] = (row, size)
        self._size += size
        while self._size > self.limit and len(self._rows) > 1:
            _, (_, freed) = self._rows.popitem(last=False)
            self._size -= freed

    def clear(self) -> None:
        self._rows.clear()
        self._size = 0


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(name.encode(), value)
        value = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, value)
    return value


def _replace_file(target: Path, write: Callable[[Path], Any]) -> None:
    """Writes under a temporary name, flushes to disk and moves into place, so that half a file is never read."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _unwritable(folder: Path, error: OSError) -> FlowFactoryError:
    given = (errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
    kind = InputError if error.errno in given else RunError
    return kind(
        f"the condition cache {folder} cannot be written: {error.strerror or error}. Give another data.cache_dir, or "
        f"make room and start again."
    )


def _corrupted(path: Path, error: Exception) -> InputError:
    return InputError(
        f"condition cache file {path} is unreadable ({error}); delete it, or set data.force_reprocess: true to encode "
        "the prompts again."
    )
