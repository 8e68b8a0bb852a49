"""Downloads models named ORG/NAME from the Hugging Face hub into its cache, which other tools share.

Only the files of a repository that a server reads are fetched, and each failure is reported in one sentence.
`huggingface_hub` does the transfer, and defines the cache and its variables (HF_TOKEN, HF_ENDPOINT, HF_HOME,
HF_HUB_OFFLINE). Complete files stay for the next attempt, incomplete ones do not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType

from eyas.common.errors import ConfigError
from eyas.common.model_folder import HubName, on_hub, read_json_object
from eyas.engine.models.table import check_architecture
from eyas.engine.models.unserved import MISTRALS_OWN

_SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
_TEMPLATES = "additional_chat_templates/*.jinja"
_WEIGHTS = "*.safetensors"
_TWICE = "consolidated*.safetensors"  # the same weights again, by other names
_OTHER_WEIGHTS = {"GGUF": "*.gguf", "PyTorch": "*.bin", "pickled": "*.pt*", "ONNX": "*.onnx"}
_MORE_FILES = 256  # descriptors that threads may open while the open ones are listed
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def model_folder(model: str, flag: str = "model", *, weights: bool = True) -> str:
    """The folder of a model: `model` itself unless it is ORG/NAME[@REVISION], which is fetched.

    `weights`: with the safetensors files. Raises ConfigError, which names `flag`, if it cannot be fetched. A
    signal during the download ends the process.
    """
    named = on_hub(model)
    if named is None:
        return model
    with _explained(named, flag), _ended_at_once(named):
        from huggingface_hub import snapshot_download

        listed = _listed(named)
        sizes = listed if listed is not None else _in_cache(named)
        files = chosen(sizes, weights=weights)
        if sizes and weights:
            _check_weights(named, files, sizes, flag)
        if listed is not None:
            _check_space(named, {name: listed[name] for name in files}, flag)
            if weights and flag == "model":
                _check_architecture(named)
        return str(
            snapshot_download(
                named.name,
                revision=named.revision,
                allow_patterns=files or None,
                local_files_only=listed is None,
            )
        )


def chosen(names: Iterable[str], *, weights: bool) -> list[str]:
    """Selects a repository's files that a server reads; its weights only if `weights`."""
    root = [name for name in names if "/" not in name]
    small = [name for name in root if any(fnmatch(name, pattern) for pattern in _SMALL)]
    small += [name for name in names if fnmatch(name, _TEMPLATES)]
    heavy = [name for name in root if fnmatch(name, _WEIGHTS)]
    heavy = [name for name in heavy if not fnmatch(name, _TWICE)] or heavy
    return sorted(small + heavy) if weights else sorted(small)


def _listed(named: HubName) -> dict[str, int] | None:
    """The files that the hub lists, with their sizes in bytes; None if the hub cannot be reached, but the
    model may be in the cache.
    """
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        about = HfApi().model_info(named.name, revision=named.revision, files_metadata=True)
    except (httpx.TransportError, OfflineModeIsEnabled):
        if not _snapshots(named).is_dir():
            raise
        return None
    return {file.rfilename: file.size or 0 for file in about.siblings or ()}


