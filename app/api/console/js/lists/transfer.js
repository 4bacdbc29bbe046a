// Export to files and import from files.
import { ApiError, getJson, request, sendJson } from "../api.js";
import { refreshConversations } from "../conversations.js";
import { notify } from "../notices.js";
import { navigate } from "../router.js";
import { signal } from "../ui.js";
import { FileError, parseFile, toJsonl } from "./formats.js";

const MAX_FILE_BYTES = 512 * 1024 * 1024;
const TYPES = { jsonl: "application/jsonl", markdown: "text/markdown", csv: "text/csv" };
const SUFFIXES = { jsonl: ".jsonl", markdown: ".md" };

/** What is being exported or imported, in words; null for nothing. */
export const transfer = signal(null);

let running = null;

/** Stop what is running; what was imported stays. */
export function cancelTransfer() {
  running?.abort();
}

/** Download one conversation. Throws ApiError. */
export async function exportOne(entry, form) {
  await run("Exporting…", async (abort) => {
    download([await written(entry.id, form, abort)], `${fileName(entry.title) || entry.id}${SUFFIXES[form]}`, form);
  });
}

/** Download all conversations as one file, newest first. Throws ApiError. */
export async function exportAll(form) {
  await run("Exporting…", async (abort) => {
    const files = [];
    for await (const entry of everyConversation(abort)) {
      files.push(await written(entry.id, form, abort).catch(unlessGone));
      transfer.value = `Exported ${files.length}…`;
    }
    const texts = files.filter((text) => text !== null);
    if (!texts.length) return void notify("There is no conversation to export.");
    const day = new Date().toISOString().slice(0, 10);
    const between = form === "markdown" ? "\n\n---\n\n" : "\n";
    download(texts.flatMap((text) => [text, between]), `conversations-${day}${SUFFIXES[form]}`, form);
  });
}

function unlessGone(error) {
  if (error.status === 404) return null; // deleted meanwhile
  throw error;
}

async function* everyConversation(abort) {
  let after = "";
  for (;;) {
    const page = await patiently(() => getJson(`/api/conversations?limit=100${after}`, { signal: abort }), abort);
    yield* page.data;
    if (!page.has_more) return;
    after = `&cursor=${encodeURIComponent(page.next_cursor)}`;
  }
}

async function written(id, form, abort) {
  const path = `/api/conversations/${encodeURIComponent(id)}`;
  if (form === "jsonl") return toJsonl(await patiently(() => getJson(path, { signal: abort }), abort));
  const read = () => request("GET", `${path}/export?format=markdown`, { signal: abort });
  return (await patiently(read, abort)).text();
}

/** The result of a request, which waits and is made again where the server has a limit on how many a second. */
async function patiently(ask, abort) {
  for (;;) {
    try {
      return await ask();
    } catch (error) {
      if (error.status !== 429 || !error.retryAfterS) throw error;
      await new Promise((resolve) => setTimeout(resolve, error.retryAfterS * 1000));
      abort.throwIfAborted();
    }
  }
}

/** Ask for files, and import them. */
export function chooseFiles() {
  const input = document.createElement("input");
  Object.assign(input, { type: "file", multiple: true, accept: ".json,.jsonl,.zip" });
  input.addEventListener("change", () => importFiles([...input.files]));
  input.click();
}

/** Import the conversations of files. Says how it went; never throws. */
export async function importFiles(files) {
  let ids = [];
  const imported = async (abort) => {
    const all = [];
    for (const file of files) {
      if (file.size > MAX_FILE_BYTES) throw new FileError(`${file.name} is larger than 512 MB; split it.`);
      all.push(...(await parseFile(await file.arrayBuffer(), file.name)));
    }
    for (const [i, conversation] of all.entries()) {
      transfer.value = `Importing ${i + 1} of ${all.length}…`;
      ids.push(await sent(conversation, abort));
    }
  };
  try {
    await run("Reading…", imported);
    if (ids.length === 1) navigate(`#/chat/${encodeURIComponent(ids[0])}`);
    if (ids.length) notify(ids.length === 1 ? "Imported 1 conversation." : `Imported ${ids.length} conversations.`, { kind: "ok" });
  } catch (error) {
    const kept = ids.length ? ` Before that, ${ids.length} were imported.` : "";
    notify(`${error.message}${kept}`, { kind: "error" });
  }
  if (ids.length) await refreshConversations();
}

/** Send one conversation; returns its id. Throws FileError that names its place in the file. */
async function sent({ body, where, places }, abort) {
  try {
    abort.throwIfAborted();
    return (await patiently(() => sendJson("POST", "/api/conversations", body), abort)).id;
  } catch (error) {
    if (!(error instanceof ApiError) || ![400, 413].includes(error.status)) throw error;
    const at = /^messages\[(\d+)\]/.exec(error.param ?? "")?.[1];
    throw new FileError(`${places[at] ?? where}: ${error.message}`);
  }
}

/** Do one transfer at a time, so that a second click does not import a file twice. */
async function run(words, work) {
  if (running) throw new FileError("Another import or export is running; wait for its end, or cancel it.");
  running = new AbortController();
  transfer.value = words;
  try {
    await work(running.signal);
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    running = null;
    transfer.value = null;
  }
}

/** A name of letters and digits of any language. */
export function fileName(title) {
  return [...title.normalize("NFC").replace(/[^\p{L}\p{N}\p{M}]+/gu, "-").replace(/^-+|-+$/g, "")].slice(0, 60).join("");
}

/** Have the browser save a file of these texts. */
export function download(texts, name, form) {
  const url = URL.createObjectURL(new Blob(texts, { type: TYPES[form] }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
