// Which model answers, and how.
import { compact, money, number } from "../format.js";
import { html } from "../ui.js";
import { icon } from "./icons.js";
import { change, currentModel, models, settings } from "./settings.js";

const perMillion = (price) => money(Number(price) * 1000);

function priceOf(model) {
  const { input, output } = model.price_usd_per_1k ?? {};
  if (!Number(input) && !Number(output)) return "free";
  return `${perMillion(input)} in, ${perMillion(output)} out per million tokens`;
}

const describe = (model, used) => `${used ? `${number(used)} of ` : ""}${compact(model.context_length)} tokens of context, ${priceOf(model)}`;

export function Panel({ chat }) {
  const { model, system, temperature, maxTokens } = settings.value;
  const current = currentModel();
  chat.changed.value;
  const usage = chat.path.findLast((message) => message.answer?.usage)?.answer.usage;
  const used = usage && usage.prompt_tokens + usage.completion_tokens;
  const set = (name) => (event) => change({ [name]: event.target.value });
  return html`<div class="panel row" role="group" aria-label="Model and settings">
    <select aria-label="Model" value=${model === "auto" ? model : current?.id} onChange=${set("model")} title=${current && describe(current)}>
      ${models.value.length > 1 && html`<option value="auto">auto: the server chooses</option>`}
      ${models.value.map((each) => html`<option value=${each.id}>${each.id}${each.state === "ready" ? "" : ` (${each.state})`}</option>`)}
    </select>
    <span class="facts">${current && describe(current, used)}</span>
    <button class="plain icon" popovertarget="tuning" aria-label="Settings of the chat" title="System prompt, temperature, length">${icon("tune")}</button>
    <div id="tuning" class="tuning card" popover>
      <label>System prompt, for new chats<textarea rows="4" dir="auto" value=${system} onInput=${set("system")}></textarea></label>
      <label>Temperature<input type="number" min="0" max="2" step="0.1" placeholder="the model's" value=${temperature} onInput=${set("temperature")} /></label>
      <label>Tokens of an answer, at most<input type="number" min="1" step="1" placeholder="no limit" value=${maxTokens} onInput=${set("maxTokens")} /></label>
    </div>
  </div>`;
}
