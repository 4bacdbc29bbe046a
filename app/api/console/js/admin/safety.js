// Safety: the policy in force, what the screens decided, what an observing policy would do, keys to look at.
import { html, useState } from "../ui.js";
import { getJson, sendJson } from "../api.js";
import { dateTime, decimal, number, percent, when } from "../format.js";
import { notify } from "../notices.js";
import { usePolled } from "./poll.js";
import { Table, Trouble } from "./parts.js";

const PAGE = 50;
const ACTIONS = ["", "block", "watch", "flag"];

export function SafetyTab() {
  return html`<${Events} /><${Report} /><${Flags} />`;
}

function Events() {
  const [action, setAction] = useState("");
  const [older, setOlder] = useState({ data: [], cursor: null });
  const { data, error, again } = usePolled((signal) => getJson(path(action, null), { signal }), 15_000, [action]);
  const more = async () => {
    try {
      const page = await getJson(path(action, older.cursor ?? data.next_cursor));
      setOlder({ data: [...older.data, ...page.data], cursor: page.next_cursor });
    } catch (problem) {
      notify(problem.message, { kind: "error" });
    }
  };
  if (!data) return error ? html`<${Trouble} error=${error} again=${again} />` : html`<p class="muted">Asking the server…</p>`;
  const rows = [...new Map([...data.data, ...older.data].map((event) => [event.id, event])).values()];
  const hasMore = older.data.length ? older.cursor !== null : data.has_more;
  const columns = [
    { head: "When", label: true, cell: (e) => html`<span title=${dateTime(e.created_at)}>${when(e.created_at)}</span>` },
    { head: "Action", cell: (e) => html`<span class=${`action-${e.action}`}>${e.action}</span>` },
    { head: "Category", cell: (e) => (e.category ? `${e.category} ${e.category_name}` : "") },
    { head: "Of", cell: (e) => e.subject },
    { head: "Stage", cell: (e) => e.stage },
    { head: "Score", number: true, cell: (e) => (e.score === null ? "" : decimal(e.score, 3)) },
    { head: "Threshold", number: true, cell: (e) => (e.threshold === null ? "" : decimal(e.threshold, 3)) },
    { head: "Owner", cell: (e) => e.owner },
    { head: "Key", cell: (e) => (e.key ? html`<code>${e.key}</code>` : "") },
    { head: "Request", cell: (e) => html`<code title=${e.request_id}>${(e.request_id ?? "").slice(-8)}</code>` },
  ];
  return html`<section>
    <${Trouble} error=${error} stale again=${again} />
    <${PolicyInForce} policy=${data.policy} again=${again} />
    <div class="admin-bar"><h2>Events</h2>
      <label>Action <select value=${action} onInput=${(event) => { setOlder({ data: [], cursor: null }); setAction(event.target.value); }}>
        ${ACTIONS.map((name) => html`<option value=${name}>${name || "all"}</option>`)}</select></label></div>
    <${Table} caption="Safety events" columns=${columns} rows=${rows} rowKey=${(e) => e.id} empty="The screens have decided nothing of this kind." />
    ${hasMore && html`<button type="button" onClick=${more}>Show older ones</button>`}
  </section>`;
}

function path(action, cursor) {
  const query = new URLSearchParams({ limit: PAGE });
  if (action) query.set("action", action);
  if (cursor) query.set("cursor", cursor);
  return `/api/admin/safety?${query}`;
}

function PolicyInForce({ policy, again }) {
  if (!policy) return html`<p class="card">This server runs with safety off: nothing is screened.</p>`;
  const reload = async () => {
    try {
      const taken = await sendJson("POST", "/api/admin/safety/reload");
      notify(`The policy is in force: ${taken.hash}.`, { kind: "ok" });
    } catch (problem) {
      notify(problem.message, { kind: "error" });
    }
    again();
  };
  return html`<div class="card admin-bar">
    <p>Policy <code>${policy.hash}</code>, ${policy.mode === "observe" ? html`<strong>observing only</strong>` : policy.mode},
      ${policy.path ? html` of <code>${policy.path}</code>` : " built in"}, loaded ${dateTime(policy.loaded_at)}. Images: ${policy.images}.</p>
    ${policy.path && html`<button type="button" onClick=${reload}>Reload the file</button>`}
  </div>`;
}

