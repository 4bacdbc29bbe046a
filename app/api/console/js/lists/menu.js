// A button that opens a menu: the pattern of the ARIA Authoring Practices.
import { html, useEffect, useRef, useState } from "../ui.js";

const MARGIN_PX = 8;

/** `items` are `{label, run, kind}`. The menu is there only while it is open. */
export function MenuButton({ label, items, children }) {
  const [opensAt, setOpensAt] = useState(null);
  const button = useRef(null);
  const close = (andFocus) => {
    setOpensAt(null);
    if (andFocus) button.current?.focus();
  };
  const onKey = (event) => {
    if (!["ArrowDown", "ArrowUp"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    setOpensAt(event.key === "ArrowDown" ? 0 : -1);
  };
  const onClick = (event) => {
    event.preventDefault(); // else the browser opens it too, as the button is its invoker
    setOpensAt(opensAt === null ? 0 : null);
  };
  return html`<button type="button" ref=${button} class="menu-button" aria-haspopup="menu"
      aria-expanded=${String(opensAt !== null)} aria-label=${label} title=${label} onKeyDown=${onKey} onClick=${onClick}>${children}</button>
    ${opensAt !== null && html`<${Menu} ...${{ label, items, button, close, opensAt }} />`}`;
}

function Menu({ label, items, button, close, opensAt }) {
  const menu = useRef(null);
  const entries = () => [...menu.current.querySelectorAll("[role=menuitem]")];
  useEffect(() => {
    const invoker = button.current;
    invoker.popoverTargetElement = menu.current; // a click on it does not count as one beside the menu
    menu.current.showPopover();
    place(menu.current, invoker);
    entries().at(opensAt).focus();
    const scrolled = (event) => !menu.current?.contains(event.target) && close(false);
    document.addEventListener("scroll", scrolled, true);
    return () => {
      invoker.popoverTargetElement = null;
      document.removeEventListener("scroll", scrolled, true);
    };
  }, []);
  const onKey = (event) => {
    const all = entries();
    const at = all.indexOf(document.activeElement);
    const next = { ArrowDown: (at + 1) % all.length, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    event.stopPropagation();
    if (next !== undefined) all.at(next).focus();
    else if (["Escape", "Tab"].includes(event.key)) close(true);
    else return;
    if (event.key !== "Tab") event.preventDefault();
  };
  const choose = (item) => {
    close(true);
    item.run();
  };
  return html`<div ref=${menu} popover="auto" role="menu" class="popup-menu" aria-label=${label} onKeyDown=${onKey}
      onToggle=${(event) => event.newState === "closed" && close(false)}>
    ${items.map((item) => html`<button type="button" role="menuitem" tabindex="-1" class=${item.kind ?? ""}
      onClick=${() => choose(item)}>${item.label}</button>`)}
  </div>`;
}

/** Below the button, or above it where there is no room. */
function place(menu, button) {
  const at = button.getBoundingClientRect();
  const isBelow = at.bottom + menu.offsetHeight + MARGIN_PX < innerHeight;
  const left = Math.min(at.left, innerWidth - menu.offsetWidth - MARGIN_PX);
  menu.style.left = `${Math.max(MARGIN_PX, left)}px`;
  menu.style.top = `${Math.max(MARGIN_PX, isBelow ? at.bottom : at.top - menu.offsetHeight)}px`;
}
