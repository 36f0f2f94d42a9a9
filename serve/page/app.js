// The form, the runs that it starts, and their results.

import { Answer, make, prefix, question, watchTips } from "./answer.js";
import { showAcceptance, showEstimate, showRounds, showSpeed } from "./figures.js";
import { Refused, generate, jsonHeaders, refusal } from "./stream.js";

const $ = (id) => document.getElementById(id);
const REASONS = { stop: "The model ended the text", length: "Max tokens reached", deadline: "The server's time limit was reached" };
const EXAMPLES = { chat: "Write a Python function that adds the numbers from 1 to n.", completion: "def fibonacci(n):\n" };
const ALTERNATIVES = 4;
const NO_RUNS = { about: "", drafting: null, plain: null, plainSeconds: null };
const history = [];
let running = null;
let runs = { ...NO_RUNS };

const mode = () => document.querySelector("input[name=mode]:checked").value;

async function start() {
  watchTips($("output"), $("tip"));
  showFigures();
  for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", showMode);
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  $("key").addEventListener("change", readAbout);
  $("prompt").addEventListener("input", showExample);
  $("example").addEventListener("click", () => {
    setPrompt(EXAMPLES[mode()]);
    $("ask").requestSubmit();
  });
  $("more").addEventListener("invalid", () => ($("more").open = true), true); // so that the browser can show its message
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) $("ask").requestSubmit();
    if (event.key === "Escape") running?.abort();
  });
  await readAbout();
}

async function readAbout() {
  try {
    const response = await fetch("/playground/about", { headers: jsonHeaders($("key").value) });
    if (!response.ok) throw await refusal(response);
    const about = await response.json();
    $("model").textContent = `${about.model}, up to ${about.max_model_len} tokens${about.drafts ? "" : "; this server does not draft"}`;
    $("temperature").value = about.sampling.temperature;
    $("top-p").value = about.sampling.top_p;
    $("draft").checked = $("draft").checked && about.drafts;
    $("draft").disabled = $("compare").disabled = !about.drafts;
    $("modes").hidden = !about.chat;
    document.querySelector(`input[value=${about.chat ? "chat" : "completion"}]`).checked = true;
    showMode();
    alertWith("");
  } catch (error) {
    $("model").textContent = "";
    failed(error);
  }
}

function showMode() {
  $("prompt-label").textContent = mode() === "chat" ? "Message" : "Text to continue";
  $("system-row").hidden = mode() !== "chat";
}

function setPrompt(text) {
  $("prompt").value = text;
  showExample();
}

// The example never replaces a text that the user has written.
function showExample() {
  $("example").hidden = $("prompt").value !== "";
}

function clear() {
  running?.abort();
  history.length = 0;
  $("output").replaceChildren();
  $("status").textContent = "";
  runs = { ...NO_RUNS };
  alertWith("");
  showFigures();
  $("prompt").focus();
}

function alertWith(message) {
  $("alert").textContent = message;
  $("alert").hidden = !message;
}

function failed(error) {
  if (error instanceof Refused && error.status === 401) $("key-row").hidden = false;
  $("status").textContent = "";
  alertWith(error.message);
}

function request() {
  const text = $("prompt").value;
  if (!text.trim()) throw new Error("The prompt is empty; enter some text.");
  const [maxTokens, temperature, seed, topP] = ["max-tokens", "temperature", "seed", "top-p"].map((id) => $(id).valueAsNumber);
  const stop = $("stops").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  const logprobs = $("probabilities").checked ? ALTERNATIVES : null;
  const options = { max_tokens: maxTokens, temperature, seed, top_p: topP, stop, logprobs };
  if (mode() === "completion") return { ...options, prompt: text };
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  return { ...options, messages: [...system, ...history, { role: "user", content: text }] };
}

async function run() {
  if (running) return;
  alertWith("");
  running = new AbortController();
  setRunning(true);
  const exchange = make("div", "exchange");
  try {
    const body = request();
    const comparing = $("compare").checked && !$("compare").disabled;
    const about = JSON.stringify(body);
    if (runs.about !== about) runs = { ...NO_RUNS, about };
    begin(exchange, body);
    const first = await answer(exchange, body, comparing || $("draft").checked, comparing);
    if (comparing && !running.signal.aborted) await answer(exchange, body, false, true);
    if (body.messages) remember(body, first);
    addTools(exchange, body, first);
  } catch (error) {
    // A message that the server refused does not become part of the conversation; its text is still in the form.
    if (exchange.querySelector(".tokens > span")) exchange.classList.add("broken");
    else exchange.remove();
    failed(error);
  }
  running = null;
  setRunning(false);
}

// Adds an exchange to the output, and brings its first line into view. Only the last message can be taken back.
function begin(exchange, body) {
  for (const button of $("output").querySelectorAll(".take-back")) button.remove();
  if (body.messages) question(exchange, body.messages.at(-1).content);
  $("output").append(exchange);
  const { top } = exchange.getBoundingClientRect();
  if (top > window.innerHeight / 2 || top < $("text-head").offsetHeight) exchange.scrollIntoView();
}

