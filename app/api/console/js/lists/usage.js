// The page of usage. Not built yet.
import { html } from "../ui.js";

export function UsageView() {
  return html`<div class="page"><h1>Usage</h1></div>`;
}
