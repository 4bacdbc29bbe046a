// The list of conversations in the side bar.
import {
  conversations, deleted, listing, loadOlder, refreshConversations, remove, rename, restore, search,
} from "../conversations.js";
import { notify } from "../notices.js";
import { route } from "../router.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { MenuButton } from "./menu.js";
import { cancelTransfer, chooseFiles, exportAll, exportOne, transfer } from "./transfer.js";
import { highlighted } from "./words.js";

const MAX_TITLE = 200;
const SEARCH_AFTER_MS = 200;

const attempt = (work) => work().catch((error) => notify(error.message, { kind: "error" }));

/** The side bar's list: search, groups by day, and what can be done to each conversation. */
export function ConversationList() {
  const [words, setWords] = useState("");
  const found = useSearch(words);
  const box = useRef(null);
  useEffect(() => void refreshConversations(), []);
  const gone = new Set(deleted.value.map(({ id }) => id));
  const entries = (found?.data ?? conversations.value).filter(({ id }) => !gone.has(id));
  const state = found ?? listing.value;
  return html`<section class="conversation-list" aria-label="Conversations" ref=${box}>
    <div class="list-head">
      <input type="search" placeholder="Search" aria-label="Search conversations" dir="auto" maxlength="1000"
        value=${words} onInput=${(event) => setWords(event.target.value)}
        onKeyDown=${(event) => event.key === "ArrowDown" && focusLink(box.current, 0, event)} />
      <${MenuButton} label="Import and export" items=${[
        { label: "Import…", run: chooseFiles },
        { label: "Export all as JSONL", run: () => attempt(() => exportAll("jsonl")) },
        { label: "Export all as Markdown", run: () => attempt(() => exportAll("markdown")) },
      ]}>⋯<//>
    </div>
    <${Transfer} />
    <p class="visually-hidden" role="status">${found?.isDone ? countOf(found) : ""}</p>
    <div class="list-scroll" onKeyDown=${(event) => onKey(event, box.current)}>
      ${grouped(entries).map((group) => html`<${Group} key=${group.name} group=${group} words=${found ? words : ""} />`)}
      <${Rest} state=${state} isEmpty=${!entries.length} isSearch=${found !== null} />
      ${!found && html`<${Deleted} />`}
    </div>
  </section>`;
}

function countOf(found) {
  if (found.data.length === 1) return "1 conversation found";
  return `${found.data.length}${found.hasMore ? " or more" : ""} conversations found`;
}