// Runs one request and shows it. Returns its text.
async function answer(exchange, body, draft, titled) {
  const kind = draft ? "drafting" : "plain";
  const comparison = draft ? "With drafting" : "Plain decoding";
  const shown = new Answer(exchange, titled ? comparison : body.messages ? "Model" : "");
  if (body.prompt !== undefined) prefix(shown, body.prompt);
  const started = performance.now();
  const result = { tokens: shown.tokens, rounds: shown.rounds, stats: null, done: false, first: null };
  runs[kind] = result;
  $("status").textContent = `Generating${titled ? (draft ? " with drafting" : " without drafting") : ""} …`;
  try {
    for await (const event of generate({ ...body, draft }, $("key").value, running.signal)) {
      shown.add(event);
      if (event.tokens.length) result.first ??= (performance.now() - started) / 1000;
      result.stats = event.stats;
      if (draft && event.learned) runs.plainSeconds = event.learned.plain_seconds ?? null;
      showFigures(event, draft);
      if (event.finish_reason) ended(result, event);
    }
  } catch (error) {
    if (!running.signal.aborted) throw error;
    shown.element.classList.add("broken");
    $("status").textContent = `You stopped it after ${shown.tokens.length} tokens.`;
    showFigures();
  }
  return shown.text;
}

function ended(result, event) {
  result.done = true;
  const { new_tokens: count, decode_seconds: seconds } = event.stats;
  const first = result.first === null ? "" : `, the first after ${result.first.toFixed(2)} s`;
  $("status").textContent = `${REASONS[event.finish_reason] ?? event.finish_reason}: ${count} tokens in ${seconds.toFixed(2)} s${first}.`;
  if (event.finish_reason === "deadline") alertWith("The text is not complete: the server's time limit for a request was reached.");
  const at = difference();
  if (at >= 0) alertWith(`The tokens differ at token ${at + 1}. Drafting must not change them: please report this.`);
  showFigures(event);
}

function remember(body, text) {
  history.push(body.messages.at(-1), { role: "assistant", content: text });
  setPrompt("");
  if (!matchMedia("(pointer: coarse)").matches) $("prompt").focus({ preventScroll: true }); // a keyboard on the screen would hide it
}

function addTools(exchange, body, text) {
  const tools = make("div", "tools");
  const add = (name, act, kind = "") => {
    const button = make("button", kind, name);
    button.type = "button";
    button.addEventListener("click", () => running || act(button));
    tools.append(button);
  };
  const takeBack = () => {
    if (body.messages) history.length -= 2;
    if (body.messages) exchange.remove();
    const sort = body.messages ? "chat" : "completion";
    document.querySelector(`input[value=${sort}]`).checked = true;
    showMode();
    setPrompt(body.prompt ?? body.messages.at(-1).content);
  };
  add("Copy", (button) => copy(text, exchange, button));
  add("Retry", () => (takeBack(), $("ask").requestSubmit()), body.messages ? "take-back" : "");
  add("Edit", () => (takeBack(), $("prompt").focus()), body.messages ? "take-back" : "");
  exchange.append(tools);
}

async function copy(text, exchange, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers offer no clipboard to pages from other hosts without TLS, but they copy a selection.
    getSelection().selectAllChildren(exchange.querySelector(".tokens"));
    document.execCommand("copy");
  }
  button.textContent = "Copied";
}

// Index of the first token at which the two texts differ, as far as both exist; -1 if they do not differ.
function difference() {
  const [first, second] = [runs.drafting, runs.plain].map((result) => result?.tokens ?? []);
  if (runs.drafting?.done && runs.plain?.done && first.length !== second.length) {
    const at = first.findIndex((token, index) => token !== second[index]);
    return at >= 0 ? at : first.length;
  }
  return first.findIndex((token, index) => index < second.length && token !== second[index]);
}

function verdict() {
  const { drafting, plain, plainSeconds } = runs;
  if (drafting?.done && plain?.done) {
    if (difference() >= 0) return "The tokens differ.";
    const ratio = drafting.stats.tokens_per_second / plain.stats.tokens_per_second;
    return `Drafting is ${ratio.toFixed(2)} times as fast. All ${plain.tokens.length} tokens are equal.`;
  }
  if (!drafting?.done || !plainSeconds) return "Compare to measure both with the same prompt.";
  const ratio = drafting.stats.tokens_per_second * plainSeconds;
  return `Estimate: ${ratio.toFixed(2)} times as fast as plain decoding, by the plain rounds among these. Compare to measure both.`;
}

function showFigures(event, draft = true) {
  showSpeed(runs.drafting?.stats, runs.plain?.stats, verdict());
  const shown = runs.drafting ?? runs.plain;
  if (draft || !runs.drafting) {
    showAcceptance(shown?.stats);
    showRounds(shown?.rounds);
  }
  if (event?.learned?.accept || event?.learned?.text) showEstimate(event.learned);
  else if (!event && !$("estimate").querySelector("svg")) showEstimate(null);
}

function setRunning(on) {
  $("go").disabled = on;
  $("stop").hidden = !on;
  $("output").setAttribute("aria-busy", String(on));
}

start();
