// What users of openai-node write, each demand as they would write it. Prints one JSON object: what came of each.
//
//   node openai_node.cjs BASE_URL KEY MODEL SEED STOP
//
// With this seed STOP is the fourth word, so that a reply can be complete.
"use strict";

const OpenAI = require("openai");

const [baseURL, apiKey, model, seed, stop] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey });
const short = 3;
const complete = { seed: Number(seed), stop: [stop] };
const messages = [{ role: "user", content: "hello" }];

const scenes = {
  async chat() {
    const made = await client.chat.completions.create({ model, messages, max_tokens: short });
    const [choice] = made.choices;
    return {
      text: choice.message.content,
      finish_reason: choice.finish_reason,
      completion_tokens: made.usage.completion_tokens,
      prompt_tokens: made.usage.prompt_tokens,
    };
  },

  async chat_stream() {
    const stream = await client.chat.completions.create({
      model, messages, max_completion_tokens: short, stream: true, stream_options: { include_usage: true },
    });
    const ids = new Set();
    let text = "", finish = null, usage = null;
    for await (const chunk of stream) {
      ids.add(chunk.id);
      usage = chunk.usage ? chunk.usage.completion_tokens : usage;
      for (const choice of chunk.choices) {
        text += choice.delta.content ?? "";
        finish = choice.finish_reason ?? finish;
      }
    }
    return { ids: ids.size, text, finish_reason: finish, completion_tokens: usage };
  },

  async chat_stream_helper() {
    let heard = "";
    const stream = client.chat.completions.stream({
      model, messages, ...complete, stream_options: { include_usage: true },
    });
    stream.on("content", (delta) => { heard += delta; });
    const final = await stream.finalChatCompletion();
    return {
      heard,
      text: final.choices[0].message.content,
      finish_reason: final.choices[0].finish_reason,
      completion_tokens: (await stream.totalUsage()).completion_tokens,
    };
  },

  async response() {
    const made = await client.responses.create({ model, input: "hello", max_output_tokens: short });
    const again = await client.responses.retrieve(made.id);
    return {
      text: made.output_text,
      again: again.output.map((item) => item.content.map((part) => part.text).join("")).join(""),
      status: made.status,
      reason: made.incomplete_details.reason,
      output_tokens: made.usage.output_tokens,
      cached_tokens: made.usage.input_tokens_details.cached_tokens,
    };
  },

  async response_stream() {
    const stream = await client.responses.create({ model, input: "hello", max_output_tokens: short, stream: true });
    const types = [], numbers = [];
    let text = "", final = null;
    for await (const event of stream) {
      types.push(event.type);
      numbers.push(event.sequence_number);
      if (event.type === "response.output_text.delta") text += event.delta;
      if (event.type === "response.incomplete") final = event.response;
    }
    return {
      types,
      rising: numbers.every((number, at) => at === 0 || number > numbers[at - 1]),
      text,
      final: final.output[0].content[0].text,
      output_tokens: final.usage.output_tokens,
    };
  },

  // The helper with its listeners; it throws on an event that it does not know or that comes out of order.
  async response_stream_listeners() {
    let text = "", events = 0;
    const stream = client.responses.stream({ model, input: "hello", ...complete });
    stream.on("event", () => { events += 1; });
    stream.on("response.output_text.delta", (event) => { text += event.delta; });
    const final = await stream.finalResponse();
    return { text, final: final.output_text ?? final.output[0].content[0].text, status: final.status, events };
  },

  // The helper, left in the middle and gone on with by the reply's id.
  async response_stream_helper() {
    let text = "", reply = null, last = 0;
    for await (const event of client.responses.stream({ model, input: "hello", ...complete })) {
      if (event.type === "response.created") reply = event.response.id;
      if (event.type === "response.output_text.delta") {
        text += event.delta;
        last = event.sequence_number;
        break;
      }
    }
    const numbers = [];
    const stream = client.responses.stream({ response_id: reply, starting_after: last });
    for await (const event of stream) {
      numbers.push(event.sequence_number);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    const final = await stream.finalResponse();
    return {
      text,
      final: final.output[0].content[0].text,
      after_the_cut: numbers.length > 0 && Math.min(...numbers) > last,
      status: final.status,
    };
  },

  async background() {
    const made = await client.responses.create({
      model, input: "hello", max_output_tokens: short, background: true,
    });
    let seen = made;
    for (let tries = 0; tries < 200 && ["queued", "in_progress"].includes(seen.status); tries += 1) {
      await new Promise((resolve) => setTimeout(resolve, 250));
      seen = await client.responses.retrieve(made.id);
    }
    let replayed = "", begins_after = null;
    for await (const event of await client.responses.retrieve(made.id, { stream: true, starting_after: 0 })) {
      begins_after ??= event.sequence_number;
      if (event.type === "response.output_text.delta") replayed += event.delta;
    }
    return { first: made.status, status: seen.status, text: seen.output[0].content[0].text, replayed, begins_after };
  },

  async cancel() {
    const made = await client.responses.create({ model, input: "hello", max_output_tokens: 400, background: true });
    const stopped = await client.responses.cancel(made.id);
    const again = await client.responses.cancel(made.id);
    return { status: stopped.status, again: again.status, usage: stopped.usage !== null };
  },

  async turns() {
    const one = await client.responses.create({ model, input: "hello", max_output_tokens: short });
    const two = await client.responses.create({
      model, input: "and now?", previous_response_id: one.id, max_output_tokens: short,
    });
    const items = [];
    for await (const item of client.responses.inputItems.list(two.id)) items.push(item.content[0].text);
    await client.responses.delete(one.id);
    const deleted = await client.responses.retrieve(one.id).then(() => false, (error) => error instanceof OpenAI.NotFoundError);
    return {
      named: two.previous_response_id === one.id,
      longer: two.usage.input_tokens > one.usage.input_tokens + one.usage.output_tokens,
      items,
      deleted,
    };
  },

  async conversation() {
    const mine = await client.conversations.create({
      metadata: { topic: "walls" }, items: [{ type: "message", role: "user", content: "first" }],
    });
    const made = await client.responses.create({
      model, input: "second", conversation: mine.id, max_output_tokens: short,
    });
    const items = [];
    for await (const item of client.conversations.items.list(mine.id, { order: "asc", limit: 2 })) {
      items.push(item.content[0].text);
      if (items.length === 2) break;
    }
    const added = await client.conversations.items.create(mine.id, { items: [{ role: "user", content: "third" }] });
    const one = { conversation_id: mine.id };
    const kept = await client.conversations.items.retrieve(added.data[0].id, one);
    items.push(kept.content[0].text);
    const left = await client.conversations.items.delete(kept.id, one);
    const renamed = await client.conversations.update(mine.id, { metadata: { topic: "doors" } });
    const gone = await client.conversations.delete(mine.id);
    return {
      named: made.conversation.id === mine.id,
      items,
      left: left.id === mine.id,
      text: made.output_text,
      topic: [mine.metadata.topic, renamed.metadata.topic],
      deleted: gone.deleted,
    };
  },

  async errors() {
    const said = (call) => call().then(
      () => ["nothing raised"],
      (error) => [error.constructor.name, error.status, error.code, String(error.requestID).startsWith("req_")],
    );
    const stranger = new OpenAI({ baseURL, apiKey: "sk-chorus-none" });
    const key = { headers: { "Idempotency-Key": `node-${Date.now()}` } };
    const tools = [{ type: "function", function: { name: "f", parameters: {} } }];
    await client.responses.create({ model, input: "a", max_output_tokens: 1 }, key);
    return {
      key: await said(() => stranger.models.list()),
      key_stream: await said(() => stranger.responses.create({ model, input: "hello", stream: true })),
      reply: await said(() => client.responses.retrieve("resp_none")),
      cancel: await said(() => client.responses.cancel("resp_none")),
      conversation: await said(() => client.conversations.retrieve("conv_none")),
      model: await said(() => client.chat.completions.create({ model: "none", messages })),
      field: await said(() => client.responses.create({ model, input: "hello", temperature: 9 })),
      field_stream: await said(() => client.chat.completions.create({ model, messages, n: 2, stream: true })),
      tools: await said(() => client.chat.completions.create({ model, messages, tools })),
      other_body: await said(() => client.responses.create({ model, input: "b" }, key)),
    };
  },

  async headers() {
    const { data, response, request_id } = await client.chat.completions
      .create({ model, messages, max_tokens: short }).withResponse();
    const models = [];
    for await (const one of client.models.list()) models.push(one.id);
    return {
      request_id: [response.headers.get("x-request-id"), request_id ?? data._request_id],
      limits: [...response.headers.keys()].filter((name) => name.startsWith("x-ratelimit-")).sort(),
      models,
      model: (await client.models.retrieve(model)).id,
    };
  },
};

async function main() {
  const shown = async ([name, scene]) => {
    try {
      return [name, await scene()];
    } catch (error) {
      return [name, { raised: `${error.constructor.name}: ${error.message}` }];
    }
  };
  const results = await Promise.all(Object.entries(scenes).map(shown)); // side by side: slow on purpose
  const { VERSION: version } = require("openai/version");
  console.log(JSON.stringify({ version, ...Object.fromEntries(results) }));
}

main();
