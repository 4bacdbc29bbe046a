"""Limits on a rendered request: its tokens, and the decoded size of its images.

An image's size is read from its header before anything decodes it: 21 KB of PNG can be 860 MB of pixels.
What is not a PNG, JPEG, WebP or GIF is refused, for other formats have other decoders, and so are video and
audio, which this server does not serve.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.core import ChatRequest, ModelCard
from app.errors import BadRequest, ContextOverflow

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

_DATA_URL = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_NO_IMAGES = ("video_url", "audio_url", "input_audio", "file")


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The limits of one request, including the conversation that it continues."""

    images: int = 64
    pixels: int = 32 * 1024**2
    total_pixels: int = 128 * 1024**2


def answer_budget(prompt_tokens: int, max_tokens: int | None, model: ModelCard) -> int:
    """The tokens that the answer may have.

    Without `max_tokens` it is what the context leaves. Raises ContextOverflow, which says
    by how much prompt and answer are too long together.
    """
    left_tokens = min(model.context_length, model.max_prompt_tokens + 1) - prompt_tokens
    requested = 1 if max_tokens is None else max_tokens
    if requested > left_tokens:
        answer = "" if max_tokens is None else f" and max_tokens asks for {max_tokens} more"
        limit = prompt_tokens + left_tokens
        raise ContextOverflow(
            f"This model holds {limit} tokens; the messages take {prompt_tokens}{answer}:"
            f" {requested - left_tokens} too many. Shorten the messages"
            f"{' or lower max_tokens' if max_tokens is not None else ''}.",
            param="messages",
        )
    return left_tokens if max_tokens is None else max_tokens


def check_text_only(request: ChatRequest) -> None:
    """Refuse content parts other than text. Raises BadRequest naming the part."""
    for where, content_part in _content_parts(request):
        if (kind := content_part.get("type")) != "text":
            raise BadRequest(
                f"The model {request.model!r} reads text only; remove the {kind} part.",
                code="unsupported_content",
                param=where,
            )


async def check_images(request: ChatRequest, limits: ImageLimits) -> None:
    """Refuse what would take too much memory to look at. Raises BadRequest naming the part."""
    parts = list(_images(request))
    if not parts:
        return
    if len(parts) > limits.images:
        where, _ = parts[limits.images]
        raise BadRequest(
            f"There are {len(parts)} images, and a request may have {limits.images} with its conversation;"
            " send fewer.",
            param=where,
        )
    await asyncio.to_thread(_check, parts, limits)


def _content_parts(request: ChatRequest) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of all messages that are no plain text, each with its place in the request."""
    for i, message in enumerate(request.body["messages"]):
        content = message.get("content")
        for j, content_part in enumerate(content if isinstance(content, list) else ()):
            yield f"messages[{i}].content[{j}]", content_part


def _images(request: ChatRequest) -> Iterator[tuple[str, str]]:
    """The place of each image in the request, and its URL. Raises BadRequest for other media."""
    for where, content_part in _content_parts(request):
        if content_part.get("type") in _NO_IMAGES:
            raise BadRequest(
                f"{where}: audio, video and files are not served; send text and images.",
                code="unsupported_content",
                param=where,
            )
        if content_part.get("type") == "image_url":
            image = content_part.get("image_url")
            url = image.get("url") if isinstance(image, dict) else image
            if not isinstance(url, str):
                raise BadRequest(f"{where}.image_url.url must be a string.", param=where)
            yield where, url


def _check(parts: list[tuple[str, str]], limits: ImageLimits) -> None:
    total = 0
    for where, url in parts:
        if url[:5].lower() != "data:":  # fetched, where the operator allows it, or refused
            continue
        width, height = _size(_decoded(url, where), where)
        pixels = width * height
        if pixels > limits.pixels:
            raise BadRequest(
                f"{where}: the image has {width} x {height} pixels, and {limits.pixels:,} are taken at most;"
                " scale it down.",
                param=where,
            )
        total += pixels
        if total > limits.total_pixels:
            raise BadRequest(
                f"{where}: with this image there are {total:,} pixels, and {limits.total_pixels:,} are taken"
                " at most in one request with its conversation; scale the images down, or send fewer.",
                param=where,
            )


def _decoded(url: str, where: str) -> bytes:
    head = _DATA_URL.match(url)
    if head is None:
        raise _unreadable(where, "its data: URL is not `data:image/…;base64,…`")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise _unreadable(where, "it is not base64") from None


def _size(image: bytes, where: str) -> tuple[int, int]:
    """Width and height, from the header alone."""
    is_webp = image[:4] == b"RIFF" and image[8:12] == b"WEBP"
    size = _webp_size(image) if is_webp else _pillow_size(image)
    if size is None:
        raise _unreadable(where, "it is no PNG, JPEG, WebP or GIF that can be read")
    return size


def _webp_size(image: bytes) -> tuple[int, int] | None:
    """The width and height by RFC 9649: Pillow would make the whole canvas to tell them."""
    kind, head = image[12:16], image[20:30]
    if len(head) < 10:
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(head[4:7], "little"), 1 + int.from_bytes(head[7:10], "little")
    if kind == b"VP8L" and head[0] == 0x2F:
        bits = int.from_bytes(head[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and head[3:6] == b"\x9d\x01\x2a":
        width, height = int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little")
        return width & 0x3FFF, height & 0x3FFF
    return None


def _pillow_size(image: bytes) -> tuple[int, int] | None:
    # Not Image.open: it tries sixty formats, and warns of large images on standard error.
    from PIL.GifImagePlugin import GifImageFile
    from PIL.JpegImagePlugin import JpegImageFile
    from PIL.PngImagePlugin import PngImageFile

    readers: Mapping[bytes, Callable[[io.BytesIO], ImageFile]] = {
        b"\x89PNG": PngImageFile,
        b"\xff\xd8\xff": JpegImageFile,
        b"GIF8": GifImageFile,
    }
    reader = next((readers[magic] for magic in readers if image.startswith(magic)), None)
    if reader is None:
        return None
    try:
        with reader(io.BytesIO(image)) as opened:
            return opened.size
    except (OSError, SyntaxError, ValueError, IndexError, KeyError, TypeError, EOFError):
        return None


def _unreadable(where: str, why: str) -> BadRequest:
    return BadRequest(f"{where}: the image cannot be read: {why}.", param=where)
