// What the server does now: gauges, the last minutes, and every live request with a way to stop it.
import { html, useRef, useState } from "../ui.js";
import { getJson, sendJson } from "../api.js";
import { notify } from "../notices.js";
import { usePolled } from "./poll.js";
import { compact, decimal, duration, number, percent } from "../format.js";
import { Confirm, Plot, Table, Trouble } from "./parts.js";

const EVERY_MS = 2000;
const LIMIT = 100;
const PHASES = {
  receive: "The request is read, screened and rendered",
  queue: "It waits for room in the engine",
  prefill: "The engine reads the prompt",
  held: "The screens hold what is generated until it is judged",
  decode: "Tokens are generated",
  resuming: "The engine is away; the answer continues when it is back",
  settle: "The answer is complete and is being settled",
};
const WHY = {
  admin: "stopped by an admin",
  cancelled: "stopped by its owner",
  disconnect: "the client left and did not return",
  deleted: "deleted by its owner",
  shutdown: "the server stopped",
  suspended: "suspended; the next process continues it",
  storage: "the answer could not be stored",
};

export function NowTab() {
  const [paused, setPaused] = useState(false);
  const { data, error, again } = usePolled(
    async (signal) => {
      const [live, requests] = await Promise.all([
        getJson("/api/admin/live", { signal }),
        getJson(`/api/admin/requests?limit=${LIMIT}`, { signal }),
      ]);
      return { live, requests };
    },
    paused ? 0 : EVERY_MS,
  );
  if (!data) return error ? html`<${Trouble} error=${error} again=${again} />` : html`<p class="muted">Asking the server…</p>`;
  return html`
    <${Trouble} error=${error} stale again=${again} />
    <div class="admin-bar">
      <${State} live=${data.live} />
      <button type="button" aria-pressed=${paused} onClick=${() => setPaused(!paused)}>${paused ? "Go on" : "Pause"}</button>
    </div>
    ${data.live.models.map((model) => html`<${Gauges} key=${model.model} model=${model} live=${data.live} />`)}
    <${Plots} samples=${data.live.samples} />
    <${Requests} requests=${data.requests} again=${again} />
    <${Ended} requests=${data.requests} now=${data.live.created_at} />`;
}

function State({ live }) {
  const { degraded, engine, store, streams } = live;
  const outages = Object.entries(engine.outages).filter(([, times]) => times).map(([cause, times]) => `${times} ${cause}`);
  const notes = [
    degraded && degraded.step !== "normal" && `degraded mode: ${degraded.step}, pressure ${decimal(degraded.pressure)}`,
    engine.reason && `the engine is away: ${engine.reason}`,
    engine.restarts > 0 && `${number(engine.restarts)} restarts of the engine (${outages.join(", ")}), the last took ${duration(engine.last_outage_s)}`,
    streams.suspended > 0 && `${number(streams.suspended)} suspended answers wait for their clients`,
    store.failing && "the store cannot be written",
    store.writer_lag_s > 1 && `the store is ${duration(store.writer_lag_s)} behind`,
  ].filter(Boolean);
  return html`<div>
    <p class="admin-state"><span class=${live.ready ? "admin-dot ok" : "admin-dot danger"} aria-hidden="true"></span>
      <strong>${live.state}</strong>${degraded && degraded.step === "normal" ? html`<span class="muted">, not degraded</span>` : null}</p>
    ${notes.length > 0 && html`<ul class="admin-notes">${notes.map((note) => html`<li>${note}</li>`)}</ul>`}
  </div>`;
}

