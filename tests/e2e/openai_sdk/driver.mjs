// Runs one case after another on the Node SDK: a JSON line in, a JSON line out.
// The same operations as driver.py, and the EventSource of the npm package `eventsource`.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { EventSource } from "eventsource";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const Weather = z.object({ sky: z.enum(["clear", "cloudy"]), windy: z.boolean() });

const call = (tool) => [tool.function.name, tool.function.arguments];

const answer = (completion) => ({
  id: completion.id,
  text: completion.choices.map((c) => c.message.content),
  finish: completion.choices.map((c) => c.finish_reason),
  tools: completion.choices.map((c) => (c.message.tool_calls ?? []).map(call)),
  usage: completion.usage?.total_tokens ?? null,
  parsed: completion.choices.flatMap((c) => (c.message.parsed ? [c.message.parsed] : [])),
});

function addTools(calls, deltas) {
  for (const delta of deltas) {
    if (delta.index === calls.length) calls.push([delta.function.name, ""]);
    calls[delta.index][1] += delta.function.arguments ?? "";
  }
}

async function collected(chunks) {
  const out = { text: [], finish: [], tools: [], usage: null, chunks: 0 };
  for await (const chunk of chunks) {
    out.chunks += 1;
    out.id = chunk.id;
    out.usage = chunk.usage?.total_tokens ?? out.usage;
    for (const { index, delta, finish_reason } of chunk.choices) {
      while (out.text.length <= index) {
        out.text.push("");
        out.finish.push(null);
        out.tools.push([]);
      }
      out.text[index] += delta.content ?? "";
      out.finish[index] = finish_reason ?? out.finish[index];
      addTools(out.tools[index], delta.tool_calls ?? []);
    }
  }
  return out;
}

async function rawStream(client, params, headers, events = Infinity) {
  const response = await client.chat.completions.create({ ...params, stream: true }, { headers }).asResponse();
  const ids = [];
  let pings = 0;
  let rest = "";
  const decoder = new TextDecoder();
  reading: for await (const piece of response.body) {
    const lines = (rest + decoder.decode(piece, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === ": ping") pings += 1;
      if (line.startsWith("id: ")) ids.push(Number(line.slice(4)));
      if (line.startsWith("data: ") && --events === 0) break reading; // cancels the body
    }
  }
  return { ids, pings };
}

const operations = {
  create: async (client, params, headers) => answer(await client.chat.completions.create(params, { headers })),

  stream: async (client, params, headers) =>
    collected(await client.chat.completions.create({ ...params, stream: true }, { headers })),

  async broken_stream(client, params, headers) {
    let text = "";
    try {
      for await (const chunk of await client.chat.completions.create({ ...params, stream: true }, { headers })) {
        for (const choice of chunk.choices) text += choice.delta.content ?? "";
      }
    } catch (exc) {
      if (!(exc instanceof OpenAI.APIError)) throw exc;
      return { text: [text], ...error(exc) };
    }
    return { text: [text] };
  },

  stream_helper: async (client, params, headers) =>
    answer(await client.chat.completions.stream(params, { headers }).finalChatCompletion()),

  parse: async (client, params, headers) =>
    answer(
      await client.chat.completions.parse(
        { ...params, response_format: zodResponseFormat(Weather, "Weather") },
        { headers },
      ),
    ),

  async raw(client, params, headers) {
    const { data, response, request_id } = await client.chat.completions
      .create(params, { headers })
      .withResponse();
    return {
      ...answer(data),
      status: response.status,
      request_id: response.headers.get("x-request-id"),
      sdk_request_id: request_id,
    };
  },

  async resume(client, params, headers) {
    const keyed = { ...headers, "Idempotency-Key": `resume-${process.hrtime.bigint()}` };
    const first = await rawStream(client, params, keyed, 4);
    const after = { ...keyed, "Last-Event-ID": String(first.ids.at(-1)) };
    const rest = await operations.stream(client, params, after);
    return { ...rest, ...first };
  },

  // A stream that is aborted after 5 chunks, as by a Stop button; no route to cancel it is called.
  async stop(client, params, headers) {
    const chunks = await client.chat.completions.create({ ...params, stream: true }, { headers });
    let left = 5;
    for await (const { id } of chunks) {
      if (--left > 0) continue;
      chunks.controller.abort();
      return { id };
    }
  },

  async objects(client, params, headers) {
    const made = await client.chat.completions.create(params, { headers });
    const again = await client.chat.completions.retrieve(made.id);
    const deleted = await client.chat.completions.delete(made.id);
    const models = [];
    for await (const model of client.models.list()) models.push(model.id);
    const model = (await client.models.retrieve(models[0])).id;
    return { ...answer(again), models, model, deleted: deleted.deleted };
  },

  // Follows a stream until the server ends the EventSource; it reconnects by itself.
  event_source: (client, params) =>
    new Promise((resolve) => {
      const seen = { data: [], ids: [], errors: [], opened: 0 };
      const source = new EventSource(params.url);
      source.onopen = () => (seen.opened += 1);
      source.onmessage = (event) => {
        seen.data.push(event.data);
        seen.ids.push(Number(event.lastEventId));
      };
      source.onerror = (event) => {
        seen.errors.push(event.code ?? null);
        if (source.readyState === EventSource.CLOSED) resolve(seen);
      };
    }),
};

const error = (exc) => ({
  error: exc.constructor.name,
  status: exc.status ?? null,
  code: exc.code ?? null,
  param: exc.param ?? null,
  message: exc.message,
  request_id: exc.requestID ?? null,
});

async function run(testCase) {
  const client = new OpenAI({
    baseURL: testCase.base_url,
    apiKey: testCase.api_key,
    maxRetries: testCase.max_retries,
  });
  const started = performance.now();
  let seen;
  try {
    seen = await operations[testCase.op](client, testCase.params, testCase.headers ?? undefined);
  } catch (exc) {
    seen = exc instanceof OpenAI.APIError ? error(exc) : { crash: `${exc.constructor.name}: ${exc.message}` };
  }
  return { ...seen, took_s: (performance.now() - started) / 1000 };
}

const sdk = JSON.parse(readFileSync(new URL("node_modules/openai/package.json", import.meta.url)));
console.log(JSON.stringify({ sdk: `node ${sdk.version}` }));
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await run(JSON.parse(line))));
}