/** The conversations that match, a page at a time; null while nothing is searched for. */
function useSearch(words) {
  const [found, setFound] = useState(null);
  const query = words.trim();
  useEffect(() => {
    if (!query) return void setFound(null);
    const abort = new AbortController();
    const read = async (data, after) => {
      try {
        const page = await search(query, { after, signal: abort.signal });
        if (abort.signal.aborted) return;
        const more = page.has_more ? () => read([...data, ...page.data], page.next_cursor) : null;
        setFound({ state: "ready", isDone: true, data: [...data, ...page.data], hasMore: page.has_more, more });
      } catch (error) {
        if (abort.signal.aborted) return;
        setFound({ state: "failed", data, hasMore: false, error: error.message, more: () => read(data, after) });
      }
    };
    const timer = setTimeout(read, SEARCH_AFTER_MS, [], null);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [query, conversations.value.length]);
  return query ? found ?? { state: "loading", data: [], hasMore: false } : null;
}

/** Runs of conversations that began on the same day, or the same month where that is long ago. */
export function grouped(entries, now = new Date()) {
  const groups = [];
  for (const entry of entries) {
    const name = dayOf(entry.created_at, now);
    if (groups.at(-1)?.name !== name) groups.push({ name, entries: [] });
    groups.at(-1).entries.push(entry);
  }
  return groups;
}

const WEEKDAY = new Intl.DateTimeFormat(navigator.languages, { weekday: "long" });
const MONTH = new Intl.DateTimeFormat(navigator.languages, { month: "long", year: "numeric" });

function dayOf(unixS, now) {
  const day = new Date(unixS * 1000);
  const midnight = (of) => new Date(of.getFullYear(), of.getMonth(), of.getDate());
  const age = Math.round((midnight(now) - midnight(day)) / 86_400_000);
  if (age <= 0) return "Today";
  if (age === 1) return "Yesterday";
  return age < 7 ? WEEKDAY.format(day) : age < 30 ? "Last 30 days" : MONTH.format(day);
}

function Group({ group, words }) {
  return html`<h3>${group.name}</h3>
    <ul>${group.entries.map((entry) => html`<${Entry} key=${entry.id} entry=${entry} words=${words} />`)}</ul>`;
}

function Highlighted({ text, words }) {
  return highlighted(text, words).map((run) => (run.isHit ? html`<mark>${run.text}</mark>` : run.text));
}

function Entry({ entry, words }) {
  const [isRenaming, setRenaming] = useState(false);
  const item = useRef(null);
  const isCurrent = route.value.name === "chat" && route.value.id === entry.id;
  const title = entry.title || "Untitled";
  const endRename = (andFocus) => {
    setRenaming(false);
    if (andFocus) requestAnimationFrame(() => item.current?.querySelector("a")?.focus());
  };
  useEffect(() => {
    if (isCurrent) item.current?.scrollIntoView({ block: "nearest" });
  }, [isCurrent]);
  const actions = { rename: () => setRenaming(true), delete: () => removeWithUndo(entry, item.current) };
  const onKeys = (event) => {
    const act = { F2: actions.rename, Delete: actions.delete }[event.key];
    if (!act || event.target.tagName !== "A") return;
    event.preventDefault();
    act();
  };
  if (isRenaming) return html`<li ref=${item}><${Rename} entry=${entry} end=${endRename} /></li>`;
  return html`<li ref=${item} class=${isCurrent ? "current" : ""} onKeyDown=${onKeys}>
    <a href="#/chat/${encodeURIComponent(entry.id)}" dir="auto" title=${title} aria-current=${isCurrent ? "page" : null}>
      <${Highlighted} text=${title} words=${words} />
      ${words && entry.excerpt && entry.excerpt !== title && html`<span class="match" dir="auto"><${Highlighted} text=${entry.excerpt} words=${words} /></span>`}
      ${entry.in_progress && html`<span class="live" role="img" aria-label=", being answered" title="Being answered"></span>`}
    </a>
    <${MenuButton} label="Actions for ${title}" items=${[
      { label: "Rename", run: actions.rename },
      { label: "Export as JSONL", run: () => attempt(() => exportOne(entry, "jsonl")) },
      { label: "Export as Markdown", run: () => attempt(() => exportOne(entry, "markdown")) },
      { label: "Delete", kind: "danger", run: actions.delete },
    ]}>⋯<//>
  </li>`;
}

function Rename({ entry, end }) {
  const field = useRef(null);
  const isOver = useRef(false);
  useEffect(() => field.current.select(), []);
  const finish = (isKept, andFocus) => {
    if (isOver.current) return;
    isOver.current = true;
    const title = [...field.current.value.trim()].slice(0, MAX_TITLE).join("");
    if (isKept && title && title !== entry.title) attempt(() => rename(entry.id, title));
    end(andFocus);
  };
  const onKey = (event) => {
    event.stopPropagation();
    if (event.isComposing) return; // Enter ends a word of Chinese or Japanese here
    if (event.key === "Enter") finish(true, true);
    if (event.key === "Escape") finish(false, true);
  };
  return html`<input class="rename" ref=${field} dir="auto" aria-label="New title" maxlength=${MAX_TITLE * 2}
    defaultValue=${entry.title} value=${entry.title} onKeyDown=${onKey} onBlur=${() => finish(true, false)} />`;
}

async function removeWithUndo(entry, item) {
  const [list, links] = [item.closest(".conversation-list"), linksOf(item.closest(".conversation-list"))];
  const at = links.indexOf(item.querySelector("a"));
  await attempt(async () => {
    await remove(entry);
    notify(`Deleted “${shortened(entry.title)}”.`, { action: { label: "Undo", run: () => attempt(() => restore(entry.id)) } });
  });
  (linksOf(list)[at] ?? linksOf(list).at(-1) ?? list.querySelector("input")).focus();
}

function shortened(title) {
  const letters = [...title];
  return letters.length > 40 ? `${letters.slice(0, 39).join("")}…` : title;
}

/** What stands below the entries: older ones, or why there are none. */
function Rest({ state, isEmpty, isSearch }) {
  const button = useRef(null);
  const more = state.more ?? loadOlder;
  const latest = useRef(more);
  latest.current = more;
  useEffect(() => {
    if (!state.hasMore || !button.current) return;
    const look = ([{ isIntersecting }]) => isIntersecting && latest.current();
    const seen = new IntersectionObserver(look, { root: button.current.closest(".side"), rootMargin: "300px" });
    seen.observe(button.current);
    return () => seen.disconnect();
  }, [state.hasMore, state.data?.length, conversations.value.length]);
  if (state.state === "failed") {
    return html`<p class="list-note" role="alert">${state.error} <button type="button" onClick=${state.more ?? refreshConversations}>Try again</button></p>`;
  }
  if (state.hasMore) return html`<button type="button" class="older" ref=${button} onClick=${more}>Show older</button>`;
  if (state.state === "loading") return html`<p class="list-note">${isSearch ? "Searching…" : "Loading…"}</p>`;
  if (!isEmpty) return null;
  return html`<p class="list-note">${isSearch ? "No conversation has these words." : "Your conversations will be listed here."}</p>`;
}

function Deleted() {
  if (!deleted.value.length) return null;
  return html`<details class="deleted">
    <summary>Deleted in this tab (${deleted.value.length})</summary>
    <ul>${deleted.value.map((entry) => html`<li key=${entry.id}>
      <span dir="auto">${entry.title}</span>
      <button type="button" aria-label="Restore ${entry.title}" onClick=${() => attempt(() => restore(entry.id))}>Restore</button>
    </li>`)}</ul>
  </details>`;
}

function Transfer() {
  if (!transfer.value) return null;
  return html`<p class="list-note" role="status">${transfer.value}
    <button type="button" onClick=${cancelTransfer}>Cancel</button></p>`;
}

const linksOf = (list) => [...list.querySelectorAll("li > a")];

function focusLink(list, at, event) {
  const link = linksOf(list).at(at);
  if (!link) return;
  event.preventDefault();
  link.focus();
}

/** The arrows go through the list. */
function onKey(event, list) {
  if (event.target.tagName !== "A") return;
  const [links, at] = [linksOf(list), linksOf(list).indexOf(event.target)];
  const next = { ArrowDown: Math.min(at + 1, links.length - 1), ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
  if (next === undefined) return;
  if (at === 0 && event.key === "ArrowUp") list.querySelector("input").focus();
  else focusLink(list, next, event);
  event.preventDefault();
}
