// The form, the runs that it starts, and what they come to.

import { Answer, prefix, question, watchMarks } from "./answer.js";
import { showAcceptance, showBelief, showSpeed } from "./figures.js";
import { Refused, generate, jsonHeaders, refusal } from "./stream.js";

const $ = (id) => document.getElementById(id);
const REASONS = { stop: "The model ended the text", length: "The text is as long as asked for", deadline: "The server's time for a request was over" };
const EXAMPLES = { chat: "Write a Python function that adds the numbers from 1 to n.", completion: "def fibonacci(n):\n" };
const history = [];
let running = null;
let runs = { about: "", drafting: null, plain: null };

const mode = () => document.querySelector("input[name=mode]:checked").value;

async function start() {
  watchMarks($("output"), $("tip"));
  showFigures();
  for (const input of document.querySelectorAll("input[name=mode]")) input.addEventListener("change", showMode);
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  $("key").addEventListener("change", learnAbout);
  $("prompt").addEventListener("input", showExample);
  $("example").addEventListener("click", () => {
    $("prompt").value = EXAMPLES[mode()];
    showExample();
    $("ask").requestSubmit();
  });
  $("more").addEventListener("invalid", () => ($("more").open = true), true); // else the browser has nowhere to say so
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !running) $("ask").requestSubmit();
    if (event.key === "Escape") running?.abort();
  });
  await learnAbout();
}

async function learnAbout() {
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

// The example takes the place of no text.
function showExample() {
  $("example").hidden = $("prompt").value !== "";
}

function clear() {
  running?.abort();
  history.length = 0;
  $("output").replaceChildren();
  $("status").textContent = "";
  runs = { about: "", drafting: null, plain: null };
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
  if (!text.trim()) throw new Error("The prompt is empty; write something.");
  const [maxTokens, temperature, seed, topP] = ["max-tokens", "temperature", "seed", "top-p"].map((id) => $(id).valueAsNumber);
  const stop = $("stops").value.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
  const options = { max_tokens: maxTokens, temperature, seed, top_p: topP, stop };
  if (mode() === "completion") return { ...options, prompt: text };
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  return { ...options, messages: [...system, ...history, { role: "user", content: text }] };
}

async function run() {
  if (running) return;
  alertWith("");
  running = new AbortController();
  setRunning(true);
  try {
    const body = request();
    const comparing = $("compare").checked && !$("compare").disabled;
    const about = JSON.stringify(body);
    if (runs.about !== about) runs = { about, drafting: null, plain: null };
    if (body.messages) question($("output"), $("prompt").value);
    if ($("text").getBoundingClientRect().top > window.innerHeight / 2) $("text").scrollIntoView();
    const first = await answer(body, comparing || $("draft").checked, comparing);
    if (comparing && !running.signal.aborted) await answer(body, false, true);
    if (body.messages) remember(body, first);
  } catch (error) {
    failed(error);
  }
  running = null;
  setRunning(false);
}

// Runs one request and shows it. Returns its text.
async function answer(body, draft, titled) {
  const kind = draft ? "drafting" : "plain";
  const shown = new Answer($("output"), titled ? (draft ? "With drafting" : "Plain decoding") : body.messages ? "Model" : "");
  if (body.prompt !== undefined) prefix(shown, body.prompt);
  runs[kind] = { tokens: shown.tokens, stats: null, done: false };
  $("status").textContent = `Generating${titled ? (draft ? " with drafting" : " without drafting") : ""} …`;
  try {
    for await (const event of generate({ ...body, draft }, $("key").value, running.signal)) {
      const follow = nearEnd();
      shown.add(event);
      if (follow) $("output").scrollTop = $("output").scrollHeight;
      runs[kind].stats = event.stats;
      showFigures(event, draft);
      if (event.finish_reason) ended(runs[kind], event);
    }
  } catch (error) {
    shown.element.classList.add("broken");
    if (!running.signal.aborted) throw error;
    $("status").textContent = `You stopped it after ${shown.tokens.length} tokens.`;
    showFigures();
  }
  return shown.text;
}

function ended(result, event) {
  result.done = true;
  const { new_tokens: count, decode_seconds: seconds } = event.stats;
  $("status").textContent = `${REASONS[event.finish_reason] ?? event.finish_reason}: ${count} tokens in ${seconds.toFixed(2)} s.`;
  if (event.finish_reason === "deadline") alertWith("The text is not complete: the server's time for a request was over.");
  const at = difference();
  if (at >= 0) alertWith(`The tokens of the two ways differ at token ${at + 1}. Drafting must not change them: please report this.`);
  showFigures(event);
}

function remember(body, text) {
  history.push(body.messages.at(-1), { role: "assistant", content: text });
  $("prompt").value = "";
  showExample();
  if (!matchMedia("(pointer: coarse)").matches) $("prompt").focus({ preventScroll: true }); // else the keyboard hides the text
}

// Where the two texts differ, of as much as there is of both; -1: nowhere.
function difference() {
  const [first, second] = [runs.drafting, runs.plain].map((result) => result?.tokens ?? []);
  if (runs.drafting?.done && runs.plain?.done && first.length !== second.length) {
    const at = first.findIndex((token, index) => token !== second[index]);
    return at >= 0 ? at : first.length;
  }
  return first.findIndex((token, index) => index < second.length && token !== second[index]);
}

function verdict() {
  const { drafting, plain } = runs;
  if (!drafting?.done || !plain?.done) return "Compare to measure both with the same prompt.";
  if (difference() >= 0) return "The tokens differ.";
  const ratio = drafting.stats.tokens_per_second / plain.stats.tokens_per_second;
  return `Drafting is ${ratio.toFixed(2)} times as fast. All ${plain.tokens.length} tokens are equal.`;
}

function showFigures(event, draft = true) {
  showSpeed(runs.drafting?.stats, runs.plain?.stats, verdict());
  if (draft || !runs.drafting) showAcceptance((runs.drafting ?? runs.plain)?.stats);
  if (event?.learned) showBelief(event.learned);
  else if (!event && !$("belief").querySelector("svg")) showBelief(null);
}

const nearEnd = () => $("output").scrollHeight - $("output").scrollTop - $("output").clientHeight < 40;

function setRunning(on) {
  $("go").disabled = on;
  $("stop").disabled = !on;
  $("output").setAttribute("aria-busy", String(on));
}

start();
