// API keys: a list, new ones whose secret is shown once, other terms, rotation, revocation.
import { html, useRef, useState } from "../ui.js";
import { getJson, sendJson } from "../api.js";
import { dateTime, money, number } from "../format.js";
import { notify } from "../notices.js";
import { me, signIn } from "../session.js";
import { usePolled } from "./poll.js";
import { Confirm, Dialog, Table, Trouble } from "./parts.js";

const SHOWN = 200;
const DAY_S = 86_400;

const FIELDS = [
  { name: "name", head: "Name", help: "What the key is for", required: true, maxlength: 100 },
  { name: "owner", head: "Owner", help: "Keys of one owner share conversations and usage; empty: the key alone", onlyNew: true, maxlength: 100 },
  { name: "scope", head: "Role", choices: { chat: "chat", admin: "admin" } },
  { name: "tier", head: "Tier", choices: { standard: "standard", interactive: "interactive: first in the queue", batch: "batch: last in the queue" } },
  { name: "rpm", head: "Requests a minute", number: true, none: "no limit" },
  { name: "tpm", head: "Tokens a minute", number: true, none: "no limit" },
  { name: "max_streams", head: "Answers at once", number: true, none: "no limit" },
  { name: "budget_usd", head: "Budget a month, US dollars", number: true, step: "any", none: "no limit" },
  { name: "models", head: "Models", help: "Names with commas between", none: "all" },
  { name: "expires_at", head: "Ends", time: true, none: "never" },
  { name: "weight", head: "Weight in its tier", number: true, step: "any", more: true },
  { name: "safety", head: "Safety", choices: { standard: "as the policy says", observe: "observe: record only", enforce: "enforce", strict: "strict" }, more: true },
  { name: "degrade", head: "A full server may shorten answers", choices: { on: "yes", off: "no" }, more: true },
  { name: "grammars", head: "Grammars", choices: { all: "all", schemas: "JSON schemas and tools alone" }, more: true },
  { name: "resume", head: "Answers run on when the client leaves", choices: { asked: "where the request asks for it", always: "always" }, more: true },
];
const NEW = { scope: "chat", tier: "standard", weight: 1, safety: "standard", degrade: "on", grammars: "all", resume: "asked" };

export function KeysTab() {
  const [filter, setFilter] = useState("");
  const [dialog, setDialog] = useState(null);
  const { data, error, again } = usePolled(async (signal) => (await getJson("/api/admin/keys", { signal })).data, 30_000);
  const close = () => setDialog(null);
  const act = async (path, method, done) => {
    try {
      done(await sendJson(method, path));
    } catch (problem) {
      notify(problem.message, { kind: "error" });
    }
    again();
  };
  if (!data) return error ? html`<${Trouble} error=${error} again=${again} />` : html`<p class="muted">Asking the server…</p>`;
  const words = filter.trim().toLowerCase();
  const found = data.filter((key) => [key.name, key.id, key.owner].some((text) => text.toLowerCase().includes(words)));
  const active = found.filter((key) => key.status === "active");
  const rows = [...active, ...found.filter((key) => key.status !== "active")].slice(0, SHOWN);
  const byId = (key) => `/api/admin/keys/${encodeURIComponent(key.id)}`;
  const columns = [
    { head: "Name", label: true, cell: (key) => html`${key.name}${key.id === me.value?.key?.id ? html` <span class="muted">(yours)</span>` : null}` },
    { head: "Status", cell: (key) => html`<span class=${`status-${key.status}`}>${key.status}</span>` },
    { head: "Role", cell: (key) => key.scope },
    { head: "Tier", cell: (key) => key.tier },
    { head: "Limits", cell: limits },
    { head: "Budget", number: true, cell: (key) => (key.budget_usd === null ? "" : money(key.budget_usd)) },
    { head: "Models", cell: (key) => (key.models ? key.models.join(", ") : "all") },
    { head: "Ends", cell: ends },
    { head: "Owner", cell: (key) => (key.owner === key.id ? html`<span class="muted">its own</span>` : key.owner) },
    { head: "Id", cell: (key) => html`<code>${key.id}</code>` },
    { head: html`<span class="visually-hidden">Change</span>`, acts: true, cell: (key) =>
      key.status === "revoked" ? null
        : html`<button type="button" aria-label=${`Change ${key.name}`} onClick=${() => setDialog({ view: "change", key })}>Change</button>` },
  ];
  return html`
    <${Trouble} error=${error} stale again=${again} />
    <div class="admin-bar">
      <label>Find <input type="search" value=${filter} onInput=${(event) => setFilter(event.target.value)} placeholder="name, id or owner" /></label>
      <button type="button" class="primary" onClick=${() => setDialog({ view: "new" })}>New key</button>
    </div>
    ${me.value?.open && html`<p class="card">This server needs no key yet. The first key ends that: from then on every request needs one,
      so make an admin key first. Conversations stored until then belong to the owner <code>local</code>.</p>`}
    <p class="muted" role="status">${number(active.length)} active, ${number(found.length - active.length)} ended${found.length > SHOWN ? `; the first ${SHOWN} are shown` : ""}.</p>
    <${Table} caption="API keys" columns=${columns} rows=${rows} rowKey=${(key) => key.id} empty=${data.length ? "No key matches." : "There is no key yet."} />
    ${dialog?.view === "new" && html`<${KeyForm} onClose=${close} onDone=${(issued) => { setDialog({ view: "secret", key: issued }); again(); }} />`}
    ${dialog?.view === "change" && html`<${KeyForm} old=${dialog.key} onClose=${close} onOther=${(view) => setDialog({ view, key: dialog.key })} onDone=${() => { close(); notify("Changed; it is in force.", { kind: "ok" }); again(); }} />`}
    ${dialog?.view === "secret" && html`<${Secret} issued=${dialog.key} onClose=${close} />`}
    ${dialog?.view === "rotate" && html`<${Rotate} old=${dialog.key} onClose=${close} onDone=${(issued) => { setDialog({ view: "secret", key: issued }); again(); }} />`}
    ${dialog?.view === "revoke" && html`<${Confirm} title=${`Revoke ${dialog.key.name}?`} action="Revoke it" onClose=${close}
      onYes=${() => act(byId(dialog.key), "DELETE", (key) => notify(`Revoked ${key.name}.`, { kind: "ok" }))}
      text=${`${dialog.key.id === me.value?.key?.id ? "This is the key that you are signed in with. " : ""}Requests with this key are refused at once, for good. Its conversations and usage stay.`} />`}`;
}

