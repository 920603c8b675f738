"""Decoding of stored values: nothing is lost, scaled or cast silently."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from horovod_spark_runner import DataError, Dataset
from horovod_spark_runner.data.manifest import Column
from horovod_spark_runner.data.prepare.checks import encoding_of
from horovod_spark_runner.data.prepare.columns import DataRequest
from horovod_spark_runner.data.prepare.parquet import open_parquet
from horovod_spark_runner.data.prepare.schema import Roles
from horovod_spark_runner.data.read.arrow_to_numpy import column_to_numpy, empty_rows
from horovod_spark_runner.data.read.decode import (
    RowDecoder,
    UndecodableRow,
    decode_array,
    decode_value,
)
from horovod_spark_runner.data.read.images import _bits, _formats, decode_image, image_dtype
from horovod_spark_runner.storage.filesystem import Location

DEEP = np.linspace(0, 65535, 48, dtype=np.uint16).reshape(6, 8)
SHALLOW = np.linspace(0, 255, 48, dtype=np.uint8).reshape(6, 8)


def encoded(array: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def image_column(dtype: str, *shape: int) -> Column:
    return Column("image", dtype, shape or (6, 8, 1), "image")


def png_of_16_bits(kind: int = 2, channels: int = 3) -> bytes:
    """A PNG of 16 bits per channel and that colour type, which Pillow reads but does not write."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    line = b"\0" + struct.pack(">4H", 65535, 256, 0, 65535)[: 2 * channels] * 8
    header = struct.pack(">IIBBBBB", 8, 6, 16, kind, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(line * 6))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000"])
def test_formats_of_images_are_recognised_and_read(kind: str) -> None:
    data = encoded(np.dstack([SHALLOW] * 3), kind)
    assert encoding_of(data) == "image"
    assert image_dtype("image", data) == "uint8"
    decoded = decode_image(image_column("uint8"), data)
    assert abs(decoded[..., 0].astype(int) - SHALLOW).max() <= (
        20 if kind in ("JPEG", "WEBP") else 1
    )


def test_other_bytes_are_no_images() -> None:
    for data in (b"", b"BM", b"BM" + bytes(range(30)), b"RIFF\0\0\0\0WAVE", DEEP.tobytes()):
        assert encoding_of(data) == "raw"
    assert encoding_of(b"\x93NUMPY\1\0") == "npy"
    assert encoding_of(b"PK\3\4 and so on") == "npz"


def test_a_format_that_pillow_does_not_read_is_refused_by_name() -> None:
    heic = b"\0\0\0\x18ftypheic" + bytes(20)
    assert encoding_of(heic) == "image"
    with pytest.raises(DataError, match="'image'.*ftyp") as raised:
        image_dtype("image", heic)
    assert "BytesIO" not in str(raised.value)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_images_of_16_bits_keep_their_values(kind: str) -> None:
    data = encoded(DEEP, kind)
    assert image_dtype("image", data) == "uint16"
    for dtype in ("uint16", "int32", "float32", "float64"):
        decoded = decode_value(image_column(dtype), data, None, None)
        assert decoded.dtype == dtype
        np.testing.assert_array_equal(decoded[..., 0], DEEP)
    np.testing.assert_array_equal(
        decode_image(image_column("uint16", 6, 8, 3), data), np.dstack([DEEP] * 3)
    )
    half = decode_image(image_column("uint16", 3, 4), data)
    assert abs(half.mean() - DEEP.mean()) < 600
    assert half.max() > 50000


