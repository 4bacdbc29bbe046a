// The page of admin keys: what the server does now, keys, safety, the prefix cache.
import { html } from "../ui.js";
import { navigate, route } from "../router.js";
import { NowTab } from "./now.js";
import { KeysTab } from "./keys.js";
import { SafetyTab } from "./safety.js";
import { PrefixesTab } from "./prefixes.js";

const TABS = [
  { id: "now", name: "Now", view: NowTab },
  { id: "keys", name: "Keys", view: KeysTab },
  { id: "safety", name: "Safety", view: SafetyTab },
  { id: "prefixes", name: "Prefix cache", view: PrefixesTab },
];

export function AdminView() {
  const chosen = TABS.find((tab) => tab.id === route.value.id) || TABS[0];
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = TABS[(TABS.indexOf(chosen) + step + TABS.length) % TABS.length];
    navigate(`#/admin/${next.id}`);
    document.getElementById(`admin-tab-${next.id}`).focus();
  };
  return html`<div class="admin page">
    <h1>Admin</h1>
    <div class="admin-tabs" role="tablist" aria-label="Parts of the admin page" onKeyDown=${move}>
      ${TABS.map((tab) => html`<button type="button" role="tab" id=${`admin-tab-${tab.id}`} aria-selected=${tab === chosen}
        aria-controls="admin-panel" tabindex=${tab === chosen ? 0 : -1} onClick=${() => navigate(`#/admin/${tab.id}`)}>${tab.name}</button>`)}
    </div>
    <div id="admin-panel" role="tabpanel" aria-labelledby=${`admin-tab-${chosen.id}`} tabindex="0"><${chosen.view} key=${chosen.id} /></div>
  </div>`;
}
