// Third-party clients in JavaScript, unchanged: `node clients.mjs URL MODEL [TEXT]` sends TEXT to any server, and prints a JSON line
// with the result of each call.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const [baseURL, model, TEXT = "import os"] = process.argv.slice(2);
const options = { baseURL, apiKey: "none" };
const COUNT = 16, ROOM = 60; // tokens of a text, and those that an object or a call may take
const messages = [{ role: "user", content: TEXT }];
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 4 }, big: { type: "boolean" } },
  required: ["name", "big"],
  additionalProperties: false,
};

async function show(client, call, give) {
  let found;
  try {
    found = { found: await give() };
  } catch (error) {
    found = { error: `${error.name}: ${error.message}` };
  }
  console.log(JSON.stringify({ client, call, ...found }));
}

async function joined(parts, textOf) {
  let text = "";
  for await (const part of parts) text += textOf(part);
  return text;
}

async function last(parts) {
  let found;
  for await (const part of parts) found = part;
  return found;
}

const openai = new OpenAI(options);
const chat = { model, messages, temperature: 0 };
const create = (more) => openai.chat.completions.create({ ...chat, ...more });
const response_format = { type: "json_schema", json_schema: { name: "City", schema, strict: true } };
const tools = [{ type: "function", function: { name: "City", parameters: schema } }];
const responses = { model, input: messages, temperature: 0, max_output_tokens: COUNT };
await show("openai of npm", "chat", async () => (await create({ max_tokens: COUNT })).choices[0].message.content);
await show("openai of npm", "stream", async () =>
  joined(await create({ max_tokens: COUNT, stream: true }), (part) => part.choices[0].delta.content ?? ""));
await show("openai of npm", "usage", async () =>
  (await create({ max_tokens: COUNT, stream: true, stream_options: { include_usage: true } }).then(last)).usage.completion_tokens);
const call = { max_tokens: ROOM, tools, tool_choice: "required", parallel_tool_calls: false };
await show("openai of npm", "function", async () =>
  JSON.parse((await create(call)).choices[0].message.tool_calls[0].function.arguments));
await show("openai of npm", "streamed_function", async () =>
  JSON.parse((await openai.chat.completions.stream({ ...chat, ...call }).finalMessage()).tool_calls[0].function.arguments));
await show("openai of npm", "object", async () =>
  (await openai.chat.completions.parse({ ...chat, max_tokens: ROOM, response_format })).choices[0].message.parsed);
await show("openai of npm", "responses", async () => (await openai.responses.create(responses)).output_text);

const anthropic = new Anthropic({ baseURL: baseURL.replace(/\/v1$/, ""), apiKey: "none" });
const asked = { model, messages, temperature: 0, max_tokens: COUNT };
const use = {
  ...asked,
  max_tokens: ROOM,
  tools: [{ name: "City", input_schema: schema }],
  tool_choice: { type: "any", disable_parallel_tool_use: true },
};
const output_config = { format: { type: "json_schema", schema } };
const said = await anthropic.messages.create(asked);
await show("anthropic of npm", "chat", () => said.content[0].text);
await show("anthropic of npm", "usage", () => said.usage.output_tokens);
await show("anthropic of npm", "stream", () => anthropic.messages.stream(asked).finalText());
await show("anthropic of npm", "function", async () => (await anthropic.messages.create(use)).content[0].input);
await show("anthropic of npm", "streamed_function", async () => (await anthropic.messages.stream(use).finalMessage()).content[0].input);
await show("anthropic of npm", "object", async () =>
  JSON.parse((await anthropic.messages.create({ ...asked, max_tokens: ROOM, output_config })).content[0].text));

const provider = createOpenAI(options);
const providerOptions = { openai: { store: false } };
for (const [client, chosen] of [["ai", provider.chat(model)], ["ai by responses", provider(model)]]) {
  const brief = { model: chosen, prompt: TEXT, temperature: 0, maxOutputTokens: COUNT, maxRetries: 0, providerOptions };
  const long = { ...brief, maxOutputTokens: ROOM };
  const City = tool({ inputSchema: jsonSchema(schema) });
  await show(client, "chat", async () => (await generateText(brief)).text);
  await show(client, "stream", async () => joined(streamText(brief).textStream, (part) => part));
  await show(client, "usage", async () => (await generateText(brief)).usage.outputTokens);
  const called = { ...long, toolChoice: "required", tools: { City } };
  await show(client, "function", async () => (await generateText(called)).toolCalls[0].input);
  await show(client, "streamed_function", async () => (await streamText(called).toolCalls)[0].input);
  await show(client, "object", async () => (await generateObject({ ...long, schema: jsonSchema(schema) })).object);
}
