"""Opens checkpoints, whatever their files."""

from __future__ import annotations

from fused_optim.checkpoint.reading.dcp_folder import DcpFolder
from fused_optim.checkpoint.reading.files import SafetensorsFiles, TorchFile, safetensors_files
from fused_optim.checkpoint.reading.source import Source
from fused_optim.checkpoint.storage.folders import Folder, LocalFolder, PathLike, folder_at
from fused_optim.checkpoint.storage.metadata import FILE, unfinished


def open_source(path: PathLike | Folder) -> Source:
    """A folder of torch.distributed.checkpoint, a file of torch.save, or safetensors files. Runs no code of them.

    Raises FileNotFoundError for what is not there or not whole, ValueError for what is none of these or is damaged.
    """
    folder = folder_at(path)
    if folder.size(FILE) is not None:
        return DcpFolder(folder)
    if isinstance(folder, LocalFolder):
        if files := safetensors_files(folder.path):
            return SafetensorsFiles(folder.path, files)
        if folder.path.is_file():
            return TorchFile(folder.path)
    expected = (
        f"expected a folder of torch.distributed.checkpoint with a file {FILE}, which is written last, a file of "
        "torch.save, or safetensors files"
    )
    contents = "found nothing"
    if folder.exists():
        contents = f"found none of them; {unfinished(folder)}"
    raise FileNotFoundError(f"{folder}: {expected}; {contents}")


def open_checked(path: PathLike) -> Source:
    """:func:`open_source`, and compare all that is described with the files."""
    source = open_source(path)
    source.check()
    return source
