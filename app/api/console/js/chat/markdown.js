// Draws Markdown while it arrives. Blocks that are finished are drawn once; the last one is drawn again as it grows.
// The end is drawn from the whole text, so that a streamed answer and a reloaded one are the same.
import { DOMPurify, Marked } from "../../vendor/markdown.js";
import { codeBlock } from "./code.js";

const escape = (text) => text.replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
const TAGS = "a p br hr h1 h2 h3 h4 h5 h6 em strong del pre code blockquote ul ol li table thead tbody tr th td input sub sup kbd";
const CLEAN = {
  ALLOWED_TAGS: TAGS.split(" "),
  ALLOWED_ATTR: ["href", "title", "start", "align", "type", "checked", "disabled"],
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const SAFE_TAG = /^<\/?(br|sub|sup|kbd)\s*\/?>$/i;
const SAFE_LINK = /^(https?:|mailto:)/i;
const MARK = /^ *(\d{1,9}[.)]?|[-+*])\s*$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)\n/;

const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text, block }) => {
      if (SAFE_TAG.test(text)) return text;
      return block ? `<p>${escape(text.trim()).replaceAll("\n", "<br>")}</p>` : escape(text);
    },
    // Above them stand the headings of the page and of the message.
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    code: ({ text, lang }) => `<pre title="${escape(lang ?? "")}"><code>${escape(text)}</code></pre>`,
    // No image of another host is loaded: whoever wrote the text would learn who reads it, and when.
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
  },
});

function clean(markup) {
  const fragment = DOMPurify.sanitize(markup, CLEAN);
  for (const link of fragment.querySelectorAll("a")) {
    if (!SAFE_LINK.test(link.getAttribute("href") ?? "")) link.replaceWith(...link.childNodes);
    else Object.assign(link, { rel: "noopener noreferrer nofollow", target: "_blank" });
  }
  for (const block of fragment.querySelectorAll("p,li,h1,h2,h3,h4,h5,h6,th,td,blockquote,ul,ol")) block.dir = "auto";
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre.textContent, pre.title));
  for (const box of fragment.querySelectorAll("input")) {
    if (box.type !== "checkbox") box.remove();
    box.disabled = true;
    box.ariaLabel = box.checked ? "done" : "to do";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.blocks = []; // what is drawn: {raw, type, links, node}
    this.text = "";
    this.offset = 0; // characters of blocks that do not change any more
    this.finished = 0; // the number of those blocks
    this.fence = null; // the code block that is open: {node, from, close, seen}
    this.plain = null; // shows all of it as it is
  }

  // Draws `text`, which begins with what was drawn; `whole` says that nothing follows.
  draw(text, whole) {
    if (this.plain && !whole && text.startsWith(this.text)) return void (this.plain.textContent = text);
    if (this.plain) this.element.replaceChildren();
    this.plain = null;
    try {
      this.drawBlocks(text, whole);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.drawPlain(text); // thousands of quotes or lists within each other overflow the stack
    }
  }

  drawPlain(text) {
    this.plain = Object.assign(document.createElement("p"), { className: "raw", dir: "auto", textContent: text });
    this.element.replaceChildren(this.plain);
    this.blocks = [];
    this.offset = this.finished = 0;
    this.fence = null;
    this.text = text;
  }

  drawBlocks(text, whole) {
    if (whole || !text.startsWith(this.text)) {
      this.offset = this.finished = 0;
      this.fence = null;
    }
    this.text = text;
    if (this.fence && this.growFence(text)) return;
    const tokens = marked.lexer(text.slice(this.offset));
    const links = whole ? JSON.stringify(tokens.links) : "{}"; // a link's address may stand below it
    const shown = tokens.filter(({ type }) => type !== "space" && type !== "def");
    shown.forEach((token, index) => this.drawBlock(this.finished + index, token, links));
    for (const { node } of this.blocks.splice(this.finished + shown.length)) node.remove();
    if (!whole) this.settle(tokens, shown);
  }

  drawBlock(index, token, links) {
    const old = this.blocks[index];
    const { raw, type } = token;
    if (old && old.raw === raw && old.type === type && old.links === links && !old.open) return;
    const block = { raw, type, links };
    if (type === "list") this.drawList(block, old, token);
    else if (type === "code") block.node = codeBlock(token.text, token.lang);
    else (block.node = document.createElement("div")).append(clean(marked.parser([token])));
    this.blocks[index] = block;
    if (!old) this.element.append(block.node);
    else if (old.node !== block.node) old.node.replaceWith(block.node);
  }

  // A list is drawn item by item: a long answer is often a single list.
  drawList(block, old, token) {
    const frame = clean(marked.parser([{ ...token, items: [] }])).firstChild;
    const keep = old?.items && old.links === block.links && old.node.isEqualNode?.call(old.node.cloneNode(), frame.cloneNode());
    block.node = keep ? old.node : frame;
    block.items = keep ? old.items : [];
    if (!keep) frame.replaceChildren();
    const { node, items } = block;
    token.items.forEach((item, index) => {
      const seen = `${token.loose} ${item.raw}`;
      if (items[index] === seen) return;
      const drawn = clean(marked.parser([{ ...token, items: [item] }])).querySelector("li");
      if (node.children[index]) node.children[index].replaceWith(drawn);
      else node.append(drawn);
      items[index] = seen;
    });
    while (node.children.length > token.items.length) node.lastElementChild.remove();
    items.length = token.items.length;
  }

  // All blocks but the last are finished, and not read again; nor is the list before what may be its next number.
  settle(tokens, shown) {
    this.fence = null;
    if (shown.at(-2)?.type === "list" && MARK.test(shown.at(-1).raw)) shown.pop();
    const last = shown.at(-1);
    if (!last) return;
    for (const token of tokens.slice(0, tokens.indexOf(last))) this.offset += token.raw.length;
    this.finished += shown.length - 1;
    const open = last.type === "code" && FENCE.exec(last.raw);
    if (!open) return;
    const close = new RegExp(`^ {0,3}${open[1][0]}{${open[1].length},}[ \\t]*$`, "m");
    if (close.test(last.raw.slice(open[0].length))) return;
    const block = this.blocks[this.finished];
    block.open = true;
    this.fence = { node: block.node, from: this.offset + open[0].length, close, seen: 0 };
  }

  // Adds to an open block of code without reading it again; false once it is closed.
  growFence(text) {
    const { node, from, close, seen } = this.fence;
    const code = text.slice(from);
    if (close.test(code.slice(code.lastIndexOf("\n", seen) + 1))) return false;
    this.fence.seen = code.length;
    node.grow(code);
    return true;
  }
}
