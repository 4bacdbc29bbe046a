// The model and how it is asked, for all chats of this browser; and the models that there are.
import { signal } from "../ui.js";
import { getJson } from "../api.js";
import { read, write } from "../storage.js";

const NAME = "chat";
const NONE = { model: "", system: "", temperature: "", maxTokens: "" };

export const models = signal([]);
export const settings = signal(kept());

// What lies there may be of another version, or no JSON.
function kept() {
  try {
    const values = JSON.parse(read(NAME));
    return Object.fromEntries(Object.keys(NONE).map((name) => [name, typeof values[name] === "string" ? values[name] : ""]));
  } catch {
    return NONE;
  }
}

export function change(values) {
  settings.value = { ...settings.value, ...values };
  write(NAME, JSON.stringify(settings.value));
}

export async function loadModels() {
  models.value = (await getJson("/api/models")).data;
}

export const currentModel = () => models.value.find(({ id }) => id === settings.value.model) ?? models.value[0];

// The model that is asked, once it is known which there are. Throws ApiError.
export async function modelToAsk() {
  if (!models.value.length) await loadModels();
  return currentModel()?.id;
}

export function sampling() {
  const { model, temperature, maxTokens } = settings.value;
  const chosen = model === "auto" ? "auto" : currentModel()?.id;
  return {
    ...(chosen && { model: chosen }),
    ...(temperature !== "" && { temperature: Number(temperature) }),
    ...(maxTokens !== "" && { max_tokens: Number(maxTokens) }),
  };
}

// Dollars of an answer, by the prices of its model; null where the model has none.
export function costUsd(modelId, usage) {
  const price = models.value.find(({ id }) => id === modelId)?.price_usd_per_1k;
  if (!price || !usage) return null;
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const { prompt_tokens: input, completion_tokens: output } = usage;
  return ((input - cached) * price.input + cached * price.cached_input + output * price.output) / 1000;
}