def _in_cache(named: HubName) -> dict[str, int]:
    """The files, with sizes, of the revision fetched last; {} if an older tool fetched it without the
    list.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(named.name, revision=named.revision)
    except CachedRepoTreeNotFoundError:
        return {}
    return {file.path: file.size for file in tree}


def _snapshots(named: HubName) -> Path:
    from huggingface_hub import constants

    return (
        Path(constants.HF_HUB_CACHE).expanduser() / f"models--{named.name.replace('/', '--')}" / "snapshots"
    )


def _check_architecture(named: HubName) -> None:
    """Raises ConfigError, before the weights are fetched, for a model that cannot be served."""
    from huggingface_hub import hf_hub_download

    path = hf_hub_download(named.name, "config.json", revision=named.revision)
    check_architecture(read_json_object(Path(path), "model"), named.name)


def _check_weights(named: HubName, files: list[str], all_files: Mapping[str, int], flag: str) -> None:
    if "config.json" not in files:
        own = f", but {MISTRALS_OWN}" if "params.json" in files else ""
        raise ConfigError(f"--{flag}: {named.name} has no config.json on the hub{own}", param=flag)
    if any(fnmatch(name, _WEIGHTS) for name in files):
        return
    others = [kind for kind, pattern in _OTHER_WEIGHTS.items() if any(fnmatch(n, pattern) for n in all_files)]
    only = f", only {' and '.join(others)} files" if others else ""
    text = f"{named.name} has no safetensors files on the hub{only}, and no other weights are fetched"
    raise ConfigError(f"--{flag}: {text}", param=flag)


def _check_space(named: HubName, sizes: Mapping[str, int], flag: str) -> None:
    """Raises ConfigError if the disk has no space for the files that are not in the cache yet."""
    from huggingface_hub import try_to_load_from_cache

    missing = [
        size
        for name, size in sizes.items()
        if not isinstance(try_to_load_from_cache(named.name, name, revision=named.revision), str)
    ]
    folder = _snapshots(named)
    existing = next(parent for parent in folder.parents if parent.is_dir())
    if (free := shutil.disk_usage(existing).free) < sum(missing):
        raise _disk_full(named, flag, f"{_size(sum(missing))} are to come, and {_size(free)} are free")


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1e8 else f"{count / 2**20:.1f} MiB"


def _disk_full(named: HubName, flag: str, why: str) -> ConfigError:
    cache = _snapshots(named).parents[1]
    text = f"{named.name} does not fit on the disk of {cache}: {why} (HF_HOME names another place)"
    return ConfigError(f"--{flag}: {text}", param=flag)


@contextlib.contextmanager
def _explained(named: HubName, flag: str) -> Iterator[None]:
    """Converts the errors of a download to ConfigErrors of one sentence."""
    import httpx
    from huggingface_hub import errors

    def refused(text: str) -> ConfigError:
        return ConfigError(f"--{flag}: {named.name} {text}", param=flag)

    try:
        yield
    except ConfigError:
        raise
    except errors.GatedRepoError as error:
        raise refused(f"is gated: accept its terms on the hub, and {_token()} may read it") from error
    except errors.RepositoryNotFoundError as error:
        text = f"is no folder here, and no model on the hub ({_endpoint()}) that {_token(bare=True)} can see"
        raise refused(text) from error
    except errors.RevisionNotFoundError as error:
        raise refused(f"has no revision {named.revision} on the hub") from error
    except errors.OfflineModeIsEnabled as error:
        text = f"is no folder here and not in the cache ({_snapshots(named).parents[1]})"
        raise refused(f"{text}, and HF_HUB_OFFLINE forbids to fetch it") from error
    except errors.LocalEntryNotFoundError as error:
        raise refused(f"is not whole in the cache, {_unreachable()}") from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        why = f"the hub ({_endpoint()}) refuses it: {code} {error.response.reason_phrase}"
        advice = f" (is the token right that {_token()} has?)" if code in (401, 403) else ""
        raise refused(f"cannot be fetched, {why}{advice}") from error
    except errors.HFValidationError as error:
        raise refused("is no folder here, and no name that the hub could know") from error
    except httpx.TransportError as error:
        raise refused(f"is no folder here, {_unreachable()}: {type(error).__name__}") from error
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(named, flag, str(error.strerror)) from error
        raise refused(f"cannot be fetched: {str(error).splitlines()[0]}") from error


def _token(*, bare: bool = False) -> str:
    from huggingface_hub import get_token

    if bare:
        return "its token (HF_TOKEN)" if get_token() else "anyone (a private one needs HF_TOKEN)"
    return "see that the token in HF_TOKEN" if get_token() else "set HF_TOKEN to a token that"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _unreachable() -> str:
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "and HF_HUB_OFFLINE forbids to fetch the rest"
    return f"and the hub cannot be reached ({_endpoint()})"


@contextlib.contextmanager
def _ended_at_once(named: HubName) -> Iterator[None]:
    """Makes SIGINT and SIGTERM end the process immediately, and remove the incomplete files that it has open.

    The library would wait for its threads, which may have gigabytes to read, or a peer that does not respond.
    """

    def end(number: int, _: FrameType | None) -> None:
        what = f"fetching {named.name} was interrupted; files that arrived whole stay for the next try"
        os.write(2, f"\neyas: {what}\n".encode())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the errors of threads that are cut off
        opened = max(map(int, os.listdir("/proc/self/fd"))) + _MORE_FILES
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # threads open no further ones
        for descriptor in range(opened):
            with contextlib.suppress(OSError):
                if (part := Path(f"/proc/self/fd/{descriptor}").readlink()).suffix == ".incomplete":
                    part.unlink()
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # others cannot set signal handlers
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
