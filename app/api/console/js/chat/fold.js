// An answer is what its events add up to; whatever is drawn of it is a function of this object.

export const emptyAnswer = () => ({
  id: null, conversationId: null, messageId: null, model: null, createdAt: null, lastEventId: 0, done: false,
  text: "", reasoning: "", tools: [], finish: null, matched: null, usage: null, error: null,
  abandoned: null, budget: null, moderation: null,
});

export function fold(answer, { id, data }) {
  if (id) answer.lastEventId = Number(id);
  if (data === "[DONE]") {
    answer.done = true;
    return;
  }
  if (data.error) {
    answer.error = data.error;
    answer.usage = data.error.usage ?? answer.usage;
    return;
  }
  answer.id ??= data.id;
  answer.model ??= data.model;
  answer.createdAt ??= data.created ?? null;
  answer.conversationId ??= data.conversation_id ?? null;
  answer.messageId ??= data.message_id ?? null;
  for (const name of ["usage", "abandoned", "budget", "moderation"]) answer[name] = data[name] ?? answer[name];
  for (const choice of data.choices ?? []) {
    if (choice.index !== 0) continue;
    const delta = choice.delta ?? {};
    answer.text += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) foldCall(answer.tools, call);
    if (choice.finish_reason) {
      answer.finish = choice.finish_reason;
      answer.matched = choice.matched_stop ?? null;
    }
  }
}

function foldCall(tools, call) {
  const tool = (tools[call.index] ??= { id: call.id, name: "", arguments: "" });
  tool.name += call.function?.name ?? "";
  tool.arguments += call.function?.arguments ?? "";
}

// A stored message, in the same shape: a chat that is reloaded is drawn by the same code.
export function storedAnswer(message) {
  const calls = message.tool_calls ?? [];
  return {
    ...emptyAnswer(),
    model: message.model ?? null,
    id: message.request_id ?? null,
    messageId: message.id,
    done: message.status !== "in_progress",
    text: textOf(message.content),
    reasoning: message.reasoning_content ?? "",
    tools: calls.map((c) => ({ id: c.id, name: c.function?.name ?? "", arguments: c.function?.arguments ?? "" })),
    finish: message.finish_reason,
    usage: message.usage,
    status: message.status,
  };
}

export const textOf = (content) =>
  typeof content === "string"
    ? content
    : (content ?? []).map((part) => part.text ?? "").filter(Boolean).join("\n");

export const imagesOf = (content) =>
  Array.isArray(content) ? content.map((part) => part.image_url?.url).filter((url) => url?.startsWith("data:image/")) : [];
