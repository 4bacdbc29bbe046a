// The page of usage: what was used and what it cost, in plots and in a table with the ledger's numbers.
import { getJson } from "../api.js";
import { money, number, percent } from "../format.js";
import { me } from "../session.js";
import { html, useEffect, useState } from "../ui.js";
import { PERIODS, daysOf, isDay, monthOf, rangeOf, today } from "./periods.js";
import { Plot } from "./plot.js";
import { fileOf, grouped, labelOf, stacks, sumOf, usdWriter } from "./sums.js";
import { download } from "./transfer.js";

const TOKENS = [
  ["uncached", "Input, computed"], ["cached_tokens", "Input, from the cache"], ["output_tokens", "Output"],
];
const GROUPS = { day: "Day", model: "Model", key: "Key", owner: "Owner" };

/** The page. An admin key sees all owners, any other its own. */
export function UsageView() {
  const [period, setPeriod] = useState({ name: "month", from: monthOf(0).from, to: today() });
  const [by, setBy] = useState("day");
  const isAdmin = me.value?.scope === "admin";
  const range = rangeOf(period);
  const report = useReport(range, isAdmin);
  const groups = Object.keys(GROUPS).filter((name) => name !== "owner" || isAdmin);
  return html`<div class="page usage">
    <h1>Usage</h1>
    <${Budget} at=${report.rows} />
    <form class="usage-form" onSubmit=${(event) => event.preventDefault()}>
      <${Period} period=${period} set=${setPeriod} />
      <label>Group by
        <select value=${by} onChange=${(event) => setBy(event.target.value)}>
          ${groups.map((name) => html`<option value=${name}>${GROUPS[name]}</option>`)}
        </select>
      </label>
      <button type="button" disabled=${!report.rows?.length} onClick=${() => save(report.rows, range)}>Download CSV</button>
    </form>
    <p class="muted">Days are UTC days.${isAdmin ? " All owners are shown." : ""}</p>
    <div aria-busy=${report.isLoading}>${shown(report, range, by)}</div>
  </div>`;
}

function shown({ rows, error, retry }, range, by) {
  if (error) return html`<p role="alert" class="error">${error} <button type="button" onClick=${retry}>Try again</button></p>`;
  if (!rows) return html`<p class="muted">Loading…</p>`;
  if (!rows.length) {
    return html`<div class="card usage-empty"><p><b>Nothing was used in this period.</b></p>
      <p>A request is counted once its answer has ended. <a href="#/chat">Ask something</a>, or choose another period.</p></div>`;
  }
  return html`<${Totals} sums=${sumOf(rows)} />
    <${Plots} rows=${rows} range=${range} by=${by} />
    <${Table} rows=${rows} by=${by} />`;
}

/** Every day, model and key of a period, as the ledger has them; `rows` is null while they are read. */
function useReport({ from, to }, isAdmin) {
  const [report, setReport] = useState({ rows: null, isLoading: true });
  const [attempts, setAttempts] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    setReport((last) => ({ ...last, isLoading: true, error: null }));
    const path = `/api/usage?from=${from}&to=${to}&group_by=day,model,key${isAdmin ? ",owner" : ""}`;
    const read = async () => {
      try {
        if (!isDay(from) || !isDay(to) || to < from) throw new Error("Choose a first day, and a last day that is not before it.");
        const { groups } = await getJson(path, { signal: abort.signal });
        const rows = groups.map((group) => ({ ...group, uncached: group.input_tokens - group.cached_tokens }));
        setReport({ rows, isLoading: false, error: null });
      } catch (error) {
        if (!abort.signal.aborted) setReport({ rows: null, isLoading: false, error: error.message });
      }
    };
    read();
    return () => abort.abort();
  }, [from, to, isAdmin, attempts]);
  return { ...report, retry: () => setAttempts(attempts + 1) };
}

function Period({ period, set }) {
  const field = (name, label) => html`<label>${label}
    <input type="date" required value=${period[name]} max=${name === "from" ? period.to : null}
      onChange=${(event) => set({ ...period, [name]: event.target.value })} /></label>`;
  const choose = (name) => set(name === "range" ? { name, ...rangeOf(period) } : { ...period, name });
  return html`<label>Period
      <select value=${period.name} onChange=${(event) => choose(event.target.value)}>
        ${Object.entries(PERIODS).map(([name, label]) => html`<option value=${name}>${label}</option>`)}
      </select>
    </label>
    ${period.name === "range" && html`${field("from", "From")} ${field("to", "To")}`}`;
}

