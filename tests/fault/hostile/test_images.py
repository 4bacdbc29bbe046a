"""Images that are small to send and large to look at: refused by their headers, undecoded."""

from __future__ import annotations

import base64
import io
import struct
import tracemalloc
import zlib
from typing import Any

import pytest
from PIL import Image

from app.core import ChatRequest
from app.engine.request_limits import ImageLimits, check_images
from app.errors import BadRequest

LIMITS = ImageLimits()


def data_url(image: bytes, kind: str = "png") -> str:
    """The image as it is sent."""
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def request(*urls: str, text: str = "what is this?") -> ChatRequest:
    """A request with these images after a text."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    parts += [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return ChatRequest("chatcmpl-1", "ann", "m", {"messages": [{"role": "user", "content": parts}]}, 0)


async def refusal(*urls: str, limits: ImageLimits = LIMITS) -> tuple[str | None, str]:
    """The param and message that a request with these images is refused with."""
    with pytest.raises(BadRequest) as error:
        await check_images(request(*urls), limits)
    return error.value.param, error.value.message


def picture(width: int, height: int, kind: str, **options: Any) -> bytes:
    """A real image."""
    written = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(written, kind, **options)
    return written.getvalue()


def png(width: int, height: int) -> bytes:
    """A PNG that says it is so large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    data = zlib.compress(b"\0" * 100_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def webp(kind: bytes, head: bytes) -> bytes:
    """A WebP file of one chunk that begins like this."""
    chunk = kind + struct.pack("<I", 100) + head.ljust(100, b"\0")
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


def jpeg(width: int, height: int) -> bytes:
    """A real JPEG whose frame header says it is so large."""
    image = picture(16, 16, "JPEG")
    at = image.index(b"\xff\xc0") + 5
    return image[:at] + struct.pack(">HH", height, width) + image[at + 4 :]


BOMBS = {
    "png": png(30_000, 28_000),
    "the largest png": png(2**31 - 1, 2**31 - 1),
    "jpeg": jpeg(65_535, 65_535),
    "gif": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + picture(8, 8, "GIF")[10:],
    "webp, extended": webp(b"VP8X", b"\0" * 4 + b"\xff\x3f\0" + b"\xff\x3f\0"),
    "webp, lossless": webp(b"VP8L", b"\x2f" + struct.pack("<I", 0x3FFF | 0x3FFF << 14)),
    "webp, lossy": webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", 0x3FFF, 0x3FFF)),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_a_bomb_is_refused_unread(name: str):
    """It is a 400 that names the part and the pixels, at the price of its bytes."""
    url = data_url(BOMBS[name])
    tracemalloc.start()
    try:
        param, message = await refusal(url)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert param == "messages[0].content[1]"
    assert "pixels" in message
    assert "scale it down" in message
    assert peak_bytes < 4 * 1024**2


async def test_many_images_are_counted_before_they_are_read():
    """A thousand images in one body are refused by their number, and below it by their pixels together."""
    small = data_url(png(1000, 1000))
    assert (await refusal(*[small] * 1164))[0] == "messages[0].content[65]"
    param, message = await refusal(*[data_url(png(5000, 5000))] * 10)
    assert (param, "together" in message or "pixels" in message) == ("messages[0].content[6]", True)
    await check_images(request(*[small] * 64), LIMITS)


@pytest.mark.parametrize(
    "url",
    [
        data_url(picture(8, 8, "TIFF"), "tiff"),
        data_url(picture(8, 8, "BMP"), "bmp"),
        data_url(picture(16, 16, "ICO"), "x-icon"),
        data_url(picture(8, 8, "PPM")),
        data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"),
        data_url(b""),
        data_url(b"\x89PNG\r\n\x1a\n"),
        data_url(b"\xff\xd8\xff"),
        data_url(b"GIF89a"),
        data_url(b"RIFF\0\0\0\0WEBPVP8X"),
        data_url(picture(8, 8, "PNG")[:20]),
        "data:image/png;base64,@@@@",
        "data:image/png;base64,QUJD\n",
        "data:image/png,abc",
        "data:",
        "DATA:image/png;base64," + base64.b64encode(png(30_000, 28_000)).decode(),
    ],
)
async def test_what_is_no_ordinary_image_is_refused(url: str):
    """Other formats, cut files and what is no base64 are a 400 that names the part."""
    param, _ = await refusal(url)
    assert param == "messages[0].content[1]"


@pytest.mark.parametrize("kind", ["video_url", "audio_url", "input_audio"])
async def test_other_media_are_refused(kind: str):
    """A video is an image many times over: it is refused by its type."""
    part = {"type": kind, kind: {"url": "data:video/mp4;base64,AAAA"}}
    asked = ChatRequest("chatcmpl-1", "ann", "m", {"messages": [{"role": "user", "content": [part]}]}, 0)
    with pytest.raises(BadRequest) as error:
        await check_images(asked, LIMITS)
    assert (error.value.code, error.value.param) == ("unsupported_content", "messages[0].content[0]")


async def test_ordinary_images_pass():
    """Ten photographs of 12 million pixels, and every format that is served, are what a model is sent."""
    await check_images(request(*[data_url(jpeg(4032, 3024), "jpeg")] * 10), LIMITS)
    pictures = [
        data_url(picture(640, 480, "PNG")),
        data_url(picture(640, 480, "JPEG", progressive=True), "jpg"),
        data_url(picture(640, 480, "GIF"), "gif"),
        data_url(picture(640, 480, "WEBP"), "webp"),
        data_url(picture(640, 480, "WEBP", lossless=True), "webp"),
        data_url(picture(640, 480, "WEBP", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0"), "webp"),
        "data:image/png;charset=utf-8;base64," + base64.b64encode(picture(9, 9, "PNG")).decode(),
    ]
    await check_images(request(*pictures), LIMITS)
    sizes = ImageLimits(pixels=640 * 480, total_pixels=640 * 480 * 7)
    await check_images(request(*pictures), sizes)


async def test_the_limits_are_exact():
    """A pixel more than may be is too many."""
    url = data_url(picture(10, 10, "WEBP"))
    await check_images(request(url, url), ImageLimits(2, 100, 200))
    for limits in (ImageLimits(1, 100, 200), ImageLimits(2, 99, 200), ImageLimits(2, 100, 199)):
        await refusal(url, url, limits=limits)


async def test_text_is_not_looked_at():
    """A request without images costs nothing."""
    await check_images(request(text="data:image/png;base64,@@@@"), ImageLimits(0, 1, 1))
