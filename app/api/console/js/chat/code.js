// A block of code: its language, a button to copy it, and colours.
import { DOMPurify } from "../../vendor/markdown.js";
import hljs from "../../vendor/highlight.js";

const MAX_CHARS = 30_000; // beyond them colours would hold the page up
const MAX_GROWING_CHARS = 4_000;
const PAUSE_MS = 200;
const COLOURS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

export function codeBlock(text, info) {
  const language = (info ?? "").trim().split(/\s/)[0].toLowerCase();
  const figure = document.createElement("figure");
  figure.className = "code";
  figure.innerHTML = '<figcaption><span></span><button type="button" data-copy>Copy</button></figcaption><pre tabindex="0"><code></code></pre>';
  figure.querySelector("span").textContent = language || "text";
  const code = figure.querySelector("code");
  let [shown, colouredAt] = [0, 0];
  const paint = (source) => {
    shown = source.length;
    if (!hljs.getLanguage(language) || source.length > MAX_CHARS) return (code.textContent = source);
    const { value } = hljs.highlight(source, { language, ignoreIllegals: true });
    return code.replaceChildren(DOMPurify.sanitize(value, COLOURS));
  };
  figure.grow = (source) => {
    const now = performance.now();
    if (source.length < MAX_GROWING_CHARS && now - colouredAt > PAUSE_MS) {
      colouredAt = now;
      paint(source);
    } else {
      code.append(source.slice(shown));
      shown = source.length;
    }
  };
  paint(text);
  return figure;
}