def test_images_of_more_bits_than_their_type_are_refused() -> None:
    with pytest.raises(DataError, match=r"\b8 bits.*dtypes=\{'image': 'uint16'\}"):
        decode_image(image_column("uint8"), encoded(DEEP))
    with pytest.raises(DataError, match=r"\b0\b.*\b65535\b.*\bint16\b.*'int32'"):
        decode_value(image_column("int16"), encoded(DEEP), None, None)
    wide = encoded(np.full((6, 8), 70_000, np.int32), "TIFF")
    with pytest.raises(DataError, match="70000.*uint16"):
        decode_value(image_column(image_dtype("image", wide)), wide, None, None)
    assert decode_value(image_column("int32"), wide, None, None).max() == 70_000
    real = encoded(np.full((6, 8), 0.25, np.float32), "TIFF")
    assert image_dtype("image", real) == "float32"
    assert decode_image(image_column("float32"), real).max() == 0.25
    with pytest.raises(DataError, match=r"dtypes=\{'image': 'float32'\}"):
        decode_value(image_column("uint16"), real, None, None)
    with pytest.raises(DataError, match=r"\b(one|1) channel .*\b4"):
        decode_image(image_column("uint16", 6, 8, 4), encoded(DEEP))


def tiff_of_16_bits() -> bytes:
    """A TIFF of 48 bits per pixel, likewise."""
    import struct

    tags = [(256, 3, 1, 8), (257, 3, 1, 6), (258, 3, 3, 200), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, 300), (277, 3, 1, 3), (278, 3, 1, 6), (279, 4, 1, 288)]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    head = struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4)
    bits = struct.pack("<3H", 16, 16, 16)
    return head.ljust(200, b"\0") + bits.ljust(100, b"\0") + DEEP.tobytes() * 3


def deep_header(kind: str, mark: bytes, at: int, value: int) -> bytes:
    """An image whose header says that its channels are of more than 8 bits."""
    data = bytearray(encoded(np.dstack([SHALLOW] * 3), kind))
    data[data.index(mark) + at] = value
    return bytes(data)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: png_of_16_bits(2, 3), "PNG"),
        (lambda: png_of_16_bits(6, 4), "PNG"),
        (lambda: png_of_16_bits(4, 2), "PNG"),
        (tiff_of_16_bits, "TIFF"),
        (lambda: deep_header("JPEG2000", b"\xff\x4f\xff\x51", 42, 15), "JPEG2000"),
    ],
)
def test_colours_that_pillow_would_cut_to_8_bits_are_refused(
    make: Callable[[], bytes], kind: str, dtype: str
) -> None:
    if kind not in _formats():
        pytest.skip("this Pillow does not read them")
    with pytest.raises(DataError, match=f"'image'.*{kind}.* 8"):
        decode_image(image_column(dtype, 6, 8, 3), make())