function Gauges({ model, live }) {
  const latest = live.samples.at(-1);
  const waiting = Object.entries(model.queued);
  const numWaiting = waiting.reduce((sum, [, queued]) => sum + queued.requests, 0);
  const oldestS = Math.max(...waiting.map(([, queued]) => queued.oldest_wait_s));
  const used = model.kv.max_tokens ? model.kv.used_tokens / model.kv.max_tokens : 0;
  const middle = (p) => (p ? duration(p.p50) : "–");
  const tail = (p) => (p ? `p90 ${duration(p.p90)}, p99 ${duration(p.p99)}`.replaceAll(/(\d) |(p\d+) /g, "$1$2\u00a0") : `none ended in ${number(live.window_s / 60)} minutes`);
  const alone = live.models.length === 1;
  return html`<section>
    ${!alone || !model.ready ? html`<h2>${model.model}${model.ready ? "" : " (not ready)"}</h2>` : null}
    <dl class="admin-tiles">
      <${Tile} name="Running" value=${number(model.running)} note=${model.queued_in_engine ? `${number(model.queued_in_engine)} wait inside the engine` : `${number(live.streams.readers)} readers`} />
      <${Tile} name="Waiting" value=${number(numWaiting)} note=${numWaiting ? `${waiting.filter(([, q]) => q.requests).map(([tier, q]) => `${tier} ${number(q.requests)}`).join(", ")}; oldest ${duration(oldestS)}` : "nobody"} />
      <${Tile} name="KV memory" value=${percent(used)} note=${`${compact(model.kv.used_tokens)} of ${compact(model.kv.max_tokens)} tokens, ${compact(model.kv.reserved_tokens)} reserved`}>
        <meter min="0" max="1" value=${used} aria-label="KV memory in use"></meter><//>
      ${alone && html`<${Tile} name="Tokens/s" value=${latest ? compact(latest.tokens_per_s) : "–"} note="generated, all requests" />`}
      <${Tile} name="First token" value=${middle(model.ttft_s)} note=${tail(model.ttft_s)} />
      <${Tile} name="Per token" value=${middle(model.tpot_s)} note=${tail(model.tpot_s)} />
      <${Tile} name="Cache hits" value=${percent(model.hit_rate)} note="of prompt tokens" />
      ${alone && html`<${Tile} name="Loop lag" value=${latest ? duration(latest.loop_lag_s) : "–"} note="longest delay in 5 s" />`}
    </dl>
  </section>`;
}

function Tile({ name, value, note, children }) {
  return html`<div><dt>${name}</dt><dd><span class="admin-value">${value}</span>${children}<span class="muted">${note}</span></dd></div>`;
}

function Plots({ samples }) {
  if (samples.length < 2) return null;
  const of = (name) => samples.map((sample) => sample[name]);
  const minutes = duration(samples.at(-1).at - samples[0].at);
  return html`<section>
    <h2>Last ${minutes}</h2>
    <div class="admin-plots">
      <${Plot} title="Tokens per second" show=${compact} series=${[{ name: "tokens/s", values: of("tokens_per_s"), className: "line-a" }]} />
      <${Plot} title="Requests" show=${number} series=${[
        { name: "running", values: of("running"), className: "line-a" },
        { name: "waiting", values: of("waiting"), className: "line-b" }]} />
      <${Plot} title="KV tokens in use" show=${compact} series=${[{ name: "tokens", values: of("used_tokens"), className: "line-a" }]} />
      <${Plot} title="Loop lag" show=${duration} series=${[{ name: "lag", values: of("loop_lag_s"), className: "line-a" }]} />
    </div>
  </section>`;
}

