"""Turns a checkpoint into shards: bounded in memory, and able to go on after an interruption."""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from cascadia_p2p.errors import CapacityError, CascadiaError, CheckpointError, UsageError
from cascadia_p2p.matrices.encoding import Encoding
from cascadia_p2p.matrices.quantise import prepare
from cascadia_p2p.models.family import SourceModel
from cascadia_p2p.models.layout import TensorPlan, TensorRole, names_in_words
from cascadia_p2p.shards.attenuation import RangeEstimate, check_layers
from cascadia_p2p.shards.copying import copy
from cascadia_p2p.shards.encodings import AS_IN_FILE, Asked, Encodings
from cascadia_p2p.shards.files import PART, WholeFile, write_whole
from cascadia_p2p.shards.fingerprint import fingerprint
from cascadia_p2p.shards.journal import Journal
from cascadia_p2p.shards.manifest import (
    EMBED,
    FORMAT,
    HEAD,
    MANIFEST,
    MOST_SOURCES,
    TABLE,
    FileEntry,
    Manifest,
    ShardTable,
    differing_source,
    layer_file,
    shard_directory,
)
from cascadia_p2p.shards.opening import open_source
from cascadia_p2p.shards.placement import Placed, check_source, place
from cascadia_p2p.shards.source import Source
from cascadia_p2p.shards.split import check_split, choose_shards, even_split

