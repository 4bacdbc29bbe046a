// Who uses the console: the key, and what the server says of its owner.
import { ApiError, getJson, key, refusals } from "./api.js";
import { read, write } from "./storage.js";
import { effect, signal } from "./ui.js";

export { key } from "./api.js";

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
    me.value = await getJson("/api/me");
    session.value = "signed-in";
  } catch (error) {
    if (!(error instanceof ApiError) || ![401, 403].includes(error.status)) throw error;
    ask(key.value || error.status === 403 ? error.message : "");
  }
}

/** Sign in with a key, kept in this browser with `remember`, else in this tab. Throws ApiError, and keeps nothing then. */
export async function signIn(text, { remember = true } = {}) {
  const cleaned = cleanKey(text);
  if (!/^[\x21-\x7e]+$/.test(cleaned)) {
    throw new ApiError(0, { code: "invalid_key", message: "That is no key: a key has letters, digits and signs, without spaces." });
  }
  const answer = await getJson("/api/me", { key: cleaned });
  forget(key.value);
  write("key", cleaned, { tab: !remember });
  key.value = cleaned;
  me.value = answer;
  reason.value = "";
  session.value = "signed-in";
}

/** Forget the key; the other tabs that use it are signed out too. */
export function signOut() {
  ask("");
}

/** The key in a text that was copied with its surroundings. */
export function cleanKey(text) {
  return text.trim().replace(/^(?:authorization:\s*)?bearer\s+/i, "").replace(/^(?:export\s+)?[A-Z_]*KEY=/, "").replace(/^(["'])(.*)\1$/, "$2");
}

function forget(text) {
  for (const tab of [true, false]) if (read("key", { tab }) === text) write("key", null, { tab });
}

function ask(why) {
  forget(key.value);
  key.value = "";
  me.value = null;
  reason.value = why;
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
  if (isKeys && !read("key", { tab: true }) && (read("key") ?? "") !== key.value) check().catch(() => {});
});
