// Who uses the console: the key, and what the server says of its owner.
import { ApiError, getJson, key, refusals } from "./api.js";
import { clear, read, write } from "./storage.js";
import { effect, signal } from "./ui.js";

export { key } from "./api.js";

const PATIENCE_MS = 8000;
const MAX_KEY_CHARS = 1000;
const OPEN_OWNER = "local"; // of everybody, as long as no key is needed

/** The answer of GET /api/me; null while nobody is signed in. */
export const me = signal(null);

/** "checking", "signed-out" or "signed-in". */
export const session = signal("checking");

/** Why a key is asked for, in words; empty for no reason but that there is none. */
export const reason = signal("");

/** Look whom the server takes us for, with the key that is kept or with none. Throws ApiError unless it answers that. */
export async function check() {
  key.value = read("key", { tab: true }) ?? read("key") ?? "";
  try {
    enter(await getJson("/api/me", { signal: AbortSignal.timeout(PATIENCE_MS) }));
  } catch (error) {
    if (!(error instanceof ApiError) || ![401, 403].includes(error.status)) throw error;
    ask(key.value || error.status === 403 ? error.message : "");
  }
}

/** Sign in with a key, kept in this browser with `remember`, else in this tab. Throws ApiError, and keeps nothing then. */
export async function signIn(text, { remember = true } = {}) {
  const cleaned = cleanKey(text);
  if (cleaned.length > MAX_KEY_CHARS) throw new ApiError(0, { code: "invalid_key", message: "That is no key: it is too long." });
  if (!/^[\x21-\x7e]+$/.test(cleaned)) {
    throw new ApiError(0, { code: "invalid_key", message: "That is no key: a key has letters, digits and signs, without spaces." });
  }
  const answer = await getJson("/api/me", { key: cleaned });
  key.value = cleaned;
  enter(answer);
  write("key", cleaned, { tab: !remember });
}

/** What somebody else left in this browser, as drafts, is not for whom the server names now. */
function enter(answer) {
  if (read("owner") !== answer.owner) {
    const names = read("owner") === OPEN_OWNER ? ["key", "question"] : ["key"];
    const kept = names.flatMap((name) => [true, false].map((tab) => [name, read(name, { tab }), { tab }]));
    clear();
    for (const entry of kept) write(...entry);
  }
  write("owner", answer.owner);
  me.value = answer;
  reason.value = "";
  session.value = "signed-in";
}

/** Forget the key and all else of this person; the other tabs that use the key are signed out too. */
export function signOut() {
  me.value = null; // what is awaited is not kept any more
  clear();
  ask("");
}

/** The key in a text that was copied with its surroundings. */
export function cleanKey(text) {
  return text.trim().replace(/^(?:authorization:\s*)?bearer\s+/i, "").replace(/^(?:export\s+)?[A-Z_]*KEY=/, "").replace(/^(["'])(.*)\1$/, "$2");
}

function forget(text) {
  for (const tab of [true, false]) if (read("key", { tab }) === text) write("key", null, { tab });
}

/** Ask for a key. Who was signed in leaves nothing in the page's memory: it is loaded again. */
function ask(why) {
  forget(key.value);
  if (session.peek() === "signed-in") {
    write("reason", why || null, { tab: true });
    session.value = "checking";
    location.reload();
    return;
  }
  key.value = "";
  reason.value = why || (read("reason", { tab: true }) ?? "");
  write("reason", null, { tab: true });
  session.value = "signed-out";
}

let handledRefusals = 0;
effect(() => {
  if (refusals.value === handledRefusals) return;
  handledRefusals = refusals.value;
  const hadKey = key.peek() !== "";
  if (session.peek() === "signed-in") ask(hadKey ? "The server no longer takes your key: it has expired, or was revoked." : "The server asks for a key now.");
});

// Another tab has signed in or out.
window.addEventListener("storage", (event) => {
  const isKeys = event.key === "tokenring.key" || event.key === null;
  if (isKeys && !read("key", { tab: true }) && (read("key") ?? "") !== key.value) location.reload();
});