_WORK = ".export"
_SPARE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an export is.

    Args:
        done: bytes that are written, those of an earlier run among them.
        total: bytes of all weights.
        file: the file that is being written, as `shard-NN/NAME`.
    """

    done: int
    total: int
    file: str


@dataclass(frozen=True, slots=True)
class _Work:
    """One file of weights that has to be there in the end."""

    shard: int
    name: str
    plans: tuple[TensorPlan, ...]
    layer: int | None = None

    @property
    def path(self) -> str:
        return f"{shard_directory(self.shard)}/{self.name}"


@dataclass(frozen=True, slots=True)
class _PlacedWork(_Work):
    """The same, when it is known where each tensor will lie."""

    placed: tuple[Placed, ...] = ()
    size: int = 0


def export(
    checkpoint: Path,
    out: Path,
    *,
    shards: int | None = None,
    split: Sequence[int] | None = None,
    only: Sequence[int] | None = None,
    encodings: Encodings | Asked | None = None,
    attenuation: Mapping[int, int] | None = None,
    progress: Callable[[Progress], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Manifest:
    """Write the shards of a checkpoint and return their manifest.

    Run again with the same arguments after an interruption it goes on with the file it stopped at, and
    the result is the same to the byte. A directory that is already complete is left as it is; files
    that are missing there are written again. Shards that are added later join those that are there, and a
    shard's directory is the same to the byte however many are exported with it, and wherever.

    Args:
        checkpoint: directory with `config.json` and safetensors files, or a GGUF file.
        out: directory to write; made if absent.
        shards: this many, of sizes as even as possible. Either this or `split`.
        split: layers of each shard.
        only: indexes of the shards to write; only the files that hold their tensors have to be there.
        encodings: stored forms. What is not asked for is as usual: four bits for experts and dense MLPs,
            eight for projections and head, bfloat16 for the embedding; of GGUF files as in the file.
        attenuation: exponents by layer, see `Manifest`; layers that are not named have what is estimated.
        progress: told after every piece.
        note: told, in a sentence each, what of the checkpoint is left out.

    Raises:
        CheckpointError: the checkpoint is not what it should be.
        UsageError: the split does not fit the model, or `out` holds something else.
        CapacityError: too little free space.
        CascadiaError: `out` can not be written.
    """
    note = note or _silent
    with open_source(checkpoint) as source:
        model = source.model()
        sizes = _decide_split(model, shards, split)
        chosen = choose_shards(only, len(sizes))
        plans = [plan for work in _plan_work(model, sizes, chosen) for plan in work.plans]
        source.require(_sources(plans))
        for plan in plans:
            check_source(plan, source)
        _note_rest(model, note)
        try:
            task = _Task(
                source, model, sizes, _decide_encodings(source, encodings), chosen, attenuation or {}
            )
            return task.run(out, progress or _silent)
        except OSError as error:
            raise _in_words(error, out) from error


def needed_files(
    checkpoint: Path,
    *,
    shards: int | None = None,
    split: Sequence[int] | None = None,
    only: Sequence[int] | None = None,
) -> tuple[str, ...]:
    """The names of the files that `export` would read tensors from, sorted; none of them has to be there yet.

    Args:
        checkpoint: directory with `config.json` and the index.
        shards: as of `export`.
        split: as of `export`.
        only: as of `export`.

    Raises:
        CheckpointError: the checkpoint is not what it should be.
        UsageError: the split does not fit the model.
    """
    with open_source(checkpoint) as source:
        model = source.model()
        sizes = _decide_split(model, shards, split)
        work = _plan_work(model, sizes, choose_shards(only, len(sizes)))
        return tuple(sorted(source.files_of(_sources([plan for part in work for plan in part.plans]))))


class _Meter:
    """Adds up what is written and tells it."""

    def __init__(self, total: int, done: int, tell: Callable[[Progress], None]) -> None:
        self._total = total
        self._tell = tell
        self._done = done
        self._within = 0

    def step(self, place_of_file: str, nbytes: int) -> None:
        """A piece of a file is written."""
        self._within += nbytes
        self._tell(Progress(self._done + self._within, self._total, place_of_file))

    def finish(self, place_of_file: str, size: int) -> None:
        """A file is there."""
        self._done += size
        self._within = 0
        self._tell(Progress(self._done, self._total, place_of_file))


class _Task:
    """An export whose source has been found good."""

    def __init__(
        self,
        source: Source,
        model: SourceModel,
        split: tuple[int, ...],
        encodings: Encodings,
        chosen: tuple[int, ...],
        attenuation: Mapping[int, int],
    ) -> None:
        self.source = source
        self.model = model
        self.split = split
        self.encodings = encodings
        self.chosen = chosen
        self.attenuation = dict(attenuation)
        check_layers(self.attenuation, model.config.layers)
        self.work = [_place(work, encodings, source) for work in _plan_work(model, split, chosen)]
        self.tokenizer = source.tokenizer()
        if len(source.files) > MOST_SOURCES:
            raise CheckpointError(
                f"{source.path} is spread over {len(source.files)} files: at most {MOST_SOURCES} are handled"
            )
        self.fingerprint = fingerprint(source, model, split, encodings, self.tokenizer)
        self.read = {
            shard: source.files_of(
                _sources([plan for work in self.work if work.shard == shard for plan in work.plans])
            )
            for shard in chosen
        }
        self.samples = {file: source.sample(file) for file in sorted(frozenset().union(*self.read.values()))}

    def run(self, out: Path, progress: Callable[[Progress], None]) -> Manifest:
        """Write what is not there yet."""
        if out.exists() and not out.is_dir():
            raise UsageError(f"{out} is a file: give a directory to write the shards to")
        self._earlier(out)
        prepare()
        work = out / _WORK
        work.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(work / "lock", timeout=0):
                # Looked at again: another export may just have finished its shards.
                manifest, unfinished = self._write(out, self._earlier(out), progress)
                if not unfinished:
                    # Behind the lock another export may begin at once, whose journal would go.
                    shutil.rmtree(work, ignore_errors=True)
        except Timeout:
            raise UsageError(
                f"another export is writing to {out}: wait for it, or choose another directory"
            ) from None
        if not unfinished:
            # Where a file that is open can not be removed, the directory is empty only now.
            with contextlib.suppress(OSError):
                work.rmdir()
        return manifest

    def _earlier(self, out: Path) -> Manifest | None:
        """The manifest of what is there already."""
        if not (out / MANIFEST).exists():
            return None
        earlier = Manifest.load(out)
        if earlier.fingerprint != self.fingerprint or differing_source(earlier.sources, self.samples):
            raise UsageError(
                f"{out} holds the export of something else (another checkpoint, split or encoding): "
                "choose another directory, or remove this one first"
            )
        return earlier

    def _write(
        self, out: Path, earlier: Manifest | None, progress: Callable[[Progress], None]
    ) -> tuple[Manifest, bool]:
        """Write the chosen shards; also whether an earlier run began others that are not finished."""
        journal = Journal(out / _WORK / "journal", out, self.fingerprint, self.samples)
        for place_of_file, entry in earlier.files.items() if earlier else ():
            path = out / place_of_file
            if path.is_file() and path.stat().st_size == entry.size:
                journal.trust(place_of_file, entry, earlier.attenuation_of(place_of_file) if earlier else 0)
        for unfinished in out.glob(f"shard-*/*{PART}"):
            unfinished.unlink()
        self._check_space(out, journal)
        finished = {work.path: known for work in self.work if (known := journal.finished(work.path))}
        total = sum(work.size for work in self.work)
        meter = _Meter(total, sum(entry.size for entry in finished.values()), progress)
        for work in self.work:
            if work.path not in finished:
                finished[work.path], exponent = self._write_weights(out, work, partial(meter.step, work.path))
                journal.note(work.path, finished[work.path], exponent)
                meter.finish(work.path, work.size)
        meter.finish(self.work[-1].path, 0)
        for shard in self.chosen:
            finished |= self._write_rest(out, shard)
        for work in self.work:
            if work.layer is not None:
                self.attenuation.setdefault(work.layer, journal.attenuation(work.path))
        manifest = self._write_manifests(out, earlier, finished)
        return manifest, not journal.places <= manifest.files.keys()

    def _check_space(self, out: Path, journal: Journal) -> None:
        rest = sum(work.size for work in self.work if journal.finished(work.path) is None)
        free = shutil.disk_usage(out).free
        if rest and (need := rest + _SPARE_BYTES) > free:
            raise CapacityError(
                f"the rest of the export needs {bytes_in_words(need)} on the disk of {out}, "
                f"where {bytes_in_words(free)} is free: make room, or choose a directory on another disk"
            )

    def _write_weights(
        self, out: Path, work: _PlacedWork, step: Callable[[int], None]
    ) -> tuple[FileEntry, int]:
        """Write one file; also the exponent that is estimated for its layer."""
        path = out / work.path
        path.parent.mkdir(exist_ok=True)
        with WholeFile(path, work.size) as file:
            estimate = RangeEstimate()
            copy(self.source, work.placed, file, step, estimate.watch)
            return file.finish(), estimate.exponent()

    def _write_rest(self, out: Path, shard: int) -> dict[str, FileEntry]:
        """The table and the tokenizer of one shard."""
        directory = shard_directory(shard)
        table = ShardTable(
            format=FORMAT,
            fingerprint=self.fingerprint,
            shard=shard,
            files={
                work.name: {item.plan.name: item.entry for item in work.placed}
                for work in self.work
                if work.shard == shard
            },
        )
        content = {TABLE: table.to_bytes(), **{str(name): data for name, data in self.tokenizer.items()}}
        return {
            f"{directory}/{name}": write_whole(out / directory / name, data) for name, data in content.items()
        }

    def _write_manifests(self, out: Path, earlier: Manifest | None, files: dict[str, FileEntry]) -> Manifest:
        for shard in self.chosen:
            directory = shard_directory(shard)
            own = {place: entry for place, entry in files.items() if place.startswith(f"{directory}/")}
            layers = {work.layer for work in self.work if work.shard == shard}
            exponents = {layer: n for layer, n in self.attenuation.items() if layer in layers}
            samples = {file: self.samples[file] for file in self.read[shard]}
            manifest = self._manifest(own, samples, exponents)
            write_whole(out / directory / MANIFEST, manifest.to_bytes())
        known: dict[str, str | None] = {}
        exponents = self.attenuation
        if earlier is not None:
            files = {**earlier.files, **files}
            known = {file: sample for file, sample in earlier.sources.items() if sample}
            exponents = {int(layer): n for layer, n in earlier.attenuation.items()} | exponents
        # The one beside the shards comes last: where it stands, everything that it lists does.
        manifest = self._manifest(files, {**known, **self.samples}, exponents)
        write_whole(out / MANIFEST, manifest.to_bytes())
        return manifest

    def _manifest(
        self, files: Mapping[str, FileEntry], samples: Mapping[str, str | None], exponents: Mapping[int, int]
    ) -> Manifest:
        return Manifest(
            format=FORMAT,
            family=self.model.family,
            config=self.model.config.to_json(),
            split=list(self.split),
            encodings=self.encodings,
            stored=_most_stored(self.source, self.model, self.encodings),
            tokenizer=list(self.tokenizer),
            files=dict(files),
            fingerprint=self.fingerprint,
            sources={file: samples.get(file) for file in self.source.files},
            attenuation={str(layer): n for layer, n in exponents.items() if n},
        )


def _decide_encodings(source: Source, asked: Encodings | Asked | None) -> Encodings:
    if isinstance(asked, Encodings):
        return asked
    return source.encodings.model_copy(update=dict(asked or {}))


def _most_stored(source: Source, model: SourceModel, encodings: Encodings) -> Encodings:
    """What most numbers of each part are stored as, the same wherever a part of the model is exported."""
    parts = {
        "experts": (TensorRole.EXPERTS, TensorRole.DENSE),
        "projections": (TensorRole.PROJECTIONS,),
        "head": (TensorRole.HEAD,),
        "embedding": (TensorRole.EMBEDDING,),
    }
    found = {part: encodings.of(roles[0]) for part, roles in parts.items()}
    # Of other checkpoints some files may be elsewhere; they hold nothing that could be kept.
    if source.encodings == AS_IN_FILE:
        for part, roles in parts.items():
            numbers: Counter[Encoding] = Counter()
            for plan in model.layout.tensors():
                if plan.role in roles:
                    form = source.form(plan.source)
                    numbers[encodings.of(plan.role, form.kind, form.bits)] += math.prod(plan.shape)
            found[part] = max(numbers, key=lambda encoding: numbers[encoding])
    return Encodings.model_validate(found)


def _decide_split(model: SourceModel, shards: int | None, split: Sequence[int] | None) -> tuple[int, ...]:
    if (shards is None) == (split is None):
        raise UsageError("export needs either --shards N or --split a,b,...")
    if shards is not None:
        return even_split(shards, model.config.layers)
    sizes = tuple(split or ())
    check_split(sizes, model.config.layers)
    return sizes


def _plan_work(model: SourceModel, split: Sequence[int], chosen: Sequence[int]) -> list[_Work]:
    """The files of weights of the chosen shards, in the order of the model."""
    result: list[_Work] = []
    layer = 0
    for shard, count in enumerate(split):
        parts = [
            _Work(shard, layer_file(index), model.layout.layers[index], index)
            for index in range(layer, layer + count)
        ]
        layer += count
        if shard == 0:
            parts.insert(0, _Work(shard, EMBED, model.layout.embed))
        if shard == len(split) - 1:
            parts.append(_Work(shard, HEAD, model.layout.head))
        if shard in chosen:
            result += parts
    return result


def _place(work: _Work, encodings: Encodings, source: Source) -> _PlacedWork:
    placed, size = place(work.plans, encodings, source)
    return _PlacedWork(work.shard, work.name, work.plans, work.layer, placed, size)


def _sources(plans: Sequence[TensorPlan]) -> list[str]:
    return sorted({plan.source for plan in plans})


def _note_rest(model: SourceModel, note: Callable[[str], None]) -> None:
    if skipped := model.layout.skipped:
        parts = ", ".join(f"{part} ({len(names)} tensors)" for part, names in skipped.items())
        note(f"left out, as the text model is computed without: {parts}")
    if unknown := model.layout.unknown:
        named = names_in_words(unknown, 8)
        note(f"warning: {len(unknown)} tensors of the checkpoint are not known and left out: {named}")


def _in_words(error: OSError, out: Path) -> CascadiaError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(
            f"the disk of {out} is full: free some space and run the same command, it goes on"
        )
    where = error.filename or out
    return CascadiaError(f"{where}: {error.strerror}; when that is mended, run the same command to go on")


def bytes_in_words(count: int) -> str:
    """A size as people say it, in decimal units."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def _silent(_: object) -> None:
    """Tells nobody."""
