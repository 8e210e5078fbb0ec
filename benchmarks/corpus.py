"""Text that a machine holds (sources and documentation) as the tokens of a byte-pair tokenizer trained on it.

Files count once, by path and by content, and are ordered by the hash of their content; every fiftieth of them is held
out. So the tokens depend on the text alone. They are kept in a folder:

    train.npy, held_out.npy    uint16, with token 0 after each file
    tokenizer.json
    text.json                  the options, numbers of files, bytes and tokens, a hash of all content
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ENDINGS = (".py", ".pyi", ".c", ".h", ".hpp", ".cuh", ".cpp", ".md", ".rst", ".txt")
HELD_OUT_EVERY = 50
SMALLEST_FILE, LARGEST_FILE = 64, 1_000_000  # bytes; larger ones are mostly tables
SAMPLE_BYTES = 80_000_000  # that the tokenizer is trained on
END = 0  # the token after each file
BYTES = 257  # a vocabulary of at least this, and less than twice, needs no tokenizer: tokens are bytes plus 1

Encode = Callable[[list[str]], list[list[int]]]


def machine_folders() -> list[Path]:
    """What usually has sources and documentation."""
    found = [sys.prefix, sysconfig.get_path("stdlib"), "/usr/include", "/usr/local/cuda", "/usr/lib/python3"]
    found += [
        "/usr/share/doc",
        "/usr/share/perl",
        "/usr/lib/gcc",
        "/usr/lib/llvm",
        "/usr/src",
        "/usr/local/include",
        "/opt",
    ]
    return [Path(name) for name in found if Path(name).is_dir()]


@dataclass(frozen=True)
class Source:
    """Which text, and how it becomes tokens."""

    folders: Sequence[Path] = field(default_factory=machine_folders)
    vocabulary: int = 25_344
    max_bytes: int = 1_500_000_000
    sample_bytes: int = SAMPLE_BYTES

    def described(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self), default=str))


@dataclass(frozen=True)
class Text:
    train: np.ndarray  # uint16
    held_out: np.ndarray
    facts: dict[str, Any]


# --- files --------------------------------------------------------------------------------------------------------


def files_under(folders: Sequence[Path]) -> list[str]:
    """Paths with links resolved, each once."""
    found = set()
    for folder in folders:
        for parent, _, names in os.walk(folder):
            found.update(os.path.realpath(os.path.join(parent, name)) for name in names if name.endswith(ENDINGS))
    return sorted(found)


def read_text(path: str) -> tuple[bytes, bytes] | None:
    """A hash of its content and the content, if it is UTF-8 text of a size worth reading."""
    try:
        if not SMALLEST_FILE <= os.stat(path).st_size <= LARGEST_FILE:
            return None
        content = Path(path).read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    return hashlib.blake2b(content, digest_size=16).digest(), content


def read_all(folders: Sequence[Path], max_bytes: int) -> dict[bytes, bytes]:
    """Contents by their hash, in the order of the hashes, up to ``max_bytes``."""
    with ThreadPoolExecutor(64) as pool:
        contents = dict(filter(None, pool.map(read_text, files_under(folders), chunksize=64)))
    kept, size = {}, 0
    for key in sorted(contents):
        size += len(contents[key])
        if size > max_bytes:
            break
        kept[key] = contents[key]
    return kept


# --- tokens -------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Sequence[bytes], vocabulary: int, sample_bytes: int) -> Any:
    """Byte-level BPE, trained on the first ``sample_bytes`` of ``texts``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def sample() -> Iterator[str]:
        size = 0
        for text in texts:
            if size >= sample_bytes:
                return
            size += len(text)
            yield text.decode()

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def encode_bytes(texts: list[str]) -> list[list[int]]:
    return [[byte + 1 for byte in text.encode()] for text in texts]


def encode_with(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


_texts: Sequence[bytes] = ()  # of the workers, which share the memory of the process that they are forked from
_encode: Encode = encode_bytes


def _tokens_of(part: range) -> bytes:
    ids = _encode([_texts[i].decode() for i in part])
    return np.concatenate([np.array([*each, END], dtype=np.uint16) for each in ids]).tobytes()


def tokens(texts: Sequence[bytes], encode: Encode) -> np.ndarray:
    """uint16, by as many processes as there are cores: threads of one wait for each other's memory."""
    global _texts, _encode
    _texts, _encode = texts, encode
    parts = [range(start, min(start + 64, len(texts))) for start in range(0, len(texts), 64)]
    cores = len(os.sched_getaffinity(0))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    as_usual = (signal.SIGTERM, signal.SIG_DFL)  # whatever the handler here does
    with multiprocessing.get_context("fork").Pool(min(cores, len(parts)), signal.signal, as_usual) as pool:
        found = b"".join(pool.imap(_tokens_of, parts))
    del os.environ["TOKENIZERS_PARALLELISM"]
    _texts = ()
    return np.frombuffer(found, dtype=np.uint16)


# --- the folder ---------------------------------------------------------------------------------------------------


def prepare(source: Source, folder: Path) -> Text:
    """The text of ``source``, from ``folder`` where it has been kept there."""
    facts = folder / "text.json"
    if not facts.exists() or json.loads(facts.read_text())["source"] != source.described():
        folder.mkdir(parents=True, exist_ok=True)
        facts.unlink(missing_ok=True)
        described = make(source, folder)
        facts.write_text(json.dumps(described, indent=1) + "\n")
    return load(folder)


def load(folder: Path) -> Text:
    facts = json.loads((folder / "text.json").read_text())
    return Text(np.load(folder / "train.npy"), np.load(folder / "held_out.npy"), facts)


def make(source: Source, folder: Path) -> dict[str, Any]:
    """Writes the tokens and the tokenizer, and returns what there is to say about them."""
    lap = stopwatch()
    contents = read_all(source.folders, source.max_bytes)
    texts = [*contents.values()]
    parts = {"held_out": texts[::HELD_OUT_EVERY], "train": [t for i, t in enumerate(texts) if i % HELD_OUT_EVERY]}
    if not parts["train"]:
        raise SystemExit(f"too few files with text in {', '.join(map(str, source.folders))}: {len(contents)}")
    facts: dict[str, Any] = {
        "source": source.described(),
        "fingerprint": hashlib.sha256(b"".join(contents)).hexdigest()[:16],
        "files": {name: len(texts) for name, texts in parts.items()},
        "bytes": {name: sum(map(len, texts)) for name, texts in parts.items()},
        "seconds": {"reading": round(lap(), 1)},
    }
    encode = encode_bytes
    if source.vocabulary >= 2 * BYTES:
        tokenizer = train_tokenizer(parts["train"], source.vocabulary, source.sample_bytes)
        tokenizer.save(str(folder / "tokenizer.json"))
        encode = partial(encode_with, tokenizer)
    facts["seconds"]["tokenizer"] = round(lap(), 1)
    encoded = {name: tokens(texts, encode) for name, texts in parts.items()}
    for name, array in encoded.items():
        np.save(folder / f"{name}.npy", array)
    facts["tokens"] = {name: len(array) for name, array in encoded.items()}
    facts["seconds"]["encoding"] = round(lap(), 1)
    return facts


def stopwatch() -> Callable[[], float]:
    """Seconds since the last call."""
    last = time.perf_counter()

    def lap() -> float:
        nonlocal last
        before, last = last, time.perf_counter()
        return last - before

    return lap
