// One text with its tokens, coloured by their source, and marks where drafts were rejected.

const SOURCES = { exit: "exit head", text: "from the text", verify: "verifier" };
const details = new WeakMap(); // what the tip of each token or mark shows, by its element

export class Answer {
  constructor(parent, title) {
    this.tokens = [];
    this.rounds = [];
    this.element = make("div", "answer");
    if (title) this.element.append(make("h3", "", title));
    this.body = make("span", "tokens");
    this.element.append(this.body);
    parent.append(this.element);
  }

  get text() {
    return this.body.textContent;
  }

  add(event) {
    const counts = { exit: 0, text: 0, verify: 0 };
    event.tokens.forEach((token, at) => {
      // The verifier's token replaces the rejected tokens.
      if (token.source === "verify" && at === event.tokens.length - 1) this.#mark(event.rejected, token.text);
      this.tokens.push(token.id);
      counts[token.source] += 1;
      const span = make("span", token.source, token.text);
      details.set(span, tokenTip(token));
      this.body.append(span);
    });
    if (event.tokens.length) this.rounds.push(counts);
    if (event.held) this.body.append(event.held);
  }

  #mark(rejected, instead) {
    if (!rejected.length) return;
    const mark = make("button", "mark");
    mark.type = "button";
    mark.tabIndex = document.querySelector("#output .mark") ? -1 : 0;
    const drafted = rejected.map(visible).join("");
    mark.setAttribute("aria-label", `Rejected: ${drafted}. The verifier wrote: ${visible(instead) || "nothing visible yet"}.`);
    details.set(mark, [
      ["Rejected", drafted],
      ["Verifier", visible(instead) || "…"],
    ]);
    this.body.append(mark);
  }
}

export function question(parent, text) {
  const element = make("div", "question");
  element.append(make("h3", "", "You"), document.createTextNode(text));
  parent.append(element);
}

// Puts the prompt in front of the text that continues it.
export function prefix(answer, text) {
  answer.element.insertBefore(make("span", "prompt", text), answer.body);
}

export function make(tag, kind = "", text = "") {
  const element = document.createElement(tag);
  if (kind) element.className = kind;
  element.textContent = text;
  return element;
}

// Rows of a token's tip: its source, then the likeliest tokens, with the chosen one marked.
function tokenTip({ text, source, logprob, top = [] }) {
  if (!top.length) return [[SOURCES[source], visible(text) || "…"]];
  const chosen = top.findIndex((other) => other[1] === logprob);
  const rows = top.map(([name, value], at) => [percent(value), visible(name), at === chosen]);
  if (chosen < 0) rows.push([percent(logprob), visible(text) || "…", true]);
  return [[`Source: ${SOURCES[source]}`], ...rows];
}

// Shows the tip of the token or mark that is under the pointer or has the focus. The Tab key reaches one mark, and arrow keys go to the
// other marks; if the whole text has the focus, arrow keys go from token to token.
export function watchTips(output, tip) {
  let current = null;
  const show = (element) => {
    tip.replaceChildren(...details.get(element).map(tipRow));
    tip.hidden = false;
    const place = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
    const above = place.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, Math.min(place.left - 12, room))}px`;
    tip.style.top = `${above > 8 ? above : place.bottom + 6}px`;
  };
  const hide = () => (tip.hidden = true);
  const select = (token) => {
    current?.classList.remove("current");
    current = token;
    if (!token) return hide();
    token.classList.add("current");
    token.scrollIntoView({ block: "nearest" });
    return show(token);
  };
  const on = (event) => details.has(event.target) && show(event.target);
  const follow = () => {
    const focused = document.activeElement;
    if (focused?.matches("#output .mark:focus-visible")) show(focused);
    else if (current && focused === output) show(current);
    else hide();
  };
  output.addEventListener("pointerover", on);
  output.addEventListener("focusin", on);
  output.addEventListener("click", on);
  output.addEventListener("pointerout", hide);
  output.addEventListener("focusout", () => select(null));
  document.addEventListener("pointerdown", () => select(null));
  document.addEventListener("scroll", follow, true);
  output.addEventListener("keydown", (event) => {
    const onMark = event.target !== output;
    const places = [...output.querySelectorAll(onMark ? ".mark" : ".tokens > span")];
    const at = places.indexOf(onMark ? event.target : current);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: places.length - 1 }[event.key];
    if ((onMark && at < 0) || to === undefined || !places[to]) return;
    event.preventDefault();
    if (!onMark) return select(places[to]);
    places[at].tabIndex = -1;
    places[to].tabIndex = 0;
    return places[to].focus();
  });
}

function tipRow([name, text, chosen]) {
  const row = make("span", chosen ? "chosen" : "", text === undefined ? name : `${name} `);
  if (text !== undefined) row.append(make("code", "", text));
  return row;
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
