"""A checkpoint of a run: one file beside its journal, written in one piece, used only where it is whole and fits."""

import hashlib
import io
import json
import os
import pickle
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.proving.journal import read_journal
from benchmarks.proving.running.course import EPOCH
from benchmarks.proving.running.runfile import RunFile

FILE_NAME = "checkpoint.pt"
SCHEMA = 2
DIGEST_BYTES = hashlib.sha256().digest_size


class UnusableError(Exception):
    """A checkpoint that no run may go on from; the message is the reason, as part of a sentence."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How far a run came, with all that it needs to go on as if it had never stopped."""

    identity: dict[str, Any]
    """Whose it is, by `identify`."""
    epoch: int
    """Epochs that are done."""
    wall_s: float
    """What the stopwatch showed."""
    cpu_s: float
    lengths_s: list[float]
    """How long the last epochs took, with their evaluations."""
    commits: list[str]
    """That the run was made with so far."""
    num_pieces: int
    """Processes that worked on it so far."""
    training: dict[str, Any]
    """States of model, optimizer, scheduler and of chance."""
    egeria: dict[str, Any] | None
    """State of egeria's run, or of a rival; its name is that of the files that are there."""


def identify(run: RunFile) -> dict[str, Any]:
    """Return whose a checkpoint is, by the words that a message uses.

    Args:
        run: with what it trains and what it is made with.
    """
    found = {
        "the workload": run.workload.name,
        "the tier": run.tier,
        "the seed": run.seed,
        "the policy": run.policy.name,
        "its settings": run.policy.settings,
        "the device": run.device,
        **{name: run.made_with[name] for name in ("accelerator", "torch")},
        **run.recipe,
    }
    return dict(json.loads(json.dumps(found)))


def save(checkpoint: Checkpoint, directory: Path) -> None:
    """Write a checkpoint in the place of the last one: whoever is killed meanwhile leaves either of them whole."""
    directory.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    # One level only: what `asdict` goes into it copies.
    torch.save(
        {"schema": SCHEMA, **{entry.name: getattr(checkpoint, entry.name) for entry in fields(checkpoint)}}, buffer
    )
    payload = buffer.getbuffer()
    unfinished = directory / f"{FILE_NAME}.new"
    with unfinished.open("wb") as file:
        file.write(hashlib.sha256(payload).digest())  # torch.load does not notice a damaged tensor
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(directory / FILE_NAME)


def load(directory: Path, identity: dict[str, Any]) -> Checkpoint | None:
    """Read the checkpoint of a run; None where there is none.

    Raises:
        UnusableError: it is damaged, of another run, or its journal does not reach so far.
    """
    path = directory / FILE_NAME
    if not path.exists():
        return None
    checkpoint = _read(path)
    changed = [
        f"{name} was {checkpoint.identity.get(name)!r}, now {identity.get(name)!r}"
        for name in sorted(checkpoint.identity.keys() | identity.keys())
        if checkpoint.identity.get(name) != identity.get(name)
    ]
    if changed:
        raise UnusableError(f"is of a run that was made otherwise ({'; '.join(changed)})")
    _check_journal(directory, checkpoint.epoch)
    return checkpoint


def remove(directory: Path) -> None:
    """Remove the checkpoint of a run, and what was written of the next one."""
    for name in (FILE_NAME, f"{FILE_NAME}.new"):
        (directory / name).unlink(missing_ok=True)


def _read(path: Path) -> Checkpoint:
    content = path.read_bytes()
    digest, payload = content[:DIGEST_BYTES], memoryview(content)[DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        raise UnusableError("is torn or damaged")
    try:
        # On the CPU, where states of generators belong; what is loaded from it goes to the device.
        record = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        if record.pop("schema") != SCHEMA:
            raise UnusableError("is of another version of the bench")
        return Checkpoint(**record)
    except (RuntimeError, LookupError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise UnusableError(f"cannot be read ({type(error).__name__}: {str(error).splitlines()[0]})") from error


def _check_journal(directory: Path, epoch: int) -> None:
    """Check that the journal has what the checkpoint stands on: a machine that crashed may have lost lines."""
    try:
        logged = {event["values"].get(EPOCH) for event in read_journal(directory).of("metric")}
    except OSError as error:
        raise UnusableError("has no journal beside it") from error
    if not logged.issuperset(range(1, epoch + 1)):
        raise UnusableError(f"is of epoch {epoch}, and the journal beside it does not reach so far")
