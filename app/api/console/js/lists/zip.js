// Files in a ZIP archive, as llama.cpp's console makes for several conversations.
const END = 0x06054b50;
const ENTRY = 0x02014b50;
const MAX_BYTES = 512 * 1024 * 1024;
const STORED = 0;
const DEFLATED = 8;

/** The files of an archive, as `{name, bytes}`. Throws Error. */
export async function unzipped(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const end = endOf(view);
  const files = [];
  let [at, total] = [view.getUint32(end + 16, true), 0];
  try {
    for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
      if (view.getUint32(at, true) !== ENTRY) throw new RangeError();
      const [method, packed, size] = [view.getUint16(at + 10, true), view.getUint32(at + 20, true), view.getUint32(at + 24, true)];
      const [nameLength, extra, comment] = [28, 30, 32].map((offset) => view.getUint16(at + offset, true));
      const local = view.getUint32(at + 42, true);
      const data = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
      const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameLength));
      total += size;
      if (total > MAX_BYTES) throw new Error("its files are larger than 512 MB; unpack it, and import them in parts.");
      if (!name.endsWith("/")) files.push({ name, bytes: await inflated(bytes.subarray(data, data + packed), method, size) });
      at += 46 + nameLength + extra + comment;
    }
  } catch (error) {
    throw error instanceof RangeError ? new Error("it is a damaged archive.") : error;
  }
  return files;
}

function endOf(view) {
  for (let at = view.byteLength - 22; at >= 0 && at > view.byteLength - 66_000; at -= 1) {
    if (view.getUint32(at, true) === END) return at;
  }
  throw new Error("it is a damaged archive.");
}

/** `size` bytes at most: what an entry says of itself may be a lie. */
async function inflated(packed, method, size) {
  if (method === STORED) return packed;
  if (method !== DEFLATED) throw new Error("it is packed in a way that is not read here; unpack it first.");
  const reader = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const chunks = [];
  for (let left = size; ; ) {
    const { done, value } = await reader.read().catch(() => {
      throw new RangeError();
    });
    if (done) break;
    left -= value.length;
    if (left < 0) throw new RangeError();
    chunks.push(value);
  }
  return new Uint8Array(await new Blob(chunks).arrayBuffer());
}