def test_avif_of_10_bits_is_known_by_its_header() -> None:
    if "AVIF" not in _formats():
        pytest.skip("this Pillow does not read them")
    whole = encoded(np.dstack([SHALLOW] * 3), "AVIF")
    with Image.open(io.BytesIO(whole)) as image:  # Pillow itself does not open what is patched
        assert _bits(image, whole) == 8
        assert _bits(image, deep_header("AVIF", b"av1C", 6, 0x4C)) == 10


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "JPEG2000", "AVIF"])
@pytest.mark.parametrize("size", [16, 24, 28, 0.5, -40])
def test_what_is_said_of_a_broken_image(kind: str, size: float) -> None:
    if kind not in _formats():
        pytest.skip("this Pillow does not read them")
    whole = encoded(np.dstack([SHALLOW] * 3), kind)
    data = whole[: len(whole) // 2 if size == 0.5 else int(size)]
    column = image_column("uint8", 6, 8, 3)
    with pytest.raises(DataError, match="'image'.*damaged") as raised:
        decode_image(column, data)
    assert "BytesIO" not in str(raised.value)


def returns(value: Any) -> Callable[..., Any]:
    return lambda stored, generator: value


def in_place(image: np.ndarray, generator: Any) -> np.ndarray:
    image //= 2
    return image


def test_transforms_may_work_in_place() -> None:
    decoded = decode_value(image_column("uint8"), encoded(SHALLOW), in_place, None)
    np.testing.assert_array_equal(decoded[..., 0], SHALLOW // 2)
    stored = np.array([4, 6], np.int32)
    stored.flags.writeable = False
    assert decode_value(Column("v", "int32", (2,)), stored, in_place, None).tolist() == [2, 3]
    assert stored.tolist() == [4, 6]
    assert decode_value(Column("v", "int32"), np.int32(8), in_place, None) == 4


@pytest.mark.parametrize(
    ("column", "result", "message"),
    [
        (
            image_column("uint8"),
            SHALLOW[..., None] / 255.0,
            "float64.*'image': 'float32'",
        ),
        (image_column("uint8"), DEEP[..., None], r"0\b.*\b65535\b.*\buint8\b.*'int32'"),
        (image_column("uint8"), -SHALLOW[..., None].astype(int), r"-255\b.*\b0\b.*\buint8"),
        (image_column("uint8"), SHALLOW, r"\(6, 8\).*\(6, 8, 1\)"),
        (image_column("uint8"), None, "None.*return"),
        (Column("v", "int8", (2,)), [1, 200], r"\b1\b.*\b200\b.*\bint8\b"),
        (Column("v", "int32"), 2**40, r"\bint32\b.*'int64'"),
        (Column("v", "int32", (2,)), [[1], [1, 2]], "array"),
        (Column("v", "uint8", (2,), "raw"), [0.5, 1.0], "uint8(?!.*dtypes)"),
        (Column("v", "float32"), 1e300, "float32.*'float64'"),
        (Column("v", "float32"), 1j, "complex128"),
        (Column("v", "float32"), "a", "<U1"),
        (Column("v", "string"), 1, "int64.*string"),
        (Column("v", "string"), b"a", "S1.*string"),
    ],
)
def test_results_that_do_not_fit_are_refused(column: Column, result: Any, message: str) -> None:
    stored = {"image": encoded(SHALLOW), "raw": np.zeros(2)}.get(column.encoding)
    if stored is None:
        stored = np.zeros(column.shape, column.dtype) if not column.is_text else "a"
    with pytest.raises(DataError, match=f"'(image|v)'.*transform.*{message}"):
        decode_value(column, stored, returns(result), None)


@pytest.mark.parametrize(
    ("column", "result", "expected"),
    [
        (Column("v", "float32", (2,)), np.array([1, 2]), [1.0, 2.0]),
        (Column("v", "float32", (2,)), np.array([0.5, 2.0]), [0.5, 2.0]),
        (Column("v", "uint8", (2,)), np.array([0, 255]), [0, 255]),
        (Column("v", "int8", (2,)), np.array([True, False]), [1, 0]),
        (Column("v", "float16"), 0.5, 0.5),
        (Column("v", "string", (2,)), ["a", "bcd"], ["a", "bcd"]),
    ],
)
def test_results_that_fit_get_the_columns_type(column: Column, result: Any, expected: Any) -> None:
    stored = ["", ""] if column.is_text else np.zeros(column.shape)
    decoded = decode_value(column, stored, returns(result), None)
    assert decoded.dtype == column.numpy_dtype
    assert decoded.tolist() == expected


def test_arrays_of_other_types_than_the_first_are_not_cut() -> None:
    def npy(value: Any) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, np.array(value))
        return buffer.getvalue()

    column = Column("m", "int64", (2,), "npy")
    assert decode_value(column, npy([1, 2]), None, None).tolist() == [1, 2]
    with pytest.raises(DataError, match="'m'.*float64.*'float32'"):
        decode_value(column, npy([0.5, 2.5]), None, None)
    real = Column("m", "float32", (2,), "npy")
    assert decode_value(real, npy([0.5, 2.5]), lambda m, rng: m + m.dtype.itemsize, None).tolist()


def odd(value: np.ndarray, generator: Any) -> np.ndarray:
    if value == 7:
        raise ValueError("odd")
    return value


def lower(text: np.ndarray, generator: np.random.Generator | None) -> Any:
    suffix = "" if generator is None else str(generator.integers(2**30))
    return str(text).lower() + suffix


def scale(vector: np.ndarray, generator: np.random.Generator | None) -> np.ndarray:
    vector *= 2
    if generator is not None:
        vector += generator.integers(2**20)
    return vector


def add(number: np.ndarray, generator: np.random.Generator | None) -> Any:
    return number + (0 if generator is None else generator.integers(2**20))


def test_transforms_of_numbers_arrays_and_strings(tmp_path: Path) -> None:
    n = np.arange(40)
    vectors = [[float(i), -float(i)] for i in n]
    table = pa.table({"s": [f"Word{i}" for i in n], "v": vectors, "x": n, "id": n})
    pq.write_table(table, tmp_path / "f.parquet", row_group_size=9)
    request = DataRequest(Roles(("s", "v", "x", "id"), (), labelled=False))
    manifest = open_parquet(Location(tmp_path), request)
    assert manifest is not None
    data = Dataset(manifest, {"s": lower, "v": scale, "x": add})

    def rows(epoch: int, size: int) -> dict[int, tuple[Any, ...]]:
        return {
            int(tag): (text, *vector, number)
            for rank in range(size)
            for batch in data.epoch(epoch, rank=rank, size=size, batch_size=12 // size)
            for text, vector, number, tag in zip(
                batch["s"], batch["v"].tolist(), batch["x"].tolist(), batch["id"], strict=True
            )
        }

    first = rows(0, 1)
    assert rows(0, 3) == rows(0, 1) == first
    assert rows(1, 1) != first
    for tag, (text, a, b, number) in first.items():
        assert text.startswith(f"word{tag}")
        assert a - b == 4 * tag  # one addition for the row
        assert number - tag == a - 2 * tag > 0  # equal generators for all columns of a row
    for _ in range(2):  # what was read is not changed
        shares = list(data.share(rank=0, size=1, batch_size=40))
        whole = {name: np.concatenate([part[name] for part in shares]) for name in "svx"}
        assert whole["s"].tolist() == [f"word{i}" for i in n]
        assert whole["v"].tolist() == [[2 * i, -2 * i] for i in n]
        assert whole["x"].tolist() == n.tolist()
    with pytest.raises(
        DataError, match=r"'x'.*transform.*ValueError: odd .*row 7\b.*row group 0"
    ) as raised:
        list(Dataset(manifest, {"x": odd}).share(rank=0, size=1, batch_size=9))
    chain: list[BaseException | None] = [raised.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__)
    assert any(isinstance(error, ValueError) for error in chain)
    for bad in (np.nan, np.inf):
        message = r"'v'.*transform.*NaN.*row \d.*row group \d"
        spoilt = {"v": returns(np.array([0.0, bad]))}
        with pytest.raises(DataError, match=message):
            list(Dataset(manifest, spoilt).share(rank=0, size=1, batch_size=9))
        with pytest.raises(DataError, match=message):
            list(Dataset(manifest, spoilt).epoch(0, rank=0, size=1, batch_size=9))
        passing = open_parquet(Location(tmp_path), replace(request, allow_nan=True))
        assert passing is not None
        batch = next(Dataset(passing, spoilt).share(rank=0, size=1, batch_size=9))
        assert not np.isfinite(batch["v"][:, 1]).any()
    with pytest.raises(DataError, match=r"'x'.*transform.*(real|float).*row \d.*row group"):
        list(Dataset(manifest, {"x": returns(0.5)}).share(rank=0, size=1, batch_size=9))


def test_a_row_that_cannot_be_decoded_is_numbered() -> None:
    column = image_column("uint8")
    good = encoded(SHALLOW)
    values = np.array([good] * 20 + [good[:30]] + [good] * 9, object)
    decode = RowDecoder([column], {}, allow_nan=False)
    with pytest.raises(UndecodableRow) as raised:
        decode({"image": values}, returns(None))
    assert raised.value.row == 20
    decode.close()


def test_columns_of_strings() -> None:
    column = Column("s", "string", (2,))
    assert column.blank().tolist() == [["", ""]]
    assert Column("v", "float32", (3,)).blank().tolist() == [[0.0, 0.0, 0.0]]
    assert empty_rows(3, column).shape == (3, 2)
    assert column.size > 0
    for kind in (pa.string(), pa.large_string()):
        values = pa.chunked_array([pa.array([["a", "é"], ["", "b"]], pa.list_(kind))])
        assert column_to_numpy(values, column).tolist() == [["a", "é"], ["", "b"]]
        assert column_to_numpy(values.slice(1), column).tolist() == [["", "b"]]
    scalars = pa.chunked_array([pa.array(["a", "b"])])
    assert column_to_numpy(scalars, Column("s", "string")).tolist() == ["a", "b"]
    with pytest.raises(DataError, match=r"'s'.*\bstring\b"):
        column_to_numpy(scalars, Column("s", "float32"))
    with pytest.raises(DataError, match="'s'.*int64.*string"):
        column_to_numpy(pa.chunked_array([[1]]), Column("s", "string"))
    with pytest.raises(DataError, match="'s'.*(real|float).*int32"):
        column_to_numpy(pa.chunked_array([[1.5]]), Column("s", "int32"))
    wrong = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"]).buffers())
    with pytest.raises(DataError, match="'s'.*UTF-8"):
        column_to_numpy(pa.chunked_array([wrong]), Column("s", "string"))


@pytest.mark.parametrize("encoding", ["npy", "raw", "image"])
def test_bytes_that_hold_nan_are_refused(tmp_path: Path, encoding: str) -> None:
    def stored(value: float) -> bytes:
        array = np.array([[0.5, value]], np.float32)
        if encoding == "raw":
            return array.tobytes()
        if encoding == "image":
            return encoded(array, "TIFF")
        buffer = io.BytesIO()
        np.save(buffer, array)
        return buffer.getvalue()

    rows = [stored(1.0), stored(2.0), stored(np.nan), stored(np.inf)]
    pq.write_table(pa.table({"b": rows}), tmp_path / "f.parquet")
    shapes = {"b": (1, 2, 1) if encoding == "image" else (1, 2)}
    dtypes = {"b": "float32"} if encoding == "raw" else {}
    request = DataRequest(Roles(("b",), (), labelled=False), shapes=shapes, dtypes=dtypes)
    refusing = open_parquet(Location(tmp_path), request)
    passing = open_parquet(Location(tmp_path), replace(request, allow_nan=True))
    assert refusing is not None
    assert passing is not None
    # What Spark wrote counts as verified.
    for manifest in (refusing, replace(refusing, verified=True)):
        with pytest.raises(DataError, match=r"'b'.*NaN.*\brow 2\b"):
            list(Dataset(manifest).share(rank=0, size=1, batch_size=4))
    (batch,) = Dataset(passing).share(rank=0, size=1, batch_size=4)
    assert np.isnan(batch["b"]).any()


@pytest.mark.parametrize("damage", ["cut", "header", "packed", "kind", "method"])
def test_damaged_arrays_are_refused_by_name(damage: str) -> None:
    """Each raises another type: of zipfile, zlib, tokenize, and NumPy's own."""
    plain, packed = io.BytesIO(), io.BytesIO()
    np.save(plain, np.arange(50.0))
    np.savez_compressed(packed, arr=np.arange(50.0))
    npy, npz = bytearray(plain.getvalue()), bytearray(packed.getvalue())
    encoding, data = {
        "cut": ("npz", npz[:-30]),
        "header": ("npy", npy.replace(b"(50,)", b"((50,")),
        "packed": ("npz", npz[:60] + b"\xff" * 8 + npz[68:]),
        "kind": ("npz", npy),
        "method": ("npz", npz.replace(b"\x08\x00", b"\x63\x00")),
    }[damage]
    with pytest.raises(DataError, match=f"'a'.*{encoding} array"):
        decode_array("a", encoding, bytes(data))