function limits(key) {
  return [
    key.rpm && `${number(key.rpm)} requests/min`,
    key.tpm && `${number(key.tpm)} tokens/min`,
    key.max_streams && `${number(key.max_streams)} at once`,
    key.safety !== "standard" && `safety: ${key.safety}`,
  ].filter(Boolean).join(", ");
}

function ends(key) {
  if (key.revoked_at) return `revoked ${dateTime(key.revoked_at)}`;
  const old = key.old_secrets_end_at ? `old secret until ${dateTime(key.old_secrets_end_at)}` : "";
  return [key.expires_at ? dateTime(key.expires_at) : "never", old].filter(Boolean).join("; ");
}

/** What a field of the form says for a value of the API, and back. */
function asText(field, value) {
  if (value === null || value === undefined) return "";
  if (field.name === "models") return value.join(", ");
  if (!field.time) return String(value);
  const at = new Date(value * 1000);
  return new Date(at - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

function asValue(field, text) {
  const trimmed = text.trim();
  if (trimmed === "" && field.none) return null;
  if (field.name === "models") return trimmed.split(",").map((name) => name.trim()).filter(Boolean);
  if (field.time) return Math.floor(new Date(trimmed).getTime() / 1000);
  if (field.name === "budget_usd") return trimmed; // as text it is exact
  return field.number ? Number(trimmed) : trimmed;
}

function KeyForm({ old, onClose, onDone, onOther }) {
  const start = old ?? (me.value?.open ? { ...NEW, scope: "admin" } : NEW);
  const fields = FIELDS.filter((field) => !(old && field.onlyNew));
  const [texts, setTexts] = useState(() => Object.fromEntries(fields.map((field) => [field.name, asText(field, start[field.name])])));
  const [problem, setProblem] = useState(null);
  const [busy, setBusy] = useState(false);
  const form = useRef(null);
  const save = async (event) => {
    event.preventDefault();
    const body = {};
    for (const field of fields) {
      if (texts[field.name] !== asText(field, start[field.name])) body[field.name] = asValue(field, texts[field.name]);
    }
    if (!old) for (const name of ["name", "scope"]) body[name] ??= texts[name];
    setBusy(true);
    try {
      onDone(await sendJson(old ? "PATCH" : "POST", old ? `/api/admin/keys/${encodeURIComponent(old.id)}` : "/api/admin/keys", body));
    } catch (error) {
      setProblem(error);
      setBusy(false);
      form.current.elements[(error.param ?? "").split("[")[0]]?.focus();
    }
  };
  const row = (field) => {
    const isWrong = problem?.param?.split("[")[0] === field.name;
    const common = {
      id: `key-${field.name}`,
      name: field.name,
      "aria-invalid": isWrong ? "true" : null,
      "aria-describedby": isWrong ? "key-problem" : null,
      onInput: (event) => setTexts((before) => ({ ...before, [field.name]: event.target.value })),
    };
    return html`<div class="admin-field" key=${field.name}>
      <label for=${common.id}>${field.head}</label>
      ${field.choices
        ? html`<select ...${common} value=${texts[field.name]}>${Object.entries(field.choices).map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select>`
        : html`<input ...${common} type=${field.number ? "number" : field.time ? "datetime-local" : "text"} min=${field.number ? 0 : null} step=${field.step ?? null}
            value=${texts[field.name]} required=${field.required} maxlength=${field.maxlength} placeholder=${field.none} autocomplete="off" autofocus=${field.required} />`}
      ${field.help && html`<span class="muted">${field.help}</span>`}
    </div>`;
  };
  return html`<${Dialog} title=${old ? `Change ${old.name}` : "New key"} onClose=${onClose}>
    <form ref=${form} onSubmit=${save}>
      <div class="admin-form">${fields.filter((field) => !field.more).map(row)}</div>
      <details><summary>More</summary><div class="admin-form">${fields.filter((field) => field.more).map(row)}</div></details>
      ${problem && html`<p id="key-problem" class="error" role="alert">${problem.message}</p>`}
      <div class="admin-buttons">
        ${old && html`<button type="button" class="danger" onClick=${() => onOther("revoke")}>Revoke…</button>
          <button type="button" onClick=${() => onOther("rotate")}>Rotate…</button>`}
        <button type="button" onClick=${onClose}>Cancel</button>
        <button class="primary" disabled=${busy}>${old ? "Change it" : "Create key"}</button>
      </div>
    </form>
  <//>`;
}

const OVERLAPS = [[0, "at once"], [3600, "in an hour"], [DAY_S, "in a day"], [7 * DAY_S, "in a week"]];

function Rotate({ old, onClose, onDone }) {
  const [overlapS, setOverlapS] = useState(DAY_S);
  const [problem, setProblem] = useState(null);
  const save = async (event) => {
    event.preventDefault();
    try {
      onDone(await sendJson("POST", `/api/admin/keys/${encodeURIComponent(old.id)}/rotate`, { overlap_s: overlapS }));
    } catch (error) {
      setProblem(error);
    }
  };
  return html`<${Dialog} title=${`Rotate ${old.name}`} onClose=${onClose}>
    <form onSubmit=${save}>
      <p>The key gets a new secret. Its conversations, usage and terms stay.</p>
      <p class="admin-field"><label for="overlap">The old secret ends</label>
        <select id="overlap" value=${String(overlapS)} onInput=${(event) => setOverlapS(Number(event.target.value))}>
          ${OVERLAPS.map(([seconds, text]) => html`<option value=${seconds}>${text}</option>`)}</select></p>
      ${problem && html`<p class="error" role="alert">${problem.message}</p>`}
      <div class="admin-buttons"><button type="button" onClick=${onClose}>Cancel</button><button class="primary">Rotate it</button></div>
    </form>
  <//>`;
}

/** The text of a new key, which the server shows no second time. */
function Secret({ issued, onClose }) {
  const [copied, setCopied] = useState(false);
  const box = useRef(null);
  const copy = async () => {
    box.current.select();
    try {
      await navigator.clipboard.writeText(issued.key);
      setCopied(true);
    } catch {
      setCopied(document.execCommand("copy")); // pages without TLS have no other clipboard
    }
  };
  const isFirst = me.value?.open;
  return html`<${Dialog} title=${`The key of ${issued.name}`} mustAnswer onClose=${onClose}>
    <p>Copy it now: it is shown this once.</p>
    <p class="admin-secret"><textarea ref=${box} readonly rows="3" aria-label="The key" onFocus=${(event) => event.target.select()}>${issued.key}</textarea>
      <button type="button" class="primary" autofocus onClick=${copy}>Copy</button></p>
    <p role="status">${copied ? "Copied." : ""}</p>
    ${isFirst && html`<p>From now on this server asks for a key.</p>`}
    <div class="admin-buttons">
      ${(isFirst || issued.id === me.value?.key?.id) && html`<button type="button" onClick=${() => signIn(issued.key).then(onClose, (error) => notify(error.message, { kind: "error" }))}>Sign in with it</button>`}
      <button type="button" onClick=${onClose}>Done</button>
    </div>
  <//>`;
}