/** What each policy would make of the recorded traffic; computed when asked for, as it may take a minute. */
function Report() {
  const [state, setState] = useState({ busy: false, report: null, error: null });
  const compute = async () => {
    setState({ busy: true, report: state.report, error: null });
    try {
      setState({ busy: false, report: await getJson("/api/admin/safety/report"), error: null });
    } catch (error) {
      setState({ busy: false, report: state.report, error });
    }
  };
  const { busy, report, error } = state;
  const columns = (name) => [
    { head: name, label: true, cell: (row) => row.label ?? row.name },
    { head: "Prompts", number: true, cell: (row) => number(row.prompts.read) },
    { head: "Refused", number: true, cell: (row) => number(row.prompts.refused) },
    { head: "of prompts", number: true, cell: (row) => interval(row.prompts.refused_rate) },
    { head: "Watched", number: true, cell: (row) => number(row.prompts.watched) },
    { head: "Answers", number: true, cell: (row) => number(row.answers.read) },
    { head: "Halted", number: true, cell: (row) => number(row.answers.halted) },
    { head: "of answers", number: true, cell: (row) => interval(row.answers.halted_rate) },
  ];
  return html`<section>
    <div class="admin-bar"><h2>What policies make of this month's traffic</h2>
      <button type="button" disabled=${busy} onClick=${compute}>${report ? "Compute again" : "Compute"}</button></div>
    <p role="status">${busy ? "Computing; with much traffic it takes up to a minute…" : ""}</p>
    ${error && html`<p class="error" role="alert">${error.message}</p>`}
    ${report && html`
      <p>${report.from} to ${report.to} (UTC): ${number(report.prompts)} prompts and ${number(report.answers)} answers, ${number(report.records)} of them recorded.
        Rates have their 95% interval.</p>
      <${Table} caption="By policy" columns=${columns("Policy")} rows=${report.policies} rowKey=${(row) => row.name} empty="" />
      ${["category", "key"].map((by) => report.by[by].length > 0 && html`<h3>By ${by}, as recorded</h3>
        <${Table} caption=${`By ${by}`} columns=${columns(by === "key" ? "Key" : "Category")} rowKey=${(row) => row.value ?? ""} empty=""
          rows=${report.by[by].map((row) => ({ ...row, label: [row.value, row.name].filter(Boolean).join(" ") || "no stored key" }))} />`)}`}
  </section>`;
}

const interval = (rate) => (rate ? `${percent(rate.rate)} (${percent(rate.low)} to ${percent(rate.high)})` : "");

const FLAGS = {
  spike: "many more tokens than usual",
  blocks: "many refusals by the screens",
  addresses: "used from many networks",
};

function Flags() {
  const { data, error, again } = usePolled((signal) => getJson("/api/admin/abuse", { signal }), 30_000);
  const facts = (flag) => Object.entries(flag).filter(([name]) => !["object", "kind", "owner", "key", "since"].includes(name))
    .map(([name, value]) => `${name.replaceAll("_", " ")}: ${typeof value === "number" ? decimal(value, 2) : JSON.stringify(value)}`).join(", ");
  const columns = [
    { head: "Why", label: true, cell: (flag) => FLAGS[flag.kind] ?? flag.kind },
    { head: "Owner", cell: (flag) => flag.owner },
    { head: "Key", cell: (flag) => (flag.key ? html`<code>${flag.key}</code>` : "") },
    { head: "Since", cell: (flag) => dateTime(flag.since) },
    { head: "Figures", cell: facts },
  ];
  return html`<section><h2>Keys to look at</h2>
    <${Trouble} error=${error} stale=${data !== null} again=${again} />
    ${data && html`<${Table} caption="Keys to look at" columns=${columns} rows=${data.data} rowKey=${(flag) => `${flag.kind} ${flag.owner} ${flag.key}`} empty="No key looks abused." />`}
  </section>`;
}
