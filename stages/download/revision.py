"""What a source holds now, as one string that changes if and only if its content does.

A commit on the Hugging Face hub; a hash over the contents for ModelScope and files; the maker's version for builtins.
"""

from __future__ import annotations

from stages.download.builtin.catalog import BUILTINS
from stages.download.config import DownloadConfig
from stages.download.local import hash_files, list_files
from stages.download.selection import select_files
from stages.download.source import BuiltinSource, FileSource, HubSource


def resolve_revision(config: DownloadConfig) -> str:
    """Look at the source; may ask the network. The hubs' libraries are imported only if needed.

    Raises DownloadError, TransientError, ModelError or DataError.
    """
    match config.source:
        case BuiltinSource(name):
            return str(BUILTINS[name].version)
        case FileSource(path):
            files = list_files(path)
            return hash_files({name: files[name] for name in select_files(config, list(files))})
        case HubSource() as source:
            return _resolve_at_hub(source)


def _resolve_at_hub(source: HubSource) -> str:
    if source.hub == "hf":
        from stages.download import hub

        return hub.resolve_revision(source)
    from stages.download import modelscope

    return modelscope.resolve_content(source)
