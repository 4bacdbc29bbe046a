// Where a message is written: text and images, kept as a draft.
import { notify } from "../notices.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";
import { compact } from "../format.js";
import { LARGE_CHARS } from "./chats.js";
import { icon } from "./icons.js";
import { readImage } from "./image.js";
import { currentModel } from "./settings.js";

const MIN_BODY_BYTES = 2 ** 20;
const BYTES_PER_TOKEN = 16;

/** Why a text is not sent: a server takes a MiB and so many bytes per token of context. Empty if it may be sent. */
export function refusalOf(text, model) {
  if (text.length < LARGE_CHARS || !model?.context_length) return "";
  const most = MIN_BODY_BYTES + BYTES_PER_TOKEN * model.context_length;
  if (new TextEncoder().encode(text).length <= most) return "";
  return `This text is too long: ${model.id} reads ${compact(model.context_length)} tokens. Send a part of it.`;
}

export function Composer({ chat, send, onUp }) {
  const text = chat.draft.value;
  const pasted = chat.pasted.value;
  const [images, setImages] = useState([]);
  const field = useRef(null);
  const picker = useRef(null);
  const live = chat.live.value;
  useLayoutEffect(() => {
    const { style } = field.current;
    style.height = text.length > LARGE_CHARS ? "40dvh" : "auto";
    if (text.length > LARGE_CHARS) return;
    style.height = `${field.current.scrollHeight + 2}px`;
  }, [text]);
  useEffect(() => {
    if (matchMedia("(pointer: fine)").matches) field.current.focus();
  }, [chat]);

  const attach = async (files) => {
    const pictures = [...files].filter((file) => file.type.startsWith("image/"));
    const model = currentModel();
    if (!pictures.length) return;
    if (!model?.capabilities.includes("vision")) {
      notify(`${model?.id ?? "This model"} reads no images. Choose a model with vision.`, { kind: "error" });
      return;
    }
    for (const file of pictures) {
      try {
        const url = await readImage(file);
        setImages((all) => [...all, url]);
      } catch {
        notify(`${file.name} is no image that can be read.`, { kind: "error" });
      }
    }
  };
  const isEmpty = !text.trim() && !images.length && !pasted.length;
  const isReady = !isEmpty && !chat.loading.value; // where a message goes is known once the others are read
  const submit = () => {
    if (live || !isReady) return;
    const whole = [...pasted, text].filter(Boolean).join("\n\n");
    const refusal = refusalOf(whole, currentModel());
    if (refusal) return void notify(refusal, { kind: "error" });
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    send(parts.length ? [{ type: "text", text: whole }, ...parts] : whole);
    chat.write("");
    chat.pasted.value = [];
    setImages([]);
  };
  const onKeyDown = (event) => {
    // While a word is composed, Enter takes it over. 229 is what Safari says then.
    if (event.isComposing || event.keyCode === 229) return;
    if (event.key === "Enter" && !event.shiftKey) submit();
    else if (event.key === "ArrowUp" && isEmpty) onUp();
    else return;
    event.preventDefault();
  };
  chat.takeFiles = attach;
  const onPaste = (event) => {
    const { types, files } = event.clipboardData;
    if (!types.includes("text/plain")) return void attach(files);
    // Programs of an office add a picture of what is copied as text.
    const inserted = event.clipboardData.getData("text/plain");
    if (inserted.length <= LARGE_CHARS) return;
    event.preventDefault(); // a field takes a browser seconds at this size, and minutes for megabytes
    const refusal = refusalOf(inserted, currentModel());
    if (refusal) notify(refusal, { kind: "error" });
    else chat.pasted.value = [...pasted, inserted];
  };

  return html`<form class="composer" onSubmit=${(event) => (event.preventDefault(), submit())}>
    ${images.length > 0 && html`<div class="row">${images.map((url, at) => html`<span class="thumb"><img src=${url} alt="Image ${at + 1}" />
      <button type="button" aria-label="Remove image ${at + 1}" onClick=${() => setImages(images.filter((_, index) => index !== at))}>×</button></span>`)}</div>`}
    ${pasted.length > 0 && html`<div class="row">${pasted.map((one, at) => html`<span class="pasted">${compact(one.length)} pasted characters
      <button type="button" class="plain" aria-label="Remove pasted text ${at + 1}" onClick=${() => (chat.pasted.value = pasted.filter((_, index) => index !== at))}>×</button></span>`)}</div>`}
    <div class="row">
      <input ref=${picker} type="file" accept="image/png,image/jpeg,image/webp,image/gif" multiple hidden
        onChange=${(event) => (attach(event.target.files), (event.target.value = ""))} />
      <button type="button" class="plain icon" aria-label="Attach an image" title="Attach an image" onClick=${() => picker.current.click()}>${icon("clip")}</button>
      <textarea ref=${field} rows="1" dir="auto" aria-label="Message" placeholder="Ask anything" value=${text}
        onInput=${(event) => chat.write(event.target.value)} onKeyDown=${onKeyDown} onPaste=${onPaste}></textarea>
      ${live
        ? html`<button type="button" class="primary icon" aria-label="Stop" title="Stop (Esc)" onClick=${() => chat.stop()}>${icon("stop")}</button>`
        : html`<button class="primary icon" aria-label="Send" title="Send (Enter)" disabled=${!isReady}>${icon("send")}</button>`}
    </div>
  </form>`;
}
