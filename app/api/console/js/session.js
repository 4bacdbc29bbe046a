// Who uses the console: the key, and what the server says of its owner.
import { ApiError, getJson, key, refusals } from "./api.js";
import { read, removeAllBut, write } from "./storage.js";
import { effect, signal } from "./ui.js";

export { key } from "./api.js";

/** The answer of GET /api/me; null while nobody is signed in. */
export const me = signal(null);

/** "checking", "signed-out" or "signed-in". */
export const session = signal("checking");

/** Why a key is asked for, in words; empty for no reason but that there is none. */
export const reason = signal("");

const resets = [];
/** Whose drafts, settings and chats this tab has; null for nobody's. */
let ofOwner = read("owner");

/** Call `reset` at a sign-out, and when another owner signs in than was here before: nobody sees another's texts. */
export function onOtherOwner(reset) {
  resets.push(reset);
}

function leave() {
  ofOwner = null;
  for (const reset of resets) reset();
}

function enter(answer) {
  if (ofOwner !== answer.owner) {
    if (read("owner") !== answer.owner) removeAllBut(["key", "theme"]);
    leave();
  }
  ofOwner = answer.owner;
  write("owner", ofOwner);
  me.value = answer;
  session.value = "signed-in";
}

/** Look whom the server takes us for, with the key that is kept or with none. Throws ApiError unless it answers that. */
export async function check() {
  key.value = read("key", { tab: true }) ?? read("key") ?? "";
  try {
    enter(await getJson("/api/me"));
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
  reason.value = "";
  enter(answer);
}

/** Forget the key and all that was written here; the other tabs that use the key are signed out too. */
export function signOut() {
  ask("");
  removeAllBut(["key", "theme"]);
  leave();
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