/** What the caller's key has used of its budget of this month. */
function Budget({ at }) {
  const [spent, setSpent] = useState(null);
  const key = me.value?.key;
  const hasBudget = key && key.budget_usd !== null;
  useEffect(() => {
    if (!hasBudget) return;
    getJson(`/api/usage?key=${encodeURIComponent(key.id)}`).then(setSpent, () => setSpent(null));
  }, [key?.id, hasBudget, at]);
  if (!hasBudget || spent === null) return null;
  const used = spent.cost_micro_usd;
  const budget = Math.round(spent.budget_usd * 1e6);
  const ratio = budget ? used / budget : 1;
  const left = Math.max(0, budget - used);
  return html`<section class="card budget" aria-label="Budget">
    <p><b>${money(used / 1e6)}</b> of ${money(budget / 1e6)} used this month, <b>${money(left / 1e6)}</b> left</p>
    <meter class=${ratio >= 0.9 ? "high" : ""} min="0" max="1" value=${Math.min(1, ratio)} aria-label="Part of the budget that is used">${percent(ratio)}</meter>
    <p class="muted">The budget is that of your key, ${key.name}, and begins anew each month. Running requests are not counted yet.</p>
  </section>`;
}

function Totals({ sums }) {
  const cached = sums.input_tokens ? sums.cached_tokens / sums.input_tokens : 0;
  const cards = [
    ["Cost", money(sums.cost_micro_usd / 1e6)], ["Requests", number(sums.requests)], ["Input tokens", number(sums.input_tokens)],
    ["Read from the cache", percent(cached)], ["Output tokens", number(sums.output_tokens)],
  ];
  return html`<dl class="totals">${cards.map(([name, value]) => html`<div class="card"><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Plots({ rows, range, by }) {
  const days = daysOf(range);
  const tokens = by === "day"
    ? TOKENS.map(([name, label]) => ({ label, values: stacks(rows, days, null, name)[0].values }))
    : stacks(rows, days, by, (row) => row.input_tokens + row.output_tokens);
  const costs = by === "day" ? [{ label: "Cost", values: stacks(rows, days, null, "cost_micro_usd")[0].values }] : stacks(rows, days, by, "cost_micro_usd");
  const isFree = rows.every((row) => row.cost_micro_usd === 0);
  return html`<div class="plots">
    <${Plot} title="Tokens by day" days=${days} series=${tokens} />
    ${!isFree && html`<${Plot} title="Cost by day" days=${days} series=${costs} isMoney />`}
  </div>
  ${isFree && html`<p class="muted">No price is set for these models, so that they cost nothing.</p>`}`;
}

const COLUMNS = [
  ["Requests", "requests"], ["Input tokens", "input_tokens"], ["of them cached", "cached_tokens"],
  ["Output tokens", "output_tokens"], ["Cost", "cost_micro_usd"],
];

function Table({ rows, by }) {
  const groups = grouped(rows, by);
  const cost = usdWriter(groups.map((group) => group.cost_micro_usd));
  const cells = (sums) => COLUMNS.map(([, name]) => html`<td class="number">${(name === "cost_micro_usd" ? cost : number)(sums[name])}</td>`);
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label="Usage by ${by}">
    <table>
      <caption class="visually-hidden">Usage by ${by}, as the ledger has it</caption>
      <thead><tr><th scope="col">${GROUPS[by]}</th>
        ${COLUMNS.map(([label]) => html`<th scope="col" class="number">${label}</th>`)}</tr></thead>
      <tbody>${groups.map((group) => html`<tr key=${group.id}>
        <th scope="row" dir="auto">${labelOf(group, by)}</th>${cells(group)}</tr>`)}</tbody>
      <tfoot><tr><th scope="row">Total</th>${cells(sumOf(rows))}</tr></tfoot>
    </table>
  </div>`;
}

function save(rows, { from, to }) {
  download([fileOf(rows)], `usage-${from}-${to}.csv`, "csv");
}