function Requests({ requests, again }) {
  const [stopping, setStopping] = useState(null);
  const heading = useRef(null);
  const stop = async (request) => {
    try {
      await sendJson("POST", `/api/admin/requests/${encodeURIComponent(request.id)}/cancel`);
      notify(`Stopped a request of ${who(request)}.`);
    } catch (error) {
      notify(error.status === 404 ? "It had ended already." : error.message, { kind: "error" });
    }
    heading.current?.focus(); // the button goes with its row
    again();
  };
  const columns = [
    { head: "Who", label: true, cell: (r) => html`<span title=${r.key ? `${r.key}, owner ${r.owner}` : r.owner}>${who(r)}</span>` },
    { head: "Phase", cell: (r) => html`<span class=${`phase phase-${r.phase}`} title=${PHASES[r.phase] || ""}>${r.phase}${r.position ? `, place ${number(r.position)}` : ""}</span>` },
    { head: "In phase", number: true, cell: (r) => duration(r.phase_s) },
    { head: "Age", number: true, cell: (r) => duration(r.age_s) },
    { head: "In", number: true, cell: (r) => html`<span title=${`${number(r.cached_tokens)} from the cache`}>${number(r.prompt_tokens)}</span>` },
    { head: "Out", number: true, cell: (r) => number(r.completion_tokens) },
    { head: "Tokens/s", number: true, cell: (r) => decimal(r.tokens_per_s) },
    { head: "Readers", number: true, cell: (r) => html`${number(r.readers)}${r.stops_in_s != null ? html` <span class="muted">stops in ${duration(r.stops_in_s)}</span>` : null}` },
    { head: "Tier", cell: (r) => r.tier },
    { head: "Model", cell: (r) => r.model },
    { head: "Id", cell: (r) => html`<code title=${r.id}>${r.id.slice(-8)}</code>` },
    { head: html`<span class="visually-hidden">Stop</span>`, acts: true, cell: (r) =>
      r.cancelled ? html`<span class="muted">stopping</span>`
        : html`<button type="button" class="danger" aria-label=${`Stop ${r.id.slice(-8)} of ${who(r)}`} onClick=${() => setStopping(r)}>Stop</button>` },
  ];
  return html`<section>
    <h2 ref=${heading} tabindex="-1">Live requests <span class="muted">${number(requests.total)}</span></h2>
    ${requests.has_more && html`<p class="muted">The oldest ${number(requests.data.length)} of ${number(requests.total)}.</p>`}
    <${Table} caption="Live requests" columns=${columns} rows=${requests.data} rowKey=${(r) => r.id} empty="No request is being answered." />
    ${stopping && html`<${Confirm} title="Stop this request?" action="Stop it" onYes=${() => stop(stopping)} onClose=${() => setStopping(null)}
      text=${`${who(stopping)}, ${stopping.model}, ${number(stopping.completion_tokens)} tokens so far. What was generated is kept and billed, as if its owner had stopped it.`} />`}
  </section>`;
}

function Ended({ requests, now }) {
  const columns = [
    { head: "Ended", label: true, cell: (r) => `${duration(Math.max(0, now - r.ended_at))} ago` },
    { head: "Who", cell: who },
    { head: "How", cell: how },
    { head: "In", number: true, cell: (r) => number(r.prompt_tokens) },
    { head: "Out", number: true, cell: (r) => number(r.completion_tokens) },
    { head: "First token", number: true, cell: (r) => duration(r.ttft_s) },
    { head: "Per token", number: true, cell: (r) => duration(r.tpot_s) },
    { head: "Took", number: true, cell: (r) => duration(r.total_s) },
    { head: "Id", cell: (r) => html`<code title=${r.id}>${r.id.slice(-8)}</code>` },
  ];
  const list = (title, rows, empty, open) => html`<details open=${open}>
    <summary>${title} <span class="muted">${rows.length === LIMIT ? `the newest ${LIMIT}` : number(rows.length)}</span></summary>
    <${Table} caption=${title} columns=${columns} rows=${rows} rowKey=${(r) => r.id + r.ended_at} empty=${empty} />
  </details>`;
  return html`<section>
    ${list("Failed or refused lately", requests.failed, "None.", requests.failed.length > 0)}
    ${list("Ended lately", requests.ended, "None.", false)}
  </section>`;
}

const who = (request) => request.key_name || request.owner;
const how = (request) => [request.error || request.finish_reason, request.cancelled && (WHY[request.cancelled] || request.cancelled)].filter(Boolean).join(": ");
