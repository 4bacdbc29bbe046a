// The conversations of the side bar: pages of the server's list, and what is done to one of them.
import { ApiError, getJson, key, lastContact, sendJson } from "./api.js";
import { navigate, route } from "./router.js";
import { effect, signal } from "./ui.js";

const PAGE = 50;
const POLL_MS = 4000;

/** The conversations that are loaded, newest first, as the server lists them. */
export const conversations = signal([]);

/** `{state, hasMore, error}`: state is "loading", "ready" or "failed". */
export const listing = signal({ state: "loading", hasMore: false, error: null });

/** The conversations that were deleted in this tab, last first; each can be restored. */
export const deleted = signal([]);

let cursor = null;
let refreshing = null;
let isStale = false;
let timer = 0;

/** Read the newest page again, and of what is loaded below it what may be otherwise. Never throws: `listing` has the error. */
export function refreshConversations() {
  isStale = refreshing !== null;
  refreshing ??= refresh().finally(() => {
    refreshing = null;
    if (isStale) refreshConversations();
  });
  return refreshing;
}

async function refresh() {
  const asked = key.peek();
  try {
    let [page, data, older] = [null, [], []];
    do {
      page = await getJson(`/api/conversations?limit=${PAGE}${page ? `&cursor=${encodeURIComponent(page.next_cursor)}` : ""}`);
      if (asked !== key.peek()) return; // another key's list
      data = [...data, ...page.data];
      const at = conversations.peek().findIndex((entry) => entry.id === data.at(-1)?.id);
      older = page.has_more && at >= 0 ? conversations.peek().slice(at + 1) : [];
    } while (older.some(changes));
    if (!older.length) cursor = page.next_cursor;
    conversations.value = [...data, ...older];
    listing.value = { state: "ready", hasMore: cursor !== null, error: null };
    poll();
  } catch (error) {
    listing.value = { ...listing.peek(), state: "failed", error: said(error) };
  }
}

/** Whether an entry far below has to be read again: it is being answered, or is open and may be. */
function changes(entry) {
  return entry.in_progress || (route.peek().name === "chat" && route.peek().id === entry.id);
}

/** While an answer is generated somewhere, look whether it has ended. */
function poll() {
  clearTimeout(timer);
  if (!conversations.peek().some((entry) => entry.in_progress)) return;
  timer = setTimeout(() => (document.hidden ? poll() : refreshConversations()), POLL_MS);
}

/** The next page below. */
export async function loadOlder() {
  if (cursor === null || listing.peek().state === "loading") return;
  const [asked, begin] = [key.peek(), cursor];
  listing.value = { ...listing.peek(), state: "loading" };
  try {
    const page = await getJson(`/api/conversations?limit=${PAGE}&cursor=${encodeURIComponent(begin)}`);
    if (asked !== key.peek() || begin !== cursor) return;
    cursor = page.next_cursor;
    const known = new Set(conversations.peek().map((entry) => entry.id));
    conversations.value = [...conversations.peek(), ...page.data.filter((entry) => !known.has(entry.id))];
    listing.value = { state: "ready", hasMore: cursor !== null, error: null };
  } catch (error) {
    listing.value = { ...listing.peek(), state: "failed", error: said(error) };
  }
}

/** A page of those that match. Throws ApiError, and AbortError. */
export function search(words, { after = null, signal: abort } = {}) {
  const next = after === null ? "" : `&cursor=${encodeURIComponent(after)}`;
  return getJson(`/api/conversations?limit=${PAGE}&q=${encodeURIComponent(words)}${next}`, { signal: abort });
}

/** Say what has become of a conversation: its entry gets the fields, a new one comes first. */
export function touchConversation(fields) {
  const known = conversations.peek();
  conversations.value = known.some((entry) => entry.id === fields.id)
    ? known.map((entry) => (entry.id === fields.id ? { ...entry, ...fields } : entry))
    : [{ title: "", created_at: Date.now() / 1000, ...fields }, ...known];
}

/** Give it another title. Throws ApiError. */
export async function rename(id, title) {
  touchConversation(await sendJson("PATCH", `/api/conversations/${encodeURIComponent(id)}`, { title }));
}

/** Hide it; `restore` undoes that. Throws ApiError, and shows it again. */
export async function remove(entry) {
  const before = conversations.peek();
  conversations.value = before.filter(({ id }) => id !== entry.id);
  const wasOpen = route.peek().name === "chat" && route.peek().id === entry.id;
  if (wasOpen) navigate("#/chat");
  try {
    await sendJson("DELETE", `/api/conversations/${encodeURIComponent(entry.id)}`);
    deleted.value = [{ ...entry, wasOpen }, ...deleted.peek().filter(({ id }) => id !== entry.id)];
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return;
    conversations.value = before;
    throw error;
  }
}

/** Undo a deletion. Throws ApiError. */
export async function restore(id) {
  const entry = deleted.peek().find((gone) => gone.id === id);
  await sendJson("POST", `/api/conversations/${encodeURIComponent(id)}/restore`);
  deleted.value = deleted.peek().filter((gone) => gone.id !== id);
  await refreshConversations();
  if (entry?.wasOpen) navigate(`#/chat/${encodeURIComponent(id)}`);
}

function said(error) {
  return error instanceof ApiError ? error.message : String(error);
}

effect(() => {
  key.value; // another key has other conversations
  cursor = null;
  conversations.value = [];
  deleted.value = [];
  listing.value = { state: "loading", hasMore: false, error: null };
});
effect(() => {
  // The server is back.
  if (lastContact.value === "answered" && listing.peek().state === "failed") refreshConversations();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && listing.peek().state !== "loading") refreshConversations();
});
