// The prefix report: what the cache should have had of each system prompt, and had.
import { html } from "../ui.js";
import { getJson } from "../api.js";
import { number, percent, when } from "../format.js";
import { usePolled } from "./poll.js";
import { Table, Trouble } from "./parts.js";

export function PrefixesTab() {
  const { data, error, again } = usePolled((signal) => getJson("/api/admin/prefixes?limit=100", { signal }), 15_000);
  if (!data) return error ? html`<${Trouble} error=${error} again=${again} />` : html`<p class="muted">Asking the server…</p>`;
  const columns = [
    { head: "Owner", label: true, cell: (p) => p.owner },
    { head: "Key", cell: (p) => (p.key ? html`<code>${p.key}</code>` : "") },
    { head: "Model", cell: (p) => p.model },
    { head: "Requests", number: true, cell: (p) => number(p.requests) },
    { head: "Expected tokens", number: true, cell: (p) => number(p.expected_tokens) },
    { head: "Cached", number: true, cell: (p) => number(p.cached_tokens) },
    { head: "Hits", number: true, cell: (p) => percent(p.hit_rate) },
    { head: "Lately", number: true, cell: (p) => percent(p.recent_hit_rate) },
    { head: "Varies", cell: (p) => (p.varies ? `${p.varies.kind}, character ${number(p.varies.position)}` : "") },
    { head: "Breaks", cell: (p) => Object.entries(p.breaks).map(([cause, times]) => `${cause} ${number(times)}`).join(", ") },
    { head: "Seen", cell: (p) => when(p.last_seen_at) },
  ];
  return html`<${Trouble} error=${error} stale again=${again} />
    <p class="muted">System prompts, those first that lost most tokens. Where one varies near its beginning, nothing behind it can be cached.</p>
    <${Table} caption="System prompts in the prefix cache" columns=${columns} rows=${data.data} rowKey=${(p) => p.id} empty="No system prompt has been sent twice yet." />`;
}
