// The dialog with the shortcuts of the keyboard, the version and the licences.
import { getJson } from "./api.js";
import { shortcuts } from "./shortcuts.js";
import { html, signal, useEffect, useRef, useState } from "./ui.js";

export const isHelpOpen = signal(false);

/** The dialog; the browser gives the focus back where it was. */
export function Help() {
  const dialog = useRef(null);
  const [version, setVersion] = useState("");
  useEffect(() => {
    if (!isHelpOpen.value) return;
    dialog.current.showModal();
    getJson("/version").then((answer) => setVersion(answer.version), () => {});
  }, [isHelpOpen.value]);
  return html`<dialog ref=${dialog} aria-labelledby="help-title" onClose=${() => (isHelpOpen.value = false)}>
    <h2 id="help-title">Keyboard</h2>
    <table>
      <tbody>${shortcuts.value.map((entry) => html`<tr><th scope="row"><kbd>${entry.keys}</kbd></th><td>${entry.label}</td></tr>`)}</tbody>
    </table>
    <p class="muted">Tokenring ${version} · <a href=${new URL("../vendor/LICENSES.txt", import.meta.url).href} target="_blank">Licences of the libraries</a></p>
    <form method="dialog"><button class="primary">Close</button></form>
  </dialog>`;
}
