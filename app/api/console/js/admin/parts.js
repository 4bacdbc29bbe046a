// What the tabs share: a table, dialogs, a small plot, a message.
import { html, useEffect, useRef } from "../ui.js";

/**
 * A table that scrolls sideways on a narrow screen. `columns` are {head, cell(row), number, label, acts};
 * `label` marks the cell that names the row, `acts` the one that stays in sight.
 */
export function Table({ caption, columns, rows, rowKey, empty }) {
  if (!rows.length) return html`<p class="muted">${empty}</p>`;
  return html`<div class="admin-scroll" tabindex="0" role="region" aria-label=${caption}>
    <table class="admin-table">
      <caption class="visually-hidden">${caption}</caption>
      <thead><tr>${columns.map((c) => html`<th scope="col" class=${c.number ? "number" : ""}>${c.head}</th>`)}</tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${rowKey(row)}>${columns.map((c) => {
        const content = c.cell(row);
        const whole = typeof content === "string" ? content : null; // of a cell that is cut where it is too long
        return c.label
          ? html`<th scope="row" title=${whole}>${content}</th>`
          : html`<td class=${c.number ? "number" : c.acts ? "admin-acts" : ""} title=${whole}>${content}</td>`;
      })}</tr>`)}</tbody>
    </table>
  </div>`;
}

/** A modal dialog. Escape ends it, unless what it shows is lost then: `mustAnswer`. */
export function Dialog({ title, onClose, mustAnswer, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const opened = dialog.current;
    const from = document.activeElement;
    opened.showModal();
    return () => {
      opened.close();
      if (from && from.isConnected) from.focus();
    };
  }, []);
  // Browsers close it themselves at a second Escape. A dialog that has gone must not close the next.
  return html`<dialog ref=${dialog} class="admin-dialog" aria-labelledby="admin-dialog-title"
      onCancel=${(event) => { event.preventDefault(); if (!mustAnswer) onClose(); }} onClose=${() => dialog.current && onClose()}>
    <h2 id="admin-dialog-title">${title}</h2>
    ${children}
  </dialog>`;
}

/** A question before something that cannot be undone. */
export function Confirm({ title, text, action, onYes, onClose }) {
  return html`<${Dialog} title=${title} onClose=${onClose}>
    <p>${text}</p>
    <div class="admin-buttons">
      <button type="button" autofocus onClick=${onClose}>Keep it</button>
      <button type="button" class="danger" onClick=${() => { onClose(); onYes(); }}>${action}</button>
    </div>
  <//>`;
}

const WIDTH = 240;
const HEIGHT = 56;

/** A line for each series over the last minutes. `series` are {name, values, className}. */
export function Plot({ title, series, show }) {
  const top = Math.max(...series.flatMap((s) => s.values), 0) || 1;
  const newest = series.map((s) => `${s.name} ${show(s.values.at(-1) ?? 0)}`).join(", ");
  const points = (values) =>
    values.map((v, i) => `${((i * WIDTH) / Math.max(values.length - 1, 1)).toFixed(1)},${(HEIGHT - 2 - (v * (HEIGHT - 6)) / top).toFixed(1)}`).join(" ");
  return html`<figure class="admin-plot">
    <figcaption><span>${title}</span><span class="muted">up to ${show(top)}</span></figcaption>
    <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label="${title}: now ${newest}; at most ${show(top)}">
      <line class="axis" x1="0" y1=${HEIGHT - 1} x2=${WIDTH} y2=${HEIGHT - 1} />
      ${series.map((s) => html`<polyline class=${s.className} points=${points(s.values)} vector-effect="non-scaling-stroke" />`)}
    </svg>
    ${series.length > 1 && html`<div class="admin-legend">${series.map((s) =>
      html`<span class=${s.className}>${s.name} ${show(s.values.at(-1) ?? 0)}</span>`)}</div>`}
  </figure>`;
}

/** What went wrong, where old data may still be shown below. */
export function Trouble({ error, stale, again }) {
  if (!error) return null;
  return html`<p class="admin-trouble" role="alert">${error.message || String(error)}${stale ? " What you see is old." : ""}
    ${" "}<button type="button" onClick=${again}>Try again</button></p>`;
}
