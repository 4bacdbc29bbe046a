// A button that opens a menu: the pattern of the ARIA Authoring Practices.
import { html, useEffect, useRef, useState } from "../ui.js";

const MARGIN_PX = 8;

/** `items` are `{label, run, kind}`; null stands for nothing. `run` may move the focus. */
export function MenuButton({ label, items, children }) {
  const [isOpen, setOpen] = useState(false);
  const [button, menu] = [useRef(null), useRef(null)];
  const entries = () => [...menu.current.querySelectorAll("[role=menuitem]")];
  const close = (andFocus) => {
    menu.current?.hidePopover();
    if (andFocus) button.current?.focus();
  };
  const open = (at) => {
    menu.current.showPopover();
    place(menu.current, button.current);
    entries().at(at)?.focus();
  };
  useEffect(() => {
    const shown = (event) => setOpen(event.newState === "open");
    const scrolled = (event) => !menu.current.contains(event.target) && close(false);
    menu.current.addEventListener("toggle", shown);
    document.addEventListener("scroll", scrolled, true);
    const [opened] = [menu.current];
    return () => {
      opened.removeEventListener("toggle", shown);
      document.removeEventListener("scroll", scrolled, true);
    };
  }, []);
  const onButtonKey = (event) => {
    if (!["ArrowDown", "ArrowUp"].includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    open(event.key === "ArrowDown" ? 0 : -1);
  };
  const onKey = (event) => {
    const all = entries();
    const at = all.indexOf(document.activeElement);
    const next = { ArrowDown: (at + 1) % all.length, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    event.stopPropagation();
    if (next !== undefined) all.at(next).focus();
    else if (event.key === "Escape") close(true);
    else if (event.key === "Tab") close(true);
    else return;
    if (event.key !== "Tab") event.preventDefault();
  };
  const choose = (item) => {
    close(true);
    item.run();
  };
  return html`<button type="button" ref=${button} class="menu-button" aria-haspopup="menu"
      aria-expanded=${isOpen} aria-label=${label} title=${label} onKeyDown=${onButtonKey}
      onClick=${() => (isOpen ? close(true) : open(0))}>${children}</button>
    <div ref=${menu} popover="auto" role="menu" class="popup-menu" aria-label=${label} onKeyDown=${onKey}>
      ${items.filter(Boolean).map((item) => html`<button type="button" role="menuitem" tabindex="-1"
        class=${item.kind ?? ""} onClick=${() => choose(item)}>${item.label}</button>`)}
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
