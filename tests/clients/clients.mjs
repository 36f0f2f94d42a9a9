// Clients of other people in JavaScript, unchanged: `node clients.mjs URL MODEL` prints a JSON line for each call, with what it gave.
import OpenAI from "openai";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, streamText, tool } from "ai";

const [baseURL, model] = process.argv.slice(2);
const options = { baseURL, apiKey: "none" };
const COUNT = 16, ROOM = 60; // tokens of a text, and those that an object or a call may take
const TEXT = "import os";
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

const openai = new OpenAI(options);
const chat = { model, messages, temperature: 0 };
const create = (more) => openai.chat.completions.create({ ...chat, ...more });
const response_format = { type: "json_schema", json_schema: { name: "City", schema, strict: true } };
const tools = [{ type: "function", function: { name: "City", parameters: schema } }];
const responses = { model, input: messages, temperature: 0, max_output_tokens: COUNT };
await show("openai of npm", "chat", async () => (await create({ max_tokens: COUNT })).choices[0].message.content);
await show("openai of npm", "stream", async () =>
  joined(await create({ max_tokens: COUNT, stream: true }), (part) => part.choices[0].delta.content ?? ""));
await show("openai of npm", "function", async () =>
  JSON.parse((await create({ max_tokens: ROOM, tools, tool_choice: "required" })).choices[0].message.tool_calls[0].function.arguments));
await show("openai of npm", "object", async () =>
  (await openai.chat.completions.parse({ ...chat, max_tokens: ROOM, response_format })).choices[0].message.parsed);
await show("openai of npm", "responses", async () => (await openai.responses.create(responses)).output_text);

const provider = createOpenAI(options);
const providerOptions = { openai: { store: false } };
for (const [client, chosen] of [["ai", provider.chat(model)], ["ai by responses", provider(model)]]) {
  const brief = { model: chosen, prompt: TEXT, temperature: 0, maxOutputTokens: COUNT, maxRetries: 0, providerOptions };
  const long = { ...brief, maxOutputTokens: ROOM };
  const City = tool({ inputSchema: jsonSchema(schema) });
  await show(client, "chat", async () => (await generateText(brief)).text);
  await show(client, "stream", async () => joined(streamText(brief).textStream, (part) => part));
  await show(client, "function", async () =>
    (await generateText({ ...long, toolChoice: "required", tools: { City } })).toolCalls[0].input);
  await show(client, "object", async () => (await generateObject({ ...long, schema: jsonSchema(schema) })).object);
}
