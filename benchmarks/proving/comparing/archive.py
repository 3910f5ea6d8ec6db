"""The journals of a record: folders below RECORD/journals while they are written, one compressed archive when kept."""

import io
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.proving import RefusedError

JOURNALS = "journals"
SUFFIX = ".tar.xz"


@contextmanager
def opened(results: Path) -> Iterator[Path]:
    """Yield a folder to read runs from.

    Args:
        results: a folder of runs, which is yielded as it is; or an archive, a record, or the journals of a record
            (RECORD/journals), which are unpacked for as long as the block lasts.

    Raises:
        RefusedError: the archive is damaged.
    """
    candidates = (results, results / f"{JOURNALS}{SUFFIX}", results.with_name(results.name + SUFFIX))
    archive = next((path for path in candidates if path.name.endswith(SUFFIX) and path.is_file()), None)
    if archive is None or (results.name == JOURNALS and results.is_dir()):
        yield results
        return
    with tempfile.TemporaryDirectory() as folder:
        _unpack(archive, Path(folder))
        yield Path(folder)


def refuse_to_write(results: Path) -> None:
    """Check that runs are not made into the journals of a record.

    Raises:
        RefusedError: they would be.
    """
    if results.name == JOURNALS and results.with_name(f"{JOURNALS}{SUFFIX}").is_file():
        raise RefusedError(
            f"Runs are made in a folder of results, and {results} is the archive of a record. Unpack it elsewhere "
            f"(tar xf {results}{SUFFIX} -C FOLDER), give that as --results, and write the record from there with --out."
        )


@contextmanager
def unpacked(record: Path) -> Iterator[Path]:
    """Yield the folder RECORD/journals to write to; it becomes the archive when the block ends without an error.

    What the archive had before lies in the folder. After an error the folder stays, and the next call continues with
    it. The same journals give the same archive, byte by byte.

    Raises:
        RefusedError: the archive is damaged.
    """
    folder, archive = record / JOURNALS, record / f"{JOURNALS}{SUFFIX}"
    if archive.is_file() and not folder.is_dir():
        _unpack(archive, folder)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder
    _pack(folder, archive)
    shutil.rmtree(folder)


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        raise RefusedError(
            f"{archive} must be an archive of journals, and cannot be read: {error}. Take it from the repository again."
        ) from error


def _pack(folder: Path, archive: Path) -> None:
    unfinished = archive.with_name(f"{archive.name}.new")
    with tarfile.open(unfinished, "w:xz", preset=9) as packed:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            content = path.read_bytes()
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())  # no owner, no time
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    unfinished.replace(archive)
